"""Law 7: save under plan a, restore under b, save, and so on back to a is the identity, bitwise."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.sharding.errors import PlanError
from shardwise.testing.strategies import (
    OPTIMIZERS,
    Move,
    Training,
    make_optimizer,
    meshes,
    moves,
    trainings,
)
from tests.transforms.carried import assert_bits, assert_close, square
from tests.transforms.test_carry import loses_scale

pytestmark = pytest.mark.simulated


@dataclass(frozen=True)
class Other:
    """A plan on a mesh of any number of ranks."""

    mesh: sw.Mesh
    moves: tuple[Move, ...]

    def plan(self, module: nn.Module, units: Any) -> sw.Plan:
        steps = (move.transform() for move in self.moves)
        return sw.plan(module, self.mesh, *steps, units=units)


@st.composite
def journeys(draw: st.DrawFn, *, max_ranks: int) -> tuple[Training, list[Other]]:
    training = draw(trainings(optimizers=OPTIMIZERS, max_ranks=max_ranks))
    module = training.model
    others: list[Other] = []
    for _ in range(2):
        mesh = draw(meshes(max_ranks=max_ranks))
        other = Other(mesh, draw(moves(mesh, module, training.units)))
        try:
            other.plan(module, training.units)
        except PlanError:  # an uneven cut over several axes: replicas are a plan too
            other = Other(mesh, ())
        others.append(other)
    return training, others


def alike(training: Training, other: Other) -> Other:
    """The same plan with what the first one freezes, on no more ranks than batches are made for."""
    frozen = [move for move in training.moves if move.call == "freeze"]
    rest = [move for move in other.moves if move.call != "freeze"]
    if other.mesh.size > training.mesh.size:
        return Other(training.mesh, tuple(frozen))
    return Other(other.mesh, (*frozen, *rest))


def lowered(training: Training, others: list[Other]) -> tuple[list[sw.Lowered], list[Any]]:
    module = training.model.double()
    batches = [
        optree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, one)
        for one in training.batches
    ]
    plans = [training.plan(module), *(other.plan(module, training.units) for other in others)]
    optimizer = make_optimizer(training.optimizer)
    return [sw.lower(plan, training.toy.loss_fn, optimizer) for plan in plans], batches


def trained(plan: sw.Plan) -> set[str]:
    return set(plan.opt)


def run(program: sw.Program, state: Any, batches: list[Any]) -> Any:
    for one in batches:
        state, _ = program.step(state, program.shard_batch(one))
    return state


def restored(lowered: sw.Lowered, source: Path, target: Path | None = None) -> Any:
    with sw.simulate(lowered.plan.mesh):
        program = lowered.bind()
        state = program.restore(source)
        if target is not None:
            program.save(target, state)
    return state


@settings(max_examples=10)
@given(journeys(max_ranks=8))
def test_there_and_there_and_back_is_the_identity(
    drawn: tuple[Training, list[Other]],
) -> None:
    training, others = drawn
    (a, b, c), batches = lowered(training, others)
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / name for name in "abc"]
        with sw.simulate(a.plan.mesh):
            program = a.bind()
            state = run(program, program.init(training.seed), batches)
            program.save(paths[0], state)
        there = restored(b, paths[0], paths[1])
        further = restored(c, paths[1], paths[2])
        back = restored(a, paths[2])
    ours, theirs, last = trained(a.plan), trained(b.plan), trained(c.plan)
    plans = (a.plan, b.plan, c.plan, a.plan)
    lost = any(loses_scale(one, two) for one, two in itertools.pairwise(plans))
    if ours <= theirs and ours <= last and not lost:
        assert_bits(back, state)
        assert sw.fingerprint(back) == sw.fingerprint(state)
    alike = all(plan.loss_scale == a.plan.loss_scale for plan in plans)
    if ours == theirs == last and alike:
        assert sw.fingerprint(there) == sw.fingerprint(further) == sw.fingerprint(state)
    for other in (there, further, back):
        for path, value in sw.to_global(state.params).items():
            assert torch.equal(sw.to_global(other.params)[path], value), path
        for path, value in sw.to_global(state.buffers).items():
            assert torch.equal(sw.to_global(other.buffers)[path], value), path


@settings(max_examples=8)
@given(journeys(max_ranks=4))
def test_training_resumed_elsewhere_is_training_continued(
    drawn: tuple[Training, list[Other]],
) -> None:
    training, others = drawn
    (a, b), batches = lowered(training, [alike(training, others[0])])
    assert trained(a.plan) == trained(b.plan)
    with tempfile.TemporaryDirectory() as place:
        with sw.simulate(a.plan.mesh):
            program = a.bind()
            state = run(program, program.init(training.seed), batches)
            program.save(Path(place) / "a", state)
            want = run(program, state, batches)
        with sw.simulate(b.plan.mesh):
            program = b.bind()
            state = run(program, program.restore(Path(place) / "a"), batches)
    assert_close(state, want)
    assert sw.to_global(state.step) == 2 * len(batches)


# -- optimizers of every kind -------------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: sw.optim.adafactor(1e-2),
    "muon": lambda: sw.optim.muon(1e-2, rest=sw.optim.adamw(1e-2)),
    "partition": lambda: sw.optim.partition(
        {"some": sw.optim.adamw(1e-2), "rest": sw.optim.sgd(0.1, momentum=0.9)},
        {"some": "2"},
        otherwise="rest",
    ),
    "torch": lambda: sw.optim.from_torch(torch.optim.Adam, lr=1e-2),
    "injected": lambda: sw.optim.inject(sw.optim.adamw, learning_rate=1e-2),
}
HALF = sw.precision(params="bfloat16", compute="bfloat16")
CUTS: dict[str, Callable[[nn.Module], sw.Plan]] = {
    "a": lambda m: sw.plan(m, sw.Mesh(fsdp=2), sw.zero(3, "fsdp")),
    "b": lambda m: sw.plan(m, sw.Mesh(node=2, local=2), sw.zero(1, "local")),
    "c": lambda m: sw.plan(m, sw.Mesh(fsdp=3), sw.zero(2, "fsdp", on=0, pad=True)),
}


@pytest.mark.parametrize("half", [False, True], ids=["float64", "masters"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_every_kind(kind: str, half: bool, tmp_path: Path) -> None:
    """There and back in bits; in float64, training goes on as if nothing had been saved."""
    module = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    if not half:
        module, x = module.double(), x.double()
    plans = [make(module) for make in CUTS.values()]
    a, b, c = (sw.lower(HALF(plan) if half else plan, square, KINDS[kind]()) for plan in plans)
    with sw.simulate(a.plan.mesh):
        program = a.bind()
        state = run(program, program.init(0), [x, x + 1])
        program.save(tmp_path / "a", state)
        want = run(program, state.map(lambda one: one.clone()), [x - 1])
    there = restored(b, tmp_path / "a", tmp_path / "b")
    further = restored(c, tmp_path / "b", tmp_path / "c")
    back = restored(a, tmp_path / "c")
    assert_bits(back, state)
    prints = {sw.fingerprint(one) for one in (state, there, further, back)}
    assert len(prints) == 1
    with sw.simulate(b.plan.mesh):
        program = b.bind()
        got = run(program, there, [x - 1])
    if not half:
        for path, value in sw.to_global(got.params).items():
            torch.testing.assert_close(
                value, sw.to_global(want.params)[path], rtol=1e-9, atol=1e-11
            )
