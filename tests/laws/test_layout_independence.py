"""Law 6: one seed, one set of initial weights, on any mesh; and randomness that can be repeated."""

from __future__ import annotations

from dataclasses import replace
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

    def __init__(self, dropout: type[nn.Module]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))
        self.dropout = dropout(0.5)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.bias)


def seen_masks(
    mesh: sw.Mesh,
    seed: int,
    steps: int,
    *,
    dropout: type[nn.Module] = nn.Dropout,
    batch: tuple[str, ...] | None = None,
) -> list[list[Tensor]]:
    """Per step and rank, which elements of one row were kept.

    Args:
        mesh: of the ranks.
        seed: of the state.
        steps: how many.
        dropout: what drops.
        batch: axes that split the batch; default all.
    """
    masks: list[list[Tensor]] = []

    def loss_fn(model: Any, batch: dict[str, Any]) -> Tensor:
        output = model(batch["x"])
        if type(output) is Tensor:  # the trace of the first step has fake ones
            masks[-1][batch["rank"]] = (output != 0).detach().clone()
        return output.sum()

    with sw.simulate(mesh):
        plan = sw.plan(Masks(dropout), mesh, *([] if batch else [sw.zero(3, mesh.names)]))
        if batch:  # no transform claims an axis for the model yet: say so by hand
            vars(plan)["derived"] = replace(plan.derived, batch=batch)
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.0)).bind()
        state = program.init(seed)
        x = torch.ones(1, 64)
        batches = sw.Lifted([{"x": x, "rank": rank} for rank in range(mesh.size)])
        for _ in range(steps):
            masks.append([torch.empty(0)] * mesh.size)
            state, _ = program.step(state, batches)
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


@pytest.mark.parametrize("dropout", [nn.Dropout, sw.Dropout])
def test_masks_are_equal_where_the_activation_is_replicated(dropout: type[nn.Module]) -> None:
    mesh = sw.Mesh(dp=2, tp=2)
    for step in seen_masks(mesh, 0, 2, dropout=dropout, batch=("dp",)):
        assert torch.equal(step[0], step[1])
        assert torch.equal(step[2], step[3])
        assert not torch.equal(step[0], step[2])


def test_layout_independent_masks_are_rows_of_one_mask() -> None:
    (whole,) = seen_masks(sw.Mesh(fsdp=1), 0, 1, dropout=sw.Dropout)
    assert len(whole[0]) == 1
    for mesh in (sw.Mesh(fsdp=2), sw.Mesh(fsdp=3), sw.Mesh(dp=2, fsdp=2)):
        (masks,) = seen_masks(mesh, 0, 1, dropout=sw.Dropout)
        (more,) = seen_masks(sw.Mesh(fsdp=4), 0, 1, dropout=sw.Dropout)
        assert torch.equal(torch.cat(masks), torch.cat(more)[: mesh.size])
        assert torch.equal(masks[0], whole[0])
