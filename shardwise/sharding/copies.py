"""Rows inside of blocks that several ranks hold: parts of a fused tensor that are cut less finely.

[Note: copies inside of blocks]
`((heads/(tp0 tp1) + kv/tp0 + kv/tp0) hd) embed`: with fewer kv heads than ranks, ranks along `tp1`
hold different rows of q and the same rows of k and v. Each computes with its own copy, so the
gradient of such rows is the sum over `tp1`, while that of q is not. Copies lie at the same place of
the blocks, so data axes cut them alike; how many of them a rank has left then depends on its place
along the data axes, never on its place along `tp1`. What moves has the size of the most that any
rank has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.sharding.frames import Frame, Tile, tiles_of
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.lying import local_runs
from shardwise.sharding.mesh import Mesh

Coords = Mapping[str, int]
"""A place in the mesh."""

Copies = dict[Tile, tuple[str, ...]]
"""By rectangle of a block, the axes along which all ranks hold it."""


def copies_of(frame: Frame | None, mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """The sets of axes along which rectangles of blocks are copies; none for most frames.

    Args:
        frame: of a parameter, if it has one.
        mesh: sizes of the axes.

    >>> from shardwise.sharding.frames import make_frame
    >>> from shardwise.sharding.spec import Spec
    >>> mesh, spec = Mesh(tp0=2, tp1=2), Spec.parse("((heads/(tp0 tp1) + kv/tp0) hd)")
    >>> copies_of(make_frame(spec, (12,), mesh, {"heads": 4, "kv": 2, "hd": 2}), mesh)
    (('tp1',),)
    """
    if frame is None or not frame.has_copies:
        return ()

    def tiles_at(coords: Coords) -> Iterable[Tile]:
        return frame.tiles(mesh.index(frame.axes, coords))

    found = _with_axes(frame.axes, mesh, dict.fromkeys(mesh, 0), tiles_at).values()
    return tuple(sorted({axes for axes in found if axes}))


@dataclass(frozen=True, eq=False)
class Copied:
    """What ranks hold of a tensor, told apart by the axes along which it is a copy.

    Args:
        entry: of the layout.
        layout: gives the axes that cut blocks further.
        mesh: sizes of the axes.
    """

    entry: Entry
    layout: Layout
    mesh: Mesh
    _found: dict[tuple[int, ...], Copies] = field(default_factory=dict[Any, Copies], repr=False)

    def at(self, coords: Coords) -> Copies:
        """The rectangles in the block of one rank, worked out once."""
        place = tuple(coords[axis] for axis in self.mesh)
        if place not in self._found:
            axes = () if self.entry.frame is None else self.entry.frame.axes
            self._found[place] = _with_axes(axes, self.mesh, coords, self._tiles_at)
        return self._found[place]

    def along(self, coords: Coords, axis: str) -> tuple[Tile, ...]:
        """Those that all ranks along an axis hold."""
        return tuple(tile for tile, axes in self.at(coords).items() if axis in axes)

    def most(self, axis: str) -> int:
        """Elements of `along` on the rank that has the most."""
        return max(
            sum(math.prod(tile.sizes) for tile in self.along(place, axis))
            for place in self._data_places()
        )

    def _tiles_at(self, coords: Coords) -> Iterable[Tile]:
        return tiles_of(local_runs(self.entry, self.layout, self.mesh, coords))

    def _data_places(self) -> Iterator[Coords]:
        """Every place along the axes that cut blocks; blocks have as many copies everywhere."""
        first = dict.fromkeys(self.mesh, 0)
        sizes = (range(self.mesh[axis]) for axis in self.layout.axes)
        for place in itertools.product(*sizes):
            yield first | dict(zip(self.layout.axes, place, strict=True))


def _with_axes(
    axes: Sequence[str],
    mesh: Mesh,
    coords: Coords,
    tiles_at: Callable[[Coords], Iterable[Tile]],
) -> Copies:
    found: Copies = dict.fromkeys(tiles_at(coords), ())
    for axis in axes:
        others = [set(tiles_at({**coords, axis: place})) for place in range(mesh[axis])]
        for tile in found:
            if all(tile in other for other in others):
                found[tile] = (*found[tile], axis)
    return found
