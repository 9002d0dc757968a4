"""`sw.linear_cross_entropy`: the loss of a language model's head that never makes all logits.

[Note: tiled loss]
Logits are `tokens x classes` and often the largest tensor of a step. Here they exist for one tile
of tokens at a time. Gradients could be made in forward right away, but would then have to be held
until backward: as much as the hidden states and the weight once more. So backward makes each tile
of logits again, which is one matrix product more (four instead of three) and keeps nothing but one
number for a token. Nor does a recomputation talk to other ranks: where classes are cut, the numbers
of all tiles are gathered at once in forward, so the number of tiles changes no collective.

With cut classes each rank finds the part of the hidden gradient that its own classes make. The
hidden states enter as what each rank has whole; backward sums the parts there.

References: Hsu et al., "Liger Kernel", 2024, arXiv:2410.10989, section 3.2; Wijmans et al., "Cut
Your Losses in Large-Vocabulary Language Models", 2025, arXiv:2411.09009.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardwise.sharding.errors import LossError
from shardwise.sharding.functional import bound
from shardwise.transforms.class_loss import ClassLoss, accurate
from shardwise.transforms.cross_entropy import (
    Gather,
    check_options,
    check_shapes,
    check_targets,
    class_loss,
    gather_of,
    reduced,
)
from shardwise.transforms.tensor_context import current_tensor_context

_CALL = "sw.linear_cross_entropy"

# Smaller tiles are slower products and save nothing that matters.
_TILE_BYTES = 1 << 26


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    chunks: int | str = "auto",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "sum",
    softcap: float | None = None,
) -> Tensor:
    """`sw.cross_entropy` of `hidden @ weight.T + bias`, tile by tile of tokens.

    For a loss function that takes the hidden states of a model and its head, such as
    `sw.linear_cross_entropy(hidden, model.lm_head.weight, labels)`. The tiles of logits are made
    again in backward: `2 * tokens * classes * embed` more flops, and in place of
    `tokens * classes` elements one number for each token is kept. Each rank of an axis that cuts
    the classes gathers what `sw.cross_entropy` gathers, and its part of the hidden gradient is
    summed. Gradients of a weight in less than float32 are added up in float32.

    Args:
        hidden: `... embed`, on every rank whole.
        weight: `classes embed`.
        target: `...`, integers in `[0, classes)` or `ignore_index`.
        bias: `classes`.
        chunks: how many tiles the tokens are cut into; `"auto"`: as few as there can be, if a tile
            of logits in the accurate dtype has at most 64 MiB, or if that is more: the size of
            `hidden`, or what the memory model says that backward takes for its first unit.
        ignore_index: marks tokens that have no loss and no gradient.
        label_smoothing: part of the target that is spread over all classes.
        z_loss: factor of the square of the logarithm of the sum of exponentials.
        reduction: `"sum"`, `"mean"` over the tokens that are not ignored, or `"none"`.
        softcap: logits become `softcap * tanh(logits / softcap)`, as in Gemma 2.

    Returns:
        A scalar, or `...` for `"none"`; float64 for float64 inputs, else float32.

    Raises:
        LossError: shapes, dtypes or options that do not fit.
        BatchError: on the CPU, a target that is no class.

    References:
        [Note: tiled loss].

    >>> linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([3, -100]))
    tensor(1.3863)
    """
    weight, bias = bound(weight), bound(bias)
    check_options(_CALL, label_smoothing, z_loss, reduction)
    check_shapes(_CALL, "hidden", hidden, target)
    _check(hidden, weight, bias, chunks, softcap)
    context = current_tensor_context()
    shard = context.shard_of(weight, 0) if context else None
    loss = class_loss(shard, weight.shape[0], ignore_index, label_smoothing, z_loss)
    flat = target.reshape(-1).long()
    check_targets(_CALL, flat, loss)
    if context is not None and shard is not None:
        hidden = context.enter(hidden, shard.axis, "linear_cross_entropy")
    hidden, weight, bias = _as_autocast(hidden, weight, bias)
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    head = _Head(loss, _rows(flat_hidden, weight, chunks, context.room if context else 0), softcap)
    gather = gather_of(shard, "linear_cross_entropy")
    args = (flat_hidden, weight, bias, flat, head, gather)
    if context is None:
        losses = _LinearCrossEntropy.apply(*args)
    elif shard is None:
        weights = (weight,) if bias is None else (weight, bias)
        losses = context.by_row(_whole, flat_hidden, weights, flat, head, gather)
    else:
        losses = context.invariant(_LinearCrossEntropy.apply, *args)
    return reduced(losses, target, ignore_index, reduction)


@dataclass(frozen=True, slots=True)
class _Head:
    """How a tile of logits is made.

    Args:
        loss: of the classes that are here.
        rows: tokens of a tile.
        softcap: bound of the logits, if they have one.
    """

    loss: ClassLoss
    rows: int
    softcap: float | None

    def tiles(self, tokens: int) -> Iterator[slice]:
        """The tiles, in order."""
        for start in range(0, tokens, self.rows):
            yield slice(start, min(start + self.rows, tokens))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One tile, from the classes that are here and no padding."""
        logits = functional.linear(hidden, weight, bias)
        if self.softcap is None:
            return logits
        capped = logits.to(accurate(logits.dtype)).div_(self.softcap)
        return capped.tanh_().mul_(self.softcap)

    def grads(self, logits: Tensor, target: Tensor, lse: Tensor, scale: Tensor) -> Tensor:
        """The gradient of the product, in the place of the logits where nothing else needs them."""
        if self.softcap is None:
            self.loss.write_grads(logits, logits, target, lse, scale)
            return logits
        grads = torch.empty_like(logits)
        self.loss.write_grads(grads, logits, target, lse, scale)
        return grads.mul_(logits.div_(self.softcap).square_().neg_().add_(1))


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of each token; keeps the inputs and one number for a token."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd takes no keywords
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: _Head,
        gather: Gather,
    ) -> Tensor:
        count = head.loss.count
        own = weight[:count], None if bias is None else bias[:count]
        parts = [
            head.loss.numbers(head.logits(hidden[rows], *own), target[rows])
            for rows in head.tiles(hidden.shape[0])
        ]
        if not parts:
            parts = [head.loss.numbers(hidden.new_empty((0, count)), target)]
        losses, lse = head.loss.losses(gather(torch.cat(parts, 1)), target)
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        ctx.head = head
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, target, lse = ctx.saved_tensors
        head: _Head = ctx.head
        count = head.loss.count
        own_weight = weight[:count]  # padding may hold anything, and 0 * inf is no number
        own = own_weight, None if bias is None else bias[:count]
        wanted = ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if wanted[0] else None
        weight_sum = _Sum(weight) if wanted[1] else None
        bias_sum = _Sum(bias) if wanted[2] and bias is not None else None
        for rows in head.tiles(hidden.shape[0]):
            part = hidden[rows]
            logits = head.logits(part, *own)
            grad = head.grads(logits, target[rows], lse[rows], grads[0][rows]).to(weight.dtype)
            del logits
            if hidden_grad is not None:
                torch.mm(grad, own_weight, out=hidden_grad[rows])
            if weight_sum is not None:
                weight_sum.add_product(grad.t(), part)
            if bias_sum is not None:
                bias_sum.add(grad.sum(0, dtype=accurate(grad.dtype)))
        results = (one and one.take() for one in (weight_sum, bias_sum))
        return hidden_grad, *results, None, None, None


