"""Micro-batches: cut or given, short on some ranks, missing on others, and wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.sharding.errors import BatchError, RankError
from shardwise.testing.models import Toy
from tests.transforms.test_accumulate import Even, close, even_loss

pytestmark = pytest.mark.simulated


def toy_program(mesh: sw.Mesh, *transforms: Any) -> tuple[Any, Any, Toy]:
    toy = Toy(width=4, hidden=5, depth=2, vocab=7)
    model = toy.build().double()
    plan = sw.plan(model, mesh, sw.zero(3, "fsdp"), *transforms)
    program = sw.lower(plan, toy.loss_fn, sw.optim.sgd(0.1)).bind()
    return program, program.init(0), toy


def test_given_micro_batches_are_those_that_a_batch_is_cut_into() -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program, state, toy = toy_program(mesh, sw.accumulate(3))
        micros = [toy.batch(4, seed) for seed in range(2)]  # a short window: two of three
        given, seen = program.grads(
            state, sw.MicroBatches([program.shard_batch(micro) for micro in micros])
        )
        whole = {
            name: torch.cat([micro[name] for micro in micros]) for name in ("inputs", "labels")
        }
        cut, other = program.grads(state, program.shard_batch(whole))
        torch.testing.assert_close(seen.loss, other.loss, rtol=1e-12, atol=0.0)
        close(sw.to_global(given.leaves), sw.to_global(cut.leaves))


def test_ranks_may_run_out_of_micro_batches_at_different_times() -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program, state, toy = toy_program(mesh, sw.accumulate(3))
        mine = [toy.batch(2, seed) for seed in range(4)]
        uneven = sw.Lifted([sw.MicroBatches(mine[:3]), sw.MicroBatches(mine[3:])])
        grads, metrics = program.grads(state, uneven)
        assert program.last_collectives == program.lowered.grads_items
        none = sw.Lifted([sw.MicroBatches(mine), None])
        with pytest.raises(BatchError, match="There are 4 micro-batches for a step of 3"):
            program.grads(state, none)
        two = [torch.cat([mine[i][name] for i in range(4)]) for name in ("inputs", "labels")]
        whole = dict(zip(("inputs", "labels"), two, strict=True))
        same, other = program.grads(state, program.shard_batch(whole))
        torch.testing.assert_close(metrics.loss, other.loss, rtol=1e-12, atol=0.0)
        assert metrics.tokens == other.tokens
        close(sw.to_global(grads.leaves), sw.to_global(same.leaves))


@pytest.mark.parametrize("steps", [1, 3])
def test_all_ranks_without_a_batch_have_no_elements(steps: int) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program, state, toy = toy_program(mesh, sw.accumulate(steps))
        for _ in range(2):  # before and after the first step
            for call in (program.step, program.eval):
                with pytest.raises(BatchError, match="no elements to average over") as caught:
                    call(state, None)
                assert caught.value.numbers["count"] == 0
            state, _ = program.step(state, program.shard_batch(toy.batch(4, 0)))


def test_evaluation_takes_ranks_without_a_batch_and_one_pass() -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program, state, toy = toy_program(mesh, sw.accumulate(3))
        batch = toy.batch(5, 0)
        seen = program.eval(state, sw.Lifted([None, batch]))
        assert program.last_collectives == program.lowered.eval_items
        whole = program.eval(state, sw.Lifted([batch, None]))
        cut = program.eval(state, program.shard_batch(batch))
        assert seen.loss == whole.loss
        torch.testing.assert_close(seen.loss, cut.loss, rtol=1e-12, atol=0.0)
        assert seen.tokens == cut.tokens
        with pytest.raises(BatchError, match=r"program\.eval was given MicroBatches, 2") as caught:
            program.eval(state, sw.MicroBatches([program.shard_batch(batch)] * 2))
        assert "metrics.tokens" in caught.value.fix


def test_what_cannot_be_cut_fails_on_every_rank() -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program, state, toy = toy_program(mesh, sw.accumulate(3))
        good = toy.batch(3, 0)
        bad = {**good, "labels": good["labels"][:2]}
        for _ in range(2):  # before and after the first step
            # Whoever raises first in a simulation: rank 1 itself, or rank 0 in rank 1's words.
            with pytest.raises((BatchError, RankError), match="cannot be cut into micro") as caught:
                program.step(state, sw.Lifted([good, bad]))
            assert "rows of its tensors: 2, 3; micro-batches: 3" in str(caught.value)
            assert "Fix: pass tensors of the same number of rows, or sw.Micro" in str(caught.value)
            state, _ = program.step(state, sw.Lifted([good, good]))
        mixed = sw.MicroBatches([good, {"inputs": good["inputs"]}])
        with pytest.raises(BatchError, match="Micro-batches 0 and 1 differ in structure") as caught:
            program.step(state, sw.Lifted([mixed, good]))
        assert caught.value.numbers["micro"] == 1


def test_there_is_something_to_trace() -> None:
    plan = sw.plan(Even(), sw.Mesh(fsdp=2), sw.accumulate(2))
    lowered = sw.lower(plan, even_loss, sw.optim.sgd(0.1), batch=sw.like((4, 16)))
    assert lowered.activation_bytes is not None
    one = sw.lower(plan, even_loss, sw.optim.sgd(0.1), batch=sw.MicroBatches([sw.like((2, 16))]))
    assert one.activation_bytes == lowered.activation_bytes
    assert "forward pass of one micro-batch" in lowered.text()
    with pytest.raises(BatchError, match="no micro-batch to trace") as caught:
        sw.lower(plan, even_loss, sw.optim.sgd(0.1), batch=torch.ones(0, 16))
    assert "a Tensor without rows; micro-batches: 2" in str(caught.value)
    assert "at least one row" in caught.value.fix


def test_debug_compares_micro_batches_and_lets_ranks_be_idle() -> None:
    mesh = sw.Mesh(fsdp=2)
    toy = Toy(width=4, hidden=5, depth=2, vocab=7)
    with sw.simulate(mesh):
        plan = sw.plan(toy.build(), mesh, sw.zero(3, "fsdp"), sw.accumulate(2))
        program = sw.lower(plan, toy.loss_fn, sw.optim.sgd(0.1)).bind(debug=True)
        state, good = program.init(0), toy.batch(4, 0)
        for batch in (sw.Lifted([good, None]), sw.Lifted([None, sw.MicroBatches([good])])):
            for _ in range(2):
                state, _ = program.step(state, batch)
                assert program.last_collectives == program.lowered.collectives()
        other = {**good, "inputs": good["inputs"].int()}
        with pytest.raises(BatchError, match="differ in structure") as caught:
            program.step(state, sw.Lifted([sw.MicroBatches([good]), other]))
        assert "torch.int32" in str(caught.value)


def test_a_failure_in_any_micro_batch_is_one_on_all_ranks() -> None:
    mesh = sw.Mesh(fsdp=2)
    toy = Toy(width=4, hidden=5, depth=2, vocab=7)
    armed: list[int] = []

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> Any:
        if armed and armed.pop() == 1:
            raise ValueError("bad micro-batch")
        return toy.loss_fn(model, batch)

    with sw.simulate(mesh):
        plan = sw.plan(
            toy.build(), mesh, sw.zero(3, "fsdp"), sw.accumulate(3, reduce="once", gather="step")
        )
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        batch = program.shard_batch(toy.batch(6, 0))
        state, _ = program.step(program.init(0), batch)
        before: Any = program.grads(state, batch)[0]
        for number in range(6):  # three passes of two ranks
            armed[:] = [1, *[0] * number]
            with pytest.raises((RankError, ValueError), match="bad micro-batch"):
                program.step(state, batch)
            assert not armed
            after: Any = program.grads(state, batch)[0]
            for one, other in zip(before.ranks, after.ranks, strict=True):
                assert all(torch.equal(one.flats[name], other.flats[name]) for name in one.flats)
