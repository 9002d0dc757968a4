"""What edits write into while they replay, and what their patterns select."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.sharding.derived import Accumulation, LossScale, Remat
from shardwise.sharding.edits import (
    Clauses,
    TreeAtEdit,
)
from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.failures import Failure
from shardwise.sharding.homes import Request
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.offload_edit import Placed
from shardwise.sharding.precision import (
    Asked,
)
from shardwise.sharding.tensor_replay import TensorDraft
from shardwise.sharding.tree import match, no_match, nothing_left, selects
from shardwise.sharding.units import ParamInfo, Unit

_PREFETCH_UNITS = 0
_ONE_PASS = Accumulation()


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
    placed: dict[tuple[str, str], Placed] = field(default_factory=dict)
    acts: dict[str, Placed] = field(default_factory=dict)


def selected(infos: Iterable[ParamInfo], clauses: Clauses) -> tuple[str, ...]:
    """Paths of the parameters that every clause selects, by path or by alias.

    Raises:
        PatternError: a pattern, or all together, select nothing.
    """
    return select_names({info.path: info.names for info in infos}, clauses)


def select_names(names: Mapping[str, tuple[str, ...]], clauses: Clauses) -> tuple[str, ...]:
    """Keys that every clause selects by one of their names.

    Raises:
        PatternError: a pattern, or all together, select nothing.
    """
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


def check_axes(draft: Draft, axes: Iterable[str], by: str) -> None:
    """Refuse names that are no axes of the mesh.

    Raises:
        PlanError: one is not.
    """
    for axis in axes:
        if axis not in draft.mesh:
            raise PlanError(
                f"{by or 'an edit'} names the unknown mesh axis {axis!r}.",
                facts=f"{draft.mesh!r} has no such axis.",
                why="Homes are cut over axes of the mesh; an axis of size 1 cuts nothing.",
                fix=f"{nearest(axis, draft.mesh.names)}; or {axis}=1 in the mesh",
                axis=axis,
            )