def _whole(hidden: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """With or without a bias in the third place."""
    bias = rest[:-3] or (None,)
    return _LinearCrossEntropy.apply(hidden, weight, *bias, *rest[-3:])


class _Sum:
    """The gradient of a parameter over all tiles, added up in the accurate dtype.

    Args:
        like: the parameter's block; rows of padding stay zero.
    """

    def __init__(self, like: Tensor) -> None:
        self._dtype = like.dtype
        self._sum = torch.zeros_like(like, dtype=accurate(like.dtype))

    def add(self, part: Tensor) -> None:
        """Add to the first rows."""
        self._sum[: part.shape[0]].add_(part)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add a matrix product to the first rows."""
        rows = self._sum[: left.shape[0]]
        if self._sum.dtype == left.dtype:
            rows.addmm_(left, right)
        else:
            rows.add_(left @ right)

    def take(self) -> Tensor:
        """In the parameter's dtype."""
        return self._sum.to(self._dtype)


def _rows(hidden: Tensor, weight: Tensor, chunks: int | str, room: int) -> int:
    """Tokens of a tile; depends on what is equal on all ranks of an axis: shapes and the plan."""
    tokens = max(1, hidden.shape[0])
    if isinstance(chunks, int):
        return -(-tokens // chunks)
    limit = max(_TILE_BYTES, room, hidden.numel() * hidden.element_size())
    rows = max(1, limit // max(1, weight.shape[0] * accurate(weight.dtype).itemsize))
    return -(-tokens // -(-tokens // rows))  # as few tiles, of about equal sizes


def _as_autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the product of the linear layer would be made of: backward makes it again."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: int | str, softcap: float | None
) -> None:
    bias_shape = None if bias is None else tuple(bias.shape)
    fits = weight.ndim == 2 and weight.shape[1] == hidden.shape[-1]
    if not fits or bias_shape not in (None, (weight.shape[0],)):
        raise LossError(
            f"{_CALL} cannot multiply hidden states and weight.",
            where=f"{_CALL}(hidden, weight, target, bias=)",
            facts=f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, bias {bias_shape}",
            why="hidden is '... embed', weight 'classes embed' as in nn.Linear, bias 'classes'.",
            fix="model.lm_head.weight; weight.t() of a Conv1D",
            shape=tuple(hidden.shape),
            weight_shape=tuple(weight.shape),
            bias_shape=bias_shape,
        )
    named = isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1
    if not named and chunks != "auto":
        raise LossError(
            f"{_CALL} cannot cut tokens into {chunks!r} tiles.",
            where=f"{_CALL}(..., chunks={chunks!r})",
            why="Tokens are cut into tiles of equal size, the last one smaller.",
            fix='chunks="auto", or a number from 1',
            chunks=chunks,
        )
    if softcap is not None and not 0 < softcap < float("inf"):
        raise LossError(
            f"A softcap of {softcap} bounds no logits.",
            where=f"{_CALL}(..., softcap={softcap})",
            why="Logits become softcap * tanh(logits / softcap).",
            fix="a positive number such as 30.0, or None",
            softcap=softcap,
        )
