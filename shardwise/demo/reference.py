"""The split reference: one process that takes each rank's part in turn and adds the gradients.

Of shardwise it uses the optimizer alone, on whole tensors, so equal bits mean that sharding,
movement and the order of addition change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

import shardwise as sw
from shardwise.demo import engine
from shardwise.demo.gpt import GPT
from shardwise.demo.options import Options
from shardwise.demo.text import draw_batch

CHECKED_STEPS = 20


def largest_difference(text: Tensor, options: Options, ranks: int) -> float:
    """Train both ways for a few steps and compare all weights: a collective, without clipping."""
    options = replace(options, steps=min(CHECKED_STEPS, options.steps))
    setup = engine.prepare(options, clip=False)
    state = setup.program.init(seed=options.seed)
    start = engine.full_weights(state)
    for step in engine.train(setup, state, text, options):
        state = step.state
    ours = engine.full_weights(state)
    theirs = _train_split(start, text, options, ranks)
    return max(float((ours[path] - theirs[path]).abs().max()) for path in ours)


def _train_split(
    weights: dict[str, Tensor], text: Tensor, options: Options, ranks: int
) -> dict[str, Tensor]:
    model = GPT()
    optimizer = engine.optimizer(options, clip=False)
    opt_state = optimizer.init(weights)
    for number in range(options.steps):
        batch = draw_batch(
            text, rows=options.rows, context=model.config.context, seed=options.seed + number
        )
        parts = zip(*(tensor.chunk(ranks) for tensor in batch.values()), strict=True)
        grads = _gradients(model, weights, [dict(zip(batch, part, strict=True)) for part in parts])
        weights, opt_state = sw.optim.apply_in_place(optimizer, weights, grads, opt_state)
    return weights


def _gradients(
    model: GPT, weights: dict[str, Tensor], parts: Iterable[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Gradients of the mean: sums over parts in rank order, divided once by the global count."""
    leaves = {path: weight.detach().requires_grad_() for path, weight in weights.items()}
    sums: list[Tensor] = []
    count = 0.0
    for part in parts:
        mean = engine.loss_fn(_Called(model, leaves), part)
        grads = torch.autograd.grad(mean.total, list(leaves.values()))
        sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else list(grads)
        count += float(mean.count)
    factor = torch.tensor(1.0, dtype=torch.float64) / count
    return {path: total * factor for path, total in zip(leaves, sums, strict=True)}


class _Called(torch.nn.Module):
    """A model that runs with given weights in the place of its own."""

    def __init__(self, model: GPT, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._call = lambda tokens: functional_call(model, weights, (tokens,))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits under the given weights."""
        return self._call(tokens)
