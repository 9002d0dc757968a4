"""A mesh: named axes with sizes, major to minor. A plain value; no process group, no device."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.sharding.errors import MeshError, nearest


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mesh:
    """Named axes with sizes, major to minor: the last axis varies fastest over ranks.

    Args:
        world: number of ranks that `-1` resolves against; default WORLD_SIZE, else 1.
        links: optional kind of link per axis (`"nvlink"`, `"network"`, ...), for cost models.
        axes: axis name to size; one size may be -1.

    Raises:
        MeshError: sizes below 1, more than one -1, or a product that is not the world.

    >>> mesh = Mesh(dp=2, fsdp=-1, world=8)
    >>> mesh
    Mesh(dp=2, fsdp=4)
    >>> mesh.size, mesh["fsdp"], mesh.coords(5)
    (8, 4, {'dp': 1, 'fsdp': 1})
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[str, ...]
    joins: tuple[tuple[str, tuple[str, ...]], ...]

    def __init__(
        self,
        /,
        *,
        world: int | None = None,
        links: Mapping[str, str] | None = None,
        **axes: int,
    ) -> None:
        _check_axes(axes)
        links = dict(links or {})
        for name in links:
            if name not in axes:
                raise MeshError(
                    f"Mesh({_render(axes)}, links=...) names the unknown axis {name!r}.",
                    why="links gives a kind of link to axes of this mesh.",
                    fix=nearest(name, axes),
                )
        sizes = _resolve(axes, world)
        object.__setattr__(self, "names", tuple(axes))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "links", tuple(links.get(name, "") for name in axes))
        object.__setattr__(self, "joins", ())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def __getitem__(self, axis: str) -> int:
        """Size of one axis, or of a joined one."""
        self.check(axis)
        if axis not in self.names:
            return self.product(self.parts(axis))
        return self.sizes[self.names.index(axis)]

    def __contains__(self, axis: object) -> bool:
        return axis in self.names or any(axis == name for name, _ in self.joins)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __repr__(self) -> str:
        return f"Mesh({_render(dict(zip(self.names, self.sizes, strict=True)))})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Make IPython and hypothesis print `repr`; for dataclasses they would list all fields."""
        del cycle
        printer.text(repr(self))

    def check(self, *axes: str) -> None:
        """Raise `MeshError` for a name that is no axis of this mesh."""
        for axis in axes:
            if axis not in self:
                raise MeshError(
                    f"{axis!r} is not an axis of {self!r}.",
                    why="Transforms name mesh axes.",
                    fix=nearest(axis, self.names),
                    axis=axis,
                )

    def product(self, axes: tuple[str, ...]) -> int:
        """Number of ranks that differ only in `axes`."""
        return math.prod(self[axis] for axis in axes)

    def coords(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis."""
        if not 0 <= rank < self.size:
            raise MeshError(
                f"rank {rank} is not in {self!r}.",
                why=f"Ranks run from 0 to {self.size - 1}.",
                fix="pass a rank below mesh.size",
                rank=rank,
                size=self.size,
            )
        out: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name in self.names}

    def rank(self, coords: Mapping[str, int]) -> int:
        """Rank at a position; axes left out count as 0."""
        self.check(*coords)
        rank = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            rank = rank * size + coords.get(name, 0)
        return rank

    def index(self, axes: tuple[str, ...], coords: Mapping[str, int]) -> int:
        """Linear position along several axes, the first one major."""
        index = 0
        for axis in axes:
            index = index * self[axis] + coords[axis]
        return index

    def peers(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` only along `axis`, in axis order."""
        coords, parts = self.coords(rank), self.parts(axis)
        places = itertools.product(*(range(self[part]) for part in parts))
        return tuple(
            self.rank({**coords, **dict(zip(parts, place, strict=True))}) for place in places
        )

    def parts(self, axis: str) -> tuple[str, ...]:
        """The axes that a name stands for: itself, or those that a joined name joins."""
        return dict(self.joins).get(axis, (axis,))

    def expand(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The same axes with joined names written out.

        >>> Mesh(tp=4).split_joined("tp", {"tp0": 2, "tp1": 2}).expand(["tp"])
        ('tp0', 'tp1')
        """
        return tuple(part for axis in axes for part in self.parts(axis))

    @property
    def whole(self) -> Mesh:
        """The mesh with all joined axes as one each, as it was before they were split."""
        parts = {part: name for name, axes in self.joins for part in axes}
        names = tuple(dict.fromkeys(parts.get(name, name) for name in self.names))
        links = dict(zip((parts.get(n, n) for n in self.names), self.links, strict=True))
        return Mesh(world=self.size, links=links, **{name: self[name] for name in names})

    def split_joined(self, axis: str, sizes: Mapping[str, int]) -> Mesh:
        """As `split`, but the axis stays a name for collectives over all of its parts.

        >>> mesh = Mesh(dp=2, tp=4).split_joined("tp", {"tp0": 2, "tp1": 2})
        >>> mesh, mesh["tp"], mesh.peers("tp", 0), mesh.whole
        (Mesh(dp=2, tp0=2, tp1=2), 4, (0, 1, 2, 3), Mesh(dp=2, tp=4))
        """
        made = self.split(axis, **sizes)
        object.__setattr__(made, "joins", (*self.joins, (axis, tuple(sizes))))
        return made

    def split(self, axis: str, **parts: int) -> Mesh:
        """Replace one axis by several, major to minor; one part may be -1.

        >>> Mesh(fsdp=8).split("fsdp", node=-1, local=4)
        Mesh(node=2, local=4)
        """
        size = self[axis]
        _check_axes(parts)
        for name in parts:
            if name in self.names and name != axis:
                raise MeshError(
                    f"split({axis!r}, {_render(parts)}) reuses the axis {name!r} of {self!r}.",
                    why="Axis names are unique in a mesh.",
                    fix="choose another name for that part",
                )
        sizes = dict(zip(parts, _resolve(parts, size), strict=True))
        axes: dict[str, int] = {}
        links: dict[str, str] = {}
        for name, old, link in zip(self.names, self.sizes, self.links, strict=True):
            for key, value in (sizes if name == axis else {name: old}).items():
                axes[key] = value
                links[key] = link
        return Mesh(world=self.size, links=links, **axes)


def _render(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _check_axes(axes: Mapping[str, int]) -> None:
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise MeshError(
                f"Mesh({_render(axes)}): axis {name!r} has size {size!r}.",
                why="Sizes are whole numbers from 1, or -1 for what the world leaves.",
                fix=f"{name}=1 switches the axis off",
                axis=name,
                size=size,
            )


def _resolve(axes: Mapping[str, int], world: int | None) -> tuple[int, ...]:
    """Fill in the one -1, and check that the product is the world when one is known."""
    free = [name for name, size in axes.items() if size == -1]
    fixed = math.prod(size for size in axes.values() if size != -1)
    if len(free) > 1:
        raise MeshError(
            f"Mesh({_render(axes)}) leaves {len(free)} axes open: {', '.join(free)}.",
            why="-1 is filled with what the other axes leave, so only one can be open.",
            fix=f"give a size to {free[1]!r}",
        )
    if not free and world is None:
        return tuple(axes.values())
    total = world if world is not None else int(os.environ.get("WORLD_SIZE", "1"))
    if (free and total % fixed) or (not free and fixed != total):
        raise MeshError(
            f"Mesh({_render(axes)}) does not multiply to the world size {total}.",
            facts=[
                f"{' * '.join(str(s) for s in axes.values() if s != -1) or '1'} == {fixed}; "
                f"{total} % {fixed} == {total % fixed}.",
            ],
            why="Every rank has one position on every axis.",
            fix=f"choose sizes whose product divides {total}" if free else "use -1 for one axis",
            world=total,
            product=fixed,
        )
    return tuple(total // fixed if size == -1 else size for size in axes.values())
