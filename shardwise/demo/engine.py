"""Everything the demo asks of shardwise: plan, lower, bind, step, evaluate, gather."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.demo.gpt import GPT, GPTConfig
from shardwise.demo.options import Options, Traffic
from shardwise.demo.text import draw_batch
from shardwise.sharding.collectives import Collective
from shardwise.testing.echo import bind_alone
from shardwise.testing.ledger import measure

TENSOR_AXIS = "tp"
"""Over which layers are cut."""

_ZERO_AXIS = "fsdp"
_CONTEXT = GPTConfig().context
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_WARMUP_STEPS = 10
_MAX_NORM = 1.0
_EVAL_ROWS = 256
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class Setup(NamedTuple):
    """A plan, what it costs, and the program that runs it on this rank."""

    plan: sw.Plan
    lowered: sw.Lowered
    program: sw.Program


class Step(NamedTuple):
    """The state after a step, and its loss."""

    state: sw.State
    loss: float


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    """Cross entropy of the next byte, written for the whole batch: no rank, no group."""
    logits = model(batch["tokens"]).flatten(0, 1)
    targets = batch["targets"].flatten()
    return sw.Mean(sw.cross_entropy(logits, targets), targets.numel())


def optimizer(options: Options, *, clip: bool) -> sw.optim.GradientTransform:
    """AdamW under a warm-up and a cosine, with or without clipping by the global norm."""
    schedule = sw.optim.warmup_cosine(
        options.learning_rate,
        warmup=min(_WARMUP_STEPS, options.steps - 1),
        steps=options.steps,
        start=options.learning_rate / _WARMUP_STEPS,
        end=options.learning_rate / 10,
    )
    adamw = sw.optim.adamw(schedule, betas=_BETAS, weight_decay=_WEIGHT_DECAY)
    return sw.optim.chain(sw.optim.clip_by_global_norm(_MAX_NORM), adamw) if clip else adamw


def prepare(options: Options, *, clip: bool = True, dtype: torch.dtype = torch.float32) -> Setup:
    """Plan the GPT over all ranks of this job and bind the program."""
    lowered = lower(options, clip=clip, dtype=dtype)
    return Setup(lowered.plan, lowered, lowered.bind())


def lower(options: Options, *, clip: bool = True, dtype: torch.dtype = torch.float32) -> sw.Lowered:
    """The program of the GPT over all ranks of this job, traced on a batch that does not exist."""
    plan = make_plan(sw.Mesh(links=None, **dict(options.mesh)), options, dtype)
    rows = -(-options.rows // plan.mesh.product(plan.batch))
    tokens = sw.like((rows, _CONTEXT), torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    return sw.lower(plan, loss_fn, optimizer(options, clip=clip), batch=batch)


def make_plan(mesh: sw.Mesh, options: Options, dtype: torch.dtype = torch.float32) -> sw.Plan:
    """The GPT on a mesh."""
    with torch.device("meta"):
        model = GPT().to(dtype)
    return sw.plan(model, mesh, *transforms(mesh, options))


def transforms(mesh: sw.Mesh, options: Options) -> list[sw.Transform]:
    """What the options ask of a plan on a mesh."""
    chosen: list[sw.Transform] = []
    if TENSOR_AXIS in mesh:
        chosen.append(sw.tensor_parallel(TENSOR_AXIS))
    if options.sequence:
        chosen.append(sw.sequence_parallel(TENSOR_AXIS))
    split = [axis for axis in mesh if axis != TENSOR_AXIS]
    if options.zero and split:
        chosen.append(sw.zero(options.zero, _ZERO_AXIS if _ZERO_AXIS in split else split[-1]))
    if options.precision != "fp32":
        chosen.append(sw.precision(compute=_DTYPES[options.precision]))
    if options.accumulate > 1:
        chosen.append(sw.accumulate(options.accumulate))
    if options.remat:
        chosen.append(sw.remat("layers.*"))
    for home, memory in options.offload:
        to = sw.disk(tempfile.gettempdir()) if memory == "disk" else memory
        chosen.append(sw.offload(home, to))
    return chosen


def batches(text: Tensor, options: Options, *, first: int = 0) -> Iterator[dict[str, Tensor]]:
    """The global batch of each step from `first` on, the same on every rank."""
    for number in range(first, options.steps):
        yield draw_batch(text, rows=options.rows, context=_CONTEXT, seed=options.seed + number)


def train(setup: Setup, state: sw.State, text: Tensor, options: Options) -> Iterator[Step]:
    """Take `options.steps` steps; each state handle is dead once the next one is asked for."""
    for batch in batches(text, options):
        state, metrics = setup.program.step(state, setup.program.shard_batch(batch))
        yield Step(state, float(metrics.loss))


def rest_bytes(lowered: sw.Lowered) -> int:
    """What is predicted to rest, wherever it does."""
    memory = lowered.memory()
    return memory.rest_bytes + sum(held.rest_bytes for held in memory.tiers.values())


def step_bytes(lowered: sw.Lowered) -> int:
    """The most that a step is predicted to take beyond rest, activations included."""
    memory = lowered.memory()
    here = memory.peak_bytes - memory.rest_bytes + (memory.activations or 0)
    return here + sum(held.peak_bytes - held.rest_bytes for held in memory.tiers.values())


def measured_step_bytes(setup: Setup, text: Tensor, options: Options) -> int:
    """The same, measured on one rank alone: gloo's threads free memory where nobody counts."""
    batch = setup.program.shard_batch(next(batches(text, options)))
    alone = bind_alone(setup.lowered)
    state = alone.init(options.seed, None)
    alone.grads(state, batch)  # the first pass also makes what later ones keep
    _, usage = measure(lambda: alone.grads(state, batch))
    return usage.peak


def evaluate(setup: Setup, state: sw.State, text: Tensor, options: Options) -> float:
    """Mean loss over a fixed batch of text the model has not seen."""
    batch = draw_batch(text, rows=_EVAL_ROWS, context=_CONTEXT, seed=options.seed)
    return float(setup.program.eval(state, setup.program.shard_batch(batch)).loss)


def full_weights(state: sw.State) -> dict[str, Tensor]:
    """Whole parameters by path, on every rank: a collective, so all ranks call it together."""
    return {path: value.contiguous().clone() for path, value in sw.to_global(state.params).items()}


def traffic(items: Iterable[Collective]) -> Traffic:
    """How many collectives a list holds, and the payload they move."""
    items = tuple(items)
    return Traffic(len(items), sum(item.nbytes for item in items))
