"""BUF-1 and BUF-2: rotary tables that no checkpoint has, and running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)


class Rotary(nn.Module):
    """A table of frequencies that is not persistent, and a counter that is."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)
        self.register_buffer("seen", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inv_freq.copy_(100.0 ** -torch.arange(0, 1, 0.25))
            self.seen.zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.lin(x * self.inv_freq)


def rotary_loss(model: nn.Module, batch: Tensor) -> sw.Mean:
    return sw.Mean(model(batch).square().sum(), len(batch))


@pytest.mark.parametrize("source", ["module", "seed"])
@pytest.mark.parametrize("level", [0, 3])
def test_buf_1_buffers_are_right_on_every_rank(level, source):
    """The plan's model is on meta; values come from rank 0's module, or from the modules' init."""
    with torch.device("meta"):
        empty = Rotary()
    model, wrong = Rotary(), Rotary()
    wrong.inv_freq.fill_(float("nan"))
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with sw.simulate(MESH):
        plan = sw.plan(empty, MESH, sw.zero(level, "fsdp"))
        program = sw.lower(plan, rotary_loss, sw.optim.sgd(0.1)).bind()
        sources = [sw.from_module(model), sw.from_module(wrong)]
        state = program.init(sw.Lifted(sources) if source == "module" else 3)
        params = {path: value.clone() for path, value in sw.to_global(state.params).items()}
        state, metrics = program.step(state, program.shard_batch(batch))
        buffers = [rank.buffers for rank in state.ranks]
    for mine in buffers:
        assert torch.equal(mine["inv_freq"], model.inv_freq)
        assert int(mine["seen"]) == 1
    plain = copy.deepcopy(model)
    plain.load_state_dict(params, strict=False)
    want = rotary_loss(plain, batch)
    torch.testing.assert_close(metrics.loss, (want.total / want.count).detach().double())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("level", [0, 3])
def test_buf_2_running_statistics_over_twenty_steps(level):
    """Each rank's own rows make its statistics; after each step they are averaged."""
    torch.manual_seed(0)
    model = Normed()
    batches = [torch.randn(8, 4) for _ in range(20)]
    with sw.simulate(MESH):
        plan = sw.plan(model, MESH, sw.zero(level, "fsdp"))
        program = sw.lower(plan, rotary_loss, sw.optim.sgd(0.01)).bind()
        state = program.init(sw.from_module(model))
        for batch in batches:
            state, _ = program.step(state, program.shard_batch(batch))
        buffers = [rank.buffers for rank in state.ranks]
    want = by_hand(model, batches)
    for mine in buffers:
        assert mine["norm.num_batches_tracked"].dtype == torch.int64
        assert int(mine["norm.num_batches_tracked"]) == 20
        for name in ("norm.running_mean", "norm.running_var"):
            assert mine[name].dtype == torch.float32
            assert torch.equal(mine[name], buffers[0][name])
            torch.testing.assert_close(mine[name], want[name], rtol=1e-4, atol=1e-5)


def by_hand(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Two copies, one per half of the rows; gradients and statistics averaged after every step."""
    copies = [copy.deepcopy(model).double() for _ in range(2)]
    for batch in batches:
        for one, rows in zip(copies, batch.double().tensor_split(2), strict=True):
            one.zero_grad()
            rotary_loss(one, rows).total.backward()
        for tensors in zip(*(list(one.parameters()) for one in copies), strict=True):
            grad = sum(tensor.grad for tensor in tensors) / len(batch)
            for tensor in tensors:
                tensor.data -= 0.01 * grad
        for tensors in zip(*(list(one.buffers()) for one in copies), strict=True):
            mean = sum(tensors) / 2
            for tensor in tensors:
                tensor.copy_(mean)
    return {name: buffer.float() for name, buffer in copies[0].named_buffers()}
