"""MEM-3: what many small parameters cost in collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)


class Small(nn.Module):
    """Ten parameters of 16 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x) * sum(self.weights) / 1000


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Small() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def steps(count: int) -> list[Counter[str]]:
    """Kinds of the collectives of the first step and of the one after it."""
    model = Many(count)
    with sw.simulate(MESH):
        plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        found = []
        for _ in range(2):
            state, _ = program.step(state, program.shard_batch(torch.ones(2, 16)))
            found.append(Counter(f"{c.kind} {c.reason}" for c in program.last_collectives))
    return found


@pytest.mark.parametrize("count", [10, 100])
def test_mem_3_two_gathers_and_one_reduction_for_each_unit_from_the_first_step_on(count):
    expected = {
        "all_gather forward": count,
        "all_gather backward": count,
        "reduce_scatter grads": count,
        "all_gather scalars": 1,
    }
    assert steps(count) == [expected, expected]


def test_mem_3_units_together_cost_one_unit():
    """Whoever wants fewer and larger collectives says so: ten units in one."""
    model = nn.Sequential(*(nn.Sequential(*(Small() for _ in range(10))) for _ in range(10)))
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    lowered = sw.lower(plan, loss_fn, sw.optim.sgd(0.1))
    kinds = Counter(item.kind for item in lowered.collectives())
    assert kinds == {"all_gather": 2 * 10 + 1, "reduce_scatter": 10}
