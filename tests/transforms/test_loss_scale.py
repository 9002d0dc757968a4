"""The loss scale in a program: it never shows in the gradients, and float16 has it by itself."""

from __future__ import annotations

import re
import warnings
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import LossScaleError, RankError
from tests.transforms.five_parts import check_all
from tests.transforms.overflowing import INF, MESHES, WIDTH, batch, leaves, same, start

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("level", range(4))
def test_growth_never_shows_in_the_gradients(level: int, ranks: int) -> None:
    """Gradients are divided by the scale that was used, in steps in which it grows as in others."""
    steps = range(5)

    def run(*transforms: sw.Transform) -> tuple[list[Any], list[float], list[list[Tensor]]]:
        program, state = start(ranks, sw.zero(level, "fsdp"), *transforms)
        grads, scales = [], []
        for seed in steps:
            data = program.shard_batch(batch(ranks, seed))
            found, _ = program.grads(state, data)
            grads.append(sw.to_global(found.leaves))
            state, metrics = program.step(state, data)
            scales.append(metrics.scale.item())
        return grads, scales, leaves(state)

    with sw.simulate(MESHES[ranks]):
        plain, ones, final = run()
        scaled, used, last = run(sw.loss_scale(window=1, initial_power=8, hysteresis=1))
    assert ones == [1.0] * 5
    assert used == [256.0, 256.0, 512.0, 1024.0, 2048.0]
    for one, other in zip(plain, scaled, strict=True):
        assert all(torch.equal(one[path], other[path]) for path in one)  # powers of two: all bits
    assert same(final, last)


@pytest.mark.parametrize("level", range(4))
def test_a_scale_that_is_no_power_of_two(level: int) -> None:
    with sw.simulate(MESHES[2]):
        finals = []
        for transforms in ((), (sw.loss_scale(1000.0),)):
            # Not Adam: it makes a step of the rounding in a bias in front of a batch norm.
            program, state = start(
                2, sw.zero(level, "fsdp"), *transforms, optimizer=sw.optim.sgd(0.1, momentum=0.9)
            )
            for seed in range(3):
                state, metrics = program.step(state, program.shard_batch(batch(2, seed)))
            finals.append(sw.to_global(state.params))
        assert metrics.scale == 1000.0
    for path, value in finals[0].items():
        torch.testing.assert_close(finals[1][path], value, rtol=1e-9, atol=1e-12)


def test_an_overflow_at_the_minimum_ends_on_every_rank_and_leaves_the_state() -> None:
    with sw.simulate(MESHES[2]):
        scale = sw.loss_scale(initial_power=1, hysteresis=1)
        program, state = start(2, sw.zero(3, "fsdp"), scale)
        bad = program.shard_batch(batch(2, rank=1, grad=INF))
        state, metrics = program.step(state, bad)
        assert (metrics.scale, state.ranks[1].scale) == (2.0, 1.0)
        before = leaves(state)
        errors: list[BaseException] = []

        def attempt(rank: int) -> None:
            try:
                program._ranks[rank].step(state.ranks[rank], bad.ranks[rank])
            except LossScaleError as error:
                errors.append(error)

        assert program._world is not None
        program._world.run(attempt)
        assert len(errors) == 2
        check_all(
            errors,
            LossScaleError,
            "gradient (2 of 2 ranks, first: layers.0.0.weight); scale 1, minimum 1",
            "Fix: look for NaN",
            scale=1.0,
            minimum=1.0,
            skipped=2,
            skipped_in_a_row=2,
        )
        with pytest.raises((LossScaleError, RankError)):
            program.step(state, bad)
        assert same(leaves(state), before)
        state, metrics = program.step(state, program.shard_batch(batch(2)))
        assert metrics.applied


