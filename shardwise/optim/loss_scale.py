"""The loss scale as pure functions of its state: when it grows, when it falls, when it gives up.

[Note: loss scale]
Gradients in float16 below 6e-8 are zero and above 65504 infinite, so the loss is multiplied before
backward and the gradients are divided afterwards, by the scale that was used: the scale of the
state that the step began with. A step whose gradients are not finite is skipped and the scale falls
by half, once as many overflows as `hysteresis` says have been absorbed but one; after `window` good
steps in a row the next good one doubles it and restores the hysteresis. The sequences are those of
DeepSpeed's dynamic loss scale. A skipped step counts for nothing else: neither the step count nor
a learning rate schedule advances.

The loss is a sum over elements while gradients are wanted of its mean, so in float16 the sum is
divided before backward by the power of two that is nearest to the number of elements of the last
global batch; powers of two divide exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.sharding.derived import LossScale
from shardwise.sharding.errors import LossScaleError
from shardwise.sharding.scaling import LossScaleState, first_scaling

_FACTOR = 2.0


def init_loss_scale(settings: LossScale | None, *, half: bool = False) -> LossScaleState:
    """The state before the first step.

    Args:
        settings: of the plan; None: no loss scale.
        half: whether float16 computes or carries gradients, so that the loss needs a divisor.

    >>> init_loss_scale(LossScale()).scale.item() == 2**16
    True
    """
    divisor = 0.0 if half else 1.0
    if settings is None:
        return first_scaling(divisor=divisor)
    return first_scaling(settings.initial, settings.hysteresis, divisor)


def next_loss_scale(
    settings: LossScale | None, state: LossScaleState, *, finite: bool, reason: str = ""
) -> LossScaleState:
    """The state after a step.

    Args:
        settings: of the plan; None: no loss scale, only skipped steps are counted.
        state: before the step; not modified.
        finite: whether loss and gradients were, on every rank.
        reason: what was not, for the error.

    Raises:
        LossScaleError: an overflow at the minimum of a dynamic scale.

    >>> state = init_loss_scale(LossScale(initial=8.0, hysteresis=1))
    >>> next_loss_scale(LossScale(initial=8.0, hysteresis=1), state, finite=False).scale
    tensor(4., dtype=torch.float64)
    """
    return _after_good(settings, state) if finite else _after_bad(settings, state, reason)


def next_divisor(state: LossScaleState, count: float, *, half: bool) -> LossScaleState:
    """The state with the divisor of the next step.

    Args:
        state: not modified.
        count: number of elements of this step's global batch, positive.
        half: whether float16 computes or carries gradients.

    >>> next_divisor(init_loss_scale(None, half=True), 1000.0, half=True).divisor.item()
    1024.0
    """
    if not half or (near := nearest_power(count)) == state.divisor.item():
        return state
    return state._replace(divisor=_like(state.divisor, near))


def nearest_power(count: float) -> float:
    """The power of two nearest to a positive number, by ratio.

    >>> nearest_power(11.0), nearest_power(12.0), nearest_power(0.3)
    (8.0, 16.0, 0.25)
    """
    return 2.0 ** round(math.log2(count))


def _after_good(settings: LossScale | None, state: LossScaleState) -> LossScaleState:
    if state.skipped_in_a_row.item():
        state = state._replace(skipped_in_a_row=_like(state.skipped_in_a_row, 0))
    if settings is None or not settings.dynamic:
        return state
    before = int(state.good_steps.item())
    grows = before > 0 and before % settings.window == 0
    if settings.consecutive_hysteresis or grows:
        state = state._replace(hysteresis=_like(state.hysteresis, settings.hysteresis))
    if grows:
        scale = min(state.scale.item() * _FACTOR, settings.maximum)
        state = state._replace(scale=_like(state.scale, scale))
    return state._replace(good_steps=_like(state.good_steps, before + 1))


def _after_bad(settings: LossScale | None, state: LossScaleState, reason: str) -> LossScaleState:
    state = state._replace(skipped=state.skipped + 1, skipped_in_a_row=state.skipped_in_a_row + 1)
    if settings is None or not settings.dynamic:
        return state
    state = state._replace(good_steps=_like(state.good_steps, 0))
    left = int(state.hysteresis.item())
    if left > 1:
        return state._replace(hysteresis=_like(state.hysteresis, left - 1))
    scale = state.scale.item()
    if scale <= settings.minimum:
        raise _at_minimum(settings, state, reason)
    return state._replace(scale=_like(state.scale, max(scale / _FACTOR, settings.minimum)))


def _like(old: Tensor, value: float) -> Tensor:
    return torch.tensor(value, dtype=old.dtype, device=old.device)


def _at_minimum(settings: LossScale, state: LossScaleState, reason: str) -> LossScaleError:
    in_a_row, skipped = int(state.skipped_in_a_row.item()), int(state.skipped.item())
    return LossScaleError(
        "The loss scale is at its minimum, and the gradients still overflow.",
        where="program.step(state, batch) or program.update(state, grads)",
        facts=[
            f"{reason or 'non-finite gradient'}; scale {state.scale.item():g}, "
            f"minimum {settings.minimum:g}",
            f"{in_a_row} steps in a row were skipped, this one included; {skipped} in all",
        ],
        why="Every further step would be skipped and nothing learnt, without a word. "
        "The state that was passed in is unchanged and still usable.",
        fix="look for NaN in the batch, for a rate that is too high, or for a loss in float16 "
        "(loss.float()); or lower the minimum: "
        f"loss_scale(minimum={settings.minimum / 16:g})",
        scale=state.scale.item(),
        minimum=settings.minimum,
        skipped=skipped,
        skipped_in_a_row=in_a_row,
    )
