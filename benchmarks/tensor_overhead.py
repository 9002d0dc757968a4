"""Host time of a step whose layers a tensor axis cuts, beside the same layers alone and DTensor.

`plain` is a module that is as small as what one rank has: it computes what each rank computes and
moves nothing. Beside it the whole module under `parallelize_module` (column- and row-parallel
DTensors) and under `tensor_parallel`. Tiny dimensions on a fake group: collectives return at once,
so what is measured is the Python and dispatch work that a system adds. Variants run round-robin in
one process, one thread; process time, medians of paired per-round ratios with quartiles, of a
forward and backward pass and of a whole step with SGD. Written to `benchmarks/TENSOR.md`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from benchmarks.host_overhead import Pass, mean_square, measure, ratios
from benchmarks.page import FOLDER, machine, put, table

WORLD = 8
BLOCKS = 12
WIDTH = 32
PAGE = FOLDER / "TENSOR.md"
ABOUT = "# The host time of tensor parallelism\n\nWritten by `make bench`."
TARGET = 1.7
"""What a step may cost beside the plain one."""

RATE = 0.01
PLAIN, PEER, OURS = "plain, the size of one rank", "DTensor, column and row", "shardwise"


class Block(nn.Module):
    """A residual MLP whose hidden units may be a part of all."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the MLP finds."""
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks in a list."""

    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


AXES = {
    "up.weight": "mlp embed",
    "up.bias": "mlp",
    "down.weight": "embed mlp",
    "down.bias": "embed",
}


def by_torch(model: nn.Module, batch: Tensor, *, steps: bool) -> Pass:
    """Forward and backward of a module of torch, and SGD if it steps."""
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)

    def run() -> None:
        mean_square(model, batch).backward()
        if steps:
            sgd.step()
        sgd.zero_grad(set_to_none=True)

    return run


def by_dtensor(batch: Tensor, *, steps: bool) -> Pass:
    """The same with the layers of every block as DTensors."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return by_torch(model, batch, steps=steps)


def by_shardwise(batch: Tensor, *, steps: bool) -> Pass:
    """The same by `tensor_parallel`."""
    plan = sw.plan(Model(), sw.Mesh(tp=WORLD), sw.tensor_parallel("tp"), axes=AXES)
    program = sw.lower(plan, mean_square, sw.optim.sgd(RATE), batch=batch).bind(device="cpu")
    states = [program.init(seed=0)]

    def step() -> None:
        states[0], _ = program.step(states[0], batch)

    return step if steps else lambda: program.grads(states[0], batch)


def compare(batch: Tensor, rounds: int, *, steps: bool) -> tuple[str, float]:
    """A table of one comparison, and the median of our ratio to the plain module."""
    variants: dict[str, Pass] = {
        PLAIN: by_torch(Model(4 * WIDTH // WORLD), batch, steps=steps),
        PEER: by_dtensor(batch, steps=steps),
        OURS: by_shardwise(batch, steps=steps),
    }
    seconds = measure(variants, rounds, 3)
    rows: list[list[str]] = []
    for name, times in seconds.items():
        lower, median, upper = ratios(times, seconds[PLAIN])
        us = 1e6 * statistics.median(times)
        rows.append([name, f"{us:.0f}", f"{median:.2f} ({lower:.2f} - {upper:.2f})"])
    lower, median, upper = ratios(seconds[PEER], seconds[OURS])
    rows.append([f"{PEER} / {OURS}", "", f"{median:.2f} ({lower:.2f} - {upper:.2f})"])
    _, ours, _ = ratios(seconds[OURS], seconds[PLAIN])
    return table(["", "us", "x plain"], rows), ours


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    batch = torch.randn(4, WIDTH)
    written = {}
    for heading, steps in (("A forward and backward pass", False), ("A step with SGD", True)):
        grid, median = compare(batch, options.rounds, steps=steps)
        told = "" if not steps else f"\n\nTarget: {TARGET}; measured: {median:.2f}."
        written[heading] = grid + told
        print(f"{heading}\n\n{grid}{told}\n")
    said = (
        f"{BLOCKS} blocks of {WIDTH} channels over {WORLD} ranks of a fake group, 4 rows; process "
        f"time, one thread, medians and quartiles of {options.rounds} rounds; {machine()}."
    )
    put(options.page, f"{ABOUT}\n\n{said}", written)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
