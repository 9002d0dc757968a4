"""Norms of the whole gradient and of groups of it, in one packed reduction over all ranks.

[Note: every element once]
A norm is a sum over elements (or their maximum): each rank adds what it holds, then ranks add up.
Which ranks hold different elements is read from the spec of each parameter's `opt` home: those
along the axes that shard it. Along all other axes ranks hold the same bits and add nothing; so it
is with the rows of a fused tensor that several ranks hold, which are added apart from the others
(see [Note: copies inside of blocks]). Sums that are to be added over the same axes are one number,
whatever buckets they come from; the axes are taken from the innermost to the outermost, each once,
and a sum that has been added over its innermost axis joins those that only had the rest to go. So
there are as many collectives as axes that shard anything, and each carries 8 bytes per norm and
distinct set of axes that has it left. Ranks add in rank order along each axis: the result is the
same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.optim.norms import Norm, power_sum, root, select_all
from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective, packed_items
from shardwise.sharding.copies import Copied, copies_of
from shardwise.sharding.leaves import Flats
from shardwise.sharding.lying import rectangle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Mover, finish
from shardwise.sharding.plan import Plan
from shardwise.sharding.spec import Spec

AxesLeft = tuple[str, ...]
"""Axes that a sum is yet to be added over, in the order of the mesh."""


class Slice(NamedTuple):
    """Neighbours in a bucket's buffer that count in the same norms; padding between them is 0."""

    bucket: str
    start: int
    stop: int


class Rows(NamedTuple):
    """Of one parameter in a bucket, the rectangles that are copies along exactly some axes.

    Args:
        bucket: name of the bucket.
        copied: of the parameter in its buffer.
        axes: along which.
    """

    bucket: str
    copied: Copied
    axes: tuple[str, ...]


class Part(NamedTuple):
    """Slices that are sharded over the same axes and count in the same norms."""

    axes: AxesLeft
    norms: tuple[Norm, ...]
    slices: tuple[Slice | Rows, ...]


class Column(NamedTuple):
    """A sum on its way to one norm."""

    norm: Norm
    axes: AxesLeft


class Round(NamedTuple):
    """The reduction of some columns over one axis."""

    columns: tuple[Column, ...]
    item: Collective


@dataclass(frozen=True)
class Reduction:
    """What is added up on each rank, and over which axes; see [Note: every element once].

    Args:
        norms: all that are computed.
        parts: what each rank adds by itself.
        rounds: what ranks add up, in order.
    """

    norms: tuple[Norm, ...]
    parts: tuple[Part, ...]
    rounds: tuple[Round, ...]

    @property
    def items(self) -> tuple[Collective, ...]:
        """The collectives of the rounds."""
        return tuple(one.item for one in self.rounds)

    @cached_property
    def num_elements(self) -> int:
        """Elements that one rank adds up."""
        pieces = (piece for part in self.parts for piece in part.slices)
        return sum(
            piece.stop - piece.start if isinstance(piece, Slice) else piece.copied.entry.numel
            for piece in pieces
        )


def sharding_axes(spec: Spec, mesh: Mesh) -> AxesLeft:
    """The axes along which ranks hold different elements, in the order of the mesh.

    >>> sharding_axes(Spec.parse("d0/(ep dp) d1"), Mesh(dp=2, ep=2, tp=2))
    ('dp', 'ep')
    """
    return tuple(axis for axis in mesh if axis in spec.mesh_axes and mesh[axis] > 1)


def plan_norms(norms: Iterable[Norm], plan: Plan, buckets: Sequence[Bucket]) -> Reduction:
    """Work out how some norms of the gradient are computed.

    Args:
        norms: which; in any order.
        plan: gives the specs.
        buckets: all buckets of the plan.

    Raises:
        PatternError: a norm selects no trainable parameter.
    """
    wanted = tuple(sorted(set(norms), key=lambda norm: (norm.where, norm.unless, norm.ord)))
    members = [bucket for bucket in buckets if bucket.opt]
    paths = tuple(path for bucket in members for path in bucket.paths)
    selected = select_all(wanted, paths)
    counted: dict[str, list[Norm]] = {path: [] for path in paths}
    for norm in wanted:
        for path in selected[norm]:
            counted[path].append(norm)
    found: dict[tuple[AxesLeft, tuple[Norm, ...]], list[Slice | Rows]] = {}
    for bucket in members if wanted else ():
        for axes, inside, piece in _slices(bucket, plan, counted):
            found.setdefault((axes, inside), []).append(piece)
    parts = tuple(Part(axes, inside, tuple(all_)) for (axes, inside), all_ in found.items())
    columns = {Column(norm, part.axes) for part in parts for norm in part.norms}
    return Reduction(wanted, parts, _rounds(columns, wanted, plan.mesh))


