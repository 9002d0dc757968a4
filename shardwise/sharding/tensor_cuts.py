"""Which parts of which parameters tensor axes cut, from the names of dimensions; and the frames.

[Note: fewer heads than ranks]
Names in `SHARED` may be cut into fewer parts than an axis has ranks, if these divide: `kv` of 2
heads over `tp=4`. The axis is then split (`tp0=2, tp1=2`), the name is cut over the first part
only, and ranks along the rest hold copies: specs show it, and gradients are summed over the copies
(see [Note: copies inside of blocks] for those in a fused tensor). Where the heads of a group lie
beside their `kv` in one tensor, `(kv (group + 1 + 1) hd)`, the rest of the axis cuts `group`. The
axis keeps its own name for collectives over all of it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import AxesError, nearest
from shardwise.sharding.failures import Failure
from shardwise.sharding.frames import Frame, make_frame
from shardwise.sharding.grammar import Atom, Position, Sum
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo

CUT = ("vocab", "heads", "kv", "mlp", "tp_out", "tp_in")
"""Names that a tensor axis cuts if no rules say otherwise."""

WHOLE = ("embed", "hd", "group", "norm", "pos", "types", "layers", "rank", "experts")
"""Names that stay whole."""

SHARED = ("kv",)
"""Names that may have copies; see [Note: fewer heads than ranks]."""

GROUP = "group"
"""The heads that share one of `kv`."""

UNEVEN = ("vocab",)
"""Names that may be cut unevenly where they are a dimension of their own: `torch.chunk` rule."""


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """A mesh axis over which layers are cut.

    Args:
        name: of the axis, as the user's mesh has it.
        parts: the axes that it was split into; itself if it was not.
        cuts: by name of a dimension, into how many parts it is cut.
        sequence: whether activations between cut layers are cut along the sequence.
    """

    name: str
    parts: tuple[str, ...]
    cuts: FrozenMap[str, int]
    sequence: bool = False


class Asked(NamedTuple):
    """What one edit asks: names to cut over an axis, of some parameters.

    `listed` tells that the names are those of the call.
    """

    axis: str
    names: tuple[str, ...] | None
    known: tuple[str, ...]
    paths: tuple[str, ...]
    by: str
    listed: bool = False


@dataclass(slots=True)
class Cuts:
    """What all edits amount to.

    `marks` are by path, `counts` by axis and name.
    """

    mesh: Mesh
    axes: dict[str, TensorAxis] = field(default_factory=dict)
    marks: dict[str, dict[Position, tuple[str, ...]]] = field(default_factory=dict)
    frames: dict[str, Frame] = field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def cut_tensors(
    mesh: Mesh, asked: Sequence[Asked], infos: Mapping[str, ParamInfo], sizes: Mapping[str, int]
) -> Cuts:
    """The marks and frames of all parameters, and the mesh with axes split where they have to be.

    Args:
        mesh: of the plan.
        asked: by the edits, in turn.
        infos: by path.
        sizes: of names that shapes leave open.
    """
    cuts = Cuts(mesh)
    counts: dict[str, dict[str, int]] = {}
    chosen: dict[str, list[tuple[Asked, str]]] = {}
    for one in asked:
        counts.setdefault(one.axis, {})
        for path in one.paths:
            names = _names_to_cut(one, infos[path], cuts)
            _find_sizes(one, infos[path], names, sizes, cuts)
            for name in names if path in cuts.sizes else ():
                parts = _parts(one, infos[path], name, cuts)
                if parts is None:
                    continue
                if counts[one.axis].setdefault(name, parts) != parts:
                    cuts.failures.append(_unlike(one, infos[path], name, counts[one.axis][name]))
                chosen.setdefault(path, []).append((one, name))
    if cuts.failures:
        return cuts
    for axis, by_name in counts.items():
        _split(cuts, axis, by_name)
    for path, pairs in chosen.items():
        _refuse_whole_terms(cuts, infos[path], pairs)
        _mark(cuts, infos[path], [*pairs, *_groups(cuts, infos[path], pairs)])
    return cuts


def _names_to_cut(one: Asked, info: ParamInfo, cuts: Cuts) -> tuple[str, ...]:
    wanted = CUT if one.names is None else one.names
    known = tuple(dict.fromkeys((*wanted, *(WHOLE if one.names is None else one.known))))
    for name in info.axes.names:
        if name not in known and not _is_anonymous(info.axes):
            cuts.failures.append(
                Failure(
                    by=one.by,
                    problem=f"has no rule for the name {name!r} of {{count}}",
                    path=info.path,
                    tail=f"shape {info.shape}   axes '{info.axes}'",
                    why="Every name is either cut or kept whole by a rule, so that a misspelt one "
                    "cannot stay whole unnoticed.",
                    fix=f"{nearest(name, known)}; or rules=sw.Rules(..., {name}=None)",
                    numbers={"name": name},
                )
            )
    return tuple(name for name in info.axes.names if name in wanted)


def _is_anonymous(axes: Axes) -> bool:
    return axes == Axes.anonymous(axes.ndim)


def _find_sizes(
    one: Asked, info: ParamInfo, names: Sequence[str], sizes: Mapping[str, int], cuts: Cuts
) -> None:
    """Sizes of all names of a parameter that has something to cut."""
    if not names:
        return
    given = {name: sizes[name] for name in info.axes.names if name in sizes}
    try:
        cuts.sizes[info.path] = info.axes.sizes(info.shape, **given)
    except AxesError as error:
        cuts.failures.append(
            Failure(
                by=one.by,
                problem="does not know the sizes of {count}",
                path=info.path,
                tail=f"shape {info.shape}   axes '{info.axes}'",
                fact=error.what,
                why="A part of a dimension is cut evenly, so its size must be known.",
                fix="sw.plan(..., sizes={'hd': ...}) with the sizes that the shapes leave open",
                numbers={"shape": info.shape},
            )
        )


def _parts(one: Asked, info: ParamInfo, name: str, cuts: Cuts) -> int | None:
    """Into how many parts a name is cut; None after a failure."""
    size, ranks = cuts.sizes[info.path][name], cuts.mesh[one.axis]
    alone = all(at[1:] == () for at in info.axes.places()[name])
    if size % ranks == 0 or (name in UNEVEN and alone):
        return ranks
    if name in SHARED and ranks % size == 0:
        return size
    more = f", or {ranks} % {name} == 0" if name in SHARED else ""
    divisors = [n for n in range(2, ranks + 1) if ranks % n == 0 and size % n == 0]
    cuts.failures.append(
        Failure(
            by=one.by,
            problem=f"cannot cut {name!r} of {{count}}",
            path=info.path,
            tail=f"shape {info.shape}   axes '{info.axes}'",
            fact=f"{name} is {size}; mesh axis {one.axis!r} has {ranks} ranks; "
            f"{size} % {ranks} == {size % ranks}.",
            why=f"{cuts.mesh!r}.  {name} % ranks == 0{more}: a rank computes with whole {name}.",
            fix=f"{one.axis}={divisors[-1] if divisors else 1}, or where= to leave these out",
            numbers={"name": name, "size": size, "ranks": ranks, "remainder": size % ranks},
        )
    )
    return None


def _unlike(one: Asked, info: ParamInfo, name: str, parts: int) -> Failure:
    return Failure(
        by=one.by,
        problem=f"cuts {name!r} of {{count}} into other parts than elsewhere",
        path=info.path,
        tail=f"shape {info.shape}   axes '{info.axes}'",
        fact=f"elsewhere {name} is cut into {parts} parts.",
        why="An axis is split once, so that copies lie along one part of it.",
        fix="make the axis small enough to cut all of them evenly",
        numbers={"name": name, "parts": parts},
    )


def _split(cuts: Cuts, axis: str, by_name: Mapping[str, int]) -> None:
    """Split an axis so that every name is cut over the first parts of it."""
    ranks = cuts.mesh[axis]
    points = sorted({1, *by_name.values(), ranks})
    sizes = [b // a for a, b in itertools.pairwise(points)]
    parts = (axis,)
    if len(sizes) > 1:
        parts = tuple(f"{axis}{number}" for number in range(len(sizes)))
        cuts.mesh = cuts.mesh.split_joined(axis, dict(zip(parts, sizes, strict=True)))
    cuts.axes[axis] = TensorAxis(axis, parts, FrozenMap(by_name))


def _groups(
    cuts: Cuts, info: ParamInfo, pairs: Sequence[tuple[Asked, str]]
) -> Iterator[tuple[Asked, str]]:
    """The heads of a group beside their `kv`, to be cut over the rest of the axis."""
    size = cuts.sizes[info.path].get(GROUP)
    for one, name in pairs:
        axis = cuts.axes[one.axis]
        rest = cuts.mesh[one.axis] // axis.cuts[name]
        if name not in SHARED or rest == 1 or size is None:
            continue
        if size % rest:
            cuts.failures.append(_uneven_group(one, info, size, rest))
            continue
        cuts.axes[one.axis] = replace(axis, cuts=FrozenMap({**axis.cuts, GROUP: rest}))
        yield one, GROUP


def _uneven_group(one: Asked, info: ParamInfo, size: int, rest: int) -> Failure:
    return Failure(
        by=one.by,
        problem=f"cannot cut {GROUP!r} of {{count}}",
        path=info.path,
        tail=f"shape {info.shape}   axes '{info.axes}'",
        fact=f"{GROUP} is {size}; {rest} ranks share one of kv; {size} % {rest} == {size % rest}.",
        why="Ranks with copies of the same kv heads divide the heads of their group.",
        fix=f"make the axis {one.axis!r} smaller, or where= to leave these out",
        numbers={"size": size, "ranks": rest, "remainder": size % rest},
    )


def _refuse_whole_terms(cuts: Cuts, info: ParamInfo, pairs: Sequence[tuple[Asked, str]]) -> None:
    """Of tensors side by side in one, all are cut or none, if only into one part."""
    names = {name for _, name in pairs}
    cut_at = [at for name in names for at in info.axes.places()[name]]
    for position, node in info.axes.nodes():
        if not isinstance(node, Sum):
            continue
        terms = [(*position, number) for number in range(len(node.children))]
        whole = [term for term in terms if all(at[: len(term)] != term for at in cut_at)]
        if whole and len(whole) < len(terms):
            cuts.failures.append(_whole_terms(pairs[0][0], info, whole, sorted(names)))


def _whole_terms(
    one: Asked, info: ParamInfo, whole: Sequence[Position], names: Sequence[str]
) -> Failure:
    told = ", ".join(dict.fromkeys(info.axes.node_text(at) for at in whole))
    return Failure(
        by=one.by,
        problem="cuts only some of the parts side by side in {count}",
        path=info.path,
        tail=f"shape {info.shape}   axes '{info.axes}'",
        fact=f"cut: {', '.join(names)}; whole: {told}.",
        why="A rank would have its rows of the one and all rows of the other, and nothing says "
        "which of them belong together.",
        fix=f"names= that cut {told} as well, or where= to leave these parameters whole",
        numbers={"cut": tuple(names), "whole": told},
    )


def _mark(cuts: Cuts, info: ParamInfo, pairs: Sequence[tuple[Asked, str]]) -> None:
    """Mark the places of the names; the first name that finds an axis free takes it."""
    marks = cuts.marks.setdefault(info.path, {})
    for one, name in pairs:
        axis = cuts.axes[one.axis]
        mesh_axes = _axes_of(cuts, axis, name)
        for at in info.axes.places()[name]:
            free = all(
                info.axes.alternatives(at, other) or not set(mesh_axes) & set(used)
                for other, used in marks.items()
            )
            if free and isinstance(info.axes.node(at), Atom):
                marks[at] = (*marks.get(at, ()), *mesh_axes)
    spec = Spec(info.axes, tuple(marks.items()))
    frame = make_frame(spec, info.shape, cuts.mesh, cuts.sizes[info.path])
    if frame is not None:
        cuts.frames[info.path] = frame


def _axes_of(cuts: Cuts, axis: TensorAxis, name: str) -> tuple[str, ...]:
    """The parts of an axis that cut a name: the first ones, and of a group those after its kv."""
    count = axis.cuts["kv"] if name == GROUP else axis.cuts[name]
    sizes = itertools.accumulate((cuts.mesh[part] for part in axis.parts), operator.mul, initial=1)
    number = sum(size < count for size in sizes)
    return axis.parts[number:] if name == GROUP else axis.parts[:number]


def copy_axes(frame: Frame | None, axes: Sequence[TensorAxis]) -> tuple[str, ...]:
    """Axes along which ranks hold copies of a block that they compute different things with.

    >>> mesh = Mesh(tp=4).split_joined("tp", {"tp0": 2, "tp1": 2})
    >>> frame = make_frame(Spec.parse("kv/tp0"), (2,), mesh, {})
    >>> copy_axes(frame, [TensorAxis("tp", ("tp0", "tp1"), FrozenMap(kv=2))])
    ('tp1',)
    """
    if frame is None:
        return ()
    return tuple(
        part
        for axis in axes
        if set(axis.parts) & set(frame.axes)
        for part in axis.parts
        if part not in frame.axes
    )
