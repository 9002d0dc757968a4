"""Replay: write edits, in phase order, into a draft, and derive every layout from it.

A new kind of edit is a frozen dataclass in `edits`, a function here that writes it into a `Draft`,
and a row in `KINDS`. Nothing else knows the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardwise.sharding.boundaries import find_casts
from shardwise.sharding.derived import Accumulation, Base, Derived, LossScale, Precision, Remat
from shardwise.sharding.edits import (
    PHASES,
    AccumulateEdit,
    Clauses,
    Edit,
    FreezeEdit,
    HomeEdit,
    KeepEdit,
    LossScaleEdit,
    PrefetchEdit,
    RematEdit,
    SequenceEdit,
    TensorEdit,
    TreeAtEdit,
)
from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.failures import Failure, raise_failures
from shardwise.sharding.homes import HOMES, Request, Target, place
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.modules import select_modules
from shardwise.sharding.precision import (
    Asked,
    Dtypes,
    PrecisionEdit,
    dtypes_of,
    is_float,
    misfit,
    no_float,
)
from shardwise.sharding.spec import Spec
from shardwise.sharding.tensor_replay import TensorDraft, derive_tensor, resolve_cuts
from shardwise.sharding.tree import FrozenMap, match, match_exact, no_match, nothing_left, selects
from shardwise.sharding.units import ParamInfo, Unit

_PREFETCH_UNITS = 0
_ONE_PASS = Accumulation()
_DTYPE_OF_HOME = {"params": "params", "grads": "grads", "opt": "master"}


@dataclass(slots=True)
class Draft:
    """What edits write into while they replay."""

    mesh: Mesh
    infos: dict[str, ParamInfo]
    units: tuple[Unit, ...]
    modules: tuple[str, ...]
    buffers: tuple[str, ...]
    requests: dict[str, dict[str, Request]] = field(default_factory=dict)
    overrides: dict[tuple[str, str], TreeAtEdit] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    keep: set[str] = field(default_factory=set)
    prefetch: int = _PREFETCH_UNITS
    accumulation: Accumulation = _ONE_PASS
    dtypes: dict[str, dict[str, Asked]] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    buffer_dtypes: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    loss_scale: LossScale | None = None
    remat: dict[str, Remat] = field(default_factory=dict)
    tensor: TensorDraft = field(default_factory=TensorDraft)


class Kind(NamedTuple):
    """A kind of edit: its value, and what writes that value into a draft."""

    edit: type[Edit]
    apply: Callable[[Draft, Any], None]


def replay(base: Base, edits: Iterable[Edit]) -> Derived:
    """Derive all layouts; edits come sorted by phase.

    Raises:
        PlanError: an edit selects nothing, or asks for a layout some parameter cannot have; all
            failures in one error.
    """
    infos = {info.path: info for info in base.infos}
    draft = Draft(base.mesh, infos, base.units, base.modules, base.buffers)
    late = PHASES.index("sequence")
    edits = list(edits)
    for edit in edits:
        if PHASES.index(edit.phase) <= late:
            KINDS[edit.kind].apply(draft, edit)
    # Data axes may be those that a tensor axis was split into, and cut what it leaves.
    draft.mesh, cuts = resolve_cuts(draft.tensor, base, draft.infos)
    draft.failures += cuts.failures
    draft.claimed |= {part for axis in cuts.axes.values() for part in axis.parts}
    for edit in edits:
        if PHASES.index(edit.phase) > late:
            KINDS[edit.kind].apply(draft, edit)
    return _derive(draft, base)


def uses_half(
    compute: Mapping[str, Spec], grads: Mapping[str, Spec], reduce: Mapping[str, str]
) -> bool:
    """Whether float16 computes or carries gradients."""
    specs = (*compute.values(), *grads.values())
    carried = (reduce[path] for path in grads)
    return "float16" in {*(spec.dtype for spec in specs), *carried}


def replay_order(edit: Edit) -> tuple[int, str]:
    """Sort key of the replay: by phase, then by kind; kinds of one phase write different things.

    >>> replay_order(FreezeEdit()) < replay_order(HomeEdit(home="opt", axis=None))
    True
    """
    return PHASES.index(edit.phase), edit.kind


def selected(infos: Iterable[ParamInfo], clauses: Clauses) -> tuple[str, ...]:
    """Paths of the parameters that every clause selects, by path or by alias.

    Raises:
        PatternError: a pattern, or all together, select nothing.
    """
    return _select({info.path: info.names for info in infos}, clauses)


def _select(names: Mapping[str, tuple[str, ...]], clauses: Clauses) -> tuple[str, ...]:
    known = [name for group in names.values() for name in group]
    for pattern in dict.fromkeys(pattern for clause in clauses for pattern in clause):
        if not any(match(pattern, name) for name in known):
            raise no_match(pattern, known)
    found = tuple(
        key for key, group in names.items() if all(selects(clause, group) for clause in clauses)
    )
    if not found and clauses:
        shown = (", ".join(map(repr, clause)) for clause in clauses)
        raise nothing_left(" and ".join(shown), known)
    return found


def _set_home(draft: Draft, edit: HomeEdit) -> None:
    _check_axes(draft, edit.axis or (), edit.by)
    axes = draft.mesh.expand(edit.axis or ())
    request = Request(axes, edit.on, edit.pad, edit.by)
    for path in selected(draft.infos.values(), edit.where):
        draft.requests.setdefault(path, {})[edit.home] = request


def _check_axes(draft: Draft, axes: Iterable[str], by: str) -> None:
    for axis in axes:
        if axis not in draft.mesh:
            raise PlanError(
                f"{by or 'an edit'} names the unknown mesh axis {axis!r}.",
                facts=f"{draft.mesh!r} has no such axis.",
                why="Homes are cut over axes of the mesh; an axis of size 1 cuts nothing.",
                fix=f"{nearest(axis, draft.mesh.names)}; or {axis}=1 in the mesh",
                axis=axis,
            )


def _freeze(draft: Draft, edit: FreezeEdit) -> None:
    for path in selected(draft.infos.values(), edit.where):
        draft.infos[path] = replace(draft.infos[path], trainable=False)


def _tensor(draft: Draft, edit: TensorEdit) -> None:
    _check_axes(draft, [edit.axis], edit.by)
    draft.tensor.edits.append((edit, selected(draft.infos.values(), edit.where)))


def _sequence(draft: Draft, edit: SequenceEdit) -> None:
    _check_axes(draft, [edit.axis], edit.by)
    draft.tensor.sequences[edit.axis] = edit


def _keep(draft: Draft, edit: KeepEdit) -> None:
    # The root and its children stay open for the whole step in any case.
    units = {unit.name: (unit.name,) for unit in draft.units if unit.kind == "unit"}
    found = _select(units, edit.where)
    draft.keep = draft.keep.union(found) if edit.keep else draft.keep.difference(found)


def _prefetch(draft: Draft, edit: PrefetchEdit) -> None:
    draft.prefetch = edit.distance


def _precision(draft: Draft, edit: PrecisionEdit) -> None:
    if edit.settings:
        _set_dtypes(draft, edit)
    if edit.outputs:
        for path in _select_modules(draft, edit):
            draft.outputs[path] = edit.outputs
    if edit.buffers:
        clauses = tuple(clause for clause in (edit.buffer_paths, *edit.where) if clause)
        for path in _select({name: (name,) for name in draft.buffers}, clauses):
            draft.buffer_dtypes[path] = edit.buffers


def _set_dtypes(draft: Draft, edit: PrecisionEdit) -> None:
    asked = {name: Asked(value, edit.by) for name, value in edit.settings.items()}
    # A last segment with a star is over whatever is there; a name in full is meant.
    patterns = [p for clause in edit.where for p in clause if "*" not in p.rpartition(".")[2]]
    for path in selected(draft.infos.values(), edit.where):
        info = draft.infos[path]
        if is_float(info.dtype):
            draft.dtypes.setdefault(path, {}).update(asked)
        elif any(match_exact(p, name) for p in patterns if p[0] != "~" for name in info.names):
            draft.failures.append(no_float(info, edit))


def _select_modules(draft: Draft, edit: PrecisionEdit | RematEdit) -> list[str]:
    """The modules of an edit that all masks around it select as well."""
    found = select_modules(edit.modules, draft.modules)
    inside = [path for path in found if all(selects(clause, (path,)) for clause in edit.where)]
    if not inside:
        shown = (", ".join(map(repr, clause)) for clause in (edit.modules, *edit.where))
        raise nothing_left(" and ".join(shown), draft.modules)
    return inside


def _loss_scale(draft: Draft, edit: LossScaleEdit) -> None:
    if edit.value:
        draft.loss_scale = LossScale(initial=float(edit.value), dynamic=False)
        return
    draft.loss_scale = LossScale(
        initial=2.0**edit.initial_power,
        window=edit.window,
        hysteresis=edit.hysteresis,
        minimum=edit.minimum,
        consecutive_hysteresis=edit.consecutive_hysteresis,
        maximum=edit.maximum,
    )


def _accumulate(draft: Draft, edit: AccumulateEdit) -> None:
    draft.accumulation = Accumulation(edit.steps, edit.reduce, edit.gather)


def _remat(draft: Draft, edit: RematEdit) -> None:
    for path in _select_modules(draft, edit):
        draft.remat[path] = Remat(edit.policy, edit.names)


def _tree_at(draft: Draft, edit: TreeAtEdit) -> None:
    paths = {name: info.path for info in draft.infos.values() for name in info.names}
    if edit.path not in paths:
        raise no_match(edit.path, list(paths))
    path = paths[edit.path]
    if path not in selected(draft.infos.values(), edit.where):
        raise PlanError(
            f"{edit.by or 'tree_at'} lies outside of the mask around it.",
            where=path,
            facts=f"mask {edit.where!r}",
            why="A masked transform changes only parameters that the mask selects.",
            fix="widen the mask, or apply tree_at outside of it",
            path=path,
        )
    draft.overrides[edit.home, path] = edit


KINDS: FrozenMap[str, Kind] = FrozenMap(
    (kind.edit.kind, kind)
    for kind in (
        Kind(HomeEdit, _set_home),
        Kind(FreezeEdit, _freeze),
        Kind(TensorEdit, _tensor),
        Kind(SequenceEdit, _sequence),
        Kind(KeepEdit, _keep),
        Kind(PrefetchEdit, _prefetch),
        Kind(PrecisionEdit, _precision),
        Kind(LossScaleEdit, _loss_scale),
        Kind(AccumulateEdit, _accumulate),
        Kind(RematEdit, _remat),
        Kind(TreeAtEdit, _tree_at),
    )
)


def _derive(draft: Draft, base: Base) -> Derived:
    dtypes = {p: dtypes_of(info, draft.dtypes.get(p, {})) for p, info in draft.infos.items()}
    marks = draft.tensor.marks
    compute = {
        path: Spec(info.axes, tuple(marks.get(path, {}).items()), dtype=dtypes[path].compute)
        for path, info in draft.infos.items()
    }
    tensor = derive_tensor(draft.tensor, base)
    homes: dict[str, dict[str, Spec]] = {home: {} for home in HOMES}
    failures = list(draft.failures)
    for path, info in draft.infos.items():
        target = Target(info, compute[path], draft.mesh, tensor.block(info))
        owned = HOMES if info.trainable else HOMES[:1]
        requests = draft.requests.get(path, {})
        placed = place(target, {home: requests[home] for home in owned if home in requests})
        for home in owned:
            edit = draft.overrides.get((home, path))
            spec = _override(draft, info, edit) if edit else placed[home]
            if isinstance(spec, Failure):
                failures.append(spec)
            else:
                dtype = spec.dtype if edit else getattr(dtypes[path], _DTYPE_OF_HOME[home])
                homes[home][path] = spec.with_(dtype=dtype)
    failures += _misfits(draft, homes, dtypes)
    raise_failures(failures, len(draft.infos))
    precision = _make_precision(draft, dtypes, compute)
    return Derived(
        mesh=draft.mesh,
        infos=tuple(draft.infos.values()),
        units=draft.units,
        params=FrozenMap(homes["params"]),
        grads=FrozenMap(homes["grads"]),
        opt=FrozenMap(homes["opt"]),
        compute=FrozenMap(compute),
        batch=tuple(axis for axis in draft.mesh.names if axis not in draft.claimed),
        keep=frozenset(draft.keep),
        prefetch=draft.prefetch,
        accumulation=draft.accumulation,
        precision=precision,
        remat=_remat_in_order(draft),
        loss_scale=draft.loss_scale
        or _default_loss_scale(compute, homes["grads"], precision.reduce),
        tensor=tensor,
    )


def _misfits(
    draft: Draft, homes: Mapping[str, Mapping[str, Spec]], dtypes: Mapping[str, Dtypes]
) -> list[Failure]:
    """What the dtypes that were asked for, as `tree_at` has left them, do not allow."""
    found: list[Failure | None] = []
    for path, asked in draft.dtypes.items():
        if path in homes["params"] and path in homes["opt"]:
            rest = {"params": homes["params"][path].dtype, "master": homes["opt"][path].dtype}
            found.append(misfit(draft.infos[path], asked, dtypes[path]._replace(**rest)))
    return [failure for failure in found if failure is not None]


def _make_precision(
    draft: Draft, dtypes: Mapping[str, Dtypes], compute: Mapping[str, Spec]
) -> Precision:
    infos = tuple(draft.infos.values())
    own = Asked("nearest")
    return Precision(
        gather=FrozenMap((path, found.gather) for path, found in dtypes.items()),
        reduce=FrozenMap((path, found.reduce) for path, found in dtypes.items()),
        stochastic=frozenset(
            path
            for path, asked in draft.dtypes.items()
            if asked.get("rounding", own).value == "stochastic" and draft.infos[path].trainable
        ),
        casts=find_casts(infos, compute, draft.modules, draft.outputs),
        buffers=FrozenMap(draft.buffer_dtypes),
    )


def _remat_in_order(draft: Draft) -> FrozenMap[str, Remat]:
    """Outer modules first; what the last edit said of a module counts."""
    chosen = draft.remat
    asked = [path for path in draft.modules if path in chosen]
    return FrozenMap((path, chosen[path]) for path in asked if chosen[path].policy != "nothing")


def _default_loss_scale(
    compute: Mapping[str, Spec], grads: Mapping[str, Spec], reduce: Mapping[str, str]
) -> LossScale | None:
    """Without a word from the user, float16 is scaled and nothing else is."""
    return LossScale() if uses_half(compute, grads, reduce) else None


def _override(draft: Draft, info: ParamInfo, edit: TreeAtEdit) -> Spec | Failure:
    spec = Spec.parse(edit.spec)
    _check_axes(draft, spec.mesh_axes, edit.by)
    problem, fix = _misfit(spec, info, draft.mesh)
    if not problem:
        return spec
    return Failure(
        by=edit.by or f"tree_at({edit.home!r}, {edit.path!r}, {edit.spec!r})",
        problem=f"gives {{count}} a home {problem}",
        path=info.path,
        tail=f"shape {info.shape}   axes '{info.axes}'",
        why=f"{draft.mesh!r}.",
        fix=fix,
        numbers={"spec": edit.spec, "shape": info.shape},
    )


def _misfit(spec: Spec, info: ParamInfo, mesh: Mesh) -> tuple[str, str]:
    """What is wrong with a spec as a home of this parameter, and the fix; both empty: nothing."""
    if spec.axes != info.axes:
        return f"with the axes '{spec.axes}'", f"write the dimensions as '{info.axes}'"
    if spec.partial:
        return f"with sums pending over {', '.join(spec.partial)}", "leave out the '+' part"
    for dim, size in enumerate(info.shape):
        axes = [axis for axis in spec.dim_axes(dim) if mesh[axis] > 1]
        parts = mesh.product(tuple(axes))
        if len(axes) > 1 and size % parts:
            rest = f"dim {dim} has size {size}; {size} % {parts} == {size % parts}"
            return f"that chunks chunks ({rest})", "cut it unevenly over one axis only"
    return "", ""
