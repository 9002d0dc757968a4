"""Buffers: what a forward pass writes is averaged (integers: the maximum), the rest stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.oracles.one_process import assert_same, cut, one_process, sharded

pytestmark = pytest.mark.simulated

MESHES = {"2": sw.Mesh(fsdp=2), "2x2": sw.Mesh(dp=2, fsdp=2)}
every_mesh = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


class Normed(nn.Module):
    """Two units with batch norm; `seen` counts rows, `table` is never written."""

    def __init__(self, *, branch: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("ema", torch.zeros(4), persistent=False)
        self.register_buffer("book", torch.zeros(4))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("peak", torch.zeros((), dtype=torch.complex64))
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        if self.branch and float(x.detach().sum()) > 1e9:  # nothing behind this line is traced
            return x
        self.seen += x.shape[0]
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)  # replaced, not written in place
        self.book.data.add_(x.detach().sum(0))  # no version counter shows this
        self.peak += torch.complex(x.detach().amax(), x.detach().amin())
        x = x + self.table
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    out = model(batch)
    return sw.Mean(out.square().sum(), out.shape[0])


def batches(steps: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(steps)]


def after_one_step(module: nn.Module, batch: Tensor, parts: int) -> dict[str, Tensor]:
    """What each rank's own statistics would be, averaged (or their maximum)."""
    runs = []
    for part in cut(batch, parts):
        copied = copy.deepcopy(module).train()
        copied(part)
        runs.append(dict(copied.named_buffers()))
    stacks = {name: torch.stack([run[name] for run in runs]) for name in runs[0]}
    return {
        name: stack.mean(0) if stack.is_floating_point() or stack.is_complex() else stack.amax(0)
        for name, stack in stacks.items()
    }


def bound(module: nn.Module, mesh: sw.Mesh, level: int = 3) -> sw.Program:
    plan = sw.plan(module, mesh, sw.zero(level, "fsdp"))
    return sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()


@every_mesh
@pytest.mark.parametrize("branch", [False, True], ids=["traced", "not traced"])
def test_statistics_are_averaged_and_counters_take_the_maximum(mesh, branch):
    torch.manual_seed(0)
    module = Normed(branch=branch).double()
    (batch,) = batches()
    rows = 4 * mesh.size - 1  # ranks with different numbers of rows
    batch = batch.repeat(2, 1)[:rows]
    with sw.simulate(mesh):
        program = bound(module, mesh)
        state = program.init(sw.from_module(module))
        state, _ = program.step(state, program.shard_batch(batch))
        buffers = sw.to_global(state.buffers)
        assert program.last_collectives == program.lowered.collectives()
    want = after_one_step(module, batch, mesh.size)
    assert buffers.keys() == want.keys()
    for name, value in want.items():
        loose = 1e-6 if value.dtype == torch.complex64 else 1e-12
        torch.testing.assert_close(buffers[name], value, rtol=loose, atol=loose)
    assert int(buffers["seen"]) == 4
    assert torch.equal(buffers["table"], module.table)
    assert torch.equal(buffers["turns"], module.turns)


@every_mesh
def test_training_with_batch_norm_is_exact_while_ranks_are_equal(mesh):
    """With the same rows on every rank, one process with one part has the same statistics."""
    torch.manual_seed(0)
    module = Normed().double()
    data = [part.repeat(mesh.size, 1) for part in batches(3)]
    want = one_process(
        module, loss_fn, [part[:8] for part in data], lambda p: torch.optim.SGD(p, 0.1)
    )
    plan = sw.plan(module, mesh, sw.zero(3, "fsdp"))
    assert_same(sharded(module, plan, loss_fn, data, sw.optim.sgd(0.1)), want)


def test_a_written_buffer_costs_one_gather_and_others_none():
    mesh = sw.Mesh(fsdp=2)
    module = Normed().double()
    with sw.simulate(mesh):
        program = bound(module, mesh)
        state = program.init(sw.from_module(module))
        program.step(state, program.shard_batch(batches()[0]))
    items = [item for item in program.last_collectives if item.reason == "buffers"]
    # All but `table` and `turns`, as float64, and whether the rank had a batch.
    written = 2 * (4 + 4 + 1) + 1 + 4 + 4 + 2
    assert [(item.kind, item.nbytes) for item in items] == [("all_gather", 8 * (1 + written))]


def test_eval_reads_the_buffers_and_writes_none():
    mesh = sw.Mesh(fsdp=2)
    torch.manual_seed(0)
    module = Normed().double()
    (batch,) = batches()
    with sw.simulate(mesh):
        program = bound(module, mesh)
        state = program.init(sw.from_module(module))
        state, _ = program.step(state, program.shard_batch(batch))
        before = {name: value.clone() for name, value in sw.to_global(state.buffers).items()}
        metrics = program.eval(state, program.shard_batch(batch))
        after = sw.to_global(state.buffers)
    assert all(torch.equal(before[name], after[name]) for name in before)
    plain = copy.deepcopy(module)
    values = {**sw.to_global(state.params), **before}
    with torch.no_grad():
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            tensor.copy_(values[name])
        mean = loss_fn(plain.eval(), batch)
    torch.testing.assert_close(metrics.loss, mean.total / mean.count, rtol=1e-12, atol=0.0)


def test_buffers_do_not_change_when_a_step_fails():
    """Also those whose writes no trace has shown."""
    mesh = sw.Mesh(fsdp=2)
    module = Normed(branch=True).double()

    def loss(model: nn.Module, batch: Tensor) -> Any:
        mean = loss_fn(model, batch)
        if float(batch[0, 0]) > 1e3:
            raise ValueError("too large")
        return mean

    with sw.simulate(mesh):
        plan = sw.plan(module, mesh, sw.zero(3, "fsdp"))
        program = sw.lower(plan, loss, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        before = {name: value.clone() for name, value in sw.to_global(state.buffers).items()}
        bad = batches()[0]
        bad[0] = 1e4
        with pytest.raises(sw.sharding.errors.RankError, match="too large"):
            program.step(state, program.shard_batch(bad))
        after = sw.to_global(state.buffers)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(one.buffers["seen"], before["seen"]) for one in state.ranks)
