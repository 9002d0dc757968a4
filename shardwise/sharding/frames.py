"""Frames: what each rank holds of a parameter that tensor axes cut.

[Note: frames]
A compute spec marks parts of dimensions with tensor axes: `((heads/tp + kv/tp + kv/tp) hd) embed`.
A rank's *block* then consists of runs of rows of each dimension, one after the other: one run for a
plain cut, one for every segment of a fused dimension. All blocks have one shape, the last ones
padded at their ends where a whole dimension does not divide. Data axes cut blocks further, so
buckets and movement know blocks only; what looks at whole tensors (initial values, checkpoints,
exports, leaves) goes through the runs. Runs of one rank are in the order of the tensor, so the
tensor's own order is never lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.sharding.axes import Axes
from shardwise.sharding.grammar import Atom, Node, Position, Sum
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec


class Run(NamedTuple):
    """Rows `start` to `stop` of a dimension of the tensor, which begin at row `at` of a block."""

    start: int
    stop: int
    at: int

    @property
    def count(self) -> int:
        """How many rows."""
        return self.stop - self.start


Runs = tuple[Run, ...]


class Tile(NamedTuple):
    """A rectangle of a tensor, and where it begins in the block that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """How tensor axes cut one parameter; see [Note: frames].

    Args:
        shape: of the whole tensor.
        axes: mesh axes that cut it, in the order of the mesh.
        block: shape of the block that every rank holds.
        cuts: by place along `axes`, the runs of every dimension.
        segments: by dimension, the lengths of the pieces of a block: more than one in a fused
            dimension.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    block: tuple[int, ...]
    cuts: tuple[tuple[Runs, ...], ...]
    segments: tuple[tuple[int, ...], ...]

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """Dimensions that are cut."""
        return tuple(dim for dim, size in enumerate(self.shape) if self.block[dim] != size)

    @cached_property
    def has_copies(self) -> bool:
        """Whether several places along `axes` hold the same rectangle."""
        tiles = [tile for place in range(len(self.cuts)) for tile in self.tiles(place)]
        return len(set(tiles)) < len(tiles)

    def tiles(self, place: int) -> Iterator[Tile]:
        """The rectangles of one place's block; none where it holds padding only."""
        yield from tiles_of(self.cuts[place])


def tiles_of(runs: Sequence[Runs]) -> Iterator[Tile]:
    """Every rectangle that runs of all dimensions make.

    >>> list(tiles_of([(Run(0, 2, 0), Run(6, 8, 2)), (Run(0, 3, 0),)]))[1]
    Tile(offsets=(6, 0), sizes=(2, 3), at=(2, 0))
    """
    for combined in itertools.product(*runs):
        if all(run.count for run in combined):
            yield Tile(
                tuple(run.start for run in combined),
                tuple(run.count for run in combined),
                tuple(run.at for run in combined),
            )


def clip(runs: Runs, start: int, stop: int) -> Runs:
    """What rows `start` to `stop` of a block hold, counted from `start`.

    >>> clip((Run(0, 4, 0), Run(8, 12, 4)), 3, 6)
    (Run(start=3, stop=4, at=0), Run(start=8, stop=10, at=1))
    """
    kept = []
    for run in runs:
        first, last = max(run.at, start), min(run.at + run.count, stop)
        if first < last:
            shift = run.start - run.at
            kept.append(Run(first + shift, last + shift, first - start))
    return tuple(kept)


