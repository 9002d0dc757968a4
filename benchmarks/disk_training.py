"""Training with the optimizer's state on disk, beside DDP and DeepSpeed's NVMe, on two gloo ranks.

All systems live in the same processes and take turns step by step; ratios are paired per round.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import shardwise as sw
from benchmarks import variants
from benchmarks.cpu_step import ABOUT, PAGE, quartiles
from benchmarks.page import machine, put, table
from benchmarks.training import ROWS, SIZES, draw, timed_step
from benchmarks.variants import Variant
from shardwise.launch import join_job

Times = dict[str, list[float]]
_WARM_UP = 2


def systems(folder: str, peer: bool) -> list[Variant]:
    """DDP in memory, ours in memory and on disk, and DeepSpeed's NVMe where it can be built."""
    config = SIZES["64M"]
    on_disk = variants.shardwise(config, 3, sw.offload("opt", sw.disk(folder)))
    on_disk.name = "shardwise ZeRO-3, opt on disk"
    found = [variants.ddp(config), variants.shardwise(config, 3), on_disk]
    if peer:
        found.append(variants.deepspeed(config, 3, ROWS, nvme=folder))
    return found


def run(folder: str, rounds: int, peer: bool) -> Times:
    """Wall seconds of each step."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    join_job("cpu")
    times: Times = {}
    members = systems(folder, peer)
    for number in range(rounds + _WARM_UP):
        batch = draw(SIZES["64M"], number)
        shift = number % len(members)
        for member in members[shift:] + members[:shift]:
            wall, _ = timed_step(member, batch)
            if number >= _WARM_UP:
                times.setdefault(member.name, []).append(wall)
    return {member.name: times[member.name] for member in members}


def has_peer() -> bool:
    """Whether DeepSpeed's operator for files can be built: it needs the headers of libaio."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: PLC0415 - an optional peer

        AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # whatever keeps it from being built
        print(f"without DeepSpeed's NVMe: {error}")
        return False
    return True


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    peer = has_peer()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        args = (folder, options.rounds, peer)
        times = sw.spawn(run, ranks=2, args=args, timeout=1500)[0]
    first = next(iter(times.values()))
    grid = [
        [
            name,
            quartiles([1e3 * one for one in values], ".0f"),
            quartiles([one / ddp for one, ddp in zip(values, first, strict=True)], ".2f"),
        ]
        for name, values in times.items()
    ]
    absent = "" if peer else "\n\nDeepSpeed's NVMe is absent: its operator could not be built."
    text = (
        f"64 M parameters in float32 on {machine()}; 2 gloo ranks on one drive, {options.rounds} "
        "rounds, wall time of the slowest rank.\n\n"
        f"{table(['', 'ms', 'time / DDP'], grid)}{absent}"
    )
    print(text)
    put(options.page, ABOUT, {"Training from disk": text})


if __name__ == "__main__":
    main()
