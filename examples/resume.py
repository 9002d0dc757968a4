"""Start it again and it goes on: weights, optimizer, place in the data, generator, losses so far.

Alone or under torchrun: `torchrun --max-restarts=3 --nproc-per-node 2 -m examples.resume`. After
SIGTERM it saves and ends; a rank that dies costs the steps since the last checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwise as sw

STEPS, ROWS = 12, 8


class Loader:
    """Rows in a new order each epoch; knows where it is."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.epoch, self.taken = rows, 0, 0

    def next(self) -> Tensor:
        if self.taken + ROWS > len(self.rows):
            self.epoch, self.taken = self.epoch + 1, 0
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
        self.taken += ROWS
        return self.rows[order[self.taken - ROWS : self.taken]]


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    return sw.Mean((model(batch) - batch.cumsum(1)).square().sum(), len(batch))


def main(folder: str = "runs/resume", stop_after: int = STEPS) -> list[float]:
    """Losses of all steps, those of earlier calls too; any number of ranks may go on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.adamw(2e-2)).bind()
    loader, losses = Loader(torch.randn(20, 6)), list[float]()
    with sw.Checkpointer(program, folder, every=3, keep=2) as checkpointer:
        state = checkpointer.resume_or_init(sw.from_module(model))
        if checkpointer.extra:
            loader.epoch, loader.taken, losses = checkpointer.extra
        while checkpointer.step < stop_after and not checkpointer.stopping:
            state, metrics = program.step(state, program.shard_batch(loader.next()))
            losses.append(float(metrics.loss))
            state = state.with_extra((loader.epoch, loader.taken, losses))
            checkpointer.after_step(state)
    return losses


if __name__ == "__main__":
    print("losses", " ".join(f"{loss:.3f}" for loss in main()))
