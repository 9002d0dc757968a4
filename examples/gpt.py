"""Train the demo's plain GPT on any number of ranks, in one screen.

    python examples/gpt.py
    torchrun --nproc-per-node 2 examples/gpt.py

The model is `shardwise/demo/gpt.py`, so that an installed `shardwise demo` has it too: a plain
`nn.Module` that knows nothing about sharding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.demo.gpt import GPT, GPTConfig, generate
from shardwise.demo.text import draw_batch, standard_library

__all__ = ["GPT", "GPTConfig", "generate", "loss_fn", "main"]


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    """Written for the whole batch: no rank, no group, no backward."""
    logits = model(batch["tokens"]).flatten(0, 1)
    targets = batch["targets"].flatten()
    total = functional.cross_entropy(logits, targets, reduction="sum")
    return sw.Mean(total, targets.numel())


def main(steps: int = 20) -> list[float]:
    """Train for a few steps and return the losses."""
    with torch.device("meta"):
        model = GPT()
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.adamw(3e-3)).bind()
    state = program.init(seed=0)
    text = standard_library().train
    losses: list[float] = []
    for step in range(steps):
        batch = draw_batch(text, rows=16, context=model.config.context, seed=step)
        state, metrics = program.step(state, program.shard_batch(batch))
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(" ".join(f"{loss:.3f}" for loss in main()))
