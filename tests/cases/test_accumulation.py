"""Cases from the field: micro-steps that should not communicate, token means, batch arithmetic."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import BatchError
from shardwise.sharding.job import join_job
from tests.cases.test_tokens import COUNTS, Model, as_mean, as_sum, one_process, sequences

# -- ACC-1 ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def square(model: nn.Module, x: Tensor) -> sw.Mean:
    return sw.Mean(model(x).square().sum(), x.shape[0])


def reductions(mesh: sw.Mesh, level: int, steps: int, **options: Any) -> tuple[list[str], Any]:
    """Axes of the reductions of one step with so many micro-steps, and its gradients."""
    torch.manual_seed(0)
    model = Net().double()
    batch = torch.randn(16, 4, dtype=torch.float64)
    with sw.simulate(mesh):
        plan = sw.plan(model, mesh, sw.zero(level, "fsdp"), sw.accumulate(steps, **options))
        program = sw.lower(plan, square, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        grads, _ = program.grads(state, program.shard_batch(batch))
        items = [item for item in program.last_collectives if item.reason == "grads"]
        leaves = sw.to_global(grads.leaves)
    loss = square(model, batch).total / 16
    for (path, _), grad in zip(
        model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(leaves[path], grad, rtol=1e-9, atol=1e-12)
    return [f"{item.kind} {item.axis}" for item in items], leaves


@pytest.mark.simulated
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("mesh", [sw.Mesh(fsdp=2), sw.Mesh(dp=2, fsdp=2)], ids=repr)
def test_acc_1_reductions_of_four_micro_steps_are_those_of_one(mesh: sw.Mesh, level: int) -> None:
    one, _ = reductions(mesh, level, 1)
    four, _ = reductions(mesh, level, 4, reduce="once")
    assert four == one
    assert one


@pytest.mark.simulated
@pytest.mark.parametrize("level", [2, 3])
def test_acc_1_shards_are_scattered_each_time_and_replicas_summed_once(level: int) -> None:
    mesh = sw.Mesh(dp=2, fsdp=2)
    one, _ = reductions(mesh, level, 1)
    four, _ = reductions(mesh, level, 4)
    scatters, sums = "reduce_scatter fsdp", "all_reduce dp"
    assert four.count(scatters) == 4 * one.count(scatters) > 0
    assert four.count(sums) == one.count(sums) > 0


# -- TOK-1 ------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("loss_fn", [as_sum, as_mean])
@pytest.mark.parametrize("level", range(4))
def test_tok_1_two_micro_steps_on_two_ranks_are_all_eleven_tokens(loss_fn: Any, level: int) -> None:
    torch.manual_seed(0)
    module = Model().double()
    want_loss, want = one_process(module)
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        plan = sw.plan(module, mesh, sw.zero(level, "fsdp"), sw.accumulate(2))
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        # Rank 0 has the sequences of 3 and 1 labels, rank 1 those of 5 and 2, one a micro-step.
        batch = program.shard_batch(sequences())
        assert [len(part["tokens"]) for part in batch.ranks] == [2, 2]
        grads, metrics = program.grads(state, batch)
        got = sw.to_global(grads.leaves)
        after = sw.to_global(program.step(state, batch)[0].params)
    assert metrics.tokens == sum(COUNTS) == 11
    torch.testing.assert_close(metrics.loss, want_loss.detach(), rtol=1e-12, atol=0.0)
    for path, grad in want.items():
        torch.testing.assert_close(got[path], grad, rtol=1e-10, atol=1e-14)
        moved = module.get_parameter(path).detach() - 0.1 * grad
        torch.testing.assert_close(after[path], moved, rtol=1e-10, atol=1e-14)


# -- CFG-1 ------------------------------------------------------------------------------------

SIZES = (None, 1, 2, 3, 4, 6, 12)
OF_THREE = {
    1: sw.Mesh(dp=1, tp=2, pp=2),
    2: sw.Mesh(pp=2, dp=2, tp=2),
    3: sw.Mesh(fsdp=3, cp=2),
}


@pytest.mark.abstract
@pytest.mark.parametrize("ranks", OF_THREE)
def test_cfg_1_any_two_sizes_give_the_third(ranks: int) -> None:
    for whole, micro, steps in itertools.product(SIZES, repeat=3):
        given = {"global_": whole, "micro": micro, "accumulate": steps}
        known = [size for size in (whole, micro, steps) if size is not None]
        if whole is None:
            third = Fraction((micro or 0) * (steps or 0) * ranks)
            right = (third, micro, steps)
        elif micro is None or steps is None:
            third = Fraction(whole, (micro or steps or 1) * ranks)
            right = (whole, micro or third, steps or third)
        else:
            third = Fraction(int(whole == micro * steps * ranks))
            right = (whole, micro, steps)
        if len(known) >= 2 and third > 0 and third.denominator == 1:
            found = sw.batch_sizes(OF_THREE[ranks], **given)
            assert found == (*right, ranks)
            assert found.global_ == found.micro * found.accumulate * found.ranks
            continue
        with pytest.raises(BatchError) as caught:
            sw.batch_sizes(OF_THREE[ranks], **given)
        shown = [str(size or "?") for size in (micro, steps)]
        assert f"{shown[0]} * {shown[1]} * {ranks}; global: {whole or '?'}" in str(caught.value)
        assert caught.value.numbers["ranks"] == ranks


@pytest.mark.abstract
@pytest.mark.parametrize("bad", [0, -2, 1.5, True, "4"])
@pytest.mark.parametrize("name", ["global_", "micro", "accumulate"])
def test_cfg_1_sizes_are_positive_whole_numbers(name: str, bad: Any) -> None:
    given: dict[str, Any] = {"global_": 4, "micro": 2, "accumulate": None, name: bad}
    with pytest.raises(BatchError, match="no positive whole number") as caught:
        sw.batch_sizes(sw.Mesh(dp=2), **given)
    assert f"{name} is {bad!r}" in str(caught.value)
    assert "the product is the global batch" in caught.value.fix


@pytest.mark.abstract
def test_cfg_1_a_plan_brings_its_axes_and_its_passes() -> None:
    plan = sw.plan(Net(), sw.Mesh(dp=2, fsdp=2), sw.accumulate(3))
    assert sw.batch_sizes(plan, global_=24) == (24, 2, 3, 4)
    assert sw.batch_sizes(plan, micro=5) == (60, 5, 3, 4)
    plain = sw.plan(Net(), sw.Mesh(dp=2, fsdp=2))
    assert sw.batch_sizes(plan, global_=24, micro=2) == (24, 2, 3, 4)
    assert sw.batch_sizes(plain, global_=24, micro=2) == (24, 2, 3, 4)
    assert sw.batch_sizes(plain, global_=24) == (24, 6, 1, 4)
    with pytest.raises(BatchError, match="different numbers of passes") as caught:
        sw.batch_sizes(plan, global_=24, accumulate=2)
    assert "accumulate(3), the argument is 2" in str(caught.value)
    assert caught.value.numbers == {"accumulate": 2, "steps": 3}
    with pytest.raises(BatchError, match=r"1 \* 3 \* 4 == 12, not 24"):
        sw.batch_sizes(plan, global_=24, micro=1)
    with pytest.raises(BatchError, match=r"25 % \(3 \* 4\) == 1"):
        sw.batch_sizes(plan, global_=25)


# -- HNG-2 ------------------------------------------------------------------------------------

NUM_BATCHES = (5, 3)


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    sizes = [1 + (rank + number) % 3 for number in range(NUM_BATCHES[rank])]
    return [torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in sizes]


def windows(rank: int, steps: int) -> list[list[Tensor]]:
    """Micro-batches of each step of a rank; the last window may be short."""
    mine = batches(rank)
    return [mine[i : i + steps] for i in range(0, len(mine), steps)]


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return Net().double()


def run_out(level: int, steps: int) -> list[Any]:
    """Train on this rank of a job until both ranks have run out, then evaluate likewise."""
    mesh = sw.Mesh(fsdp=-1)
    model = make_net()
    plan = sw.plan(model, mesh, sw.zero(level, "fsdp"), sw.accumulate(steps))
    program = sw.lower(plan, square, sw.optim.sgd(0.1)).bind()
    state = program.init(sw.from_module(model))
    rank = join_job().rank
    source, losses = iter(windows(rank, steps)), []
    while not program.agree((window := next(source, None)) is None):
        batch = None if window is None else sw.MicroBatches(window)
        state, metrics = program.step(state, batch)
        assert program.last_collectives == program.lowered.collectives()
        losses.append(float(metrics.loss))
    params = {path: value.clone() for path, value in sw.to_global(state.params).items()}
    evaluation, total, rows = iter(batches(rank)), 0.0, 0.0
    while not program.agree((one := next(evaluation, None)) is None):
        seen = program.eval(state, one)
        total += float(seen.loss * seen.tokens)
        rows += float(seen.tokens)
    return [losses, params, total / rows]


def run_out_at_every_level() -> list[Any]:
    return [run_out(level, steps) for level in range(4) for steps in (1, 2)]


def expected(steps: int) -> list[Any]:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    both = [windows(rank, steps) for rank in range(2)]
    losses = []
    for step in range(len(both[0])):
        rows = torch.cat([micro for mine in both for one in mine[step : step + 1] for micro in one])
        optimizer.zero_grad()
        loss = square(model, rows).total / len(rows)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    rows = torch.cat([batch for rank in range(2) for batch in batches(rank)])
    with torch.no_grad():
        mean = float(square(model, rows).total / len(rows))
    return [losses, {path: value.detach() for path, value in model.named_parameters()}, mean]


@pytest.mark.gloo
@pytest.mark.timeout(90)
def test_hng_2_a_rank_that_has_run_out_adds_nothing_and_nobody_hangs() -> None:
    found = sw.spawn(run_out_at_every_level, ranks=2, timeout=80)
    for results in found:
        runs = [steps for _ in range(4) for steps in (1, 2)]
        for steps, (losses, params, mean) in zip(runs, results, strict=True):
            want_losses, want_params, want_mean = expected(steps)
            torch.testing.assert_close(losses, want_losses, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(params, want_params, rtol=1e-10, atol=1e-12)
            assert mean == pytest.approx(want_mean, rel=1e-10)
