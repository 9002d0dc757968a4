"""ZeRO as arithmetic on homes: which data axes cut params, grads and optimizer state."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

from shardwise.sharding.edits import Clauses, Edit, FreezeEdit, HomeEdit, KeepEdit, PrefetchEdit
from shardwise.sharding.errors import PlanError, strict_keywords
from shardwise.sharding.homes import HOMES
from shardwise.sharding.plan import Plan, Transform, named
from shardwise.sharding.scope import call_site
from shardwise.sharding.tree import Where

Axis: TypeAlias = str | Sequence[str] | None
"""A mesh axis, several (major to minor), or None to clear."""

_LEVELS = range(4)


@strict_keywords
def shard_params(
    axis: Axis, *, on: str | int = "auto", where: Where = "**", pad: bool = False
) -> Transform:
    """Cut resting parameters over data axes; a unit gathers its own before it runs.

    Saves `nbytes * (n - 1) / n` per rank at rest; costs an all-gather of as many bytes for the
    forward and, unless kept gathered, for the backward.

    Args:
        axis: mesh axis, several (major to minor), or None: whole again.
        on: `"auto"`, the name of a dimension, or its number.
        where: which parameters.
        pad: allow `on` to cut a dimension unevenly (`torch.chunk`), over one axis.

    Raises:
        PlanError: when applied: unknown axis or dimension, or an uneven cut without `pad`.

    >>> shard_params("fsdp").__name__
    "shard_params('fsdp')"
    """
    by = _written("shard_params", axis, on=on, where=where, pad=pad)
    return _set_homes({"params": axis}, by=by, on=on, where=where, pad=pad)


@strict_keywords
def shard_grads(
    axis: Axis, *, on: str | int = "auto", where: Where = "**", pad: bool = False
) -> Transform:
    """Cut gradients over data axes: reduce-scatter instead of all-reduce.

    Arguments and errors as `shard_params`; the axes shared with `params` always come first.

    >>> shard_grads(("node", "local")).__name__
    "shard_grads(('node', 'local'))"
    """
    by = _written("shard_grads", axis, on=on, where=where, pad=pad)
    return _set_homes({"grads": axis}, by=by, on=on, where=where, pad=pad)


@strict_keywords
def shard_optimizer(
    axis: Axis, *, on: str | int = "auto", where: Where = "**", pad: bool = False
) -> Transform:
    """Cut optimizer state and master weights over data axes.

    Arguments and errors as `shard_params`; the axes shared with the other homes come first.

    >>> shard_optimizer(None).__name__
    'shard_optimizer(None)'
    """
    by = _written("shard_optimizer", axis, on=on, where=where, pad=pad)
    return _set_homes({"opt": axis}, by=by, on=on, where=where, pad=pad)


@strict_keywords
def zero(
    level: int, axis: Axis, *, on: str | int = "auto", where: Where = "**", pad: bool = False
) -> Transform:
    """Set all three homes: level 1 cuts `opt`, 2 also `grads`, 3 also `params`; 0 none.

    The same as `shard_optimizer`, `shard_grads` and `shard_params` in a chain, with None for the
    homes above the level.

    Args:
        level: 0 to 3.
        axis: mesh axis or several (major to minor).
        on: `"auto"`, the name of a dimension, or its number.
        where: which parameters.
        pad: allow `on` to cut a dimension unevenly (`torch.chunk`), over one axis.

    Raises:
        PlanError: another level, or a level without an axis; when applied, as `shard_params`.

    References:
        ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, section 5.

    >>> zero(3, "fsdp", where="layers.*").__name__
    "zero(3, 'fsdp', where='layers.*')"
    """
    by = _written("zero", level, axis, on=on, where=where, pad=pad)
    if level not in _LEVELS or isinstance(level, bool):
        raise PlanError(
            f"{by} has no such level.",
            why="ZeRO cuts opt (1), grads too (2), params too (3), or nothing (0).",
            fix="choose a level from 0 to 3",
            level=level,
        )
    if level > 0 and not axis:
        raise PlanError(
            f"{by} names no mesh axis.",
            why=f"Level {level} cuts homes over data axes.",
            fix="name an axis of the mesh, or use level 0 to cut nothing",
            level=level,
        )
    cut = dict(zip(HOMES, (level >= 3, level >= 2, level >= 1), strict=True))
    axes = {home: axis if cut[home] else None for home in HOMES}
    return _set_homes(axes, by=by, on=on, where=where, pad=pad)


@strict_keywords
def freeze(where: Where) -> Transform:
    """Take parameters out of training: they keep a home and a compute layout, nothing else.

    Args:
        where: which parameters.

    >>> freeze("embed").__name__
    "freeze('embed')"
    """
    by, site = _written("freeze", where), call_site()

    def apply(plan: Plan) -> Plan:
        return plan.edit(FreezeEdit(where=plan.clauses(where), by=by), site=site)

    return named(apply, by)


@strict_keywords
def keep_gathered(where: Where = "**", *, keep: bool = True) -> Transform:
    """Leave units gathered between forward and backward: one all-gather less, `nbytes` more.

    Args:
        where: which units, by the path of their module.
        keep: False takes them back.

    >>> keep_gathered("layers.31").__name__
    "keep_gathered('layers.31')"
    """
    by, site = _written("keep_gathered", where, keep=keep), call_site()

    def apply(plan: Plan) -> Plan:
        if not any(unit.kind == "unit" for unit in plan.units):
            warnings.warn(f"{by} has no effect: the model has no units.", stacklevel=2)
        clauses = plan.unit_clauses(where)
        return plan.edit(KeepEdit(where=clauses, keep=keep, by=by), site=site)

    return named(apply, by)


@strict_keywords
def prefetch(distance: int) -> Transform:
    """Start gathering `distance` units ahead; each adds the bytes of one unit to the peak.

    Args:
        distance: number of units, 0 for none.

    Raises:
        PlanError: a negative distance, or (when applied) inside of `masked` or `partition`.

    >>> prefetch(2).__name__
    'prefetch(2)'
    """
    by, site = _written("prefetch", distance), call_site()
    edit = PrefetchEdit(distance=distance, by=by)
    return named(lambda plan: plan.edit(edit, site=site), by)


def _set_homes(
    axes: dict[str, Axis], *, by: str, on: str | int, where: Where, pad: bool
) -> Transform:
    site = call_site()
    for axis in axes.values():
        _check_axis(by, axis)
    if pad and on == "auto" and any(axes.values()):
        warnings.warn(
            f"{by}: pad=True has no effect, on='auto' cuts unevenly by itself.", stacklevel=4
        )

    def apply(plan: Plan) -> Plan:
        clauses = plan.clauses(where)
        return plan.edit(
            *(_home_edit(home, axis, clauses, by, (on, pad)) for home, axis in axes.items()),
            site=site,
        )

    return named(apply, by)


def _check_axis(by: str, axis: Axis) -> None:
    names = axis if isinstance(axis, tuple | list) else (axis or "",)
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None:
        raise PlanError(
            f"{by} names {odd!r} ({type(odd).__name__}) as a mesh axis.",
            why="Axes are named: 'fsdp', or ('dp', 'fsdp') major to minor.",
            fix="write the name of the axis; sizes stand in the Mesh",
            axis=odd,
        )


def _home_edit(home: str, axis: Axis, where: Clauses, by: str, cut: tuple[str | int, bool]) -> Edit:
    names = (axis,) if isinstance(axis, str) else None if axis is None else tuple(axis)
    return HomeEdit(home=home, axis=names, on=cut[0], pad=cut[1], where=where, by=by)


def _written(call: str, *args: Any, **options: Any) -> str:
    """A call as its user wrote it: options at their defaults are left out."""
    defaults = {"on": "auto", "where": "**", "pad": False, "keep": True}
    shown = [_argument(value) for value in args if value != "**"]
    shown += [f"{k}={_argument(v)}" for k, v in options.items() if v != defaults[k]]
    return f"{call}({', '.join(shown)})"


def _argument(value: Any) -> str:
    return getattr(value, "__name__", "predicate") if callable(value) else repr(value)
