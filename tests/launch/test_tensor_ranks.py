"""Tensor parallelism on four real processes: as in the simulation, and no rank left waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.sharding.errors import BatchError, RankError
from shardwise.sharding.job import join_job
from tests.laws.tensor_models import Small

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

STEPS = 2
SEQUENCE = (sw.sequence_parallel("tp"), sw.remat("layers.*"))
CASES: dict[str, tuple[Small, dict[str, int], tuple[Any, ...]]] = {
    "tp x fsdp": (
        Small(kv=2, mlp="gated", tied=True, loss="whole"),
        {"fsdp": 2, "tp": 2},
        (sw.zero(3, "fsdp"),),
    ),
    "fsdp x tp, a cut sequence": (
        Small(rows="blocks", mlp="fused", norm="rms"),
        {"tp": 2, "fsdp": 2},
        (sw.zero(2, "fsdp"), *SEQUENCE, sw.accumulate(2)),
    ),
    # Two kv heads split the axis: its collectives run in a group joined of both parts.
    "few kv heads": (Small(heads=8, kv=2, loss="tiled"), {"tp": 4}, SEQUENCE),
    "one kv head": (Small(kv=1), {"tp": 4}, ()),
}


def train(name: str) -> dict[str, Any]:
    """Two steps on this rank, or on all simulated ones: losses, norms, and whole tensors."""
    small, sizes, transforms = CASES[name]
    model = small.build()
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(0.5), sw.optim.adamw(1e-2, eps=1e-4))
    plan = sw.plan(model, sw.Mesh(**sizes), sw.tensor_parallel("tp"), *transforms)
    program = sw.lower(plan, small.loss_fn, optimizer).bind()
    state = program.init(3)
    losses, norms = [], []
    for step in range(STEPS):
        parts = program.shard_batch(small.batch(8, 5, step))
        state, metrics = program.step(state, parts)
        assert program.last_collectives == program.lowered.collectives()
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    return {"losses": losses, "norms": norms, "params": sw.to_global(state.params)}


def train_all() -> list[dict[str, Any]]:
    return [train(name) for name in CASES]


def test_four_ranks_do_what_the_simulation_does() -> None:
    simulated = []
    for _, sizes, _ in CASES.values():
        with sw.simulate(sw.Mesh(**sizes)):
            simulated.append(train(list(CASES)[len(simulated)]))
    ran = sw.spawn(train_all, ranks=4, timeout=90)
    for found in ran:
        torch.testing.assert_close(found, ran[0], rtol=0, atol=0)
        torch.testing.assert_close(found, simulated, rtol=1e-12, atol=1e-14)


class Failing:
    """Fails on one rank, inside of its last block."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.armed = False

    def hook(self, module: Any, args: Any, output: Tensor) -> None:
        if self.armed and join_job().rank == self.rank:
            raise MemoryError("no memory is left")


def fail_in_turn(rank: int) -> list[str]:
    """Steps of other shapes of which one fails on one rank; then batches that differ."""
    small = Small(depth=2)
    model = small.build()
    transforms = (sw.tensor_parallel("tp"), *SEQUENCE, sw.zero(3, "fsdp"))
    plan = sw.plan(model, sw.Mesh(fsdp=2, tp=2), *transforms)
    program = sw.lower(plan, small.loss_fn, sw.optim.sgd(0.1)).bind()
    failing = Failing(rank)
    for one in program._ranks:
        one.template.module.layers[1].register_forward_hook(failing.hook)
    state, _ = program.step(program.init(0), program.shard_batch(small.batch(4, 4, 0)))
    wide = program.shard_batch(small.batch(7, 6, 1))
    failing.armed = True
    said = []
    for call in (program.step, program.eval):
        try:
            call(state, wide)
        except RankError as error:
            said.append(str(error))
    failing.armed = False
    state, metrics = program.step(state, wide)
    said.append(f"{metrics.loss.item():.12f}")
    return said


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_fails_alone_leaves_nobody_waiting(rank: int) -> None:
    ran = sw.spawn(fail_in_turn, ranks=4, args=(rank,), timeout=60)
    for said in ran:
        assert len(said) == 3
        for text in said[:2]:
            assert text.startswith(f"Rank {rank} failed in the step.")
            assert "MemoryError: no memory is left" in text
        assert said[2] == ran[0][2]


def step_on_unlike_batches() -> str:
    small = Small(depth=1)
    model = small.build()
    plan = sw.plan(model, sw.Mesh(fsdp=2, tp=2), sw.tensor_parallel("tp"))
    program = sw.lower(plan, small.loss_fn, sw.optim.sgd(0.1)).bind()
    with pytest.raises(BatchError) as caught:
        program.step(program.init(0), small.batch(2, 4, seed=join_job().rank))
    return str(caught.value)


def test_every_rank_hears_of_unlike_batches() -> None:
    for text in sw.spawn(step_on_unlike_batches, ranks=4, timeout=60):
        assert text.startswith("Ranks along 'tp' have different batches: 1 not that of rank 0.")
