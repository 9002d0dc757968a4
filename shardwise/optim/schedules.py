"""Learning rates as functions of the step count: tensor in, tensor out, so that nothing waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from shardwise.optim.checks import check_non_negative
from shardwise.sharding.errors import OptimError, strict_keywords

Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""From the 0-dim int64 count of steps taken to the 0-dim rate of the next step."""


def constant(value: float) -> Schedule:
    """The same rate at every step.

    Args:
        value: the rate.

    Raises:
        OptimError: a negative or infinite rate.

    >>> constant(0.1)(torch.tensor(7)).item()
    0.1
    """
    check_non_negative("constant", "value", value, usual="constant(3e-4)")
    # Not torch.full: a rate made from the count lives where the count lives, ranks included.
    return lambda count: torch.full_like(count, value, dtype=torch.float64)


@strict_keywords
def warmup_cosine(
    peak: float, *, warmup: int, steps: int, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """A straight line from `start` to `peak`, then half a cosine down to `end`.

    The first step has rate `start`, step `warmup` has `peak`, step `steps` and later have `end`.

    Args:
        peak: the highest rate.
        warmup: number of steps on the line; 0 starts at the peak.
        steps: number of steps in all, warm-up included.
        start: the rate of the first step.
        end: the rate from step `steps` on.

    Raises:
        OptimError: a negative rate, or not `0 <= warmup < steps`.

    >>> rate = warmup_cosine(1.0, warmup=2, steps=6)
    >>> [round(rate(torch.tensor(count)).item(), 3) for count in range(7)]
    [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]

    References:
        Loshchilov and Hutter, SGDR, 2017, equation 5.
    """
    for name, value in (("peak", peak), ("start", start), ("end", end)):
        check_non_negative("warmup_cosine", name, value, usual=f"a rate such as {name}=3e-4")
    if not 0 <= warmup < steps:
        raise OptimError(
            f"warmup_cosine(warmup={warmup}, steps={steps}) leaves no step to the cosine.",
            where="arguments warmup and steps of warmup_cosine()",
            facts=f"warmup is {warmup}; steps is {steps}; allowed: 0 <= warmup < steps.",
            why="steps counts all steps, those of the warm-up included.",
            fix=f"steps={max(warmup, 0) + max(steps, 1)}, or a shorter warmup",
            warmup=warmup,
            steps=steps,
        )

    def schedule(count: Tensor) -> Tensor:
        step = count.to(torch.float64)
        line = start + (peak - start) * (step / max(warmup, 1))
        fraction = ((step - warmup) / (steps - warmup)).clamp(0.0, 1.0)
        cosine = end + (peak - end) * (0.5 * (1.0 + torch.cos(math.pi * fraction)))
        return torch.where(step < warmup, line, cosine)

    return schedule


def as_schedule(call: str, learning_rate: float | Schedule) -> Schedule:
    """The schedule that an optimizer's `learning_rate` argument stands for.

    Args:
        call: name of the optimizer, for the error.
        learning_rate: a rate, or a schedule, which is tried once at count 0.

    Raises:
        OptimError: a bad rate, or a function that does not return a 0-dim tensor.
    """
    if not callable(learning_rate):
        usual = f"{call}(learning_rate=3e-4)"
        check_non_negative(call, "learning_rate", learning_rate, usual=usual)
        return constant(learning_rate)
    first = learning_rate(torch.zeros((), dtype=torch.int64))
    if not isinstance(first, Tensor) or first.ndim != 0:
        got = (
            f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else repr(first)
        )
        raise OptimError(
            f"{call}(learning_rate=...) got a schedule that does not return a 0-dim tensor.",
            where=f"argument learning_rate of {call}()",
            facts=f"schedule(tensor(0)) returned {got}.",
            why="The rate stays on the device: a Python number would make every step wait for it.",
            fix="compute with torch operations on the count, such as 1e-3 * 0.99**count",
        )
    return learning_rate


def first_count(params: dict[str, Tensor]) -> Tensor:
    """A 0-dim int64 zero on the device of the params, so that counting never crosses devices."""
    device = next(iter(params.values())).device if params else torch.device("cpu")
    return torch.zeros((), dtype=torch.int64, device=device)
