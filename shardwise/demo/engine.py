"""Everything the demo asks of shardwise: plan, lower, bind, step, evaluate, gather."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.demo.gpt import GPT, GPTConfig
from shardwise.demo.options import Options, Traffic
from shardwise.demo.text import draw_batch
from shardwise.sharding.movement import Collective

_CONTEXT = GPTConfig().context
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_WARMUP_STEPS = 10
_MAX_NORM = 1.0
_EVAL_ROWS = 256


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
    total = functional.cross_entropy(logits, targets, reduction="sum")
    return sw.Mean(total, targets.numel())


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


def prepare(options: Options, *, clip: bool = True) -> Setup:
    """Plan the GPT over all ranks of this job and bind the program."""
    with torch.device("meta"):
        model = GPT()
    mesh = sw.Mesh(fsdp=-1)
    transforms = [sw.zero(options.zero, "fsdp")] if options.zero else []
    plan = sw.plan(model, mesh, *transforms)
    lowered = sw.lower(plan, loss_fn, optimizer(options, clip=clip))
    return Setup(plan, lowered, lowered.bind())


def batches(text: Tensor, options: Options) -> Iterator[dict[str, Tensor]]:
    """The global batch of each step, the same on every rank."""
    for number in range(options.steps):
        yield draw_batch(text, rows=options.rows, context=_CONTEXT, seed=options.seed + number)


def train(setup: Setup, state: sw.State, text: Tensor, options: Options) -> Iterator[Step]:
    """Take `options.steps` steps; each state handle is dead once the next one is asked for."""
    for batch in batches(text, options):
        state, metrics = setup.program.step(state, setup.program.shard_batch(batch))
        yield Step(state, float(metrics.loss))


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
