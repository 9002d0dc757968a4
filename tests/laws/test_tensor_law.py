"""Laws 1 and 3 under tensor parallelism: small transformers, whatever the mesh and the plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import shardwise as sw
from tests.laws.tensor_draws import Training, check, trainings
from tests.laws.tensor_models import Small
from tests.laws.test_collectives import overheard, summary

pytestmark = pytest.mark.simulated


# Many more by hand: `python -m tests.laws.tensor_draws 500`.
@settings(max_examples=10)
@given(trainings())
def test_a_cut_transformer_trains_as_the_whole_one(training: Training) -> None:
    check(training)


@pytest.mark.parametrize(
    ("small", "sizes"),
    [
        (Small(heads=8, kv=2, depth=1, tied=True), {"tp": 4}),
        (Small(rows="blocks", kv=2, mlp="fused", depth=1), {"tp": 2, "fsdp": 2}),
    ],
    ids=["a split axis", "two axes"],
)
def test_transports_hear_what_was_predicted(small: Small, sizes: dict[str, int]) -> None:
    """Beneath the recorder: kinds, axes and bytes that reach the transport of every rank."""
    zero = [sw.zero(3, "fsdp")] if "fsdp" in sizes else []
    moves = [sw.tensor_parallel("tp"), sw.sequence_parallel("tp"), sw.remat("layers.*"), *zero]
    model = small.build()
    plan = sw.plan(model, sw.Mesh(**sizes), *moves)
    with sw.simulate(plan.base.mesh):
        program = sw.lower(plan, small.loss_fn, sw.optim.adamw(1e-2)).bind()
        state = program.init(0)
        part = program.shard_batch(small.batch(4, 5, 0))
        program.eval(state, part)
        with overheard() as evaluated:
            program.eval(state, part)
        with overheard() as seen:
            program.step(state, part)
    for rank in range(plan.mesh.size):
        assert evaluated[rank] == summary(program.lowered.eval_items)
        assert seen[rank] == summary(program.lowered.collectives())
