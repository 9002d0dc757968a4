"""Data homes: along which dimension, and over which mesh axes, a home cuts a parameter.

[Note: nested homes]
Going from one home to another is a gather, a scatter or nothing when one home cuts the blocks of
the other further: same dimension, and the axes of the coarser are a prefix of those of the finer.
So the axes of `grads` begin with those it shares with `params`, the axes of `opt` with those of
both. `on="auto"` keeps the coarser home's dimension if that divides; else it takes the first one
that divides by the axes of the finest home to come (for plain ZeRO: its own axes), or of the next
finer, down to its own. A finer home for which nothing divides stays with the coarser cut. So
automatic homes of nested axes always nest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.sharding.errors import nearest
from shardwise.sharding.failures import Failure
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec
from shardwise.sharding.units import ParamInfo

HOMES = ("params", "grads", "opt")
"""The resting layouts of a parameter, coarsest first."""


class Request(NamedTuple):
    """What the last edit asked of one home of one parameter."""

    axes: tuple[str, ...]
    on: str | int = "auto"
    pad: bool = False
    by: str = ""


class Cut(NamedTuple):
    """A dimension and the axes that cut it; no axes: the home is whole."""

    dim: int
    axes: tuple[str, ...]


class Target(NamedTuple):
    """The parameter to cut: a home cuts the blocks of its compute layout, of the shape `block`."""

    info: ParamInfo
    compute: Spec
    mesh: Mesh
    block: tuple[int, ...]

    @property
    def by_choice(self) -> list[int]:
        """Dimensions, those first that the compute layout does not cut."""
        taken = {at[0] for at, _ in self.compute.shards}
        return sorted(range(len(self.block)), key=lambda dim: (dim in taken, dim))

    def divides(self, dim: int, parts: int) -> bool:
        """Whether a dimension of the block falls into equal parts."""
        return self.block[dim] % parts == 0

    def spec(self, cut: Cut) -> Spec:
        """The layout after the cut."""
        axes = (*self.compute.dim_axes(cut.dim), *cut.axes) if cut.axes else ()
        return self.compute.shard(cut.dim, axes) if axes else self.compute


WHOLE = Cut(0, ())


def place(target: Target, requests: Mapping[str, Request]) -> dict[str, Spec | Failure]:
    """The spec of every home, or why it cannot be.

    Args:
        target: the parameter.
        requests: by home; homes without one rest as computed.
    """
    placed: dict[str, Spec | Failure] = dict.fromkeys(HOMES, target.compute)
    cuts: dict[str, Cut] = {}
    ordered = nested_axes(requests)
    automatic = [ordered[home] for home in ordered if requests[home].on == "auto"]
    for home, axes in ordered.items():
        refining = {target.mesh.product(a) for a in automatic if a[: len(axes)] == axes}
        goals = sorted(refining, reverse=True)
        cut = _cut(target, requests[home]._replace(axes=axes), _outer(cuts, axes), goals)
        if isinstance(cut, Failure):
            placed[home] = cut
        else:
            cuts[home] = cut
            placed[home] = target.spec(cut)
    return placed


def nested_axes(requests: Mapping[str, Request]) -> dict[str, tuple[str, ...]]:
    """Axes per home, ordered so that homes nest; see [Note: nested homes].

    >>> nested_axes({"params": Request(("local",)), "opt": Request(("node", "local"))})
    {'params': ('local',), 'opt': ('local', 'node')}
    """
    ordered: dict[str, tuple[str, ...]] = {}
    for home in HOMES:
        if home in requests:
            wanted = requests[home].axes
            outer = [axis for axes in ordered.values() for axis in axes if axis in wanted]
            ordered[home] = tuple(dict.fromkeys([*outer, *wanted]))
    return ordered


def _outer(cuts: Mapping[str, Cut], axes: tuple[str, ...]) -> Cut:
    """The finest cut so far that `axes` refine."""
    nested = [cut for cut in cuts.values() if axes[: len(cut.axes)] == cut.axes]
    return max(nested, key=lambda cut: len(cut.axes), default=WHOLE)


def _cut(target: Target, request: Request, outer: Cut, goals: Sequence[int]) -> Cut | Failure:
    if not request.axes or not target.info.shape:
        return WHOLE
    if request.on == "auto":
        return _auto(target, request.axes, outer, goals)
    dim = _find_dim(target.info, request.on)
    if dim is None:
        return _no_dim(target, request)
    parts = target.mesh.product(request.axes)
    alone = len(_real(request.axes, target.mesh)) == 1
    if not target.divides(dim, parts) and not (request.pad and alone):
        return _uneven(target, request, dim)
    return Cut(dim, request.axes)


def _auto(target: Target, axes: tuple[str, ...], outer: Cut, goals: Sequence[int]) -> Cut:
    """The coarser home's dimension, else the first that reaches the highest of the goals."""
    if outer.axes and target.divides(outer.dim, target.mesh.product(axes)):
        return Cut(outer.dim, axes)
    for parts in goals:
        for dim in target.by_choice:
            if target.divides(dim, parts):
                return Cut(dim, axes)
    if outer.axes:
        return outer
    # Chunks of chunks would depend on the order of the axes, so only one axis cuts unevenly;
    # axes of size 1 in front of it stay, or a finer home would no longer begin with them.
    last = axes.index(_real(axes, target.mesh)[0])
    return Cut(target.by_choice[0], axes[: last + 1])


