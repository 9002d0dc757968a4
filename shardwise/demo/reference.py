"""`--check`: the first steps once more, sharded and in one process, and the largest difference."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from shardwise.demo import engine
from shardwise.demo.gpt import GPT
from shardwise.demo.options import Options
from shardwise.sharding.plan import Plan
from shardwise.testing.oracles import split_reference

CHECKED_STEPS = 20


class Trained(NamedTuple):
    """Whole weights before and after the checked steps."""

    plan: Plan
    options: Options
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def train_sharded(text: Tensor, options: Options) -> Trained:
    """Take the first steps without clipping: a collective, all ranks call it.

    Clipping reads a norm that is added up in another order on shards, so its bits differ.
    """
    options = replace(options, steps=min(CHECKED_STEPS, options.steps))
    setup = engine.prepare(options, clip=False)
    state = setup.program.init(seed=options.seed)
    before = engine.full_weights(state)
    for step in engine.train(setup, state, text, options):
        state = step.state
    return Trained(setup.plan, options, before, engine.full_weights(state))


def largest_difference(trained: Trained, text: Tensor) -> float:
    """Repeat the steps in this process alone, each rank's part in turn, and compare all weights."""
    steps = split_reference(
        GPT(),
        engine.loss_fn,
        engine.batches(text, trained.options),
        plan=trained.plan,
        optimizer=engine.optimizer(trained.options, clip=False),
        params=trained.before,
        seed=trained.options.seed,
    )
    *_, last = steps
    return max(
        float((weight - last.params[path]).abs().max()) for path, weight in trained.after.items()
    )
