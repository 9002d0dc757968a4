"""Schedules against torch's learning rate schedulers."""

from __future__ import annotations

import pytest
import torch

from shardwise.optim import Schedule, constant, warmup_cosine
from shardwise.sharding.errors import OptimError

pytestmark = pytest.mark.abstract


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule(torch.tensor(count)).item() for count in range(steps)]


def torch_rates(
    kind: type[torch.optim.lr_scheduler.LRScheduler], peak: float, steps: int, **options: float
) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler = kind(optimizer, **options)
    out = []
    for _ in range(steps):
        out.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return out


def test_warmup_is_linear_lr() -> None:
    schedule = warmup_cosine(0.5, warmup=7, steps=20, start=0.05)
    expected = torch_rates(
        torch.optim.lr_scheduler.LinearLR, 0.5, 8, start_factor=0.1, end_factor=1.0, total_iters=7
    )
    assert rates(schedule, 8) == pytest.approx(expected, rel=1e-12)


def test_decay_is_cosine_annealing() -> None:
    schedule = warmup_cosine(0.5, warmup=7, steps=20, end=0.1)
    expected = torch_rates(
        torch.optim.lr_scheduler.CosineAnnealingLR, 0.5, 14, T_max=13, eta_min=0.1
    )
    assert rates(schedule, 21)[7:] == pytest.approx(expected, rel=1e-12)


def test_after_the_last_step_the_rate_stays_at_the_end() -> None:
    schedule = warmup_cosine(0.5, warmup=0, steps=4, end=0.1)
    assert rates(schedule, 10)[4:] == pytest.approx([0.1] * 6)
    assert rates(schedule, 1) == [0.5]


@pytest.mark.parametrize("schedule", [constant(3e-4), warmup_cosine(3e-4, warmup=2, steps=5)])
def test_a_rate_is_a_float64_tensor_where_the_count_is(schedule: Schedule) -> None:
    rate = schedule(torch.zeros((), dtype=torch.int64, device="meta"))
    assert (rate.dtype, rate.shape, rate.device.type) == (torch.float64, (), "meta")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": 5, "steps": 5}, "warmup is 5; steps is 5; allowed: 0 <= warmup < steps"),
        ({"warmup": -1, "steps": 5}, "warmup is -1; steps is 5"),
        ({"warmup": 1, "steps": 5, "end": -0.5}, "end is -0.5; allowed: 0 <= end < inf"),
    ],
)
def test_bad_arguments_name_their_numbers(options: dict[str, float], words: str) -> None:
    with pytest.raises(OptimError) as caught:
        warmup_cosine(0.1, **options)
    assert words in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_misspelt_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="'warm_up'; did you mean 'warmup'"):
        warmup_cosine(0.1, warm_up=3, steps=5)
