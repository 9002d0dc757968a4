"""What a step of several passes moves and holds: the formulas, and the bytes that are measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.collectives import Collective
from shardwise.sharding.errors import RankError
from shardwise.testing import measure
from shardwise.testing.echo import bind_alone
from tests.laws.test_memory import BATCH, MIB, Big
from tests.laws.test_memory import loss_fn as big_loss
from tests.transforms.test_accumulate import Even, even_loss

pytestmark = pytest.mark.simulated

# -- bytes --------------------------------------------------------------------------------------


P = 4 * 16 * 16 * 8  # bytes of all parameters in float64


def moved(items: tuple[Collective, ...], mesh: sw.Mesh) -> dict[str, float]:
    """Bytes by kind, as of whole buffers: n / (n - 1) of what leaves a rank."""
    found: dict[str, float] = {}
    for item in items:
        if item.reason in ("forward", "backward", "grads", "update"):
            size = mesh[item.axis]
            kind = f"{item.kind} {item.axis}"
            found[kind] = found.get(kind, 0.0) + item.nbytes * size / (size - 1)
    return found


ONE = sw.Mesh(fsdp=4)
TWO = sw.Mesh(dp=2, fsdp=2)
N = 3
ALL_REDUCE, SCATTER, GATHER = "all_reduce", "reduce_scatter", "all_gather"

FORMULAS = [
    # DDP: one all-reduce of 2 P, in every mode.
    (ONE, 0, "auto", "micro", {"all_reduce fsdp": 2 * P}),
    (ONE, 0, "each", "micro", {"all_reduce fsdp": 2 * P}),
    (ONE, 0, "once", "step", {"all_reduce fsdp": 2 * P}),
    # ZeRO-1: reduce-scatter P and all-gather P at the boundary.
    (ONE, 1, "auto", "micro", {"reduce_scatter fsdp": P, "all_gather fsdp": P}),
    (ONE, 1, "each", "micro", {"reduce_scatter fsdp": N * P, "all_gather fsdp": P}),
    # ZeRO-2: P for every micro-batch and P.
    (ONE, 2, "auto", "micro", {"reduce_scatter fsdp": N * P, "all_gather fsdp": P}),
    (ONE, 2, "once", "micro", {"reduce_scatter fsdp": P, "all_gather fsdp": P}),
    # ZeRO-3: 3 P for every micro-batch; weights kept: P and P each; both kept: 2 P.
    (ONE, 3, "auto", "micro", {"reduce_scatter fsdp": N * P, "all_gather fsdp": 2 * N * P}),
    (ONE, 3, "once", "micro", {"reduce_scatter fsdp": P, "all_gather fsdp": 2 * N * P}),
    (ONE, 3, "auto", "step", {"reduce_scatter fsdp": N * P, "all_gather fsdp": P}),
    (ONE, 3, "once", "step", {"reduce_scatter fsdp": P, "all_gather fsdp": P}),
    # Hybrid (MiCS): 3 P inside the group for every micro-batch, 2 P / g over replicas once.
    (
        TWO,
        3,
        "auto",
        "micro",
        {"reduce_scatter fsdp": N * P, "all_gather fsdp": 2 * N * P, "all_reduce dp": P},
    ),
    (
        TWO,
        2,
        "once",
        "micro",
        {"reduce_scatter fsdp": P, "all_gather fsdp": P, "all_reduce dp": P},
    ),
]


@pytest.mark.parametrize(("mesh", "level", "reduce", "gather", "expected"), FORMULAS)
def test_bytes_follow_the_formulas(
    mesh: sw.Mesh, level: int, reduce: str, gather: str, expected: dict[str, float]
) -> None:
    model = Even().double()
    with sw.simulate(mesh):
        plan = sw.plan(
            model,
            mesh,
            sw.zero(level, "fsdp"),
            sw.accumulate(N, reduce=reduce, gather=gather),
        )
        program = sw.lower(plan, even_loss, sw.optim.sgd(0.1)).bind()
        state = program.init(0)
        generator = torch.Generator().manual_seed(0)
        batch = torch.randn(12, 16, dtype=torch.float64, generator=generator)
        program.step(state, program.shard_batch(batch))
        assert program.last_collectives == program.lowered.collectives()
        assert moved(program.last_collectives, mesh) == expected


# -- memory -------------------------------------------------------------------------------------

KEEPING = {
    "each": (3, "each", "micro"),
    "once": (3, "once", "micro"),
    "step": (3, "each", "step"),
    "once and step": (3, "once", "step"),
    "zero 2 once": (2, "once", "micro"),
    "zero 1": (1, "auto", "micro"),
    "zero 0": (0, "auto", "micro"),
}


@pytest.mark.parametrize("mesh", [sw.Mesh(fsdp=2), sw.Mesh(dp=2, fsdp=4)], ids=repr)
@pytest.mark.parametrize("name", KEEPING)
def test_what_is_kept_is_predicted_and_measured(name: str, mesh: sw.Mesh) -> None:
    level, reduce, gather = KEEPING[name]
    plan = sw.plan(
        Big(), mesh, sw.zero(level, "fsdp"), sw.accumulate(2, reduce=reduce, gather=gather)
    )
    lowered = sw.lower(plan, big_loss, sw.optim.sgd(0.1, momentum=0.9), batch=BATCH)
    memory = lowered.memory()
    weights = sum(4 * p.numel() for p in Big().parameters())
    keeps_grads = reduce == "once" or name == "zero 1"
    assert (memory.kept_grads >= weights) == keeps_grads
    assert (memory.kept_weights >= weights) == (gather == "step")
    assert ("kept between passes" in str(memory)) == (keeps_grads or gather == "step")
    program = bind_alone(lowered)
    state, _ = program.step(program.init(0, None), BATCH)
    _, usage = measure(lambda: program.step(state, BATCH))
    assert memory.activations is not None
    transient = usage.peak - memory.grads - memory.activations
    assert abs(transient - memory.transient) <= 0.05 * memory.transient + MIB / 4
    assert usage.kept <= MIB / 4


def test_nothing_kept_in_a_step_lives_on_after_it_or_after_a_failure() -> None:
    fails: list[bool] = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        if fails and not batch.is_meta and batch[0, 0] == 2:
            raise ValueError("second micro-batch")
        return big_loss(model, batch)

    plan = sw.plan(
        Big(), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"), sw.accumulate(2, reduce="once", gather="step")
    )
    program = bind_alone(sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=BATCH))
    state, _ = program.step(program.init(0, None), BATCH)
    fails.append(True)

    def failing() -> None:
        with pytest.raises((ValueError, RankError), match="second micro-batch"):
            program.grads(state, BATCH)

    _, usage = measure(failing)
    assert usage.kept <= MIB / 4
    fails.clear()
    grads, _ = program.grads(state, BATCH)
    again, _ = program.grads(state, BATCH)
    for name, flat in grads.flats.items():
        assert torch.equal(flat, again.flats[name])
