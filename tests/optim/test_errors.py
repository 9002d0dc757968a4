"""Every refusal names the argument, its value, what is allowed and a fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.optim import adamw, clip_by_global_norm, constant, sgd
from shardwise.sharding.errors import OptimError

pytestmark = pytest.mark.abstract

NAN = float("nan")


@pytest.mark.parametrize(
    ("build", "name", "value", "rule", "fix"),
    [
        (lambda: adamw(-0.1), "learning_rate", -0.1, "0 <= learning_rate < inf", "3e-4"),
        (lambda: adamw(NAN), "learning_rate", NAN, "0 <= learning_rate < inf", "3e-4"),
        (lambda: sgd(float("inf")), "learning_rate", float("inf"), "< inf", "3e-4"),
        (lambda: adamw(0.1, betas=(1.0, 0.9)), "betas[0]", 1.0, "0 <= betas[0] < 1", "betas="),
        (lambda: adamw(0.1, betas=(0.9, -0.1)), "betas[1]", -0.1, "0 <= betas[1] < 1", "betas="),
        (lambda: adamw(0.1, eps=-1e-8), "eps", -1e-8, "0 <= eps < inf", "eps=1e-8"),
        (lambda: adamw(0.1, weight_decay=-1), "weight_decay", -1, "0 <= weight_decay", "=0.01"),
        (lambda: sgd(0.1, momentum=1.0), "momentum", 1.0, "0 <= momentum < 1", "momentum=0.9"),
        (lambda: sgd(0.1, weight_decay=-2.0), "weight_decay", -2.0, "0 <= weight_decay", "1e-4"),
        (lambda: clip_by_global_norm(0.0), "max_norm", 0.0, "0 < max_norm", "(1.0)"),
        (lambda: clip_by_global_norm(True), "max_norm", True, "0 < max_norm", "(1.0)"),
        (lambda: constant(-1.0), "value", -1.0, "0 <= value < inf", "constant(3e-4)"),
    ],
)
def test_out_of_range(
    build: Callable[[], object], name: str, value: float, rule: str, fix: str
) -> None:
    with pytest.raises(OptimError) as caught:
        build()
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert f"{name} is {value!r}; allowed: " in text
    assert rule in text
    assert fix in text.partition("Fix: ")[2]
    assert repr(caught.value.numbers[name]) == repr(value)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(OptimError, match="momentum is 0") as caught:
        sgd(0.1, nesterov=True, momentum=0)
    assert "Fix: momentum=0.9, or nesterov=False" in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "got"),
    [
        (lambda count: 0.1, "returned 0.1"),
        (lambda count: torch.ones(2), "returned a tensor of shape (2,)"),
    ],
)
def test_a_schedule_must_return_a_0_dim_tensor(schedule: Any, got: str) -> None:
    with pytest.raises(OptimError) as caught:
        sgd(schedule)
    assert got in str(caught.value)


def test_misspelt_keywords_name_the_nearest() -> None:
    with pytest.raises(TypeError, match="'weight_deacy'; did you mean 'weight_decay'"):
        adamw(0.1, weight_deacy=0.1)
    with pytest.raises(TypeError, match="'nestorov'; did you mean 'nesterov'"):
        sgd(0.1, nestorov=True)
