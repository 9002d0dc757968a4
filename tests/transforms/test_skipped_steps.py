"""A step whose loss or gradient is not finite on some rank changes nothing, on any rank."""

from __future__ import annotations

import warnings
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import DonatedStateError
from tests.transforms.overflowing import INF, MESHES, NAN, WIDTH, batch, leaves, same, start

pytestmark = pytest.mark.simulated

FAULTS = {
    "nan loss": ({"loss": NAN}, "loss (1 of {n} ranks, first: rank {r})"),
    "inf loss": ({"loss": INF}, "loss (1 of {n} ranks, first: rank {r})"),
    "nan gradient": ({"grad": NAN}, "gradient ("),
    "inf gradient": ({"grad": INF}, "gradient ("),
    "-inf gradient": ({"grad": -INF}, "gradient ("),
}


@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("level", range(4))
def test_a_skipped_step_changes_nothing(level: int, ranks: int) -> None:
    with sw.simulate(MESHES[ranks]):
        program, state = start(ranks, sw.zero(level, "fsdp"))
        for step, (values, text) in enumerate(FAULTS.values()):
            state, metrics = program.step(state, program.shard_batch(batch(ranks, step)))
            assert (metrics.applied, metrics.reason, metrics.skipped_steps) == (True, "", step)
            assert program.last_collectives == program.lowered.collectives()
            before = leaves(state)
            bad = program.shard_batch(batch(ranks, 9, rank=ranks - 1, **values))
            state, metrics = program.step(state, bad)
            assert same(leaves(state), before)
            assert program.last_collectives == program.lowered.grads_items
            assert not metrics.applied
            assert metrics.reason.startswith("non-finite ")
            assert text.format(n=ranks, r=ranks - 1) in metrics.reason
            if "grad" in values:
                assert "loss" not in metrics.reason
                assert "first: layers.0.0.weight)" in metrics.reason
            assert (metrics.skipped_steps, metrics.scale, metrics.grad_norm) == (step + 1, 1, None)
            assert [one.loss_scale.skipped_in_a_row.item() for one in state.ranks] == [1] * ranks
        after = leaves(state)
        # The run without the bad batches: no schedule has advanced, nothing else has either.
        program, state = start(ranks, sw.zero(level, "fsdp"))
        for step in range(len(FAULTS)):
            state, _ = program.step(state, program.shard_batch(batch(ranks, step)))
        assert same(leaves(state), after)


@pytest.mark.parametrize("donate", [True, False])
def test_a_skipped_step_consumes_the_handle_as_any_other(donate: bool) -> None:
    with sw.simulate(MESHES[2]):
        program, state = start(2, sw.zero(3, "fsdp"))
        before = leaves(state)
        bad = program.shard_batch(batch(2, rank=0, loss=NAN))
        after, _ = program.step(state, bad, donate=donate)
        if donate:
            with pytest.raises(DonatedStateError, match="step 0 at"):
                _ = state.ranks[0].params
        else:
            assert same(leaves(state), before)
            flats = [one.flats.values() for one in (state.ranks[0], after.ranks[0])]
            assert all(a.data_ptr() != b.data_ptr() for a, b in zip(*flats, strict=True))


def test_clipping_and_norms_do_not_see_a_skipped_step() -> None:
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(0.1), sw.optim.adamw(1e-2))
    with sw.simulate(MESHES[2]):
        program, state = start(2, sw.zero(1, "fsdp"), optimizer=optimizer)
        before = leaves(state)
        state, metrics = program.step(state, program.shard_batch(batch(2, rank=1, grad=INF)))
        assert same(leaves(state), before)
        assert metrics.grad_norm is None
        state, metrics = program.step(state, program.shard_batch(batch(2)))
        assert metrics.grad_norm is not None
        assert metrics.grad_norm.isfinite()


@pytest.mark.parametrize(
    "value", [3e38, 65504.0 * 2**100, 1e-45], ids=["huge", "large", "denormal"]
)
def test_finite_gradients_are_never_skipped(value: float) -> None:
    """Neither their sum nor their square needs to be finite."""

    def loss(model: nn.Module, x: Tensor) -> sw.Mean:
        return sw.Mean((model(x) * value).sum(), 1.0)

    module = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.zeros_(module.weight)  # and so is the loss
    with sw.simulate(MESHES[1]):
        plan = sw.plan(module, MESHES[1])
        program = sw.lower(plan, loss, sw.optim.sgd(0.0)).bind()
        state = program.init(sw.from_module(module))
        grads, metrics = program.grads(state, program.shard_batch(torch.eye(WIDTH)))
        assert metrics.applied
        assert sw.to_global(grads.leaves)["weight"].isfinite().all()


# -- grads and update --------------------------------------------------------------------------


def mapped(function: Any, grads: Any, *others: Any) -> Any:
    return grads.map(lambda *sets: optree.tree_map(function, *sets, namespace="shardwise"), *others)


