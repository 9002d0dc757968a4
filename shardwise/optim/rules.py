"""A gradient transform from one rule: what one tensor's step is, given its gradient and its slots.

A rule is written once, out of place; the in-place form runs it group by group and copies the new
slots over the old. That is one group's temporaries more than a fused kernel, and elementwise ATen
operations do not show cuts (see [Note: cuts do not show]). A rule that is one of the C kernel's
recipes too takes that way on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardwise.kernels.recipes import Recipe
from shardwise.optim.base import Couples, GradientTransform, Scale, Tensors, scale_of
from shardwise.optim.flat import Row, in_one_pass, scaled, write_shadows
from shardwise.optim.schedules import Schedule, first_count


class At(NamedTuple):
    """Where training stands, as 0-dim tensors."""

    count: Tensor  # float64, steps taken with this one: 1 in the first step
    rate: Tensor  # float64


Slots: TypeAlias = Mapping[str, Tensor]
Step: TypeAlias = Callable[[At, Tensor, Tensor, Slots], tuple[Tensor, dict[str, Tensor]]]
"""`step(at, param, grad, slots) -> (update, new slots)`, out of place."""


class Rule(NamedTuple):
    """What makes an optimizer.

    Attributes:
        state: a NamedTuple type: `count`, `learning_rate`, then one field per slot.
        schedule: the rate.
        slots: `slots(param) -> {field: first value}`; fields that it leaves out do not exist for
            that parameter.
        step: the step of one tensor.
        couples: what the step must see whole.
        recipe: the same step as the C kernel takes it, at a rate; None: it has none.
    """

    state: Callable[..., Any]
    schedule: Schedule
    slots: Callable[[Tensor], dict[str, Tensor]]
    step: Step
    couples: Couples = "element"
    recipe: Callable[[float], Recipe] | None = None


def from_rule(rule: Rule, fields: tuple[str, ...]) -> GradientTransform:
    """The transform of a rule.

    Args:
        rule: what makes it.
        fields: names of the slots, as in `rule.state`.

    >>> class Plain(NamedTuple):
    ...     count: Tensor
    ...     learning_rate: Tensor
    >>> def step(at: At, param: Tensor, grad: Tensor, slots: Slots) -> tuple[Tensor, dict]:
    ...     return -at.rate * grad.sign(), {}
    >>> def rate(count: Tensor) -> Tensor:
    ...     return torch.full_like(count, 0.5, dtype=torch.float64)
    >>> sign = from_rule(Rule(Plain, rate, lambda param: {}, step), ())
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> sign.apply(params, {"w": torch.tensor([3.0, -4.0])}, sign.init(params))[0]
    {'w': tensor([0.5000, 1.5000])}
    """
    return GradientTransform(
        init=partial(_init, rule, fields),
        update=partial(_update, rule, fields),
        apply=partial(_apply, rule, fields),
        couples=rule.couples,
        casts=rule.recipe is not None,
    )


def like(param: Tensor, *names: str) -> dict[str, Tensor]:
    """Slots of zeros in the shape of a parameter."""
    return {name: torch.zeros_like(param) for name in names}


def decayed(grad: Tensor, param: Tensor, weight_decay: float) -> Tensor:
    """The gradient with an L2 penalty (coupled weight decay)."""
    return grad + weight_decay * param if weight_decay else grad


def arrived(beta: float, count: Tensor) -> Tensor:
    """The part of a moment, started at zero, that `count` steps have filled."""
    return 1 - torch.pow(beta, count)


def _init(rule: Rule, fields: tuple[str, ...], params: Tensors) -> Any:
    count = first_count(params)
    first = {key: rule.slots(value) for key, value in params.items()}
    dicts = (
        {key: slots[field] for key, slots in first.items() if field in slots} for field in fields
    )
    return rule.state(count, rule.schedule(count).to(torch.float64), *dicts)


@torch.no_grad()
def _update(
    rule: Rule,
    fields: tuple[str, ...],
    grads: Tensors,
    opt_state: Any,
    params: Tensors,
    **_extra: Any,
) -> tuple[Tensors, Any]:
    rate = rule.schedule(opt_state.count).to(torch.float64)
    count = opt_state.count + 1
    at = At(count.to(torch.float64), rate)
    dicts = [dict(getattr(opt_state, field)) for field in fields]
    updates: Tensors = {}
    for key in grads:
        param = params[key]
        slots = {f: d[key] for f, d in zip(fields, dicts, strict=True) if key in d}
        change, new = rule.step(at, param, scaled(grads[key], param, None), slots)
        updates[key] = change.to(param.dtype)
        for field, values in zip(fields, dicts, strict=True):
            if field in new:
                values[key] = new[field].to(slots[field].dtype)
    return updates, rule.state(count, rate, *dicts)


@torch.no_grad()
def _apply(
    rule: Rule,
    fields: tuple[str, ...],
    params: Tensors,
    grads: Tensors,
    opt_state: Any,
    *,
    scale: Scale | None = None,
    shadows: Tensors | None = None,
    **_extra: Any,
) -> tuple[Tensors, Any]:
    rate = opt_state.learning_rate.copy_(rule.schedule(opt_state.count))
    at = At(opt_state.count.add_(1).to(torch.float64), rate)
    dicts = [getattr(opt_state, field) for field in fields]
    rows: dict[str, Row] = {}
    for key, grad in grads.items():
        slots = [values[key] for values in dicts if key in values]
        shadow = shadows.get(key) if shadows else None
        rows[key] = Row([params[key], *slots], grad, scale_of(scale, key), shadow)
    # Elsewhere than on the CPU a look at the rate would wait.
    if rule.recipe is not None and any(row.grad.is_cpu for row in rows.values()):
        left = {id(row) for row in in_one_pass(rule.recipe(rate.item()), list(rows.values()))}
        rows = {key: row for key, row in rows.items() if id(row) in left}
    for key, row in rows.items():
        slots = {f: d[key] for f, d in zip(fields, dicts, strict=True) if key in d}
        param = params[key]
        change, new = rule.step(at, param, scaled(row.grad, param, row.scale), slots)
        param.add_(change.to(param.dtype))
        for field, value in new.items():
            slots[field].copy_(value)
    write_shadows(list(rows.values()))
    return params, opt_state
