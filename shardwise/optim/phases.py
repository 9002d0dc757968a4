"""Learning rates of several phases: any schedules in a row, warmup-stable-decay, one cycle."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.optim.checks import check_non_negative, check_positive
from shardwise.optim.curves import cosine, linear
from shardwise.optim.schedules import Schedule, constant
from shardwise.sharding.errors import OptimError, strict_keywords


def join(first: Schedule, later: Mapping[int, Schedule]) -> Schedule:
    """Schedules in a row; each counts its own steps from 0, as in `SequentialLR`.

    Args:
        first: from step 0 on.
        later: the step from which each other one holds, in rising order.

    Raises:
        OptimError: steps that do not rise from 1 on.

    >>> rate = join(constant(1.0), {2: linear(1.0, 0.0, steps=2)})
    >>> [rate(torch.tensor(count)).item() for count in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    starts = list(later)
    if any(b <= a for a, b in zip([0, *starts], starts, strict=False)):
        raise OptimError(
            f"join(...) has phases that start at {', '.join(map(str, starts))}.",
            where="argument later of join()",
            facts="allowed: whole numbers that rise, from 1 on.",
            why="Each phase holds from its own step until the next one begins.",
            fix="join(first, {100: second, 900: third})",
            starts=starts,
        )

    def schedule(count: Tensor) -> Tensor:
        rate = first(count)
        for start, following in later.items():
            rate = torch.where(count < start, rate, following((count - start).clamp(min=0)))
        return rate

    return schedule


@strict_keywords
def wsd(
    peak: float, *, warmup: int, stable: int, decay: int, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """Warm-up, stable, decay: a line up, a plateau, a line down.

    Args:
        peak: the rate of the plateau.
        warmup: steps of the line up; 0 leaves it out.
        stable: steps of the plateau.
        decay: steps of the line down.
        start: the rate of the first step.
        end: the rate after the last.

    Raises:
        OptimError: a negative rate or number of steps.

    >>> rate = wsd(1.0, warmup=2, stable=2, decay=2)
    >>> [rate(torch.tensor(count)).item() for count in range(7)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]

    References:
        Hu et al., MiniCPM, 2024, section 4.
    """
    for name, steps in (("warmup", warmup), ("stable", stable)):
        check_non_negative("wsd", name, steps, usual=f"{name}=100")
    check_positive("wsd", "decay", decay, usual="decay=100")
    down = linear(peak, end, steps=decay)
    flat = join(constant(peak), {stable: down}) if stable else down
    return join(linear(start, peak, steps=warmup), {warmup: flat}) if warmup else flat


@strict_keywords
def one_cycle(
    peak: float,
    *,
    steps: int,
    rise: float = 0.3,
    start_divisor: float = 25.0,
    end_divisor: float = 1e4,
) -> Schedule:
    """Half a cosine up to `peak`, half a cosine down; as `OneCycleLR` with its defaults.

    Args:
        peak: the highest rate.
        steps: number of steps in all.
        rise: share of them before the peak.
        start_divisor: the first rate is `peak / start_divisor`.
        end_divisor: the last rate is the first divided by this.

    Raises:
        OptimError: a negative rate, or a rise that leaves no step for one of the two curves.

    >>> rate = one_cycle(1.0, steps=10, rise=0.5, start_divisor=10.0, end_divisor=10.0)
    >>> [round(rate(torch.tensor(count)).item(), 2) for count in (0, 4, 9)]
    [0.1, 1.0, 0.01]

    References:
        Smith and Topin, Super-Convergence, 2018.
    """
    check_non_negative("one_cycle", "peak", peak, usual="peak=3e-4")
    check_positive("one_cycle", "start_divisor", start_divisor, usual="start_divisor=25.0")
    check_positive("one_cycle", "end_divisor", end_divisor, usual="end_divisor=1e4")
    top = rise * steps - 1  # torch counts from 0, and lets the peak lie between two steps
    if not 0 < top < steps - 1:
        raise OptimError(
            f"one_cycle(steps={steps}, rise={rise}) leaves no step to one of its curves.",
            where="arguments steps and rise of one_cycle()",
            facts=f"the peak would be at step {top:g}; allowed: more than 0, below {steps - 1}.",
            why="The rate rises until step rise * steps - 1 and falls until step steps - 1.",
            fix="rise=0.3 with at least 4 steps",
            steps=steps,
            rise=rise,
        )
    low = peak / start_divisor
    up, down = cosine(low, peak, steps=1), cosine(peak, low / end_divisor, steps=1)

    def schedule(count: Tensor) -> Tensor:
        step = count.to(torch.float64)
        return torch.where(step <= top, up(step / top), down((step - top) / (steps - 1 - top)))

    return schedule