def test_update_skips_gradients_that_are_not_finite() -> None:
    with sw.simulate(MESHES[2]):
        program, state = start(2, sw.zero(2, "fsdp"))
        before = leaves(state)
        bad = program.shard_batch(batch(2, rank=1, grad=INF))
        grads, metrics = program.grads(state, bad)
        assert [one.finite for one in grads.ranks] == [False, False]
        assert not metrics.applied
        assert metrics.skipped_steps == 1
        state = program.update(state, grads)
        assert program.last_collectives == ()
        assert same(leaves(state), before)
        assert [one.loss_scale.skipped.item() for one in state.ranks] == [1, 1]


def test_rebuilt_gradients_are_checked_by_the_update() -> None:
    with sw.simulate(MESHES[2]):
        program, state = start(2, sw.zero(2, "fsdp"))
        good, _ = program.grads(state, program.shard_batch(batch(2)))
        lowered = program.lowered
        assert [one.finite for one in good.ranks] == [True, True]
        rebuilt = mapped(lambda leaf: leaf * 2, good)
        assert [one.finite for one in rebuilt.ranks] == [None, None]
        state = program.update(state, rebuilt)
        assert program.last_collectives == lowered.check_items + lowered.update_items
        assert state.ranks[0].step == 1
        before = leaves(state)

        # A NaN in the last leaf of rank 1 only.
        only = sw.Lifted(
            [
                optree.tree_map(
                    lambda leaf, rank=rank: (
                        leaf * NAN if rank == 1 and leaf.shape == (2,) else leaf
                    ),
                    one,
                    namespace="shardwise",
                )
                for rank, one in enumerate(good.ranks)
            ]
        )
        state = program.update(state, only)
        assert program.last_collectives == lowered.check_items
        assert same(leaves(state), before)
        assert [one.loss_scale.skipped.item() for one in state.ranks] == [1, 1]


def test_sums_of_gradients_have_what_either_has_used() -> None:
    """Two micro-steps that use different parameters, added by `tree_map`."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH, bias=False)
            self.two = nn.Linear(WIDTH, WIDTH, bias=False)
            self.never = nn.Linear(WIDTH, WIDTH, bias=False)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, which: str, x: Tensor) -> Tensor:
            return getattr(self, which)(x)

    def loss(model: nn.Module, part: dict[str, Any]) -> sw.Mean:
        return sw.Mean(model(part["which"], part["x"]).square().sum(), 1.0)

    module = Either().double()
    x = torch.eye(WIDTH, dtype=torch.float64)
    with sw.simulate(MESHES[2]):
        plan = sw.plan(module, MESHES[2], sw.zero(2, "fsdp"))
        program = sw.lower(plan, loss, sw.optim.sgd(0.1, weight_decay=0.5)).bind()
        state = program.init(sw.from_module(module))
        sets = [
            program.grads(state, sw.Lifted([{"which": which, "x": x}] * 2))[0]
            for which in ("one", "two")
        ]
        assert [sorted(one.ranks[0].used) for one in sets] == [["one.weight"], ["two.weight"]]
        total = mapped(torch.add, *sets)
        after = sw.to_global(program.update(state, total).params)
    for name in ("one.weight", "two.weight"):
        weight = module.get_parameter(name).detach()
        # The loss is the mean of both ranks' sums of squares: its gradient is 2 w.
        torch.testing.assert_close(after[name], weight - 0.1 * (2 * weight + 0.5 * weight))
    assert torch.equal(after["never.weight"], module.never.weight)


def test_gradients_of_another_program_do_not_mix() -> None:
    with sw.simulate(MESHES[2]):
        program, state = start(2, sw.zero(2, "fsdp"))
        other, others = start(2, sw.zero(0, "fsdp"))
        one, _ = program.grads(state, program.shard_batch(batch(2)))
        two, _ = other.grads(others, other.shard_batch(batch(2)))
        with pytest.raises(ValueError, match=r"gradients of \d+ buckets on rank 0 of Mesh"):
            mapped(torch.add, one, two)


# -- warnings ----------------------------------------------------------------------------------


def test_three_skipped_steps_in_a_row_warn_once() -> None:
    with sw.simulate(MESHES[2]):
        program, state = start(2, sw.zero(3, "fsdp"))
        good = program.shard_batch(batch(2))
        bad = program.shard_batch(batch(2, rank=1, loss=NAN))

        def run(steps: str) -> list[warnings.WarningMessage]:
            nonlocal state
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for mark in steps:
                    state, _ = program.step(state, good if mark == "." else bad)
            return caught

        assert run(".xx.xx.") == []
        (warning,) = run("xxxxx")
        assert warning.category is RuntimeWarning
        assert warning.filename == __file__
        text = str(warning.message)
        assert "3 steps in a row were skipped (7 in all, 3 applied)" in text
        assert "non-finite loss (1 of 2 ranks, first: rank 1)" in text
        assert "The loss scale is 1." in text
        assert len(run(".xxx")) == 1


def test_skipped_updates_warn_too() -> None:
    with sw.simulate(MESHES[1]):
        program, state = start(1)
        grads, _ = program.grads(state, program.shard_batch(batch(1, rank=0, grad=NAN)))
        for _ in range(2):
            state = program.update(state, grads)
        with pytest.warns(RuntimeWarning, match=r"3 steps in a row .* first: layers.0.0.weight"):
            program.update(state, grads)
