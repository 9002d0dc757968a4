"""How a tensor lies over the ranks of a mesh: which part each rank holds, and which rows it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from shardwise.sharding.frames import Run, Runs, Tile, clip, tiles_of
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.mesh import Mesh


class Grid:
    """The parts that some axes of a mesh make, and the ranks that hold each.

    >>> grid = Grid(Mesh(dp=2, fsdp=2), ("fsdp",))
    >>> grid.part_of, grid.holders
    ([0, 1, 0, 1], [[0, 2], [1, 3]])
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.mesh = mesh
        self.axes = axes
        self.part_of = [mesh.index(axes, mesh.coords(rank)) for rank in range(mesh.size)]
        self.holders: list[list[int]] = [[] for _ in range(mesh.product(axes))]
        for rank, part in enumerate(self.part_of):
            self.holders[part].append(rank)

    def holder_for(self, part: int, rank: int) -> int:
        """Who gives a part to a rank that does not hold it."""
        holders = self.holders[part]
        return holders[rank % len(holders)]


@dataclass(frozen=True)
class Lying:
    """How one tensor lies over ranks; its parts are numbered by tensor axes first.

    Args:
        grid: over the axes of the tensor's frame, if it has one, and then those of its layout.
        entry: of the tensor in its layout.
    """

    grid: Grid
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global tensor."""
        return self.entry.whole

    @cached_property
    def data_parts(self) -> int:
        """Parts of one block."""
        frame = self.entry.frame
        places = 1 if frame is None else len(frame.cuts)
        return len(self.grid.holders) // places

    def rows(self, part: int) -> tuple[int, int]:
        """First row and end of a part in its block, along the dimension that is cut; maybe none."""
        dim, shape, block = self.entry.dim, self.entry.shape, self.entry.block
        if self.data_parts == 1:
            return 0, shape[dim] if shape else 1
        start = min(part % self.data_parts * block[dim], shape[dim])
        return start, min(start + block[dim], shape[dim])

    def tiles(self, part: int) -> tuple[Tile, ...]:
        """The rectangles of the global tensor that a part holds, and where in its padded block.

        None where it holds padding only. A tensor without dimensions is one rectangle.
        """
        place, data_part = divmod(part, self.data_parts)
        return tuple(tiles_of(runs_in(self.entry, place, data_part, self.data_parts)))

    def first_tiles(self, part: int) -> tuple[Tile, ...]:
        """Those tiles of a part that no part before it holds: of all parts, each element once.

        Places of a frame may hold copies of a run, such as heads of keys that several ranks share;
        copies lie at the same rows of their blocks, so data axes cut them alike.
        """
        found = self.tiles(part)
        frame = self.entry.frame
        if frame is None or not frame.has_copies or part < self.data_parts:
            return found
        before = {
            tile
            for one in range(part % self.data_parts, part, self.data_parts)
            for tile in self.tiles(one)
        }
        return tuple(tile for tile in found if tile not in before)

    def parts_touching(self, tile: Tile) -> Iterator[int]:
        """The parts that may hold some of a rectangle, in order, found without a look at all."""
        dim, block = self.entry.dim, max(1, self.entry.block[self.entry.dim])
        frame = self.entry.frame
        whole = tuple((Run(0, size, 0),) for size in self.entry.shape)
        for place, cut in enumerate((whole,) if frame is None else frame.cuts):
            inside = [
                _between(runs, start, start + size)
                for runs, start, size in zip(cut, tile.offsets, tile.sizes, strict=True)
            ]
            if all(inside):
                spans = (range(a // block, -(-b // block)) for a, b in inside[dim])
                parts = sorted({part for span in spans for part in span})
                yield from (place * self.data_parts + part for part in parts)

    def parts_over(self, start: int, stop: int) -> range:
        """The parts that have some of these rows, of a tensor that no tensor axis cuts."""
        if len(self.grid.holders) == 1:
            return range(1)
        chunk = max(1, self.entry.block[self.entry.dim])
        return range(start // chunk, min(-(-stop // chunk), len(self.grid.holders)))


def _between(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """Where rows of the tensor are in a block that holds these runs: begin and end of each part."""
    found: list[tuple[int, int]] = []
    for run in runs:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            found.append((first - run.start + run.at, last - run.start + run.at))
    return found


def runs_in(entry: Entry, place: int, part: int, parts: int) -> tuple[Runs, ...]:
    """By dimension, the rows of the global tensor in one part of one block.

    Args:
        entry: of the tensor.
        place: along the axes of its frame.
        part: along the axes of its layout.
        parts: that the axes of its layout make.
    """
    if entry.frame is None:
        runs: list[Runs] = [(Run(0, size, 0),) for size in entry.shape]
    else:
        runs = list(entry.frame.cuts[place])
    if parts > 1 and runs:
        rows, size = entry.block[entry.dim], entry.shape[entry.dim]
        start = min(part * rows, size)
        runs[entry.dim] = clip(runs[entry.dim], start, min(start + rows, size))
    return tuple(runs)


def local_runs(
    entry: Entry, layout: Layout, mesh: Mesh, coords: Mapping[str, int]
) -> tuple[Runs, ...]:
    """By dimension, the rows of the global tensor that the rank at `coords` holds.

    Args:
        entry: of the layout.
        layout: gives the axes that cut blocks.
        mesh: sizes of the axes.
        coords: of the rank.

    >>> entry = Entry("w", (5,), 0, (3,), 0)
    >>> local_runs(entry, Layout(("fsdp",), (entry,), 3, None), Mesh(fsdp=2), {"fsdp": 1})
    ((Run(start=3, stop=5, at=0),),)
    """
    place = 0 if entry.frame is None else mesh.index(entry.frame.axes, coords)
    return runs_in(entry, place, mesh.index(layout.axes, coords), mesh.product(layout.axes))


def rectangle(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The view of a rectangle of a tensor.

    Args:
        tensor: of as many dimensions.
        offsets: where the rectangle begins.
        sizes: of the rectangle.
    """
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def lying_of(grid: Callable[[tuple[str, ...]], Grid], layout: Layout, entry: Entry) -> Lying:
    """How a tensor of a layout lies.

    Args:
        grid: from `grids_of`.
        layout: gives the axes that cut blocks.
        entry: of the layout.
    """
    framed = () if entry.frame is None else entry.frame.axes
    return Lying(grid((*framed, *layout.axes)), entry)


def grids_of(mesh: Mesh) -> Callable[[tuple[str, ...]], Grid]:
    """Makes each grid of a mesh once.

    Args:
        mesh: whose axes cut tensors.

    >>> grid = grids_of(Mesh(fsdp=2))
    >>> grid(("fsdp",)) is grid(("fsdp",))
    True
    """
    known: dict[tuple[str, ...], Grid] = {}

    def grid(axes: tuple[str, ...]) -> Grid:
        if axes not in known:
            known[axes] = Grid(mesh, axes)
        return known[axes]

    return grid
