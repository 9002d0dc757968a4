"""`--check`: the first steps once more, sharded and in one process, and the largest difference.

Data axes leave every sum as it is but for its order, which the split reference repeats: not a bit
may differ. A tensor axis cuts the sums inside of layers, so that rounding differs, and Adam turns
the rounding of a gradient that is zero into a whole step: what a layer computes is then compared in
float64, where such a step is nothing, with one process that has the same data ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import shardwise as sw
from shardwise.demo import engine
from shardwise.demo.gpt import GPT
from shardwise.demo.options import Options
from shardwise.testing.oracles import split_reference

CHECKED_STEPS = 20


class Trained(NamedTuple):
    """Whole weights before and after the checked steps, and what they are compared with.

    `plan` says how data ranks add up their gradients.
    """

    plan: sw.Plan
    options: Options
    dtype: torch.dtype
    reference: str
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def train_sharded(text: Tensor, options: Options) -> Trained:
    """Take the first steps without clipping: a collective, all ranks call it.

    Clipping reads a norm that is added up in another order on shards, so its bits differ.
    """
    options = replace(options, steps=min(CHECKED_STEPS, options.steps))
    dtype, reference = torch.float32, "split reference"
    if dict(options.mesh).get(engine.TENSOR_AXIS, 1) != 1:
        options, dtype = replace(options, precision="fp32"), torch.float64
        reference = "one process, float64"
    setup = engine.prepare(options, clip=False, dtype=dtype)
    state = setup.program.init(seed=options.seed)
    before = engine.full_weights(state)
    for step in engine.train(setup, state, text, options):
        state = step.state
    plan = _over_data_axes(setup.plan, options, dtype)
    return Trained(plan, options, dtype, reference, before, engine.full_weights(state))


def largest_difference(trained: Trained, text: Tensor) -> float:
    """Repeat the steps in this process alone, each data rank's part in turn, and compare."""
    steps = split_reference(
        GPT().to(trained.dtype),
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


def _over_data_axes(plan: sw.Plan, options: Options, dtype: torch.dtype) -> sw.Plan:
    """The same plan without the axis that cuts layers."""
    if not plan.tensor.axes:
        return plan
    sizes = {axis: plan.mesh[axis] for axis in plan.batch} or {"fsdp": 1}
    mesh = sw.Mesh(links=None, **sizes)
    return engine.make_plan(mesh, replace(options, sequence=False), dtype)
