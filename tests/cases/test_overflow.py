"""F16-1, HNG-1: an overflow, a NaN or an exception on one rank is a matter of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import RankError, ShardwiseError
from tests.transforms.overflowing import INF, NAN, Model, batch, leaves, loss_fn, same

MESH = sw.Mesh(fsdp=2)
STEPS = 4
BAD_STEP = 1  # the second

LEVELS = pytest.mark.parametrize("level", range(4))


def start(mesh: sw.Mesh, level: int, loss: Any = loss_fn) -> tuple[sw.Program, Any]:
    torch.manual_seed(0)
    scale = sw.loss_scale(initial_power=16, window=2, hysteresis=1)
    plan = sw.plan(Model().double(), mesh, sw.zero(level, "fsdp"), scale)
    program = sw.lower(plan, loss, sw.optim.sgd(0.1, momentum=0.9)).bind()
    return program, program.init(seed=0)


def spoilt(step: int, **values: float) -> dict[str, Tensor]:
    """The global batch of a step; in the bad step with a value in the part of rank 1."""
    return batch(2, step, rank=1 if step == BAD_STEP else -1, **values)


# -- F16-1 -------------------------------------------------------------------------------------


@pytest.mark.simulated
@LEVELS
def test_f16_1_an_overflow_on_one_rank_is_skipped_by_all(level: int) -> None:
    """The scale and its counters are equal on all ranks and those of one process that sees it."""
    records: dict[int, list[tuple[float, ...]]] = {}
    for size in (1, 2):
        mesh = sw.Mesh(fsdp=size)
        with sw.simulate(mesh):
            program, state = start(mesh, level)
            records[size] = []
            for step in range(STEPS):
                before = leaves(state)
                data = program.shard_batch(spoilt(step, grad=INF))
                state, metrics = program.step(state, data)
                assert metrics.applied == (step != BAD_STEP)
                assert same(leaves(state), before) == (step == BAD_STEP)
                numbers = [
                    (*(leaf.item() for leaf in one.loss_scale), one.step.item())
                    for one in state.ranks
                ]
                assert numbers == [numbers[0]] * size
                records[size].append((metrics.scale.item(), *numbers[0]))
    assert records[1] == records[2]
    #     used, then: scale, good steps, hysteresis, skipped, in a row, divisor, step
    assert records[2] == [
        (2.0**16, 2.0**16, 1, 1, 0, 0, 1.0, 1),
        (2.0**16, 2.0**15, 0, 1, 1, 1, 1.0, 1),
        (2.0**15, 2.0**15, 1, 1, 1, 0, 1.0, 2),
        (2.0**15, 2.0**15, 2, 1, 1, 0, 1.0, 3),
    ]


# -- HNG-1 -------------------------------------------------------------------------------------


def exploding(model: nn.Module, data: dict[str, Tensor]) -> sw.Mean:
    """Raises where the loss would be infinite; not in a trace, whose tensors have no values."""
    fake = isinstance(data["loss"], torch._subclasses.FakeTensor)
    if not fake and data["loss"].isinf().any():
        raise ValueError("sample 17 is broken")
    return loss_fn(model, data)


@pytest.mark.simulated
@LEVELS
@pytest.mark.parametrize("values", [{"loss": NAN}, {"loss": INF}, {"grad": NAN}])
def test_hng_1_all_ranks_skip_what_one_of_them_sees(level: int, values: dict[str, float]) -> None:
    with sw.simulate(MESH):
        program, state = start(MESH, level)
        for step in range(3):
            before = leaves(state)
            state, metrics = program.step(state, program.shard_batch(spoilt(step, **values)))
            assert metrics.applied == (step != BAD_STEP)
            assert same(leaves(state), before) == (step == BAD_STEP)
        assert [one.step.item() for one in state.ranks] == [2, 2]


@pytest.mark.simulated
@LEVELS
def test_hng_1_an_exception_on_one_rank_ends_the_step_on_all(level: int) -> None:
    with sw.simulate(MESH):
        program, state = start(MESH, level, exploding)
        state, _ = program.step(state, program.shard_batch(spoilt(0)))
        before = leaves(state)
        with pytest.raises(RankError, match="Rank 1 failed") as caught:
            program.step(state, program.shard_batch(spoilt(BAD_STEP, loss=INF)))
        assert "ValueError: sample 17 is broken" in str(caught.value)
        assert caught.value.numbers == {"rank": 1, "failed": 1}
        assert same(leaves(state), before)
        state, metrics = program.step(state, program.shard_batch(spoilt(2)))
        assert metrics.applied


def locals_of(state: sw.State) -> list[Tensor]:
    """Copies of this rank's parameters, optimizer state and step count."""
    flats = [*state.flats.values(), *state.opt_flats.mu.values(), *state.buffer_values.values()]
    return [flat.clone() for flat in [*flats, state.step]]


def train(level: int, values: dict[str, float]) -> tuple[list[Any], list[bool], list[bool]]:
    """One real rank: what it saw, and whether its own state changed, step by step."""
    program, state = start(MESH, level, exploding)
    seen: list[Any] = []
    changed, applied = [], []
    for step in range(3):
        before = locals_of(state)
        try:
            state, metrics = program.step(state, program.shard_batch(spoilt(step, **values)))
            seen.append((metrics.reason, metrics.scale.item(), metrics.skipped_steps))
            applied.append(metrics.applied)
        except ShardwiseError as error:
            seen.append(error)
            applied.append(False)
        pairs = zip(before, locals_of(state), strict=True)
        changed.append(not all(torch.equal(a, b) for a, b in pairs))
    return seen, changed, applied


@pytest.mark.gloo
@pytest.mark.timeout(60)
def test_hng_1_nan_on_one_of_two_real_ranks() -> None:
    ranks = sw.spawn(train, ranks=2, args=(3, {"loss": NAN}), timeout=40)
    assert ranks[0] == ranks[1]
    seen, changed, applied = ranks[0]
    assert changed == applied == [True, False, True]
    assert seen[0] == ("", 2.0**16, 0)
    assert seen[1][0].startswith("non-finite loss (1 of 2 ranks, first: rank 1)")
    assert seen[1][1:] == (2.0**16, 1)
    assert seen[2] == ("", 2.0**15, 1)


@pytest.mark.gloo
@pytest.mark.timeout(60)
def test_hng_1_an_exception_on_one_of_two_real_ranks() -> None:
    for seen, changed, applied in sw.spawn(train, ranks=2, args=(2, {"loss": INF}), timeout=40):
        assert changed == applied == [True, False, True]
        assert isinstance(seen[1], RankError)
        assert "sample 17 is broken" in str(seen[1])
        assert seen[1].numbers == {"rank": 1, "failed": 1}
        assert seen[2] == ("", 2.0**16, 0)
