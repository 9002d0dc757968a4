"""Kernels as torch operators: schema, fake and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.kernels import recipes
from shardwise.kernels.ops import operators
from shardwise.kernels.step import Group, reference_, squares

pytestmark = pytest.mark.abstract

CALLS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "adamw_step_": (
        2,
        {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "count": 2},
        recipes.adamw,
    ),
    "lion_step_": (1, {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}, recipes.lion),
    "sgd_step_": (
        1,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        recipes.sgd,
    ),
    "adagrad_step_": (1, {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.1}, recipes.adagrad),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_is_its_recipe(name: str) -> None:
    num_states, settings, recipe = CALLS[name]
    operator = getattr(operators(), name)
    param, grad = torch.randn(100), torch.randn(100).to(torch.bfloat16)
    states = [torch.rand(100) for _ in range(num_states)]
    want = Group(param.clone(), grad, tuple(s.clone() for s in states), torch.zeros(100).half())
    args = (param, grad, *states, torch.zeros(100).half(), 0.5, *settings.values())
    torch.library.opcheck(operator.default, args)
    operator(*args)
    reference_(recipe(**settings), [want], scale=0.5)
    assert torch.equal(param, want.param)
    assert all(map(torch.equal, states, want.states))
    assert torch.equal(args[2 + num_states], want.shadow)


def test_squares_is_an_operator() -> None:
    values = torch.randn(5000)
    torch.library.opcheck(operators().squares.default, (values,))
    assert operators().squares(values).item() == squares(values)


def test_a_compiled_function_calls_it() -> None:
    step = operators().sgd_step_

    def run(param: torch.Tensor, grad: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
        step(param, grad, mu, None, 1.0, 0.1, 0.9, False, 0.0)
        return param.sum()

    one, two = (torch.ones(8), torch.ones(8), torch.zeros(8)), torch.ones(8)
    got = torch.compile(run, backend="aot_eager", fullgraph=True)(*one)
    assert got == run(two, torch.ones(8), torch.zeros(8))
    assert torch.equal(one[0], two)
