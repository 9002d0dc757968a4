"""Where the block of a rank lies in the whole activation, for each call of `sw.dropout`.

A trace has types and writes down, by the place and number of a call, how its input is cut. A step
has lengths only, which may be others than those of the trace: of the sequence, or of a dimension
that is merged with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.sharding.errors import PlanError, RandomError
from shardwise.sharding.frames import Run
from shardwise.sharding.mesh import Mesh
from shardwise.transforms.activation_types import Sharded, Types
from shardwise.transforms.tensor_context import Cut, DropoutCall


@dataclass(frozen=True, slots=True)
class CutAt:
    """How a call's input is cut along one axis: its type, and the length of that dimension."""

    axis: str
    kind: Sharded


def cuts_in(types: Types, tensor: Tensor, call: DropoutCall) -> tuple[CutAt, ...]:
    """How the types of a trace say that a tensor is cut.

    Raises:
        PlanError: two axes cut one dimension.
    """
    found: list[CutAt] = []
    for axis in types.axes:
        kind = types.of(tensor, axis)
        if isinstance(kind, Sharded):
            other = next((one for one in found if one.kind.dim == kind.dim), None)
            if other is not None:
                raise _cut_twice(call, tensor, kind.dim, (other.axis, axis))
            found.append(CutAt(axis, kind))
    return tuple(found)


def cuts_at(
    found: tuple[CutAt, ...],
    tensor: Tensor,
    call: DropoutCall,
    *,
    mesh: Mesh,
    coords: Mapping[str, int],
    length_of: Callable[[str], int],
) -> tuple[Cut, ...]:
    """Where the block of one rank lies.

    Args:
        found: from `cuts_in`.
        tensor: this rank's block.
        call: for errors.
        mesh: sizes of axes.
        coords: of the rank.
        length_of: the length of the sequence in a stack of modules; 0 if it is not known.

    Raises:
        RandomError: the tensor is not what the trace has seen there.
    """
    cuts: list[Cut] = []
    for one in found:
        kind, ranks = one.kind, mesh[one.axis]
        place = mesh.index(mesh.parts(one.axis), coords)
        if kind.dim >= tensor.ndim:
            raise _other_length(call, tensor, kind, 0)
        length = tensor.shape[kind.dim]
        segments = _segments(kind, length)
        if segments is None:
            raise _other_length(call, tensor, kind, length)
        rows = kind.rows or 0
        if kind.stack:
            known = length_of(kind.stack)
            rows = known if -(-known // ranks) == length else 0
        copies = kind.mixed or (kind.copies,) * len(segments)
        blocks = [(size, ranks // n, place // n) for size, n in zip(segments, copies, strict=True)]
        cuts.append(_cut(kind.dim, blocks, rows))
    return tuple(cuts)


def _segments(kind: Sharded, length: int) -> tuple[int, ...] | None:
    """The pieces of a dimension of this length; None if nothing tells."""
    if length == sum(kind.segments):
        return kind.segments
    if len(kind.segments) == 1:
        # Only a sequence, or a batch that a layer has cut, may have another length.
        return (length,)
    piece = kind.segments[0]
    if set(kind.segments) == {piece} and piece and length % piece == 0:
        return (piece,) * (length // piece)
    return None


def _cut(dim: int, blocks: Sequence[tuple[int, int, int]], rows: int) -> Cut:
    """A block whose pieces are each a block of a piece of the whole.

    Args:
        dim: that is cut.
        blocks: of each piece, the length here, into how many it is cut, and which one this is.
        rows: of the whole, if the last blocks are padded.

    >>> _cut(1, [(4, 2, 1), (2, 2, 1)], 0)
    Cut(dim=1, runs=(Run(start=4, stop=8, at=0), Run(start=10, stop=12, at=4)), size=12)
    >>> _cut(1, [(4, 2, 1)], 7)
    Cut(dim=1, runs=(Run(start=4, stop=7, at=0),), size=7)
    """
    size = rows or sum(length * ranks for length, ranks, _ in blocks)
    runs: list[Run] = []
    start = at = 0
    for length, ranks, place in blocks:
        first = min(start + place * length, size)
        runs.append(Run(first, min(first + length, size), at))
        start, at = start + ranks * length, at + length
    return Cut(dim, tuple(runs), size)


def _where(call: DropoutCall) -> str:
    name = f", name {call.name!r}" if call.name else ""
    return f"module {call.place or '(root)'}{name}, call {call.number}"


def unseen_call(call: DropoutCall) -> RandomError:
    """The error for a call that the trace has not met."""
    return RandomError(
        "sw.dropout was called where the first pass over the model met no such call.",
        where=_where(call),
        facts=f"it is call {call.number} of this place in this pass.",
        why="Ranks of a tensor axis cut one mask, and which part of an activation a rank has was "
        "found out in the first pass, call by call.",
        fix="call it as often in every pass, with training= or p= where it is to do nothing",
        number=call.number,
    )


def _other_length(call: DropoutCall, tensor: Tensor, kind: Sharded, length: int) -> RandomError:
    shape = tuple(tensor.shape)
    return RandomError(
        "sw.dropout cannot tell which part of the whole activation this rank has.",
        where=_where(call),
        facts=f"x has shape {shape} here; in the first pass it was {kind}, "
        f"{sum(kind.segments)} rows a rank, and now has {length}.",
        why="An element's mask depends on its place in the whole activation.",
        fix="call sw.dropout before dimensions are merged, or with inputs of the same form in "
        "every pass",
        shape=shape,
        segments=kind.segments,
    )


def _cut_twice(call: DropoutCall, tensor: Tensor, dim: int, axes: tuple[str, str]) -> PlanError:
    return PlanError(
        f"sw.dropout is called on an activation of which {axes[0]!r} and {axes[1]!r} cut the same "
        "dimension.",
        where=_where(call),
        facts=f"dim {dim} of shape {tuple(tensor.shape)} on each rank.",
        why="Its masks depend on the place of an element in the whole activation, which is known "
        "for one cut of each dimension.",
        fix="torch's dropout there, which draws apart for every block",
        axes=axes,
        dim=dim,
    )
