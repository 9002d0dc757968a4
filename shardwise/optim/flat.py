"""Flat groups: what an in-place optimizer and the gradient norm need from a 1-D buffer.

[Note: cuts do not show]
A parameter's group is cut differently on every mesh, and the result must not tell: any piece of
a group, at any offset, gets the bits that it gets inside the whole. torch's fused CPU kernels
give whole vectors and the last few elements to two loops that round differently (measured on
torch 2.13, AVX-512 and AVX2: a random cut of 1..200 elements differs in 33-58 % of cases, for
adamw and sgd, in float32 and float64). So the kernel is run on whole vectors only, and what
remains is copied to a buffer of LANES elements and run as whole vectors too: no difference in
4,800 cuts, nor between 1 and 2 threads. Elementwise ATen operations have no such seam in float32
and float64 (21 operations, 268 cuts each, 0-dim tensor and Python scalars); in 16 bits
`add(alpha=)` has one. One thread, 1e6 float32 elements: adamw 0.4-0.5 ms by padded tails,
1.3-1.5 ms by ATen operations; torch.optim.AdamW 0.43 ms fused, 1.5 ms foreach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LANES = 64
"""A multiple of the elements in one vector for every dtype (at most 32: bfloat16, AVX-512)."""


def on_whole_vectors(
    kernel: Callable[..., None], *, written: Sequence[Tensor], read: Sequence[Tensor]
) -> None:
    """Run an elementwise in-place kernel so that its result does not depend on cuts.

    Costs one copy of at most 63 elements per tensor. See [Note: cuts do not show].

    Args:
        kernel: called with flat tensors of one length, first those of `written`, then of `read`.
        written: tensors that the kernel changes, all of one shape.
        read: tensors that it only reads, of the same shape.

    >>> params, grads = torch.ones(3), torch.full((3,), 0.5)
    >>> on_whole_vectors(lambda p, g: p.sub_(g), written=[params], read=[grads])
    >>> params
    tensor([0.5000, 0.5000, 0.5000])
    """
    flat = [tensor.reshape(-1) for tensor in (*written, *read)]
    length = flat[0].numel()
    body = length - length % LANES
    if body:
        kernel(*(tensor[:body] for tensor in flat))
    if body < length:
        tails = [_padded(tensor[body:]) for tensor in flat]
        kernel(*tails)
        for tensor, tail in zip(flat[: len(written)], tails, strict=False):
            tensor[body:] = tail[: length - body]
    for tensor, result in zip(written, flat, strict=False):
        if not tensor.is_contiguous():  # reshape made a copy
            tensor.copy_(result.view(tensor.shape))


def _padded(tail: Tensor) -> Tensor:
    whole = tail.new_zeros(LANES)
    whole[: tail.numel()] = tail
    return whole


def scaled(grad: Tensor, like: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient in the dtype of `like`, cast before it is scaled; `grad` is never written."""
    cast = grad.to(like.dtype)
    return cast if scale is None else (cast * scale).to(like.dtype)


def reals(tensor: Tensor) -> Tensor:
    """A complex tensor as the pairs of real numbers that optimizers step; others as they are.

    >>> reals(torch.tensor([1 + 2j])).tolist()
    [[1.0, 2.0]]
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def like_reals(values: Tensor, like: Tensor) -> Tensor:
    """The way back from `reals` for values of the tensor `like`."""
    return torch.view_as_complex(values) if like.is_complex() else values


def squared_norm(groups: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum of squares of each group, as 0-dim float64 tensors.

    Accumulated in float64, so that neither the square of a float32 nor a long sum is lost. The
    order of the sum depends on the length: the last bits are not the same for other cuts.

    Args:
        groups: tensors of any shape; empty ones count as 0.

    >>> squared_norm({"w": torch.tensor([3.0, 4.0])})
    {'w': tensor(25., dtype=torch.float64)}
    """
    return {
        key: torch.linalg.vector_norm(reals(group), dtype=torch.float64).square()
        for key, group in groups.items()
    }
