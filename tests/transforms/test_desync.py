"""`bind(debug=True)`: ranks that call, run or report different things all get one error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.collectives import Collective
from shardwise.sharding.errors import RankError
from shardwise.sharding.movement import Mover
from shardwise.sharding.simulation import Simulated, World
from shardwise.transforms.desync import agreed
from shardwise.transforms.metrics import Metrics
from shardwise.transforms.program import _call

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=3)
CPU = torch.device("cpu")


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def loss_fn(model: nn.Module, x: Tensor) -> sw.Mean:
    return sw.Mean(model(x).square().sum(), x.shape[0])


def rows() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def lowered(*more: sw.Transform, optimizer: Any = None) -> sw.Lowered:
    plan = sw.plan(build(), MESH, sw.zero(3, "fsdp"), *more)
    return sw.lower(plan, loss_fn, optimizer or sw.optim.sgd(0.1))


def outcomes(world: World, run: Callable[[int], Any]) -> list[Any]:
    """What every rank gets, errors included: in a job each rank would see its own."""

    def attempt(rank: int) -> Any:
        try:
            return run(rank)
        except Exception as error:
            return error

    return world.run(attempt)


def assert_one_error(seen: list[Any], *texts: str, **numbers: Any) -> RankError:
    """The same five-part error on all ranks."""
    assert all(isinstance(error, RankError) for error in seen), seen
    assert len({str(error) for error in seen}) == 1
    for text in texts:
        assert text in str(seen[0])
    assert seen[0].numbers.items() >= numbers.items()
    assert seen[0].where
    assert seen[0].why
    assert seen[0].fix
    return seen[0]


def call(program: sw.Program, rank: int, name: str, state: Any, batch: Any) -> Any:
    """One call of the public face on one rank of a simulation."""
    one = program._ranks[rank]
    run = {"step": one.step, "eval": one.evaluate, "grads": one.grads}[name]
    return _call(one, name, state.ranks[rank], lambda: run(state.ranks[rank], batch.ranks[rank]))


# -- programs -----------------------------------------------------------------------------------


def test_ranks_that_agree_train_as_without_debug() -> None:
    losses: list[list[float]] = []
    for debug in (False, True):
        with sw.simulate(MESH):
            program = lowered(optimizer=sw.optim.adamw(0.1)).bind(debug=debug)
            state, batch = program.init(0), program.shard_batch(rows())
            found: list[float] = []
            for _ in range(3):
                state, metrics = program.step(state, batch)
                found += [metrics.loss.item(), program.eval(state, batch).loss.item()]
                assert program.agree(True)
            grads, _ = program.grads(state, batch)
            state = program.update(state, grads)
            found.append(sw.to_global(state.params)["0.weight"].sum().item())
            losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("settled", [False, True])
def test_another_call_on_one_rank(settled: bool) -> None:
    with sw.simulate(MESH) as world:
        program = lowered().bind(debug=True)
        state, batch = program.init(0), program.shard_batch(rows())
        if settled:
            state, _ = program.step(state, batch)
        names = ["step", "step", "eval"]
        seen = outcomes(world, lambda rank: call(program, rank, names[rank], state, batch))
        step = int(settled)
        error = assert_one_error(
            seen,
            "Ranks do not make the same call.",
            f"rank 0: program.step {step}\n",
            f"rank 2: program.eval {step}\n",
            "Nothing has run; the states are unchanged.",
            "program.agree(",
            rank=2,
            calls=(f"step {step}", f"step {step}", f"eval {step}"),
        )
        assert error.where == "rank 2 against rank 0"
        # Nothing has run: they go on together.
        _, metrics = program.step(state, batch)
        assert metrics.applied


def test_a_state_of_another_step_on_one_rank() -> None:
    with sw.simulate(MESH) as world:
        program = lowered().bind(debug=True)
        old, batch = program.init(0), program.shard_batch(rows())
        new, _ = program.step(old, batch, donate=False)
        mixed = sw.Lifted([new.ranks[0], old.ranks[1], new.ranks[2]])
        seen = outcomes(world, lambda rank: call(program, rank, "step", mixed, batch))
    assert_one_error(seen, "rank 1: program.step 0\n", rank=1, calls=("step 1", "step 0", "step 1"))


def test_a_rank_that_was_lowered_otherwise_is_found_before_a_byte_moves() -> None:
    """One rank fetches a unit ahead, so that its list has the same items in another order."""
    with sw.simulate(MESH) as world:
        program, other = lowered().bind(debug=True), lowered(sw.prefetch(1)).bind(debug=True)
        state, batch = program.init(0), program.shard_batch(rows())
        state, _ = program.step(state, batch)
        other.step(other.init(0), batch)
        mine = program._ranks[1].lowering
        ahead = other._ranks[1].lowering
        position = next(
            i for i, (a, b) in enumerate(zip(mine.collectives(), ahead.collectives())) if a != b
        )
        assert set(mine.collectives()) == set(ahead.collectives())
        program._ranks[1].lowering = ahead
        seen = outcomes(world, lambda rank: call(program, rank, "step", state, batch))
        assert all(one.mover.executed != [] for one in program._ranks)  # of the step before
        assert_one_error(
            seen,
            f"Rank 1 does not run the collectives of rank 0: number {position} differs.",
            "step 1, before it began",
            f"rank 1: {' '.join(str(ahead.collectives()[position]).split())}",
            f"rank 0: {' '.join(str(mine.collectives()[position]).split())}",
            "Nothing has run.",
            "lower the same plan",
            rank=1,
            position=position,
        )
        program._ranks[1].lowering = mine
        _, metrics = program.step(state, batch)
        assert metrics.applied


def test_a_rank_that_fails_in_the_optimizer() -> None:
    """It runs what is left of the update with zeros, so that the others can hear of it."""
    plain = sw.optim.sgd(0.1)
    armed: set[int] = set()

    def apply(params: Any, grads: Any, opt_state: Any, **extra: Any) -> Any:
        if turns.pop() in armed:
            raise ValueError("no memory for a moment")
        return plain.apply(params, grads, opt_state, **extra)

    turns: list[int] = []
    with sw.simulate(MESH) as world:
        program = lowered(optimizer=plain._replace(apply=apply)).bind(debug=True)
        batch = program.shard_batch(rows())
        turns += [2, 1, 0]  # ranks take turns only where they wait for each other
        state, _ = program.step(program.init(0), batch)
        turns += [2, 1, 0]
        armed.add(1)
        seen = outcomes(world, lambda rank: call(program, rank, "step", state, batch))
    assert isinstance(seen[1], ValueError)
    for error in (seen[0], seen[2]):
        assert isinstance(error, RankError)
        assert "Rank 1 failed in step 1, and this rank did not." in str(error)
        assert "ValueError: no memory for a moment" in str(error)
        assert "go on from a checkpoint" in error.fix
        assert error.numbers == {"rank": 1, "failed": 1}


# -- the check itself ---------------------------------------------------------------------------


def metrics(loss: float) -> Metrics:
    one = torch.tensor(1.0)
    return Metrics(loss=torch.tensor(loss, dtype=torch.float64), tokens=one, aux={"z": one})


def check(run: Callable[[int, Mover], Any], items: list[Collective] | None = None) -> list[Any]:
    with sw.simulate(MESH) as world:

        def one(rank: int) -> Any:
            mover = Mover(MESH, rank, Simulated(world, rank))
            mover.call = "step 4"
            return agreed(mover, lambda: run(rank, mover), predicted=items or [], device=CPU)

        return outcomes(world, one)


def test_what_ran_is_compared_with_what_the_others_ran() -> None:
    item = Collective("all_gather", "fsdp", 16, "layers.3", "forward")

    def run(rank: int, mover: Mover) -> None:
        mover.executed = [item, item] if rank == 2 else [item]

    assert_one_error(
        check(run),
        "Rank 2 does not run the collectives of rank 0: number 1 differs.",
        "step 4, after it had run",
        "rank 0: nothing more (of 1)",
        "rank 2: all_gather fsdp 16 B forward layers.3 torch.float32 (of 2)",
        "The states are not to be trusted.",
        rank=2,
        position=1,
    )


def test_a_dtype_alone_is_a_difference() -> None:
    item = Collective("all_gather", "fsdp", 16, "layers.3", "forward")

    def run(rank: int, mover: Mover) -> None:
        mover.executed = [replace(item, dtype=torch.float64) if rank else item]

    assert_one_error(check(run), "forward layers.3 torch.float64", rank=1, position=0)


@pytest.mark.parametrize(
    "other",
    [
        metrics(0.1 + 0.2),
        replace(metrics(0.3), aux={"z": torch.tensor(2.0)}),
        replace(metrics(0.3), applied=False),
        replace(metrics(0.3), grad_norm=torch.tensor(1.0)),
        replace(metrics(0.3), skipped_steps=1),
    ],
    ids=["last bit of the loss", "aux", "applied", "norm", "skipped"],
)
def test_results_are_compared_to_the_last_bit(other: Metrics) -> None:
    """Alone and beside a state, as `step` returns them."""
    for pack in (lambda one: one, lambda one: (None, one)):
        seen = check(lambda rank, mover, p=pack: p(other if rank == 1 else metrics(0.3)))
        assert_one_error(
            seen, "Ranks report different results of step 4.", "rank 0: applied=True", rank=1
        )
        assert check(lambda rank, mover, p=pack: p(metrics(0.3)))[1] is not None


def test_a_failure_of_all_ranks_stays_what_it_is() -> None:
    def run(rank: int, mover: Mover) -> None:
        raise ValueError("on every rank")

    assert all(isinstance(error, ValueError) for error in check(run))
