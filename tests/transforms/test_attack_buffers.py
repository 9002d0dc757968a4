"""Attacks on buffers: shared, views of each other, resized, with a graph, large integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import LowerError, RankError, UnitError
from tests.oracles.one_process import one_process
from tests.transforms.attacked import TWO, WIDTH, Stack, batches, bind, linear, loss_fn, started
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated


class Normed(Stack):
    """Two batch norms behind the units, which may share their running statistics."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2)).double()
        if shared:
            first, second = self.norms
            second.running_mean = first.running_mean
            second.running_var = first.running_var
            second.num_batches_tracked = first.num_batches_tracked

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        return super().forward(x)


class Buffered(nn.Module):
    """A unit with a buffer of ones, and `write(self, out)` after its linear layer."""

    def __init__(self, write: Any, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("seen", torch.ones(WIDTH) if buffer is None else buffer)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.write(self, out)
        return out


def trained(module: nn.Module, *transforms: sw.Transform) -> dict[str, Tensor]:
    """The buffers after two steps in a world of one."""
    program = bind(module, *transforms)
    state = program.init(sw.from_module(module))
    for batch in batches():
        state, _ = program.step(state, batch)
    return dict(state.buffers)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_batch_norms_step_as_in_torch(shared: bool, training: bool) -> None:
    """Whatever mode the module was handed in, and also if two modules hold one buffer."""
    module = Normed(shared=shared).train(training)
    before = {name: value.clone() for name, value in module.named_buffers()}
    got = trained(module)
    want = one_process(module, loss_fn, batches(), lambda p: torch.optim.SGD(p, 0.1)).buffers
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert not torch.equal(value, before[name])
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=name)
    assert module.training is training
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


def test_a_shared_buffer_that_one_module_replaces_is_refused() -> None:
    class Replacing(Normed):
        def forward(self, x: Tensor) -> Tensor:
            self.norms[1].running_mean = self.norms[1].running_mean + 1
            return super().forward(x)

    module = Replacing(shared=True)
    program = bind(module)
    with pytest.raises(UnitError) as caught:
        program.step(program.init(sw.from_module(module)), batches()[0])
    check(caught.value, UnitError, buffer="norms.0.running_mean", holders=2)


@pytest.mark.parametrize("written", [False, True])
def test_a_buffer_that_is_a_view_of_another(written: bool) -> None:
    class Viewed(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2, WIDTH, dtype=torch.float64))
            self.register_buffer("row", self.table[0])

        def forward(self, x: Tensor) -> Tensor:
            if written:
                self.table += 1
            return super().forward(x) + self.row

    if not written:
        assert trained(Viewed()).keys() == {"table", "row"}
        return
    with pytest.raises(LowerError) as caught:
        trained(Viewed())
    check(caught.value, LowerError, buffer="table", other="row")


def test_large_integers_are_exact() -> None:
    """Equal on all ranks: kept; else the largest, which float64 cannot tell from its neighbour."""

    def count(unit: Buffered, out: Tensor) -> None:
        unit.seen += out.shape[0]

    module = Stack(lambda: Buffered(count, torch.tensor([2**53, -(2**62) + 1])))
    with started(module) as (program, state):
        even, odd = batches(1)[0], batches(1, rows=7)[0]
        state, _ = program.step(state, program.shard_batch(even))
        state, _ = program.step(state, program.shard_batch(odd))
        seen = sw.to_global(state.buffers)["layers.0.seen"]
    assert seen.tolist() == [2**53 + 3 + 4, -(2**62) + 1 + 3 + 4]


def test_a_buffer_that_grows_on_two_ranks_is_refused_on_both() -> None:
    def grow(unit: Buffered, out: Tensor) -> None:
        unit.seen = torch.arange(float(len(out)))

    with started(Stack(lambda: Buffered(grow, torch.zeros(1)))) as (program, state):
        parts = program.shard_batch(batches()[0])
        for _ in range(2):  # an ordinary failure: the next call may follow
            with pytest.raises(UnitError) as caught:
                program.step(state, parts)
    check(caught.value, UnitError, "(3,)", "(1,)", buffer="layers.0.seen")


def test_a_buffer_that_grows_on_one_rank_fails_on_both() -> None:
    def grow(unit: Buffered, out: Tensor) -> None:
        unit.seen += 1
        if len(out) == 3:
            unit.seen = torch.zeros(9)

    with started(Stack(lambda: Buffered(grow))) as (program, state):
        odd = program.shard_batch(batches(rows=7)[0])
        with pytest.raises((RankError, UnitError), match=r"layers\.0\.seen"):
            program.step(state, odd)
        even = program.shard_batch(batches(rows=8)[0])
        state, _ = program.step(state, even)
        assert sw.to_global(state.buffers)["layers.0.seen"].tolist() == [2.0] * WIDTH


def test_a_buffer_written_without_detach_keeps_no_graph() -> None:
    def average(unit: Buffered, out: Tensor) -> None:
        unit.seen = 0.9 * unit.seen + 0.1 * out.mean(0)

    module = Stack(lambda: Buffered(average))
    got = trained(module)
    assert not any(value.requires_grad for value in got.values())
    with started(module, mesh=TWO) as (program, state):
        for batch in batches():
            state, _ = program.step(state, program.shard_batch(batch))
        both = sw.to_global(state.buffers)
    assert not any(value.requires_grad for value in both.values())
    torch.testing.assert_close(both["layers.0.seen"], got["layers.0.seen"], rtol=1e-9, atol=1e-9)
