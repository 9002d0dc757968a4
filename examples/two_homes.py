"""A mesh of two axes and two homes: weights cut inside a node, optimizer state over the whole job.

Weights are gathered over the fast links of one node; gradients and optimizer state, several times
their size, are cut over all ranks. It takes no ZeRO stage of its own: homes are choices of axes.
"""

import os

import torch
from torch import Tensor, nn

import shardwise as sw


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def make_plan(model: nn.Module, mesh: sw.Mesh) -> sw.Plan:
    job = ("node", "local")
    homes = sw.shard_params("local"), sw.shard_grads(job), sw.shard_optimizer(job)
    return sw.plan(model, mesh, *homes)


def main(steps: int = 4) -> list[float]:
    """Train and return the losses."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    plan = make_plan(Model(), sw.Mesh(node=-1, local=local))
    print(plan)
    program = sw.lower(plan, loss_fn, sw.optim.adamw(1e-2)).bind()
    state, losses = program.init(seed=0), list[float]()
    inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    batch = program.shard_batch({"x": inputs, "y": torch.arange(16) % 4})
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(main())
