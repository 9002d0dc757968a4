"""Different ZeRO levels for different parameters: the first pattern that matches decides.

Blocks hold most bytes and are cut in all three homes; the embeddings and the head are needed
during the whole step, so only their gradients and optimizer state are cut; norms stay whole.
"""

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.demo.gpt import GPT, GPTConfig

LEVELS = {
    "*norm*": sw.zero(0, "fsdp"),
    "layers.*": sw.zero(3, "fsdp"),
    "**": sw.zero(2, "fsdp"),
}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    logits, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    total = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return sw.Mean(total, targets.numel())


def make_plan(mesh: sw.Mesh) -> sw.Plan:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=3, width=32, heads=4, context=16, vocab=64))
    # The last block is used first in backward: keep it gathered for the moment in between.
    return sw.plan(model, mesh, sw.partition(LEVELS), sw.keep_gathered("layers.2"))


def main(steps: int = 4) -> list[float]:
    """Train and return the losses."""
    plan = make_plan(sw.Mesh(fsdp=-1))
    print(plan, plan.why("layers.0.up.weight"), sep="\n\n")
    program = sw.lower(plan, loss_fn, sw.optim.adamw(1e-2, eps=1e-6)).bind()
    state, losses = program.init(seed=0), list[float]()
    tokens = torch.arange(8 * 17).view(8, 17) * 7 % 61
    batch = program.shard_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(main())
