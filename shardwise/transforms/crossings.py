"""What an activation does where it enters or leaves a layer that a tensor axis cuts.

[Note: crossings]
A crossing changes the type of an activation along one axis, and what its gradient does on the way
back is the transpose of that. Each is an all-reduce, an all-gather or a reduce-scatter one way, and
a collective or nothing the other way:

    kind      forward                backward               types
    copy      -                      all-reduce             invariant -> replicated
    reduce    all-reduce             -                      partial -> invariant
    gather    all-gather             reduce-scatter         cut -> replicated
    scatter   reduce-scatter         all-gather             partial -> cut
    slice     takes its own rows     all-gather             invariant -> cut
    collect   all-gather             takes its own rows     cut -> invariant
    take      takes its own rows     zeros beside them      replicated -> cut
    first     -                      zeros but on one rank  replicated -> invariant
    numbers   all-gather, stacked    (no gradient)          anything -> equal on all ranks

Rows that do not divide are padded with zeros where they are cut, and the padding is dropped where
they are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.sharding.collectives import Collective, all_reduce_bytes
from shardwise.sharding.errors import BatchError
from shardwise.sharding.movement import Mover, finish

_FORWARD = {
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "reduce_scatter",
    "collect": "all_gather",
    "numbers": "all_gather",
}
_BACKWARD = {
    "copy": "all_reduce",
    "gather": "reduce_scatter",
    "scatter": "all_gather",
    "slice": "all_gather",
}


_WHOLE = ("copy", "reduce", "numbers", "first")


@dataclass(frozen=True, slots=True)
class Crossing:
    """How one activation crosses a boundary.

    Args:
        kind: see [Note: crossings].
        axis: a tensor axis, by the name that the user's mesh has for it.
        dim: dimension that is cut before or after.
        rows: of a cut dimension whose blocks are padded, if its size is known beforehand (that of
            a vocabulary is); 0: all blocks are full, or the stack tells.
        stack: list of modules between which the sequence is cut; its length is that of the tensor
            that was cut where the stack begins.
    """

    kind: str
    axis: str
    dim: int = 0
    rows: int = 0
    stack: str = ""

    def __str__(self) -> str:
        where = f" dim {self.dim}" if self.kind not in _WHOLE else ""
        return f"{self.kind}{where} over {self.axis}"


@dataclass(frozen=True, slots=True)
class Crossed:
    """The collectives of one crossing; None where nothing moves."""

    forward: Collective | None
    backward: Collective | None


class Channel(Protocol):
    """What runs the collectives of a crossing, in their turn."""

    def run(self, tensor: Tensor, *, backward: bool) -> Any:
        """Run one of the two."""
        ...


def crossed(
    crossing: Crossing, shape: torch.Size, dtype: torch.dtype, *, rows: int, ranks: int, place: str
) -> Crossed:
    """The collectives of a crossing.

    Args:
        crossing: what happens.
        shape: of the tensor that crosses, on every rank.
        dtype: of the elements.
        rows: of the cut dimension on all ranks together.
        ranks: along the axis.
        place: of the boundary, for reports.
    """
    numel = shape.numel()
    if crossing.kind in ("scatter", "slice") and numel:
        numel = numel // shape[crossing.dim] * -(-rows // ranks)
    part = numel * dtype.itemsize  # what one rank holds where the tensor is cut

    def item(kind: str | None) -> Collective | None:
        if kind is None:
            return None
        nbytes = all_reduce_bytes(part, ranks) if kind == "all_reduce" else (ranks - 1) * part
        return Collective(kind, crossing.axis, nbytes, place, "activations", dtype)

    return Crossed(item(_FORWARD.get(crossing.kind)), item(_BACKWARD.get(crossing.kind)))


class Cross(torch.autograd.Function):
    """One crossing: `forward_move` now, and `backward_move` of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        forward_move: Callable[[Tensor], Tensor],
        backward_move: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Move; what moves nothing becomes an alias, so that the graph has a node for it."""
        ctx.move = backward_move
        moved = forward_move(tensor)
        return moved.view_as(moved) if moved is tensor else moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Move the gradient."""
        return ctx.move(grads[0]), None, None


