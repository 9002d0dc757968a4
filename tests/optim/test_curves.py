"""Schedules against torch's learning rate schedulers, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from shardwise import optim
from shardwise.optim import Schedule
from shardwise.sharding.errors import OptimError

pytestmark = pytest.mark.abstract

Make = Callable[[torch.optim.Optimizer], torch_schedulers.LRScheduler]


def in_a_row(optimizer: torch.optim.Optimizer) -> torch_schedulers.LRScheduler:
    up = torch_schedulers.LinearLR(optimizer, 0.1, 1.0, total_iters=3)
    flat = torch_schedulers.ConstantLR(optimizer, 1.0, total_iters=1)
    down = torch_schedulers.LinearLR(optimizer, 1.0, 0.2, total_iters=4)
    return torch_schedulers.SequentialLR(optimizer, [up, flat, down], [3, 8])


TWINS: dict[str, tuple[Schedule, Make]] = {
    "linear": (
        optim.linear(0.5, 0.05, steps=6),
        lambda o: torch_schedulers.LinearLR(o, 1.0, 0.1, total_iters=6),
    ),
    "cosine": (
        optim.cosine(0.5, 0.1, steps=12),
        lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=12, eta_min=0.1),
    ),
    "exponential": (
        optim.exponential(0.5, decay=0.9),
        lambda o: torch_schedulers.ExponentialLR(o, 0.9),
    ),
    "step": (
        optim.step_decay(0.5, every=5, factor=0.2),
        lambda o: torch_schedulers.StepLR(o, 5, gamma=0.2),
    ),
    "one cycle": (
        optim.one_cycle(0.5, steps=13, rise=0.4),
        lambda o: torch_schedulers.OneCycleLR(o, 0.5, total_steps=13, pct_start=0.4),
    ),
    "inverse root": (
        optim.inverse_sqrt(0.5, warmup=4),
        lambda o: torch_schedulers.LambdaLR(o, lambda n: min(n / 4, (4 / max(n, 1)) ** 0.5)),
    ),
    "wsd": (optim.wsd(0.5, warmup=3, stable=5, decay=4, start=0.05, end=0.1), in_a_row),
    "join": (
        optim.join(optim.constant(0.5), {4: optim.linear(0.5, 0.0, steps=5)}),
        lambda o: torch_schedulers.LambdaLR(o, lambda n: min(1.0, max(0.0, (9 - n) / 5))),
    ),
}


def torch_rates(make: Make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", TWINS)
def test_rates_are_torchs(name: str) -> None:
    ours, theirs = TWINS[name]
    steps = 12
    got = [ours(torch.tensor(count)).item() for count in range(steps)]
    assert got == pytest.approx(torch_rates(theirs, steps), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", TWINS)
def test_a_torch_scheduler_is_a_schedule(name: str) -> None:
    _, theirs = TWINS[name]
    ours = optim.schedule_from_torch(theirs, 0.5, steps=12)
    got = [ours(torch.tensor(count)).item() for count in range(12)]
    assert got == torch_rates(theirs, 12)
    assert ours(torch.tensor(99)).item() == got[-1]


@pytest.mark.parametrize("name", TWINS)
def test_a_rate_is_a_float64_tensor_where_the_count_is(name: str) -> None:
    ours, theirs = TWINS[name]
    for schedule in (ours, optim.schedule_from_torch(theirs, 0.5, steps=3)):
        rate = schedule(torch.zeros((), dtype=torch.int64, device="meta"))
        assert (rate.dtype, rate.shape, rate.device.type) == (torch.float64, (), "meta")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: optim.linear(-1.0, 0.0, steps=2), "start is -1.0; allowed: 0 <= start < inf"),
        (lambda: optim.cosine(1.0, steps=0), "steps is 0; allowed: 0 < steps"),
        (lambda: optim.step_decay(1.0, every=1, factor=1.0), "factor is 1.0"),
        (lambda: optim.wsd(1.0, warmup=-1, stable=0, decay=1), "warmup is -1"),
        (
            lambda: optim.join(
                optim.constant(1.0), {5: optim.constant(1.0), 2: optim.constant(1.0)}
            ),
            "start at 5, 2",
        ),
        (lambda: optim.one_cycle(1.0, steps=4, rise=0.1), "peak would be at step -0.6"),
    ],
)
def test_bad_arguments_name_their_numbers(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(OptimError) as caught:
        build()
    assert words in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_scheduler_that_looks_at_a_metric_is_refused() -> None:
    with pytest.raises(OptimError, match="only counts") as caught:
        optim.schedule_from_torch(torch_schedulers.ReduceLROnPlateau, 0.1, steps=3)
    assert "set_hyperparameters" in caught.value.fix