def _real(axes: Sequence[str], mesh: Mesh) -> list[str]:
    """Axes that have more than one rank."""
    return [axis for axis in axes if mesh[axis] > 1]


def _find_dim(info: ParamInfo, on: str | int) -> int | None:
    ndim = len(info.shape)
    if isinstance(on, int):
        return on % ndim if -ndim <= on < ndim else None
    names = [info.axes.dim_name(dim) for dim in range(ndim)]
    return names.index(on) if on in names else None


def _no_dim(target: Target, request: Request) -> Failure:
    info = target.info
    names = [info.axes.dim_name(dim) for dim in range(len(info.shape))]
    hint = f"; {nearest(request.on, names)}" if isinstance(request.on, str) else ""
    return Failure(
        by=request.by,
        problem=f"finds no dimension {request.on!r} in {{count}}",
        path=info.path,
        tail=f"shape {info.shape}   axes '{info.axes}'",
        why=f"{target.mesh!r}.  Dimension chosen by on={request.on!r}.",
        fix=f"on='auto', or where= to leave these parameters out{hint}",
        numbers={"on": request.on},
    )


def _uneven(target: Target, request: Request, dim: int) -> Failure:
    info, mesh, cut = target.info, target.mesh, Cut(dim, request.axes)
    axes, parts = request.axes, mesh.product(request.axes)
    size = target.block[dim]
    why = f"{mesh!r}.  Dimension chosen by on={request.on!r}."
    if request.pad:
        why += "\npad=True cuts over one axis only: chunks of chunks depend on the axis order."
    return Failure(
        by=request.by,
        problem="cannot shard {count} evenly",
        path=info.path,
        tail=f"shape {info.shape}   axes '{info.axes}'   has '{target.spec(cut)}'",
        fact=f"dim {dim} '{info.axes.dim_name(dim)}' has size {size}; {_sizes(axes, mesh)}; "
        f"{size} % {parts} == {size % parts}.",
        why=why,
        fix=_uneven_fix(target, request, cut),
        numbers={
            "dim": dim,
            "size": size,
            "axes": axes,
            "axes_size": parts,
            "remainder": size % parts,
        },
    )


def _sizes(axes: Sequence[str], mesh: Mesh) -> str:
    if len(axes) == 1:
        return f"mesh axis {axes[0]!r} has size {mesh[axes[0]]}"
    names = " * ".join(repr(axis) for axis in axes)
    sizes = " * ".join(str(mesh[axis]) for axis in axes)
    return f"mesh axes {names} have size {sizes} == {mesh.product(tuple(axes))}"


def _uneven_fix(target: Target, request: Request, cut: Cut) -> str:
    axes, parts = request.axes, target.mesh.product(request.axes)
    size = target.block[cut.dim]
    auto = _auto(target, request.axes, WHOLE, [target.mesh.product(request.axes)])
    even = auto.axes == request.axes and target.divides(auto.dim, parts)
    manner = "" if even else " unevenly"
    verb = "pick" if even else "cut"
    fixes = [f"on='auto' (would {verb} dim {auto.dim}{manner})"]
    if len(_real(axes, target.mesh)) == 1:
        more = -size % parts
        fixes.append(f"pad=True (adds {more} rows, {100 * more / max(size, 1):.1f} %)")
    return f"{', '.join(fixes)}, or make {' * '.join(axes)} a divisor of {size}."
