"""A plan transform of your own: a function from plan to plan, built from public ones."""

import math

import torch
from torch import Tensor, nn

import shardwise as sw


def shard_large(axis: str, *, above: int) -> sw.Transform:
    """ZeRO-3 for parameters of more than `above` elements, ZeRO-1 for the rest.

    To gather a small tensor costs more than holding it. Sizes are read from the plan, so this
    composes with all other transforms.
    """

    def apply(plan: sw.Plan) -> sw.Plan:
        large = [f"^{info.path}" for info in plan.infos if math.prod(info.shape) > above]
        plan = sw.zero(1, axis)(plan)
        return sw.zero(3, axis, where=large)(plan) if large else plan

    return sw.chain(apply, name=f"shard_large({axis!r}, above={above})")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.linear(x, self.embed.weight)


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main(steps: int = 4) -> list[float]:
    """Train and return the losses."""
    plan = sw.plan(Model(), sw.Mesh(fsdp=-1), shard_large("fsdp", above=64))
    print(plan, plan.why("layers.0.weight"), sep="\n\n")
    program = sw.lower(plan, loss_fn, sw.optim.adamw(1e-2)).bind()
    state, losses = program.init(seed=0), list[float]()
    tokens = program.shard_batch(torch.arange(8 * 9).view(8, 9) * 7 % 50)
    for _ in range(steps):
        state, metrics = program.step(state, tokens)
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(main())
