"""Flat groups: what an in-place optimizer needs from a 1-D buffer.

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
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels.recipes import Recipe
from shardwise.kernels.step import Group, step_, takes

LANES = 32
"""A multiple of the elements in one vector for every dtype (at most 32: bfloat16, AVX-512).

Groups of a program are padded to it, so that their kernels run without tails.
"""

PIECE_ELEMENTS = 262_144
"""Gradients that are scaled or cast at a time on the CPU.

Measured for AdamW on 12 float32 groups of so many elements, one thread: pieces of 16,384 elements
13.3 ms, 65,536 7.5 ms, 262,144 6.1 ms; without a scale 4.3 ms.
"""


class Row(NamedTuple):
    """One group of an update: what a kernel changes, parameter first, and the gradient."""

    written: Sequence[Tensor]  # of one shape
    grad: Tensor
    scale: Tensor | None  # multiplies the gradient
    shadow: Tensor | None = None  # gets the new parameter in 16 bits


def in_one_pass(recipe: Recipe, rows: Sequence[Row]) -> list[Row]:
    """Step the rows that the C kernel takes; returns the others.

    Gradients are scaled and widened as they are read, so nothing is copied.

    Args:
        recipe: of the optimizer.
        rows: real numbers only.
    """
    native: dict[int, tuple[Tensor | None, list[Group]]] = {}
    others: list[Row] = []
    strided: list[tuple[Tensor, Tensor]] = []
    for row in rows:
        param, *states = row.written
        group = Group(param, row.grad, tuple(states), row.shadow)
        if not takes(group):
            group = _contiguous(group)
            if not takes(group):
                others.append(row)
                continue
            strided += zip(row.written, (group.param, *group.states), strict=True)
        native.setdefault(id(row.scale), (row.scale, []))[1].append(group)
    for scale, groups in native.values():
        step_(recipe, groups, scale=1.0 if scale is None else scale.item())
    for target, values in strided:
        if target is not values:
            target.copy_(values)
    return others


def _contiguous(group: Group) -> Group:
    """The same with copies of what has gaps."""
    states = tuple(state.contiguous() for state in group.states)
    return Group(group.param.contiguous(), group.grad.contiguous(), states, group.shadow)


def write_shadows(rows: Sequence[Row]) -> None:
    """Round new parameters to 16 bits, of rows that the kernel has not taken."""
    for row in rows:
        if row.shadow is not None:
            row.shadow.copy_(row.written[0])


def on_rows(kernel: Callable[..., None], rows: Sequence[Row], *, reuse_grads: bool = False) -> None:
    """Run an elementwise in-place kernel over many groups in few calls; cuts do not show.

    A call costs as much host time as 10,000 elements take. Gradients that must be scaled or cast
    are copied, `PIECE_ELEMENTS` of them at a time. On the CPU a scale of exactly 1, as in a step
    that clips nothing, is no scale: the kernel reads the gradients.

    Args:
        kernel: called with lists of flat tensors of one dtype, one for each tensor of `written`,
            and one of gradients; the tensors at one position of all lists are of one length.
        rows: real numbers only.
        reuse_grads: gradients may be scaled where they are, which takes a third of the time of
            copies: these push what the kernel reads next out of the cache.

    >>> params, grads = torch.ones(3), torch.full((3,), 2.0)
    >>> def kernel(params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    ...     for param, grad in zip(params, grads):
    ...         param.sub_(grad)
    >>> on_rows(kernel, [Row([params], grads, torch.tensor(0.5))])
    >>> params
    tensor([0., 0., 0.])
    """
    ready: dict[torch.dtype, list[list[Tensor]]] = {}
    copied: dict[torch.dtype, list[Row]] = {}
    ones: dict[int, bool] = {}
    for given in rows:
        row = given
        if row.scale is not None:
            key = id(row.scale)
            if key not in ones:
                ones[key] = _is_one(row.scale)
            # In another dtype the product would not be rounded as that of a copy is.
            in_place = reuse_grads and row.grad.dtype == row.written[0].dtype
            if in_place and not ones[key]:
                row.grad.mul_(row.scale)
            row = row._replace(scale=None) if in_place or ones[key] else row
        like, grad = row.written[0], _flat(row.grad)
        flat = [_flat(tensor) for tensor in row.written if tensor.is_contiguous()]
        length = like.numel()
        body = length - length % LANES if len(flat) == len(row.written) else 0
        rest = row
        if body:
            heads = [*flat, grad]
            if body < length:
                rest = Row([tensor[body:] for tensor in flat], grad[body:], row.scale)
                heads = [tensor[:body] for tensor in heads]
            if row.scale is None and grad.dtype == like.dtype:
                ready.setdefault(like.dtype, []).append(heads)
            else:
                copied.setdefault(like.dtype, []).append(Row(heads[:-1], heads[-1], row.scale))
        if body < length:
            on_whole_vectors(
                lambda *tensors: kernel(*([tensor] for tensor in tensors)),
                written=rest.written,
                read=[scaled(rest.grad, like, row.scale)],
            )
    for whole in ready.values():
        kernel(*map(list, zip(*whole, strict=True)))
    for part in copied.values():
        _in_pieces(kernel, part)


def _is_one(scale: Tensor) -> bool:
    """Whether a scale is known to be 1; elsewhere than on the CPU a look would wait."""
    return type(scale) is Tensor and scale.device.type == "cpu" and scale.item() == 1.0


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 1 else tensor.reshape(-1)


def _in_pieces(kernel: Callable[..., None], rows: Sequence[Row]) -> None:
    """Whole vectors of one dtype; the copies of a call lie side by side in one buffer."""
    total = sum(row.grad.numel() for row in rows)
    copies = rows[0].written[0].new_empty(min(total, PIECE_ELEMENTS))
    pieces: list[list[Tensor]] = []
    used = 0
    for written, grad, scale, _ in rows:
        start = 0
        while start < grad.numel():
            size = min(grad.numel() - start, copies.numel() - used)
            copy = copies[used : used + size]
            tensors = [*written, grad]
            if size < grad.numel():  # a slice costs as much host time as the product of 2,000
                tensors = [tensor[start : start + size] for tensor in tensors]
            *targets, cast = tensors
            if cast.dtype != copy.dtype:
                cast = copy.copy_(cast)
            if scale is not None:
                torch.mul(cast, scale, out=copy)
            pieces.append([*targets, copy])
            start, used = start + size, used + size
            if used == copies.numel():
                kernel(*map(list, zip(*pieces, strict=True)))
                pieces, used = [], 0
    if pieces:
        kernel(*map(list, zip(*pieces, strict=True)))


def on_whole_vectors(
    kernel: Callable[..., None], *, written: Sequence[Tensor], read: Sequence[Tensor]
) -> None:
    """Run an elementwise in-place kernel so that its result does not depend on cuts.

    Costs one copy of at most 31 elements per tensor. See [Note: cuts do not show].

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
