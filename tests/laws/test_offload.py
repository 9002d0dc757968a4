"""Offload changes no bit: any mixture of tiers trains as the same plan does on the device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise.sharding.pytree import tree_leaves
from shardwise.testing.strategies import Training, make_optimizer, trainings

pytestmark = pytest.mark.simulated

HOMES = ("params", "grads", "opt", "moments", "masters")


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as path:
        yield path
        assert os.listdir(path) == []


@dataclass(frozen=True)
class Put:
    """An offload as a value."""

    home: str
    memory: str
    fraction: float
    prefetch: int

    def transform(self, folder: str) -> sw.Transform:
        to = sw.disk(folder) if self.memory == "disk" else self.memory
        return sw.offload(self.home, to, fraction=self.fraction, prefetch=self.prefetch)


puts = st.lists(
    st.builds(
        Put,
        st.sampled_from(HOMES),
        st.sampled_from(["pinned_host", "disk", "device"]),
        st.sampled_from([1.0, 0.5, 0.3]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=4,
).map(tuple)


def run(training: Training, *transforms: sw.Transform) -> tuple[list[Any], list[sw.Metrics]]:
    """Everything a state holds after the steps, and what they have told."""
    model = training.model
    plan = training.plan(model)
    for transform in transforms:
        plan = transform(plan)
    optimizer = make_optimizer(training.optimizer)
    with sw.simulate(plan.mesh):
        lowered = sw.lower(plan, training.toy.loss_fn, optimizer)
        program = lowered.bind()
        state = program.init(seed=training.seed)
        metrics = []
        for batch in training.batches:
            state, told = program.step(state, program.shard_batch(batch))
            assert list(program.last_collectives) == list(program.lowered.collectives())
            metrics.append(told)
        trees = [state.params, state.master, state.opt, state.buffers, state.loss_scale]
        return tree_leaves([sw.to_global(tree) for tree in trees]), metrics


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


# A unit that runs twice in a pass adds its gradients call by call where it is left in between.
@given(trainings().filter(lambda training: training.runs_units_once), puts)
def test_tiers_change_no_bit(folder: str, training: Training, given_puts: tuple[Put, ...]) -> None:
    plain, told = run(training)
    tiered, again = run(training, *(put.transform(folder) for put in given_puts))
    assert len(plain) == len(tiered)
    assert [same(a, b) for a, b in zip(plain, tiered, strict=True)] == [True] * len(plain)
    assert [float(one.loss) for one in told] == [float(one.loss) for one in again]
