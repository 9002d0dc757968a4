"""Learning rates of one piece: linear, cosine, exponential, inverse square root, steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.optim.checks import check_fraction, check_non_negative, check_positive
from shardwise.optim.schedules import Schedule
from shardwise.sharding.errors import strict_keywords


@strict_keywords
def linear(start: float, end: float, *, steps: int) -> Schedule:
    """A straight line from `start` to `end`, then `end`.

    Args:
        start: the rate of the first step.
        end: the rate from step `steps` on.
        steps: length of the line.

    Raises:
        OptimError: a negative rate, or no steps.

    >>> rate = linear(1.0, 0.0, steps=4)
    >>> [rate(torch.tensor(count)).item() for count in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    _check_rates("linear", steps, start=start, end=end)

    def schedule(count: Tensor) -> Tensor:
        return start + (end - start) * _fraction(count, steps)

    return schedule


@strict_keywords
def cosine(start: float, end: float = 0.0, *, steps: int) -> Schedule:
    """Half a cosine from `start` to `end`, then `end`; as `CosineAnnealingLR` up to `T_max`.

    Args:
        start: the rate of the first step.
        end: the rate from step `steps` on.
        steps: length of the curve.

    Raises:
        OptimError: a negative rate, or no steps.

    >>> rate = cosine(1.0, steps=4)
    >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]

    References:
        Loshchilov and Hutter, SGDR, 2017, equation 5.
    """
    _check_rates("cosine", steps, start=start, end=end)

    def schedule(count: Tensor) -> Tensor:
        turn = 0.5 * (1.0 + torch.cos(math.pi * _fraction(count, steps)))
        return end + (start - end) * turn

    return schedule


@strict_keywords
def exponential(start: float, *, decay: float) -> Schedule:
    """`start * decay**count`; as `ExponentialLR`.

    Args:
        start: the rate of the first step.
        decay: what one step keeps of the rate.

    Raises:
        OptimError: a negative rate or decay.

    >>> exponential(1.0, decay=0.5)(torch.tensor(3)).item()
    0.125
    """
    check_non_negative("exponential", "start", start, usual="start=3e-4")
    check_positive("exponential", "decay", decay, usual="decay=0.999")
    return lambda count: start * torch.pow(decay, count.to(torch.float64))


@strict_keywords
def inverse_sqrt(peak: float, *, warmup: int) -> Schedule:
    """A straight line from 0 to `peak` in `warmup` steps, then `peak * sqrt(warmup / count)`.

    Args:
        peak: the highest rate, at step `warmup`.
        warmup: number of steps on the line, at least one.

    Raises:
        OptimError: a negative rate, or no warm-up.

    >>> rate = inverse_sqrt(1.0, warmup=2)
    >>> [round(rate(torch.tensor(count)).item(), 3) for count in (0, 1, 2, 8)]
    [0.0, 0.5, 1.0, 0.5]

    References:
        Vaswani et al., Attention Is All You Need, 2017, section 5.3.
    """
    _check_rates("inverse_sqrt", warmup, peak=peak)

    def schedule(count: Tensor) -> Tensor:
        step = count.to(torch.float64)
        return peak * torch.minimum(step / warmup, (warmup / step.clamp(min=1.0)).sqrt())

    return schedule


@strict_keywords
def step_decay(start: float, *, every: int, factor: float = 0.1) -> Schedule:
    """Multiply the rate by `factor` each `every` steps; as `StepLR`.

    Args:
        start: the rate of the first step.
        every: steps of equal rate.
        factor: what remains of the rate after them.

    Raises:
        OptimError: a negative rate, no steps, or a factor that is not below 1.

    >>> rate = step_decay(1.0, every=2, factor=0.5)
    >>> [rate(torch.tensor(count)).item() for count in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    _check_rates("step_decay", every, start=start)
    check_fraction("step_decay", "factor", factor, usual="factor=0.1")

    def schedule(count: Tensor) -> Tensor:
        falls = torch.div(count, every, rounding_mode="floor")
        return start * torch.pow(factor, falls.to(torch.float64))

    return schedule


def _fraction(count: Tensor, steps: int) -> Tensor:
    return (count.to(torch.float64) / steps).clamp(0.0, 1.0)


def _check_rates(call: str, steps: int, **rates: float) -> None:
    for name, value in rates.items():
        check_non_negative(call, name, value, usual=f"a rate such as {name}=3e-4")
    check_positive(call, "steps", steps, usual="steps=1000")
