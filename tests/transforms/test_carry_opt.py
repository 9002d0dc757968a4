"""From plan to plan with optimizers of every structure: what is kept, fresh and dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from tests.transforms.carried import FIRST, PAIR, assert_bits, batch, loss_fn, model, whole

pytestmark = pytest.mark.simulated

BASES: dict[str, Any] = {
    "sgd": lambda: sw.optim.sgd(0.1),
    "chain": lambda: sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-2)),
    "masked": lambda: sw.optim.chain(
        sw.optim.masked(sw.optim.clip_by_value(0.1), "*weight"), sw.optim.adamw(1e-2)
    ),
    "partition": lambda: sw.optim.partition(
        {"fast": sw.optim.adamw(1e-2), "slow": sw.optim.sgd(0.01, momentum=0.9)},
        {"fast": "layers.*.weight"},
        otherwise="slow",
    ),
    "inject": lambda: sw.optim.inject(sw.optim.adamw, learning_rate=1e-2),
    "torch": lambda: sw.optim.from_torch(torch.optim.NAdam, lr=1e-2),
    "whole torch": lambda: sw.optim.from_torch(torch.optim.Adafactor, lr=1e-2),
    "adafactor": lambda: sw.optim.adafactor(1e-2),
    "muon": lambda: sw.optim.partition(
        {"muon": sw.optim.muon(1e-2), "adamw": sw.optim.adamw(1e-2)},
        {"muon": "layers.*.weight"},
        otherwise="adamw",
    ),
    "ema": lambda: sw.optim.ema(sw.optim.adamw(1e-2), decay=0.9),
    "lamb": lambda: sw.optim.lamb(1e-2),
}


@pytest.mark.parametrize("name", BASES)
def test_optimizers_of_every_structure_are_carried(name: str) -> None:
    module = model()
    with sw.simulate(PAIR):
        one, two = (
            sw.lower(sw.plan(module, PAIR, sw.zero(level, "fsdp")), loss_fn, BASES[name]())
            for level in (3, 1)
        )
        first, second = one.bind(), two.bind()
        state = first.init(0)
        for seed in range(2):
            state, _ = first.step(state, first.shard_batch(batch(seed)))
        there = second.init(sw.from_state(state))
        assert_bits(first.init(sw.from_state(there)), state)
        want, _ = first.step(state, first.shard_batch(batch(2)))
        got, _ = second.step(there, second.shard_batch(batch(2)))
        expected = whole(want)
        for leaf, value in whole(got).items():
            torch.testing.assert_close(value, expected[leaf], rtol=1e-9, atol=1e-11, msg=leaf)


@pytest.mark.parametrize("name", BASES)
def test_what_begins_to_train_gets_a_fresh_state_and_the_rest_keeps_its_own(name: str) -> None:
    module = model()
    frozen = ("layers.1.*", "gain")
    plan = sw.plan(module, PAIR, sw.zero(3, "fsdp"))
    with sw.simulate(PAIR):
        part = sw.lower(sw.plan(module, PAIR, sw.freeze(frozen)), loss_fn, BASES[name]()).bind()
        full = sw.lower(plan, loss_fn, BASES[name]()).bind()
        state = part.init(0)
        for seed in range(2):
            state, _ = part.step(state, part.shard_batch(batch(seed)))
        there = full.init(sw.from_state(state))
        want, fresh, got = whole(state), whole(full.init(0)), whole(there)
        new = [leaf for leaf in got if leaf.startswith("opt.") and leaf not in want]
        assert all("layers.1." in leaf or "gain" in leaf for leaf in new), new
        for leaf, value in got.items():
            # A number that a group shares goes on counting, also for who joins the group.
            shared = leaf in new and value.ndim == 0 and "gain" not in leaf
            if not shared and not (leaf in new and "steps" in leaf):
                assert torch.equal(value, fresh[leaf] if leaf in new else want[leaf]), leaf
        # And back: what stops training loses its state, the rest is as it was.
        assert_bits(part.init(sw.from_state(there)), state)
        full.step(there, full.shard_batch(batch(3)))


def test_the_report_says_what_is_kept_fresh_and_dropped() -> None:
    module = model()
    optimizer = sw.optim.adamw(1e-2)
    with sw.simulate(FIRST):
        plans = [
            sw.plan(module, FIRST, sw.zero(3, "fsdp"), sw.freeze(where))
            for where in ("layers.0", "layers.1")
        ]
        one, two = (sw.lower(plan, loss_fn, optimizer) for plan in plans)
        state = one.bind().init(0)
        report = sw.from_state(state.ranks[1]).into(two)
    assert report.fresh == ("layers.0.weight", "layers.0.bias")
    assert report.dropped == ("layers.1.weight", "layers.1.bias")
    assert set(report.kept) == {"embed.weight", "norm.weight", "norm.bias", "gain"}
    assert "optimizer state is fresh for 2 parameters:" in str(report)
    assert "optimizer state is dropped for 2 parameters:\n  layers.1.weight" in str(report)
