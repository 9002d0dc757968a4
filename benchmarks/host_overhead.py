"""Host time of a forward and backward pass, beside the plain module and FSDP2.

Tiny dimensions on a fake group of 8 ranks: collectives return at once, so what is measured is the
Python and dispatch work that each system adds to a pass. Variants run round-robin in one process,
one thread; process time per pass, median of paired per-round ratios with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw

WORLD = 8
BLOCKS = 12
WIDTH = 32
Pass = Callable[[], object]


class Block(nn.Module):
    """A pre-norm-free MLP block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Residual MLP."""
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """A scalar loss."""
    return model(batch).square().mean()


def plain(batch: Tensor) -> Pass:
    """The unsharded module."""
    model = Model()

    def run() -> None:
        mean_square(model, batch).backward()
        model.zero_grad(set_to_none=True)

    return run


def fsdp2(batch: Tensor, *, reshard: bool) -> Pass:
    """FSDP2 with one group per block."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def run() -> None:
        mean_square(model, batch).backward()
        model.zero_grad(set_to_none=True)

    return run


def shardwise(batch: Tensor, *transforms: sw.Transform) -> Pass:
    """`program.grads`: forward, backward, the packed reduction and the normalisation."""
    plan = sw.plan(Model(), sw.Mesh(fsdp=WORLD), *transforms)
    program = sw.lower(plan, mean_square, sw.optim.sgd(0.1)).bind(device="cpu")
    state = program.init(seed=0)
    return lambda: program.grads(state, batch)


@dataclass(frozen=True)
class Row:
    """Ratios of one variant to a baseline."""

    name: str
    milliseconds: float
    ratios: tuple[float, float, float]


def measure(variants: dict[str, Pass], rounds: int, passes: int) -> dict[str, list[float]]:
    """Process seconds per pass, round by round, variants in rotation."""
    for run in variants.values():
        for _ in range(5):
            run()
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.process_time()
            for _ in range(passes):
                variants[name]()
            seconds[name].append((time.process_time() - start) / passes)
    return seconds


def ratios(numerator: list[float], denominator: list[float]) -> tuple[float, float, float]:
    """Quartiles of paired ratios: lower, median, upper."""
    paired = [a / b for a, b in zip(numerator, denominator, strict=True)]
    lower, median, upper = statistics.quantiles(paired, n=4)
    return lower, median, upper


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    batch = torch.randn(4, WIDTH)
    variants = {
        "plain": plain(batch),
        "FSDP2 ZeRO-3": fsdp2(batch, reshard=True),
        "shardwise ZeRO-3": shardwise(batch, sw.zero(3, "fsdp")),
        "FSDP2 ZeRO-2": fsdp2(batch, reshard=False),
        "shardwise ZeRO-3, kept": shardwise(batch, sw.zero(3, "fsdp"), sw.keep_gathered()),
        "shardwise ZeRO-2": shardwise(batch, sw.zero(2, "fsdp")),
    }
    seconds = measure(variants, options.rounds, options.passes)
    print(f"{'variant':<24}{'ms':>8}{'x plain':>10}  quartiles")
    for name, times in seconds.items():
        lower, median, upper = ratios(times, seconds["plain"])
        milliseconds = 1e3 * statistics.median(times)
        print(f"{name:<24}{milliseconds:>8.2f}{median:>10.2f}  {lower:.2f} - {upper:.2f}")
    for peer, ours in (
        ("FSDP2 ZeRO-3", "shardwise ZeRO-3"),
        ("FSDP2 ZeRO-2", "shardwise ZeRO-3, kept"),
        ("FSDP2 ZeRO-2", "shardwise ZeRO-2"),
    ):
        lower, median, upper = ratios(seconds[peer], seconds[ours])
        print(f"{peer} / {ours}: {median:.2f} ({lower:.2f} - {upper:.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
