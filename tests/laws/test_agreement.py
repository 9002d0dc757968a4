"""Law 8: a rank that fails or diverges gives one answer on all ranks, and costs no state."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise.sharding.errors import BatchError, RankError
from shardwise.sharding.simulation import World, current_world
from shardwise.testing.models import EXACT, SPLIT
from shardwise.testing.strategies import Training, make_optimizer, trainings

pytestmark = pytest.mark.simulated


class Fault(Exception):
    """What a user's code raises."""


class Raise(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Fault("in backward")


class Trap:
    """A loss function in which chosen ranks fail at a chosen place, once armed."""

    def __init__(self, training: Training, place: str) -> None:
        self._loss_fn = training.toy.loss_fn
        self._place = place
        self.ranks: set[int] = set()

    def __call__(self, model: Any, batch: Any) -> Any:
        if not self.ranks or int(batch["rank"]) not in self.ranks:
            return self._loss_fn(model, batch)
        if self._place == "before forward":
            raise Fault(self._place)
        result = self._loss_fn(model, batch)
        if self._place == "after forward":
            raise Fault(self._place)
        mean, *rest = result if isinstance(result, tuple) else (result,)
        if isinstance(mean, sw.Mean):
            return sw.Mean(Raise.apply(mean.total), mean.count), *rest
        return Raise.apply(mean)


def with_rank(program: sw.Program, batch: dict[str, Tensor], size: int) -> Any:
    """The parts of a batch, with the number of the rank in each."""
    lifted = program.shard_batch(batch)
    return lifted.map(
        lambda part, rank: {**part, "rank": torch.tensor(rank)}, sw.Lifted(range(size))
    )


def leaves(state: Any) -> list[Tensor]:
    flat = [
        leaf for rank in state.ranks for leaf in optree.tree_leaves(rank, namespace="shardwise")
    ]
    return [
        leaf.to_local().clone() if hasattr(leaf, "to_local") else torch.as_tensor(leaf).clone()
        for leaf in flat
        if leaf is not None
    ]


def outcome_of_each_rank(world: World, program: sw.Program, state: Any, batch: Any) -> list[Any]:
    """What every rank gets, errors included: in a job each rank would see its own."""
    ranks = program._ranks

    def attempt(rank: int) -> Any:
        try:
            return ranks[rank].step(state.ranks[rank], batch.ranks[rank])
        except Exception as error:
            return error

    return world.run(attempt)


PLACES = ["before forward", "after forward", "in backward"]


@settings(max_examples=30)
@given(trainings(features=(*EXACT, *SPLIT)), st.sampled_from(PLACES), st.data())
def test_a_fault_is_raised_on_all_ranks_and_the_state_trains_on(
    training: Training, place: str, data: st.DataObject
) -> None:
    model, size = training.model, training.mesh.size
    trap = Trap(training, place)
    plan = training.plan(model)
    if not plan.opt:
        return  # nothing trains, so there is no backward to fail in
    with sw.simulate(training.mesh) as world:
        program = sw.lower(plan, trap, make_optimizer(training.optimizer)).bind()
        state = program.init(training.seed)
        batch = with_rank(program, training.batches[0], size)
        state, _ = program.step(state, batch)
        before = leaves(state)
        trap.ranks = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=2))
        seen = outcome_of_each_rank(world, program, state, batch)
        for error in seen:
            assert isinstance(error, Fault if size == 1 else RankError), error
            assert "Fault" in str(error) or place in str(error)
        first = min(trap.ranks)
        assert size == 1 or all(error.numbers["rank"] == first for error in seen)
        assert all(torch.equal(a, b) for a, b in zip(leaves(state), before, strict=True))
        trap.ranks = set()
        after, _ = program.step(state, batch)
    assert all(isinstance(leaf, Tensor) for leaf in leaves(after))
    assert leaves(after_without_fault(training, plan))[0].equal(leaves(after)[0])


def after_without_fault(training: Training, plan: sw.Plan) -> Any:
    """The state after two steps in which nothing fails."""
    with sw.simulate(training.mesh):
        trap = Trap(training, "never")
        program = sw.lower(plan, trap, make_optimizer(training.optimizer)).bind()
        state = program.init(training.seed)
        batch = with_rank(program, training.batches[0], training.mesh.size)
        for _ in range(2):
            state, _ = program.step(state, batch)
    return state


@given(trainings().filter(lambda training: training.mesh.size > 1), st.data())
def test_another_structure_on_one_rank_is_an_error_on_all(
    training: Training, data: st.DataObject
) -> None:
    odd = data.draw(st.integers(0, training.mesh.size - 1))
    optimizer = make_optimizer(training.optimizer)
    with sw.simulate(training.mesh) as world:
        program = sw.lower(training.plan(training.model), training.toy.loss_fn, optimizer).bind()
        state: Any = program.init(training.seed)
        parts = list(program.shard_batch(training.batches[0]).ranks)
        parts[odd] = {**parts[odd], "more": torch.ones(())}
        seen = outcome_of_each_rank(world, program, state, sw.Lifted(parts))
    assert all(isinstance(error, BatchError) for error in seen)
    assert len({str(error) for error in seen}) == 1


def test_no_simulation_is_left_open() -> None:
    assert current_world() is None
