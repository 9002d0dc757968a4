"""FRZ-1, FRZ-2: frozen weights are part of the state; adapters are merged on gathered weights."""

from __future__ import annotations

import copy
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

pytestmark = pytest.mark.simulated

SCALE = 0.5


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.free = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.free(torch.tanh(self.frozen(x)))


def square(model: nn.Module, x: Tensor) -> sw.Mean:
    return sw.Mean(model(x).square().sum(), x.shape[0])


def test_frz_1_frozen_weights_are_in_the_state_and_have_no_optimizer_state() -> None:
    torch.manual_seed(0)
    module, mesh, optimizer = Two(), sw.Mesh(fsdp=2), sw.optim.adamw(0.1)
    plan = sw.plan(module, mesh, sw.zero(3, "fsdp"), sw.freeze("frozen"))
    with sw.simulate(mesh):
        program = sw.lower(plan, square, optimizer).bind()
        state = program.init(sw.from_module(module))
        state, _ = program.step(state, program.shard_batch(torch.randn(4, 6)))
        whole = sw.to_global(state.params)
        for name in ("frozen.weight", "frozen.bias"):
            assert torch.equal(whole[name], module.get_parameter(name))
        assert not torch.equal(whole["free.weight"], module.free.weight)
        assert set(state.ranks[0].opt.mu) == {"free.weight", "free.bias"}
        # Into a program that starts from other values: everything is replaced, nothing is left.
        other = sw.lower(plan, square, optimizer).bind()
        fresh = sw.to_global(other.init(seed=1).params)
        there = sw.to_global(other.init(sw.from_state(state)).params)
        assert all(torch.equal(there[name], value) for name, value in whole.items())
        assert not any(torch.equal(fresh[name], value) for name, value in whole.items())
    assert module.frozen.weight.requires_grad  # the user's own flag is not touched


class Adapter(nn.Module):
    """`y = (W + s B A) x` with W, A and B in three units of uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(5, 7, bias=False)
        self.a = nn.Linear(5, 2, bias=False)
        self.b = nn.Linear(2, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x) + SCALE * self.b(self.a(x))


def values(state: Any) -> list[Tensor]:
    leaves = [
        leaf for one in state.ranks for leaf in optree.tree_leaves(one, namespace="shardwise")
    ]
    return [leaf.to_local().clone() if hasattr(leaf, "to_local") else leaf for leaf in leaves]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("level", [0, 3])
def test_frz_2_adapters_are_merged_on_gathered_weights(ranks: int, level: int) -> None:
    torch.manual_seed(0)
    module, mesh = Adapter(), sw.Mesh(fsdp=ranks)
    data = torch.randn(6, 5)
    plan = sw.plan(module, mesh, sw.zero(level, "fsdp"), sw.freeze("w"), units=["w", "a", "b"])
    assert [unit.name for unit in plan.units if unit.kind != "root"] == ["w", "a", "b"]
    with sw.simulate(mesh):
        program = sw.lower(plan, square, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        for _ in range(2):
            state, _ = program.step(state, program.shard_batch(data))
        before = values(state)
        adapted = program.eval(state, program.shard_batch(data)).loss
        whole = sw.to_global(state.params)
        update = SCALE * whole["b.weight"] @ whole["a.weight"]
        merged = {
            "w.weight": whole["w.weight"] + update,
            "a.weight": whole["a.weight"],
            "b.weight": torch.zeros_like(whole["b.weight"]),
        }
        model = copy.deepcopy(module)
        model.load_state_dict(merged)
        folded = program.init(sw.from_module(model))
        alone = program.eval(folded, program.shard_batch(data)).loss
        # Evaluating changed no value; only gathers and the packed scalars ran.
        for mine, old in zip(values(state), before, strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(old))
    assert {item.kind for item in program.last_collectives} == {"all_gather"}
    torch.testing.assert_close(alone, adapted, rtol=1e-6, atol=1e-6)
    # The frozen W is still W0, so that merged weights are those of one process; and back again.
    assert torch.equal(whole["w.weight"], module.w.weight)
    one = train_in_one_process(module, data)
    expected = one.w.weight + SCALE * one.b.weight @ one.a.weight
    torch.testing.assert_close(merged["w.weight"], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged["w.weight"] - update, module.w.weight, rtol=1e-6, atol=1e-6)
    # The user's module switches modes by itself: nothing of the program hangs on it.
    module.eval().train()
    assert not module._forward_hooks


def train_in_one_process(module: nn.Module, data: Tensor) -> Any:
    model = copy.deepcopy(module)
    model.w.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = square(model, data)
        (loss.total / loss.count).backward()
        optimizer.step()
    return model.requires_grad_(False)
