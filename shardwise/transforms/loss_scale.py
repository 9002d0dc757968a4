"""The loss scale as a transform of plans."""

from __future__ import annotations

import warnings
from typing import Any

from shardwise.sharding.edits import LossScaleEdit
from shardwise.sharding.errors import strict_keywords
from shardwise.sharding.plan import Transform, named
from shardwise.sharding.scope import call_site

_DEFAULTS = {
    "initial_power": 16,
    "window": 1000,
    "hysteresis": 2,
    "minimum": 1.0,
    "consecutive_hysteresis": False,
    "maximum": 2.0**32,
}


@strict_keywords
def loss_scale(
    value: float = 0,
    *,
    initial_power: int = 16,
    window: int = 1000,
    hysteresis: int = 2,
    minimum: float = 1.0,
    consecutive_hysteresis: bool = False,
    maximum: float = 2.0**32,
) -> Transform:
    """Multiply the loss before backward and divide the gradients after it; for float16.

    A plan in which float16 computes or carries gradients has the dynamic scale of the defaults
    without being told. A step whose loss or gradients are not finite is skipped, whatever the dtype
    and with or without a loss scale: it changes no parameter, no optimizer state, no buffer, no
    step count and no schedule. After an overflow at the minimum of a dynamic scale the step raises
    `LossScaleError`, on every rank. Costs nothing on the wire. See [Note: loss scale].

    Args:
        value: a fixed scale; 0: dynamic, as the other arguments say.
        initial_power: the dynamic scale starts at 2 to this power.
        window: good steps in a row after which the next good one doubles the scale.
        hysteresis: the first overflow that halves the scale; those before it are only skipped.
        minimum: the smallest dynamic scale.
        consecutive_hysteresis: restore the hysteresis at every good step, not only where the scale
            grows.
        maximum: the largest dynamic scale.

    Raises:
        PlanError: a value out of range, or (when applied) inside of `masked` or `partition`.

    >>> loss_scale(window=500).__name__
    'loss_scale(window=500)'
    >>> loss_scale(128.0).__name__
    'loss_scale(128.0)'
    """
    given: dict[str, Any] = {
        "initial_power": initial_power,
        "window": window,
        "hysteresis": hysteresis,
        "minimum": minimum,
        "consecutive_hysteresis": consecutive_hysteresis,
        "maximum": maximum,
    }
    shown = {key: repr(given[key]) for key in given if given[key] != _DEFAULTS[key]}
    head = [repr(value)] if value else []
    by = f"loss_scale({', '.join([*head, *(f'{key}={text}' for key, text in shown.items())])})"
    if value and shown:
        warnings.warn(f"{by}: {', '.join(shown)} has no effect on a fixed scale.", stacklevel=3)
        given = {}
    edit, site = LossScaleEdit(value=value, **given, by=by), call_site()
    return named(lambda plan: plan.edit(edit, site=site), by)
