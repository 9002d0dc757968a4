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

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    if frame is None or all(len(segments) == 1 for segments in frame.segments):
        return ()  # what is cut as one has no part that is cut otherwise

    def tiles_at(coords: Coords) -> Iterable[Tile]:
        return frame.tiles(mesh.index(frame.axes, coords))

    found = _with_axes(frame.axes, mesh, dict.fromkeys(mesh, 0), tiles_at).values()
    return tuple(sorted({axes for axes in found if axes}))


def copies_at(entry: Entry, layout: Layout, mesh: Mesh, coords: Coords) -> Copies:
    """The rectangles in the block of one rank, each with the axes along which it is a copy.

    Args:
        entry: of the layout.
        layout: gives the axes that cut blocks further.
        mesh: sizes of the axes.
        coords: of the rank.
    """
    axes = () if entry.frame is None else entry.frame.axes

    def tiles_at(place: Coords) -> Iterable[Tile]:
        return tiles_of(local_runs(entry, layout, mesh, place))

    return _with_axes(axes, mesh, coords, tiles_at)


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


def copied(entry: Entry, layout: Layout, mesh: Mesh, coords: Coords, axis: str) -> Iterator[Tile]:
    """The rectangles in the block of one rank that all ranks along an axis hold.

    Args:
        entry: of the layout.
        layout: gives the axes that cut blocks further.
        mesh: sizes of the axes.
        coords: of the rank.
        axis: one that cuts other parts of the tensor.
    """
    for tile, axes in copies_at(entry, layout, mesh, coords).items():
        if axis in axes:
            yield tile


def most_copied(entry: Entry, layout: Layout, mesh: Mesh, axis: str) -> int:
    """Elements of `copied` on the rank that has the most.

    Args:
        entry: of the layout.
        layout: gives the axes that cut blocks further.
        mesh: sizes of the axes.
        axis: one that cuts other parts of the tensor.
    """
    first = dict.fromkeys(mesh, 0)
    places = (_coords(layout.axes, number, mesh) for number in range(mesh.product(layout.axes)))
    return max(
        sum(math.prod(tile.sizes) for tile in copied(entry, layout, mesh, first | place, axis))
        for place in places
    )


def _coords(axes: tuple[str, ...], number: int, mesh: Mesh) -> dict[str, int]:
    """The place that has a number along several axes, the first one major."""
    found: dict[str, int] = {}
    for axis in reversed(axes):
        number, found[axis] = divmod(number, mesh[axis])
    return found
