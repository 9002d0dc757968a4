"""Step time, memory and traffic of whole training steps beside the peers, over real gloo ranks.

All systems live in the same processes and take turns step by step, so that whatever else the
machine does hits all of them. Ratios are paired per round; time is wall time of the slowest rank
and process time of this one. Peak memory is measured in a pass of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks import variants
from benchmarks.variants import Batch, Variant
from shardwise.demo.gpt import GPTConfig
from shardwise.launch import join_job

SIZES = {
    "4M": (GPTConfig(layers=6, width=240, heads=6, context=64), 2),
    "64M": (GPTConfig(layers=12, width=660, heads=10, context=64), 2),
}


def build(config: GPTConfig, names: list[str]) -> list[Variant]:
    makers = {
        "ddp": lambda: variants.ddp(config),
        "fsdp3": lambda: variants.fsdp2(config, reshard=True),
        "fsdp2": lambda: variants.fsdp2(config, reshard=False),
        **{
            f"sw{level}": (lambda level=level: variants.shardwise(config, level))
            for level in range(4)
        },
    }
    return [makers[name]() for name in names]


def draw(config: GPTConfig, rows: int, number: int) -> Batch:
    seed = 1000 * number + dist.get_rank()
    tokens = torch.randint(
        0, config.vocab, (rows, config.context + 1), generator=torch.Generator().manual_seed(seed)
    )
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def run(size: str, rounds: int, names: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Per variant and round: wall seconds of the slowest rank, process seconds of this rank."""
    join_job("cpu")
    config, rows = SIZES[size]
    systems = build(config, names)
    times: dict[str, list[tuple[float, float]]] = {system.name: [] for system in systems}
    for number in range(rounds + 3):
        batch = draw(config, rows, number)
        shift = number % len(systems)
        for system in systems[shift:] + systems[:shift]:
            dist.barrier()
            wall, process = time.perf_counter(), time.process_time()
            system.step(batch)
            process = time.process_time() - process
            dist.barrier()
            wall = time.perf_counter() - wall
            if number >= 3:
                times[system.name].append((wall, process))
    reference = systems[0].weights
    for system in systems[1:]:
        if reference and system.weights:
            ours, theirs = system.weights(), reference()
            far = max(float((ours[k] - theirs[k]).abs().max()) for k in theirs)
            if dist.get_rank() == 0:
                print(
                    f"{system.name:<22} largest weight difference to DDP {far:.2e}; held {system.held() / 1e6:.0f} MB"
                )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="4M", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--variants", default="ddp,fsdp3,fsdp2,sw0,sw1,sw2,sw3")
    options = parser.parse_args()
    names = options.variants.split(",")
    times = sw.spawn(run, ranks=2, args=(options.size, options.rounds, names), timeout=3000)[0]
    base = times["DDP"]
    for name, rows in times.items():
        for column, kind in ((0, "wall"), (1, "process")):
            paired = [a[column] / b[column] for a, b in zip(rows, base, strict=True)]
            lower, median, upper = statistics.quantiles(paired, n=4)
            ms = 1e3 * statistics.median(row[column] for row in rows)
            print(
                f"{name:<22} {kind:<8} {ms:8.1f} ms   x DDP {median:.2f} ({lower:.2f} - {upper:.2f})"
            )


if __name__ == "__main__":
    main()
