"""Step time, memory and traffic of whole training steps beside the peers, over two gloo ranks.

All systems live in the same processes and take turns step by step, so that whatever else the
machine does hits all of them. Ratios are paired per round: wall time of the slowest rank, process
time of rank 0. Peak memory is measured by the allocator's events in a step of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks import report, variants
from benchmarks.traffic import observed
from benchmarks.variants import Batch, Variant
from shardwise.demo.gpt import GPT, GPTConfig
from shardwise.launch import join_job
from shardwise.testing.ledger import measure

ROWS = 2
SIZES = {
    "4M": GPTConfig(layers=6, width=240, heads=6, context=64),
    "64M": GPTConfig(layers=12, width=660, heads=10, context=64),
}
PEERS = ("plain", "fsdp3", "fsdp2", "sw0", "sw1", "sw2", "sw3")
DEEPSPEED = ("ds1", "ds2", "ds3")
_WARM_UP = 3


@dataclass
class Result:
    """What one system showed on rank 0.

    Args:
        wall: seconds per step of the slowest rank, round by round.
        process: process seconds per step.
        held: bytes between steps.
        peak: bytes at the peak of a step.
        start: seconds from nothing to the end of the first step.
        traffic: collectives and payload bytes of a step.
        difference: largest difference of a weight to DDP after all rounds.
    """

    wall: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)
    held: int = 0
    peak: int = 0
    start: float = 0.0
    traffic: tuple[int, int] = (0, 0)
    difference: float | None = None


def build(config: GPTConfig, name: str) -> Variant:
    """A system by its short name."""
    if name in ("ddp", "plain"):
        return variants.ddp(config) if name == "ddp" else variants.plain(config)
    level = int(name[-1])
    if name.startswith("fsdp"):
        return variants.fsdp2(config, reshard=level == 3)
    if name.startswith("ds"):
        return variants.deepspeed(config, level, ROWS)
    return variants.shardwise(config, level)


def draw(config: GPTConfig, number: int) -> Batch:
    """This rank's batch of one round."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(0, config.vocab, (ROWS, config.context + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def run(size: str, rounds: int, names: list[str]) -> dict[str, Result]:
    """Measure the named systems, DDP first."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    join_job("cpu")
    config = SIZES[size]
    systems: list[Variant] = []
    results: dict[str, Result] = {}
    for name in names:
        start = time.perf_counter()
        system = build(config, name)
        system.step(draw(config, 0))
        systems.append(system)
        results[system.name] = Result(start=time.perf_counter() - start)
    for number in range(1, rounds + _WARM_UP):
        batch = draw(config, number)
        shift = number % len(systems)
        for system in systems[shift:] + systems[:shift]:
            wall, process = timed_step(system, batch)
            if number >= _WARM_UP:
                results[system.name].wall.append(wall)
                results[system.name].process.append(process)
    for system in systems:
        result = results[system.name]
        result.held = system.held()
        _, usage = measure(lambda system=system: system.step(draw(config, rounds)))
        result.peak = result.held + usage.peak
        batch = draw(config, rounds + 1)
        result.traffic = observed(lambda system=system, batch=batch: system.step(batch))
        if system.traffic:
            # Its own count: the transport makes several messages of some collectives.
            result.traffic = system.traffic()
    compare_weights(systems, results)
    return results


def timed_step(system: Variant, batch: Batch) -> tuple[float, float]:
    """Wall seconds until the slowest rank is done, and process seconds of this rank."""
    dist.barrier()
    wall, process = time.perf_counter(), time.process_time()
    system.step(batch)
    process = time.process_time() - process
    dist.barrier()
    return time.perf_counter() - wall, process


def compare_weights(systems: list[Variant], results: dict[str, Result]) -> None:
    """The largest difference of any weight to DDP's, after the same steps on the same batches."""
    reference = systems[0].weights() if systems[0].weights else {}
    for system in systems[1:]:
        if system.weights:
            weights = system.weights()
            far = max(float((weights[path] - reference[path]).abs().max()) for path in reference)
            results[system.name].difference = far


def main() -> None:
    """Run both sizes and write `benchmarks/RESULTS.md` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rounds", type=int, nargs="+", default=[40, 12])
    parser.add_argument("--systems", nargs="+", default=None)
    parser.add_argument("--timeout", type=float, default=2400.0, help="seconds for one size")
    options = parser.parse_args()
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    names = options.systems or ["ddp", *PEERS, *(DEEPSPEED if has_deepspeed else ())]
    found: dict[str, dict[str, Result]] = {}
    for size, rounds in zip(options.sizes, options.rounds, strict=False):
        with torch.device("meta"):
            elements = sum(p.numel() for p in GPT(SIZES[size]).parameters())
        args = (size, rounds, names)
        results = sw.spawn(run, ranks=2, args=args, timeout=options.timeout)[0]
        found[f"{elements / 1e6:.1f} M parameters, {rounds} rounds"] = results
        print(report.table(results))
    report.write(Path(__file__).parent, found, deepspeed=has_deepspeed)


if __name__ == "__main__":
    main()
