"""From plan to plan: the rest of a state, and states that a program refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import DonatedStateError, SimulationError, StateError
from shardwise.sharding.simulation import Simulated
from tests.transforms.carried import FIRST, PLANS, assert_bits, batch, loss_fn, model, square

pytestmark = pytest.mark.simulated


def pair(**plans: Any) -> tuple[sw.Lowered, sw.Lowered]:
    module = model()
    one, two = (
        sw.lower(plan(module), loss_fn, plans.get(f"opt{i}", sw.optim.adamw(1e-2)))
        for i, plan in enumerate((PLANS["zero 3"], PLANS["zero 1"]))
    )
    return one, two


def test_step_seed_buffers_and_extra_are_carried() -> None:
    one, two = pair()
    with sw.simulate(FIRST):
        program, other = one.bind(), two.bind()
        state, _ = program.step(program.init(7), program.shard_batch(batch()))
        cursor = {"cursor": 12}
        state = sw.Lifted(s.with_extra(cursor) for s in state.ranks)
        there = other.init(sw.from_state(state))
        assert sw.to_global(there.step) == 1
        assert sw.to_global(there.seed) == 7
        assert there.ranks[0].extra is cursor
        assert torch.equal(
            sw.to_global(there.buffers)["norm.running_mean"],
            sw.to_global(state.buffers)["norm.running_mean"],
        )
        assert sw.to_global(other.init(sw.from_state(state), seed=9).seed) == 9
        with pytest.warns(UserWarning, match="init= has no effect"):
            other.init(sw.from_state(state), init=lambda module: None)


SCALES: dict[str, Any] = {
    "none": sw.chain(),
    "static": sw.loss_scale(8.0),
    "dynamic": sw.loss_scale(initial_power=4, window=3),
    "dynamic, other settings": sw.loss_scale(initial_power=9),
}


@pytest.mark.parametrize("second", SCALES)
def test_a_dynamic_loss_scale_goes_on_also_from_one(second: str) -> None:
    """A scale of 1 is what a state without a loss scale has, too."""
    module, mesh = model(), sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        one, two = (
            sw.lower(sw.plan(module, mesh, SCALES[name]), loss_fn, sw.optim.sgd(0.1))
            for name in ("dynamic", second)
        )
        state = one.bind().init(0)
        given = {"scale": 1.0, "good_steps": 5, "skipped": 7, "skipped_in_a_row": 2}
        for rank in state.ranks:
            for name, value in given.items():
                getattr(rank.scaling, name).fill_(value)
        got = two.bind().init(sw.from_state(state)).ranks[1].loss_scale
        back = one.bind().init(sw.from_state(two.bind().init(sw.from_state(state))))
    assert (got.skipped, got.skipped_in_a_row) == (7, 2)
    if second.startswith("dynamic"):
        assert (got.scale, got.good_steps, got.hysteresis) == (1.0, 5, 2)
        assert_bits(back, state)
    else:
        assert got.scale == (8.0 if second == "static" else 1.0)
        assert got.good_steps == 0
    assert got.scale is not state.ranks[1].loss_scale.scale


def test_a_state_built_leaf_by_leaf_is_carried() -> None:
    one, two = pair()
    with sw.simulate(FIRST):
        program, other = one.bind(), two.bind()
        state = program.init(0)
        built = state.map(
            lambda s: optree.tree_map(
                lambda leaf: leaf + 0 if isinstance(leaf, Tensor) else leaf,
                s,
                namespace="shardwise",
            )
        )
        assert_bits(other.init(sw.from_state(built)), other.init(sw.from_state(state)))


def refusal(run: Callable[[], Any], kind: type[Exception] = StateError) -> Any:
    with pytest.raises(kind) as caught:
        run()
    return caught.value


def test_a_dead_state_is_refused() -> None:
    one, two = pair()
    with sw.simulate(FIRST):
        program, other = one.bind(), two.bind()
        state = program.init(0)
        program.step(state, program.shard_batch(batch()))
        refusal(lambda: other.init(sw.from_state(state)), DonatedStateError)


def test_another_optimizer_is_refused_with_what_differs() -> None:
    one, _ = pair()
    _, two = pair(opt1=sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.sgd(0.1)))
    _, three = pair(opt1=sw.optim.sgd(0.1, momentum=0.9))
    with sw.simulate(FIRST):
        state = one.bind().init(0)
        error = refusal(lambda: two.bind().init(sw.from_state(state)))
        assert "The state is of another optimizer: 1 parts of it differ." in str(error)
        assert "opt: was AdamWState, is tuple" in str(error)
        assert "init(from_module(model))" in error.fix
        assert error.numbers == {"count": 1}
        error = refusal(lambda: sw.from_state(state.ranks[0]).into(three))
        assert "opt: was AdamWState, is SGDState" in str(error)


def test_state_that_has_moved_to_another_part_is_refused() -> None:
    module = model()

    def split(fast: str) -> Any:
        return sw.optim.partition(
            {"fast": sw.optim.sgd(0.1, momentum=0.9), "slow": sw.optim.sgd(0.01, momentum=0.9)},
            {"fast": fast},
            otherwise="slow",
        )

    plan = PLANS["zero 3"](module)
    one, two = (sw.lower(plan, loss_fn, split(fast)) for fast in ("layers.0", "layers"))
    with sw.simulate(FIRST):
        state = one.bind().init(0)
        error = refusal(lambda: two.bind().init(sw.from_state(state)))
    assert ".parts['fast'].mu['layers.1.weight']: has no float64 like the parameter" in str(error)
    assert ".parts['slow'].mu['layers.1.bias']: is gone" in str(error)
    assert error.numbers == {"count": 4}


def test_counts_that_differ_cannot_become_one() -> None:
    """torch's step counts are one per group; groups with two histories cannot join."""
    module = model()
    optimizer = sw.optim.from_torch(torch.optim.NAdam, lr=1e-2)
    with sw.simulate(FIRST):
        apart = sw.plan(
            module,
            FIRST,
            sw.zero(3, "fsdp", where="layers.*.weight"),
            units=["layers.0", "layers.1", "norm"],
        )
        together = sw.plan(
            module,
            FIRST,
            sw.zero(3, "fsdp"),
            units=["layers.0", "layers.1", "norm"],
        )
        one, two = (sw.lower(plan, loss_fn, optimizer) for plan in (apart, together))
        state = one.bind().init(0)
        for rank in state.ranks:
            key = next(key for key in rank.opt_flats.steps if key.startswith("layers.0"))
            rank.opt_flats.steps[key].add_(5)
        error = refusal(lambda: two.bind().init(sw.from_state(state)))
    assert "one number of 0, 5" in str(error)


