"""Ledger, recorder and strategies: they measure what is there, and shrink to what is simple."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.testing import CommsError, assert_comms, measure, rest_bytes
from shardwise.testing.echo import bind_alone
from shardwise.testing.models import EXACT, SPLIT, Toy
from shardwise.testing.strategies import (
    OPTIMIZERS,
    Move,
    Training,
    make_optimizer,
    meshes,
    moves,
    toys,
    trainings,
)

pytestmark = pytest.mark.abstract

KIB = 1024


def test_the_peak_is_the_most_that_was_held_at_once() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(64 * KIB, dtype=torch.uint8)
        del first
        second = torch.empty(48 * KIB, dtype=torch.uint8)
        third = torch.empty(32 * KIB, dtype=torch.uint8)
        del second
        return third

    result, usage = measure(run)
    assert usage == (80 * KIB, 32 * KIB)
    assert result.nbytes == usage.kept


def test_storages_resized_by_hand_are_seen() -> None:
    storage = torch.empty(64 * KIB, dtype=torch.uint8).untyped_storage()
    storage.resize_(0)
    _, usage = measure(lambda: storage.resize_(64 * KIB))
    assert usage.kept == 64 * KIB


def test_rest_counts_every_storage_once() -> None:
    model = Toy(width=4, depth=2, vocab=5, features=("tied",)).build()
    plan = sw.plan(model, sw.Mesh(fsdp=4), sw.zero(3, "fsdp"))
    lowered = sw.lower(plan, lambda m, b: m(b).sum(), sw.optim.adamw(1e-3))
    state = bind_alone(lowered, 3).init(0, None)
    assert rest_bytes(state) == lowered.memory().rest_bytes == state.nbytes


def program_after_a_step() -> sw.Program:
    model = nn.Linear(8, 8)
    mesh = sw.Mesh(fsdp=2)
    plan = sw.plan(model, mesh, sw.zero(1, "fsdp"))
    with sw.simulate(mesh):
        program = sw.lower(plan, lambda m, x: m(x).mean(), sw.optim.sgd(0.1)).bind()
        program.step(program.init(0), program.shard_batch(torch.ones(4, 8)))
    return program


def test_comms_that_are_as_expected_pass() -> None:
    # One bucket: gradients scattered, weights gathered, scalars gathered.
    assert_comms(program_after_a_step(), all_gather=2, reduce_scatter=1, all_reduce=0)
    assert_comms(program_after_a_step(), max_bytes=4 * 128 * 2)
    assert_comms(program_after_a_step())


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ({"all_gather": 1}, "all_gather: 2 ran, 1 expected"),
        ({"all_reduce": 3}, "all_reduce: 0 ran, 3 expected"),
        ({"max_bytes": 100}, "bytes, at most 100 expected"),
    ],
)
def test_comms_that_are_not_are_listed(expected: dict[str, Any], text: str) -> None:
    with pytest.raises(CommsError, match=text) as caught:
        assert_comms(program_after_a_step(), **expected)
    assert isinstance(caught.value, AssertionError)
    assert caught.value.numbers["all_gather"] == 2
    assert "reduce_scatter fsdp" in str(caught.value)
    assert "Fix:" in str(caught.value)


def simplest(strategy: st.SearchStrategy[Any]) -> Any:
    phases = (Phase.generate, Phase.shrink)
    quick = settings(max_examples=20, phases=phases, database=None, deadline=None)
    return find(strategy, lambda _: True, settings=quick)


def test_draws_shrink_to_one_rank_a_bare_model_and_no_transform() -> None:
    training = simplest(trainings())
    assert training.mesh.sizes == (1,)
    assert training.toy == Toy()
    assert training.moves == ()
    assert (training.optimizer, training.steps, training.seed) == ("sgd", 1, 0)


@given(meshes(max_ranks=6))
def test_meshes_are_small(mesh: sw.Mesh) -> None:
    assert 1 <= mesh.size <= 6
    assert set(mesh.names) <= {"fsdp", "dp", "node"}


@given(trainings(features=(*EXACT, *SPLIT)))
def test_a_training_prints_as_what_makes_it(training: Training) -> None:
    scope = {"Training": Training, "Toy": Toy, "Mesh": sw.Mesh, "sw": sw}
    for move in training.moves:
        assert eval(repr(move), scope).__name__ == move.transform().__name__
    assert eval(repr(training.toy), scope) == training.toy
    plan = training.plan(training.model)
    assert plan == training.plan(training.model)


@settings(suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.data(), meshes(), toys(features=(*EXACT, *SPLIT)))
def test_every_toy_takes_its_own_batches(data: st.DataObject, mesh: sw.Mesh, toy: Toy) -> None:
    model = toy.build()
    result = toy.loss_fn(model, toy.batch(4, data.draw(st.integers(0, 9))))
    total = result[0].total if isinstance(result, tuple) else result
    assert total.ndim == 0
    assert torch.isfinite(total)
    assert all(isinstance(move, Move) for move in data.draw(moves(mesh, model)))


def test_every_kind_of_draw_occurs() -> None:
    """What the laws are tested on is not all of one kind."""
    seen: set[str] = set()

    @settings(max_examples=250, database=None, derandomize=True, deadline=None)
    @given(trainings())
    def look(training: Training) -> None:
        seen.update(training.toy.features, [training.optimizer, f"{training.mesh.size} ranks"])
        seen.update(move.call for move in training.moves)
        plan = training.plan(training.model)
        homes = (plan.params, plan.grads, plan.opt)
        cut = [any(spec.mesh_axes for spec in home.values()) for home in homes]
        seen.add(f"cut {cut}")

    look()
    calls = {"zero", "shard_params", "shard_grads", "shard_optimizer", "freeze", "prefetch"}
    assert seen >= {*EXACT, *OPTIMIZERS, *calls, "keep_gathered", "1 ranks", "3 ranks", "4 ranks"}
    assert sum(kind.startswith("cut") for kind in seen) >= 6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_transforms(name: str) -> None:
    optimizer = make_optimizer(name)
    params = {"w": torch.ones(3)}
    updates, _ = optimizer.update({"w": torch.ones(3)}, optimizer.init(params), params)
    assert (updates["w"] < 0).all()


def test_import_shardwise_needs_neither_testing_nor_hypothesis() -> None:
    code = (
        "import sys, shardwise; assert 'shardwise.testing' not in sys.modules\n"
        "import shardwise.testing; assert 'hypothesis' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
