"""Law 6: one seed, one set of initial weights, on any mesh; and randomness that can be repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing.models import EXACT, SPLIT
from shardwise.testing.strategies import Training, make_optimizer, meshes, trainings

pytestmark = pytest.mark.simulated


def initial(training: Training, plan: sw.Plan, seed: int) -> dict[str, Tensor]:
    with sw.simulate(plan.mesh):
        optimizer = make_optimizer(training.optimizer)
        state = sw.lower(plan, training.toy.loss_fn, optimizer).bind().init(seed)
        whole: dict[str, Any] = {**sw.to_global(state.params), **sw.to_global(state.buffers)}
        whole |= {f"master {path}": value for path, value in sw.to_global(state.master).items()}
    return {path: value.clone() for path, value in whole.items()}


@given(trainings(features=(*EXACT, *SPLIT)), meshes(), st.integers(0, 3))
def test_initial_weights_do_not_depend_on_mesh_or_plan(
    training: Training, mesh: sw.Mesh, level: int
) -> None:
    model = training.model
    ours = initial(training, training.plan(model), training.seed)
    plain = sw.plan(model, mesh, sw.zero(level, mesh.names))
    theirs = initial(training, plain, training.seed)
    for path in theirs:
        assert torch.equal(ours[path], theirs[path]), path
    for path, value in ours.items():
        assert torch.equal(value, ours[path.removeprefix("master ")]), path


@settings(max_examples=15)
@given(trainings())
def test_another_seed_gives_other_weights(training: Training) -> None:
    plan = training.plan(training.model)
    ours = initial(training, plan, training.seed)
    theirs = initial(training, plan, training.seed + 1)
    assert any(not torch.equal(ours[path], theirs[path]) for path in ours)


class Masks(nn.Module):
    """Adds a dropped-out row of ones to its bias, so that the gradient shows the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))
        self.dropout = nn.Dropout(0.5)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.bias)


def seen_masks(mesh: sw.Mesh, seed: int, steps: int) -> list[list[Tensor]]:
    """Per step and rank, which elements of one row were kept."""
    masks: list[list[Tensor]] = []

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        output = model(batch)
        if type(output) is Tensor:  # the trace of the first step has fake ones
            masks[-1].append((output != 0).detach().clone())
        return output.sum()

    with sw.simulate(mesh):
        plan = sw.plan(Masks(), mesh, sw.zero(3, mesh.names))
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.0)).bind()
        state = program.init(seed)
        for _ in range(steps):
            masks.append([])
            state, _ = program.step(state, program.shard_batch(torch.ones(mesh.size, 64)))
    return masks


def test_dropout_differs_over_data_ranks_and_steps_and_repeats_with_the_seed() -> None:
    mesh = sw.Mesh(dp=2, fsdp=2)
    first, second = seen_masks(mesh, 0, 2)
    flat = [mask.flatten().tolist() for mask in (*first, *second)]
    assert len(flat) == 8
    assert all(flat[i] != flat[j] for i in range(8) for j in range(i))
    again = seen_masks(mesh, 0, 2)
    assert [m.flatten().tolist() for step in again for m in step] == flat
    other = seen_masks(mesh, 1, 1)
    assert all(mask.flatten().tolist() not in flat for mask in other[0])
