"""OPT-1: in whatever order things are made, the optimizer moves the tensors that train."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import LowerError
from tests.oracles.one_process import one_process

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    out = model(batch)
    return sw.Mean(out.square().sum(), out.shape[0])


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("order", ["plain", "eval first", "optimizer first", "kept gathered"])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_opt_1_parameters_move_as_in_one_process(order, level):
    module = make()
    want = one_process(module, loss_fn, batches(), lambda p: torch.optim.AdamW(p, 0.1))
    optimizer = sw.optim.adamw(0.1) if order == "optimizer first" else None
    kept = [sw.keep_gathered()] if order == "kept gathered" else []
    with sw.simulate(MESH):
        plan = sw.plan(module, MESH, sw.zero(level, "fsdp"), *kept)
        program = sw.lower(plan, loss_fn, optimizer or sw.optim.adamw(0.1)).bind()
        state = program.init(sw.from_module(module))
        losses = []
        for batch in batches():
            parts = program.shard_batch(batch)
            if order == "eval first":
                evaluated = program.eval(state, parts).loss.item()
            state, metrics = program.step(state, parts)
            losses.append(metrics.loss.item())
            if order == "eval first":
                assert evaluated == pytest.approx(losses[-1], rel=1e-12)
        got = sw.to_global(state.params)
    assert losses == pytest.approx(want.losses, rel=1e-12)
    for path, value in want.params.items():
        torch.testing.assert_close(got[path], value, rtol=1e-9, atol=1e-12)


def test_opt_1_an_optimizer_over_the_modules_own_tensors_is_refused():
    module = make()
    stale = torch.optim.AdamW(module.parameters(), 0.1)
    plan = sw.plan(module, MESH, sw.zero(3, "fsdp"))
    with pytest.raises(LowerError, match="AdamW, not a gradient transform") as caught:
        sw.lower(plan, loss_fn, stale)
    assert "sw.optim.adamw" in caught.value.fix
