"""DTN-1: from a distributed value to plain blocks and back, without a change of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.sharding.errors import PlanError

pytestmark = pytest.mark.simulated

AXES = {"up": "mlp embed", "down": "embed mlp"}


class Product(nn.Module):
    """A row-parallel product whose sum is still to come: `local` is put where a test says."""

    def __init__(self, place: str, spec: str, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(12, 6))
        self.down = nn.Parameter(torch.randn(6, 12))
        self.place = place
        self.local = sw.local(fn, in_specs=spec, out_specs=spec)

    def forward(self, x: Tensor) -> Tensor:
        x = self.local(x) if self.place == "replicated" else x
        h = F.linear(x, self.up)
        h = self.local(h) if self.place == "sharded" else h
        y = F.linear(h.sin(), self.down)
        y = self.local(y) if self.place == "partial" else y
        return sw.constrain(y, "batch seq embed")


class Model(nn.Module):
    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.first(x))


def loss_fn(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum(-1).mean()


def gradients(model: nn.Module, plan: sw.Plan, x: Tensor) -> dict[str, Tensor]:
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        grads, _ = program.grads(program.init(sw.from_module(model)), program.shard_batch(x))
        assert program.last_collectives == program.lowered.grads_items
        return {path: grad.clone() for path, grad in sw.to_global(grads.leaves).items()}


CASES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "replicated": ("batch seq embed", torch.tanh),
    "sharded": ("batch seq mlp/tp", torch.tanh),
    "partial": ("batch seq embed +tp", lambda y: y * 3),
}


def model_of(place: str, spec: str, fn: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Model(Product(place, spec, fn)).double()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("place", CASES)
def test_dtn_1_gradients_are_those_of_one_process(place: str, ranks: int) -> None:
    model = model_of(place, *CASES[place])
    x = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss_fn(model, x).backward()
    plan = sw.plan(model, sw.Mesh(tp=ranks), sw.tensor_parallel("tp"), axes=AXES)
    for path, grad in gradients(model, plan, x).items():
        want = model.get_parameter(path).grad
        torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-12, msg=path)


def test_dtn_1_a_partial_value_that_is_not_declared_is_summed_first() -> None:
    """Nothing is a no-op that changes gradients: the undeclared one is whole, and costs its sum."""
    declared, plain = (
        model_of("partial", spec, lambda y: y * 3)
        for spec in ("batch seq embed +tp", "batch seq embed")
    )
    x = torch.randn(4, 3, 6, dtype=torch.float64)
    found = []
    for model in (declared, plain):
        plan = sw.plan(model, sw.Mesh(tp=2), sw.tensor_parallel("tp"), axes=AXES)
        lowered = sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=x)
        found.append([item.unit for item in lowered.collectives() if item.reason == "activations"])
        grads = gradients(model, plan, x)
        loss_fn(model, x).backward()
        for path, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(path).grad, msg=path)
    assert any("constrain" in unit for unit in found[0])
    assert any("local" in unit for unit in found[1])


def test_dtn_1_a_whole_value_cannot_pass_for_a_partial_one() -> None:
    model = model_of("replicated", "batch seq embed +tp", torch.tanh)
    plan = sw.plan(model, sw.Mesh(tp=2), sw.tensor_parallel("tp"), axes=AXES)
    with pytest.raises(PlanError, match="cannot be declared a partial sum"):
        sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=torch.ones(4, 3, 6).double())