def test_another_model_or_number_of_ranks_is_refused() -> None:
    one, _ = pair()
    small = sw.plan(nn.Linear(6, 6), FIRST)
    fewer = sw.plan(model(), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    with sw.simulate(FIRST):
        state = one.bind().init(0)
        other = sw.lower(small, square, sw.optim.adamw(1e-2))
        error = refusal(lambda: other.bind().init(sw.from_state(state)))
    assert "The state is of another model" in str(error)
    assert "weight: the state has nothing, the program (6, 6)" in str(error)
    error = refusal(
        lambda: sw.from_state(state.ranks[0]).into(sw.lower(fewer, loss_fn, sw.optim.adamw(1e-2)))
    )
    assert "A state on 4 ranks cannot be carried to 2." in str(error)
    assert error.numbers == {"has": 4, "needs": 2}
    assert "same number of ranks" in error.fix
    with sw.simulate(sw.Mesh(fsdp=2)):
        program = sw.lower(fewer, loss_fn, sw.optim.adamw(1e-2)).bind()
        error = refusal(lambda: program.init(sw.from_state(state)), SimulationError)
    assert "A lifted value of 4 ranks was passed to a program on 2." in str(error)
    assert error.numbers == {"has": 4, "needs": 2}
    assert "a mesh of as many ranks" in error.fix


def test_an_all_to_all_whose_two_sides_disagree_is_refused() -> None:
    """Both follow from one plan; a fault there must not move elements to wrong places."""
    with sw.simulate(sw.Mesh(fsdp=2)) as world:

        def run(rank: int) -> None:
            out, mine = torch.zeros(3), torch.ones(3)
            Simulated(world, rank).all_to_all(out, mine, [1, 2], [1, 2] if rank else [2, 1])

        error = refusal(lambda: world.run(run), SimulationError)
    assert "Rank 0 expects other elements than its peers send." in str(error)
    assert "sent [2, 1]" in str(error)
    assert "expected (1, 2)" in str(error)
    assert error.numbers == {"rank": 0}
    assert "same state and plan" in error.fix


def test_ranks_with_states_of_different_steps_are_refused() -> None:
    one, two = pair()
    with sw.simulate(FIRST):
        program, other = one.bind(), two.bind()
        old = program.init(0)
        new, _ = program.step(old, program.shard_batch(batch()), donate=False)
        mixed = sw.Lifted([old.ranks[0], old.ranks[1], new.ranks[2], old.ranks[3]])
        error = refusal(lambda: other.init(sw.from_state(mixed)))
    assert "Ranks carry over states of different runs." in str(error)
    assert "rank 2: step 1 of a plan on Mesh(fsdp=4)" in str(error)
    assert error.numbers == {"rank": 2}