def _slices(
    bucket: Bucket, plan: Plan, counted: Mapping[str, Sequence[Norm]]
) -> Iterator[tuple[AxesLeft, tuple[Norm, ...], Slice | Rows]]:
    assert bucket.opt is not None
    entries = bucket.opt.entries
    ends = [*(entry.offset for entry in entries[1:]), bucket.opt.length]
    keys: list[tuple[AxesLeft, tuple[Norm, ...]]] = []
    for entry in entries:
        axes, inside = sharding_axes(plan.opt[entry.path], plan.mesh), tuple(counted[entry.path])
        copies = copies_of(entry.frame, plan.mesh) if inside else ()
        copied = Copied(entry, bucket.opt, plan.mesh)
        for some in ((), *copies) if copies else ():
            left = tuple(axis for axis in axes if axis not in some)
            yield left, inside, Rows(bucket.name, copied, some)
        keys.append((axes, () if copies else inside))
    start = 0
    for index, (key, end) in enumerate(zip(keys, ends, strict=True)):
        if index + 1 < len(keys) and keys[index + 1] == key:
            continue
        if key[1]:
            yield (*key, Slice(bucket.name, start, end))
        start = end


def _rounds(columns: set[Column], norms: Sequence[Norm], mesh: Mesh) -> tuple[Round, ...]:
    rounds: list[Round] = []
    order = {norm: place for place, norm in enumerate(norms)}
    for axis in reversed(tuple(mesh)):
        mine = {column for column in columns if axis in column.axes}
        if not mine:
            continue
        ordered = sorted(mine, key=lambda column: (order[column.norm], column.axes))
        (item,) = packed_items(len(ordered), [axis], mesh, "norm")
        rounds.append(Round(tuple(ordered), item))
        columns = (columns - mine) | {_after(column, axis) for column in mine}
    return tuple(rounds)


def _after(column: Column, axis: str) -> Column:
    return column._replace(axes=tuple(one for one in column.axes if one != axis))


def run_norms(mover: Mover, reduction: Reduction, flats: Flats) -> dict[Norm, Tensor]:
    """The value of every norm: 0-dim float64 tensors, the same bits on all ranks.

    Args:
        mover: the choke point.
        reduction: from `plan_norms`.
        flats: gradients by bucket in the layout of the `opt` home, in any dtype.
    """
    columns: dict[Column, Tensor] = {}
    for part in reduction.parts:
        tensors = [view for s in part.slices for view in _views(flats[s.bucket], s, mover)]
        sums = {norm.ord: power_sum(tensors, norm.ord) for norm in _one_per_ord(part.norms)}
        for norm in part.norms:
            _join(columns, Column(norm, part.axes), sums[norm.ord])
    for columns_of_round, item in reduction.rounds:
        mine = torch.stack([columns.pop(column) for column in columns_of_round])
        stack = mine.new_empty(mover.mesh[item.axis] * mine.numel())
        finish(mover.all_gather(stack, mine, item))
        ranks = stack.view(mover.mesh[item.axis], -1)
        total = ranks[0].clone()
        for other in ranks[1:]:
            total += other
        for place, column in enumerate(columns_of_round):
            largest = column.norm.ord == math.inf
            value = ranks[:, place].amax() if largest else total[place]
            _join(columns, _after(column, item.axis), value)
    device = next(iter(flats.values())).device if flats else None
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return {
        norm: root(columns.get(Column(norm, ()), nothing), norm.ord) for norm in reduction.norms
    }


def _views(flat: Tensor, piece: Slice | Rows, mover: Mover) -> list[Tensor]:
    if isinstance(piece, Slice):
        whole = piece.stop - piece.start == flat.numel()
        return [flat if whole else flat[piece.start : piece.stop]]
    block = piece.copied.entry.view(flat)
    tiles = piece.copied.at(mover.coords)
    wanted = [tile for tile, axes in tiles.items() if axes == piece.axes]
    return [rectangle(block, tile.at, tile.sizes) for tile in wanted] or [flat[:0]]


def _one_per_ord(norms: Sequence[Norm]) -> Iterable[Norm]:
    return {norm.ord: norm for norm in norms}.values()


def _join(columns: dict[Column, Tensor], column: Column, value: Tensor) -> None:
    before = columns.get(column)
    if before is None:
        columns[column] = value
    elif column.norm.ord == math.inf:
        columns[column] = torch.maximum(before, value)
    else:
        columns[column] = before + value


def whole_norm(values: Mapping[Norm, Tensor]) -> Tensor | None:
    """The norm of all gradients that a step reports: the 2-norm before any other."""
    whole = {norm.ord: value for norm, value in values.items() if not norm.where}
    return whole.get(2.0, next(iter(whole.values()), None))


def group_norms(values: Mapping[Norm, Tensor]) -> dict[str, Tensor]:
    """The norms of groups by the patterns that select them."""
    named: dict[str, Tensor] = {}
    for norm, value in values.items():
        if norm.where:
            # Two transforms may ask for one group in two ways.
            named[str(norm) if norm.group in named else norm.group] = value
    return named
