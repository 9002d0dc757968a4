"""Host time of a step whose layers a tensor axis cuts, beside the same layers alone and DTensor.

`plain` is a module that is as small as what one rank has: it computes what each rank computes and
moves nothing. Beside it that module with all-reduces written into it by hand, and the whole module
under `parallelize_module` (column- and row-parallel DTensors) and under `tensor_parallel`. Tiny
dimensions on a fake group: collectives return at once, so what is measured is the Python and
dispatch work that a system adds. Variants run round-robin in one process, one thread; process time,
medians of paired per-round ratios with quartiles, of a forward and backward pass and of a whole
step with SGD. Written to `benchmarks/TENSOR.md`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from benchmarks.host_overhead import Pass, mean_square, measure, ratios
from benchmarks.page import FOLDER, machine, put, table

WORLD = 8
LAYERS = 32
"""With fewer the fixed part of a step weighs more: 12 layers gave a ratio of 1.8, not 1.7."""
WIDTH = 64
HEADS = 8
PAGE = FOLDER / "TENSOR.md"
ABOUT = "# The host time of tensor parallelism\n\nWritten by `make bench`."
TARGET = 1.7
"""What a step may cost beside the plain one."""

RATE = 0.01
PLAIN, HAND = "plain, the size of one rank", "the same with hand-written all-reduces"
PEER, OURS = "DTensor, column and row", "shardwise"


class Layer(nn.Module):
    """A transformer layer with all heads and hidden units, or with those of one of `parts` ranks.

    Rows of one sequence each.
    """

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.heads = HEADS // parts
        inner, hidden = WIDTH // parts, 4 * WIDTH // parts
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner)
        self.value, self.out = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then an MLP."""
        normed = self.norm1(x)
        split = (*x.shape[:2], self.heads, WIDTH // HEADS)
        query, key, value = (
            layer(normed).view(split).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Layers in a list."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(parts) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")
AXES = {
    **{f"{name}.weight": "(heads hd) embed" for name in ("query", "key", "value")},
    **{f"{name}.bias": "(heads hd)" for name in ("query", "key", "value")},
    "out.weight": "embed (heads hd)",
    "up.weight": "mlp embed",
    "up.bias": "mlp",
    "down.weight": "embed mlp",
    "layers.*.heads": "heads",
}


class Copy(torch.autograd.Function):
    """By hand: an all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """An alias."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Sum."""
        whole = grads[0].clone()
        dist.all_reduce(whole)
        return whole


class Reduce(torch.autograd.Function):
    """By hand: an all-reduce in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sum."""
        whole = x.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Unchanged."""
        return grads[0]


class HandLayer(Layer):
    """A rank's layer with its crossings written into it."""

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then an MLP."""
        normed = Copy.apply(self.norm1(x))
        split = (*x.shape[:2], self.heads, WIDTH // HEADS)
        query, key, value = (
            layer(normed).view(split).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        x = x + Reduce.apply(functional.linear(mixed, self.out.weight)) + self.out.bias
        hidden = functional.gelu(self.up(Copy.apply(self.norm2(x))))
        return x + Reduce.apply(functional.linear(hidden, self.down.weight)) + self.down.bias


def by_torch(model: nn.Module, batch: Tensor, *, steps: bool) -> Pass:
    """Forward and backward of a module of torch, and SGD if it steps."""
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)

    def run() -> None:
        mean_square(model, batch).backward()
        if steps:
            sgd.step()
        sgd.zero_grad(set_to_none=True)

    return run


def by_hand(batch: Tensor, *, steps: bool) -> Pass:
    """One rank's part with hand-written crossings."""
    model = Model(WORLD)
    model.layers = nn.ModuleList(HandLayer(WORLD) for _ in model.layers)
    return by_torch(model, batch, steps=steps)


def by_dtensor(batch: Tensor, *, steps: bool) -> Pass:
    """The whole model with its linear layers as DTensors."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = Model()
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    styles |= {name: RowwiseParallel() for name in ROWS}
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.heads //= WORLD
        parallelize_module(layer, mesh, styles)
    return by_torch(model, batch, steps=steps)


def by_shardwise(batch: Tensor, *, steps: bool) -> Pass:
    """The whole model under `tensor_parallel`."""
    plan = sw.plan(Model(), sw.Mesh(tp=WORLD), sw.tensor_parallel("tp"), axes=AXES)
    program = sw.lower(plan, mean_square, sw.optim.sgd(RATE), batch=batch).bind(device="cpu")
    states = [program.init(seed=0)]

    def step() -> None:
        states[0], _ = program.step(states[0], batch)

    return step if steps else lambda: program.grads(states[0], batch)


def compare(batch: Tensor, rounds: int, *, steps: bool) -> tuple[str, float]:
    """A table of one comparison, and the median of our ratio to the plain module."""
    variants: dict[str, Pass] = {
        PLAIN: by_torch(Model(WORLD), batch, steps=steps),
        HAND: by_hand(batch, steps=steps),
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
    batch = torch.randn(2, 16, WIDTH)
    written = {}
    for heading, steps in (("A forward and backward pass", False), ("A step with SGD", True)):
        grid, median = compare(batch, options.rounds, steps=steps)
        told = "" if not steps else f"\n\nTarget: {TARGET}; measured: {median:.2f}."
        written[heading] = grid + told
        print(f"{heading}\n\n{grid}{told}\n")
    said = (
        f"{LAYERS} transformer layers of {WIDTH} channels over {WORLD} ranks of a fake group, 2 "
        f"rows of 16 tokens; process time, one thread, medians and quartiles of {options.rounds} "
        f"rounds; {machine()}."
    )
    put(options.page, f"{ABOUT}\n\n{said}", written)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
