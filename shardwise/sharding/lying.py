"""How a tensor lies over the ranks of a mesh: which part each rank holds, and which rows it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.sharding.layout import Entry
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
    """How one tensor lies: its parts are rows along a dimension."""

    grid: Grid
    entry: Entry

    def rows(self, part: int) -> tuple[int, int]:
        """First row and end of a part; may be empty."""
        dim, shape, block = self.entry.dim, self.entry.shape, self.entry.block
        if len(self.grid.holders) == 1:
            return 0, shape[dim] if shape else 1
        start = min(part * block[dim], shape[dim])
        return start, min(start + block[dim], shape[dim])

    def parts_over(self, start: int, stop: int) -> range:
        """The parts that have some of these rows."""
        if len(self.grid.holders) == 1:
            return range(1)
        chunk = max(1, self.entry.block[self.entry.dim])
        return range(start // chunk, min(-(-stop // chunk), len(self.grid.holders)))


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
