"""Where the time of a step goes: torch's profiler over the steps of some systems, side by side.

Operators are put into a few kinds by name; what no operator accounts for is Python, the autograd
engine, and waiting for the other rank. The profiler costs every operator about a microsecond, so
the sums are for reading, and ratios are measured without it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.training import SIZES, build, draw
from shardwise.launch import join_job

STEPS = 12
KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "attention"),
    "copies": ("copy_", "_foreach_copy_", "cat", "clone"),
    "optimizer": ("_fused_adamw_", "_fused_adam_"),
    "scaling and checks": (
        *("mul", "mul_", "sum", "div_"),
        *("_foreach_mul_", "_amp_foreach"),
    ),
    "collectives": ("gloo:", "c10d::"),
}
REST = "other operators"
NONE = "Python and waiting"

_ABOUT = """# Where the time of a step goes

Main thread of one of two gloo ranks, 4.3 million parameters, torch's profiler, means of 12 steps;
written by `make bench`. The profiler makes all systems slower; ratios without it are in RESULTS.md.
DDP multiplies gradients by a constant while it copies them into its bucket; the replicated plan
packs them with a copy and multiplies them by one over the count of the global batch once that is
known. Tried against what is left: the last all-reduce of each unit in flight beside backward
(kept); one all-reduce for the gradients of several units (no clear gain: 1.10 to 1.14 of DDP beside
1.10 to 1.15); reduce-scatters in flight where weights are not gathered (kept).
"""


def kind_of(name: str) -> str:
    """The kind of one profiled operator.

    >>> kind_of("aten::addmm"), kind_of("gloo:all_reduce"), kind_of("aten::gelu")
    ('matrix products', 'collectives', 'other operators')
    """
    bare = name.removeprefix("aten::")
    for kind, parts in KINDS.items():
        if any(bare == part or (part in bare and len(part) > 5) for part in parts):
            return kind
    return REST


def profile(size: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Milliseconds per step of each kind on the main thread of rank 0, and the wall time."""
    join_job("cpu")
    config = SIZES[size]
    systems = [build(config, name) for name in names]
    for number in range(4):
        for system in systems:
            system.step(draw(config, number))
    found: dict[str, dict[str, float]] = {}
    for system in systems:
        walls: list[float] = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            for number in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                with torch.profiler.record_function("one step"):
                    system.step(draw(config, number))
                walls.append(time.perf_counter() - start)
        found[system.name] = _by_kind(seen, 1e3 * statistics.fmean(walls))
    return found


def _by_kind(seen: torch.profiler.profile, wall: float) -> dict[str, float]:
    events = seen.events() or []
    mains = {event.thread for event in events if event.name == "one step"}
    sums = dict.fromkeys([*KINDS, REST], 0.0)
    for event in events:
        if event.name == "one step":
            continue
        # A collective runs on a thread of gloo's, beside the step.
        if event.thread in mains or kind_of(event.name) != "collectives":
            sums[kind_of(event.name)] += event.self_cpu_time_total / 1e3 / STEPS
    sums[NONE] = wall - sum(sums.values())
    return {**sums, "step": wall}


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """One row a kind, one column a system."""
    lines = [
        f"| ms of a step | {' | '.join(found)} |",
        "|---" * (1 + len(found)) + "|",
    ]
    for kind in next(iter(found.values())):
        cells = [f"{one[kind]:.1f}" for one in found.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write `benchmarks/SEGMENTS.md` for the small model."""
    names = ["ddp", "sw0", "sw1", "fsdp3", "sw3"]
    found = table(sw.spawn(profile, ranks=2, args=("4M", names), timeout=600)[0])
    (Path(__file__).parent / "SEGMENTS.md").write_text(f"{_ABOUT}\n{found}\n")
    print(found)


if __name__ == "__main__":
    main()
