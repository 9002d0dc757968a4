"""Precision as a transform of plans: dtypes at rest, on the wire, in computation and in sums."""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

import torch

from shardwise.sharding.edits import Edit
from shardwise.sharding.errors import PlanError, strict_keywords
from shardwise.sharding.modules import ROOT
from shardwise.sharding.plan import Plan, Transform, named
from shardwise.sharding.precision import SETTINGS, PrecisionEdit, is_half
from shardwise.sharding.scope import call_site
from shardwise.sharding.tree import Where
from shardwise.sharding.units import dtype_name

Dtype: TypeAlias = str | torch.dtype
"""A dtype, or its name in torch."""


@strict_keywords
def precision(
    *,
    where: Where | None = None,
    params: Dtype | None = None,
    master: Dtype | None = None,
    compute: Dtype | None = None,
    gather: Dtype | None = None,
    reduce: Dtype | None = None,
    grads: Dtype | None = None,
    outputs: Dtype | None = None,
    buffers: Dtype | None = None,
    rounding: str | None = None,
) -> Transform:
    """Set dtypes of parameters, of what moves them, and of what modules return.

    Typical recipes: `precision(compute="bfloat16")` for a float32 model; `precision(
    params="bfloat16", compute="bfloat16")` to rest in 16 bits beside a float32 master;
    `precision(params="bfloat16", rounding="stochastic")` without a master. What is left out
    follows from what is given, see [Note: dtypes of a parameter]; several calls add up, and of one
    setting the last call counts. Where modules of different dtypes meet, floating inputs and
    outputs are cast, see [Note: casts]. Integer and complex parameters keep their dtype.

    A gather moves `itemsize(gather) * numel * (n - 1) / n` bytes per rank, a reduction as much in
    `itemsize(reduce)`. At rest a parameter takes `itemsize(params)`, plus `itemsize(master)` for a
    master copy unless that has the same dtype and no other cut, plus its optimizer state.

    Args:
        where: parameters, and for `outputs` the modules by their own path; default: all parameters,
            the model itself, and all buffers.
        params: of the `params` home.
        master: of the `opt` home: master copy and optimizer state; default: float32, or `params`
            if that is wider.
        compute: in which modules see parameters; default: `params`. Floating inputs of the model
            are cast to it.
        gather: on the wire of gathers; default: `compute`, since parameters are cast first. Where
            nothing is gathered there is no wire, and nothing is cast to it.
        reduce: in which gradients are summed over ranks, on the wire and in the sum; default: the
            wider of float32 and `compute`, so float32 for 16 bits.
        grads: in which gradients rest after a step; default: `reduce`. The passes of a step add up
            in the wider of the two.
        outputs: of the floating outputs of modules.
        buffers: of floating buffers; default: their own.
        rounding: `"nearest"`, or `"stochastic"` for parameters of 16 bits: no master copy is kept,
            see [Note: stochastic rounding]. If `master` has 16 bits as well, optimizer state rests
            in them and is rounded likewise.

    Raises:
        PlanError: an unknown dtype, nothing to set, or (when applied) parameters that are no
            floating numbers, a master that does not hold the parameter, or stochastic rounding of
            more than 16 bits.
        PatternError: when applied: a pattern matches nothing.

    References:
        Micikevicius et al., Mixed Precision Training, 2018 (master weights); Gupta et al., Deep
        Learning with Limited Numerical Precision, 2015 (stochastic rounding).

    >>> precision(compute="bfloat16", outputs=torch.float32).__name__
    "precision(compute='bfloat16', outputs='float32')"
    """
    given: dict[str, Any] = {
        "params": params,
        "master": master,
        "compute": compute,
        "gather": gather,
        "reduce": reduce,
        "grads": grads,
        "rounding": rounding,
        "outputs": outputs,
        "buffers": buffers,
    }
    values = {name: _name(value) for name, value in given.items() if value is not None}
    by = _written(where, values)
    site = call_site()
    if not values:
        raise PlanError(
            f"{by} sets nothing.",
            where="precision(...)",
            facts=f"arguments: {', '.join(given)}; none is given.",
            why="A transform that changes nothing is an error.",
            fix="precision(compute='bfloat16'), or leave it out",
        )
    settings = {name: values[name] for name in SETTINGS if name in values}
    PrecisionEdit(**values, by=by)  # refuses unknown dtypes here, at the user's line

    def apply(plan: Plan) -> Plan:
        edits: list[Edit] = []
        if settings:
            clauses = plan.clauses("**" if where is None else where)
            edits.append(PrecisionEdit(**settings, where=clauses, by=by))
        if "outputs" in values:
            modules = plan.module_patterns(ROOT if where is None else where)
            edits.append(PrecisionEdit(outputs=values["outputs"], modules=modules, by=by))
        if "buffers" in values:
            paths = () if where is None else plan.buffer_patterns(where)
            edits.append(PrecisionEdit(buffers=values["buffers"], buffer_paths=paths, by=by))
        return plan.edit(*edits, site=site)

    return named(apply, by)


def warn_of_lost_updates(plan: Plan, *, stacklevel: int) -> None:
    """Warn, once for all of them, of parameters whose small updates round away.

    Args:
        plan: which trains parameters of 16 bits without a master and without stochastic rounding.
        stacklevel: as for `warnings.warn`, from here.
    """
    lost = [
        path
        for path, spec in plan.opt.items()
        if is_half(spec.dtype) and path not in plan.precision.stochastic
    ]
    if not lost:
        return
    dtype = plan.opt[lost[0]].dtype
    half_step = torch.finfo(getattr(torch, dtype)).eps / 4
    warnings.warn(
        f"{len(lost)} of {len(plan.opt)} trained parameters (first: {lost[0]}) are {dtype} without "
        f"a master copy: a step of less than {half_step:g} of a value rounds away. "
        f"precision(params={dtype!r}) keeps a float32 master, rounding='stochastic' needs none.",
        stacklevel=stacklevel,
    )


def _name(value: Any) -> Any:
    return dtype_name(value) if isinstance(value, torch.dtype) else value


def _written(where: Where | None, values: dict[str, Any]) -> str:
    """The call as its user wrote it."""
    place = getattr(where, "__name__", "predicate") if callable(where) else repr(where)
    head = [] if where is None else [f"where={place}"]
    return f"precision({', '.join([*head, *(f'{k}={v!r}' for k, v in values.items())])})"