def make_frame(
    spec: Spec, shape: Sequence[int], mesh: Mesh, sizes: Mapping[str, int]
) -> Frame | None:
    """The frame that the marks of a compute spec make; None if they cut nothing.

    Args:
        spec: with tensor axes only; marks inside of a dimension divide the part that they mark, a
            mark on a whole dimension may cut it unevenly (`torch.chunk`).
        shape: of the tensor.
        mesh: sizes of the axes.
        sizes: of the names inside of dimensions with marked parts.

    >>> spec = Spec.parse("((heads/tp + kv/tp + kv/tp) hd) embed")
    >>> frame = make_frame(spec, (32, 8), Mesh(tp=2), {"heads": 4, "kv": 2, "hd": 4})
    >>> frame.block, frame.segments[0], frame.cuts[1][0][1]
    ((16, 8), (8, 4, 4), Run(start=20, stop=24, at=8))
    """
    marks = {
        at: tuple(axis for axis in axes if mesh[axis] > 1)
        for at, axes in spec.shards
        if mesh.product(axes) > 1
    }
    if not marks:
        return None
    used = {axis for axes in marks.values() for axis in axes}
    axes = tuple(axis for axis in mesh if axis in used)
    places = [
        dict(zip(axes, place, strict=True))
        for place in itertools.product(*(range(mesh[axis]) for axis in axes))
    ]
    whole = tuple(shape)
    cuts = tuple(
        tuple(
            _at_once(_runs(node, (dim,), _Cut(spec.axes, marks, mesh, coords, sizes), size))
            for dim, (node, size) in enumerate(zip(spec.axes.dims, whole, strict=True))
        )
        for coords in places
    )
    block = tuple(
        max(sum(run.count for run in cut[dim]) for cut in cuts) for dim in range(len(whole))
    )
    segments = tuple(
        (block[dim],) if len(cuts[0][dim]) == 1 else tuple(run.count for run in cuts[0][dim])
        for dim in range(len(whole))
    )
    return Frame(whole, axes, block, cuts, segments)


class _Cut(NamedTuple):
    axes: Axes
    marks: Mapping[Position, tuple[str, ...]]
    mesh: Mesh
    coords: Mapping[str, int]
    sizes: Mapping[str, int]


def _runs(node: Node, at: Position, cut: _Cut, size: int) -> list[tuple[int, int]]:
    """Rows of a node of a known size that one rank holds, as ranges in order."""
    axes = cut.marks.get(at, ())
    if axes:
        rows = -(-size // cut.mesh.product(axes))
        start = min(cut.mesh.index(axes, cut.coords) * rows, size)
        return [(start, min(start + rows, size))]
    if isinstance(node, Atom) or not any(mark[: len(at)] == at for mark in cut.marks):
        return [(0, size)]
    sizes = [measure(child, cut.sizes) for child in node.children]
    parts = [
        _runs(child, (*at, i), cut, n)
        for i, (child, n) in enumerate(zip(node.children, sizes, strict=True))
    ]
    if isinstance(node, Sum):
        starts = itertools.accumulate([0, *sizes[:-1]])
        moved = zip(starts, parts, strict=True)
        return [(base + a, base + b) for base, part in moved for a, b in part]
    ranges = [(0, 1)]
    for n, part in zip(sizes, parts, strict=True):
        ranges = list(_inside(ranges, n, part))
    return ranges


def _inside(
    outer: Sequence[tuple[int, int]], size: int, inner: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Ranges of a product of an outer part and an inner one of `size` rows."""
    if list(inner) == [(0, size)]:
        yield from ((a * size, b * size) for a, b in outer)
        return
    for a, b in outer:
        for index in range(a, b):
            yield from ((index * size + c, index * size + d) for c, d in inner)


def _at_once(ranges: Sequence[tuple[int, int]]) -> Runs:
    """Ranges as runs of a block."""
    at = itertools.accumulate([0, *(stop - start for start, stop in ranges[:-1])])
    return tuple(Run(start, stop, here) for (start, stop), here in zip(ranges, at, strict=True))


def measure(node: Node, sizes: Mapping[str, int]) -> int:
    """Rows of a node.

    >>> measure(Axes.parse("((heads + kv) hd)").dims[0], {"heads": 4, "kv": 2, "hd": 8})
    48
    """
    if isinstance(node, Atom):
        return node.fixed if node.fixed is not None else sizes[node.text]
    parts = [measure(child, sizes) for child in node.children]
    return sum(parts) if isinstance(node, Sum) else math.prod(parts)
