"""`bind(debug=True)`: the checks of the first step in every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

pytestmark = pytest.mark.simulated


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.linear(x).square()
        return x + self.aux


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """From the third step on, only what left by a side door reaches the loss."""
        self.steps += 1
        for layer in self.layers:
            x = layer(x)
        return self.layers[1].aux if self.steps > 2 else x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def test_a_side_door_that_opens_later() -> None:
    mesh = sw.Mesh(fsdp=2)
    lowered = sw.lower(sw.plan(Model(), mesh, sw.zero(3, "fsdp")), loss_fn, sw.optim.sgd(0.1))
    with sw.simulate(mesh):
        program = lowered.bind(debug=True)
        state = program.init(seed=0)
        batch = program.shard_batch(torch.randn(4, 8))
        for _ in range(2):
            state, _ = program.step(state, batch)
        with pytest.raises(sw.errors.UnitError, match="side door"):
            program.step(state, batch)


def test_batches_are_compared_in_every_step() -> None:
    mesh = sw.Mesh(fsdp=2)
    plan = sw.plan(nn.Linear(8, 8), mesh, sw.zero(3, "fsdp"))
    lowered = sw.lower(plan, lambda model, batch: model(batch["x"]).mean(), sw.optim.sgd(0.1))
    good = {"x": torch.randn(2, 8)}
    with sw.simulate(mesh):
        program = lowered.bind(debug=True)
        state, _ = program.step(program.init(seed=0), sw.Lifted([good, good]))
        other = {"x": torch.randn(2, 8), "y": torch.zeros(2)}
        with pytest.raises(sw.errors.BatchError, match="differ in structure"):
            program.step(state, sw.Lifted([good, other]))