def test_the_scale_is_a_leaf_of_the_state() -> None:
    with sw.simulate(MESHES[2]):
        program, state = start(2, sw.zero(3, "fsdp"), sw.loss_scale(window=1))
        state, _ = program.step(state, program.shard_batch(batch(2, rank=1, grad=INF)))
        copy = state.map(
            lambda one: optree.tree_map(lambda leaf: leaf.clone(), one, namespace="shardwise")
        )
        for one, other in zip(state.ranks, copy.ranks, strict=True):
            assert [leaf.item() for leaf in one.loss_scale] == [2.0**16, 0, 1, 1, 1, 1.0]
            assert all(map(torch.equal, one.loss_scale, other.loss_scale))
        rest, _ = program.step(copy, program.shard_batch(batch(2)))
        straight, _ = program.step(state, program.shard_batch(batch(2)))
        assert same(leaves(rest), leaves(straight))


# -- float16 -----------------------------------------------------------------------------------


def half_start(level: int, rows: int, *transforms: sw.Transform) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).half()
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).half()

    def loss(model: nn.Module, x: Tensor) -> sw.Mean:
        return sw.Mean(model(x).float().square().sum(), x.shape[0])

    plan = sw.plan(module, MESHES[2], sw.zero(level, "fsdp"), *transforms)
    with pytest.warns(UserWarning, match="without a master copy"):
        program = sw.lower(plan, loss, sw.optim.sgd(0.1)).bind()
    return module, program, program.init(sw.from_module(module)), x


@pytest.mark.parametrize("level", range(4))
def test_float16_is_scaled_without_being_told(level: int) -> None:
    with sw.simulate(MESHES[2]):
        module, program, state, x = half_start(level, 12)
        assert state.ranks[0].scale == 2.0**16
        assert state.ranks[0].loss_scale.divisor == 0.0
        scales, applied = [], []
        for _ in range(6):
            grads, _ = program.grads(state, program.shard_batch(x))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                state, metrics = program.step(state, program.shard_batch(x))
            scales.append(metrics.scale.item())
            applied.append(metrics.applied)
            assert {one.loss_scale.divisor.item() for one in state.ranks} == {16.0}
            if metrics.applied:
                break
        assert metrics.applied
        assert state.ranks[0].step == 1
        assert scales == sorted(scales, reverse=True)
        wide = module.float()
        loss = wide(x.float()).square().sum() / len(x)
        want = torch.autograd.grad(loss, list(wide.parameters()))
        found = sw.to_global(grads.leaves)
        for (path, _), grad in zip(wide.named_parameters(), want, strict=True):
            torch.testing.assert_close(found[path].float(), grad, rtol=2e-2, atol=2e-3)


def test_many_elements_do_not_overflow_float16() -> None:
    """The sum over 4,096 rows is divided before backward; the guess for the first step is right."""
    with sw.simulate(MESHES[2]):
        _, program, state, x = half_start(3, 4096, sw.loss_scale(64.0))
        state, metrics = program.step(state, program.shard_batch(x))
        assert metrics.applied
        assert program.lowered.first_divisor == 4096.0
        assert state.ranks[0].loss_scale.divisor == 4096.0


@pytest.mark.parametrize("level", range(4))
def test_gradients_that_float16_cannot_hold_at_rest_are_skipped(level: int) -> None:
    """They are finite in the float32 sums, and would be infinite where they rest."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
        return sw.Mean((model(batch["x"]) * batch["factor"]).sum(), len(batch["x"]))

    with sw.simulate(MESHES[2]):
        module = nn.Linear(WIDTH, WIDTH)
        plan = sw.plan(module, MESHES[2], sw.zero(level, "fsdp"), sw.precision(grads="float16"))
        program = sw.lower(plan, loss, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        for factor, applied in ((1.0, True), (1e5, False), (1e4, True)):
            data = {"x": torch.ones(4, WIDTH), "factor": torch.full((4, 1), factor)}
            before = leaves(state)
            state, metrics = program.step(state, program.shard_batch(data))
            assert metrics.applied == applied
            assert same(leaves(state), before) != applied
            lowered = program.lowered
            ran = lowered.collectives() if applied else lowered.grads_items
            assert program.last_collectives == ran
            assert lowered.range_items
            if not applied:
                text = r"non-finite gradient \(\d of 2 ranks, first: (bias|weight)\)"
                assert re.fullmatch(text, metrics.reason)