def all_reduced(mover: Mover, tensor: Tensor, item: Collective) -> Tensor:
    """The sum over the ranks of an axis, in new memory; autograd sees a copy."""
    whole = tensor.clone(memory_format=torch.contiguous_format)
    finish(mover.all_reduce(whole.detach().view(-1), item))
    return whole


def gathered(mover: Mover, tensor: Tensor, item: Collective, dim: int, rows: int) -> Tensor:
    """The blocks of all ranks side by side along `dim`, without padding.

    Args:
        mover: the choke point.
        tensor: this rank's block.
        item: the collective.
        dim: along which they lie.
        rows: of the whole.
    """
    ranks = mover.mesh[item.axis]
    mine = tensor.contiguous()
    stack = mine.new_empty((ranks, *mine.shape))
    finish(mover.all_gather(stack.view(-1), mine.view(-1), item))
    whole = stack[0] if ranks == 1 else torch.cat(stack.unbind(0), dim)
    return whole.narrow(dim, 0, rows).contiguous()  # as what the model would see uncut


def scattered(mover: Mover, tensor: Tensor, item: Collective, dim: int) -> Tensor:
    """This rank's block along `dim` of the sum over the ranks of an axis, padded with zeros."""
    ranks = mover.mesh[item.axis]
    blocks = _blocks(tensor, dim, ranks)
    mine = torch.empty_like(blocks[0])
    finish(mover.reduce_scatter(mine.view(-1), blocks.view(-1), item))
    return mine


def stacked(mover: Mover, tensor: Tensor, item: Collective) -> Tensor:
    """The tensors of all ranks in rank order, in a new first dimension."""
    mine = tensor.contiguous()
    stack = mine.new_empty((mover.mesh[item.axis], *mine.shape))
    finish(mover.all_gather(stack.view(-1), mine.view(-1), item))
    return stack


def own_block(tensor: Tensor, dim: int, place: int, ranks: int) -> Tensor:
    """This rank's block along `dim` of what every rank has, padded with zeros."""
    rows = tensor.shape[dim]
    count = -(-rows // ranks)
    start = min(place * count, rows)
    mine = tensor.narrow(dim, start, min(count, rows - start))
    return _padded(mine, dim, count).contiguous()


def check_even(place: str, crossing: Crossing, tensor: Tensor, ranks: int) -> None:
    """Refuse to cut what user code has declared cut where it does not divide.

    Raises:
        BatchError: the length is another one than in the trace, and does not.
    """
    size = tensor.shape[crossing.dim]
    if size % ranks:
        raise BatchError(
            f"Dimension {crossing.dim} of {size} rows cannot be cut over {ranks} ranks.",
            where=place,
            facts=f"shape {tuple(tensor.shape)}; {size} % {ranks} == {size % ranks}.",
            why="What sw.constrain and sw.local cut has blocks of equal length.",
            fix=f"batches in which it divides by {ranks}, or sw.sequence_parallel, which pads",
            size=size,
            ranks=ranks,
        )


def beside_zeros(grad: Tensor, dim: int, place: int, ranks: int) -> Tensor:
    """The gradient of a whole tensor of which a rank has taken its block: zeros elsewhere."""
    shape = list(grad.shape)
    shape[dim] *= ranks
    whole = grad.new_zeros(shape)
    whole.narrow(dim, place * grad.shape[dim], grad.shape[dim]).copy_(grad)
    return whole


def _blocks(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """Equal blocks along `dim`, one after the other in memory."""
    count = -(-tensor.shape[dim] // ranks)
    whole = _padded(tensor, dim, count * ranks)
    return whole.unflatten(dim, (ranks, count)).movedim(dim, 0).contiguous()


def _padded(tensor: Tensor, dim: int, rows: int) -> Tensor:
    missing = rows - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
