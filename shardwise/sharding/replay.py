"""Replay: write edits, in phase order, into a draft, and derive every layout from it.

A new kind of edit is a frozen dataclass in `edits`, a function here that writes it into a `Draft`,
and a row in `KINDS`. Nothing else knows the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from shardwise.sharding.derived import Accumulation, Base, Derived, LossScale, Remat
from shardwise.sharding.deriving import derive
from shardwise.sharding.draft import Draft, check_axes, select_names, selected
from shardwise.sharding.edits import (
    PHASES,
    AccumulateEdit,
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
from shardwise.sharding.errors import PlanError
from shardwise.sharding.homes import Request
from shardwise.sharding.modules import select_modules
from shardwise.sharding.offload_edit import OffloadEdit, Placed, sizes_of, spread
from shardwise.sharding.precision import (
    Asked,
    PrecisionEdit,
    is_float,
    no_float,
)
from shardwise.sharding.tensor_replay import resolve_cuts
from shardwise.sharding.tiers import Tier
from shardwise.sharding.tree import FrozenMap, match_exact, no_match, nothing_left, selects


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
    return derive(draft, base)


def replay_order(edit: Edit) -> tuple[int, str]:
    """Sort key of the replay: by phase, then by kind; kinds of one phase write different things.

    >>> replay_order(FreezeEdit()) < replay_order(HomeEdit(home="opt", axis=None))
    True
    """
    return PHASES.index(edit.phase), edit.kind


def _set_home(draft: Draft, edit: HomeEdit) -> None:
    check_axes(draft, edit.axis or (), edit.by)
    axes = draft.mesh.expand(edit.axis or ())
    request = Request(axes, edit.on, edit.pad, edit.by)
    for path in selected(draft.infos.values(), edit.where):
        draft.requests.setdefault(path, {})[edit.home] = request


def _freeze(draft: Draft, edit: FreezeEdit) -> None:
    for path in selected(draft.infos.values(), edit.where):
        draft.infos[path] = replace(draft.infos[path], trainable=False)


def _tensor(draft: Draft, edit: TensorEdit) -> None:
    check_axes(draft, [edit.axis], edit.by)
    draft.tensor.edits.append((edit, selected(draft.infos.values(), edit.where)))


def _sequence(draft: Draft, edit: SequenceEdit) -> None:
    check_axes(draft, [edit.axis], edit.by)
    draft.tensor.sequences[edit.axis] = edit


def _keep(draft: Draft, edit: KeepEdit) -> None:
    # The root and its children stay open for the whole step in any case.
    units = {unit.name: (unit.name,) for unit in draft.units if unit.kind == "unit"}
    found = select_names(units, edit.where)
    draft.keep = draft.keep.union(found) if edit.keep else draft.keep.difference(found)


def _prefetch(draft: Draft, edit: PrefetchEdit) -> None:
    draft.prefetch = edit.distance


def _offload(draft: Draft, edit: OffloadEdit) -> None:
    placed = Placed(Tier.parse(edit.tier), edit.prefetch)
    if edit.part == "acts":
        found = dict.fromkeys(_select_modules(draft, edit), 1)
        draft.acts |= dict.fromkeys(spread(found, edit.fraction), placed)
        return
    paths = selected(draft.infos.values(), edit.where)
    owned = [draft.infos[p] for p in paths if edit.part == "params" or draft.infos[p].trainable]
    for path in spread(sizes_of(owned), edit.fraction):
        draft.placed[edit.part, path] = placed


def _precision(draft: Draft, edit: PrecisionEdit) -> None:
    if edit.settings:
        _set_dtypes(draft, edit)
    if edit.outputs:
        for path in _select_modules(draft, edit):
            draft.outputs[path] = edit.outputs
    if edit.buffers:
        clauses = tuple(clause for clause in (edit.buffer_paths, *edit.where) if clause)
        for path in select_names({name: (name,) for name in draft.buffers}, clauses):
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


def _select_modules(draft: Draft, edit: PrecisionEdit | RematEdit | OffloadEdit) -> list[str]:
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
        draft.remat[path] = Remat(edit.policy, edit.names, edit.tier)


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
        Kind(OffloadEdit, _offload),
        Kind(PrecisionEdit, _precision),
        Kind(LossScaleEdit, _loss_scale),
        Kind(AccumulateEdit, _accumulate),
        Kind(RematEdit, _remat),
        Kind(TreeAtEdit, _tree_at),
    )
)
