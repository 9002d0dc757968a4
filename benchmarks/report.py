"""Tables and plots of `benchmarks/training.py`."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot

BASE = "DDP"


class Measured(Protocol):
    """See `training.Result`."""

    wall: list[float]
    process: list[float]
    held: int
    peak: int
    start: float
    traffic: tuple[int, int]
    difference: float | None


def quartiles(ours: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of paired ratios."""
    lower, median, upper = statistics.quantiles(
        [a / b for a, b in zip(ours, base, strict=True)], n=4
    )
    return lower, median, upper


def ratio(ours: Sequence[float], base: Sequence[float]) -> str:
    """A ratio with its quartiles; said not to be measurable when they span more than it differs."""
    if ours is base:
        return "1.00"
    lower, median, upper = quartiles(ours, base)
    text = f"{median:.2f} ({lower:.2f} - {upper:.2f})"
    return text if upper - lower <= abs(median - 1) else f"{text}, not measurable"


def table(results: Mapping[str, Measured]) -> str:
    """One row a system."""
    base = results[BASE]
    lines = [
        "| system | step, ms | wall / DDP | process / DDP | held, MB | peak, MB | collectives "
        "| payload, MB | first step after, s | weights to DDP |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in results.items():
        count, payload = one.traffic
        cells = [
            name,
            f"{1e3 * statistics.median(one.wall):.0f}",
            ratio(one.wall, base.wall),
            ratio(one.process, base.process),
            f"{one.held / 1e6:.0f}",
            f"{one.peak / 1e6:.0f}",
            str(count),
            f"{payload / 1e6:.0f}",
            f"{one.start:.1f}",
            f"{one.difference:.1e}" if one.difference is not None else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def against(results: Mapping[str, Measured], ours: str, peer: str) -> str:
    """A sentence on two systems."""
    if ours not in results or peer not in results:
        return ""
    wall = ratio(results[ours].wall, results[peer].wall)
    process = ratio(results[ours].process, results[peer].process)
    return f"- {ours} / {peer}: wall {wall}, process {process}"


def write(folder: Path, found: Mapping[str, Mapping[str, Measured]], *, deepspeed: bool) -> None:
    """Write `RESULTS.md`, `results.png` and `results.svg`."""
    cpu = platform.processor() or platform.machine()
    lines = [
        "# Training steps beside the peers",
        "",
        f"Two gloo ranks, one thread each, on a machine of {os.cpu_count()} cores ({cpu}), torch "
        f"{torch.__version__}, fp32, the same byte-level GPT, AdamW (fused where the system has "
        "it); `plain` is each rank alone, without communication. Written by `make bench`; systems "
        "take turns in one pair of processes; ratios are "
        "medians of paired rounds with quartiles.",
        "",
        "Held is what a system keeps between steps, peak the most in a step by torch's allocator "
        "(scratch memory of gloo itself is not seen). Collectives and payload are what each rank "
        "must send: counted by shardwise itself, and for the peers by torch's profiler as they "
        "reach gloo, which makes an all-reduce of each reduce-scatter.",
        "" if deepspeed else "\nDeepSpeed was not installed (extra `peers`).",
    ]
    for size, results in found.items():
        lines += [f"## {size}", "", table(results), ""]
        pairs = [
            against(results, "shardwise ZeRO-3", "FSDP2 ZeRO-3"),
            against(results, "shardwise ZeRO-2", "FSDP2 ZeRO-2"),
            *(
                against(results, f"shardwise ZeRO-{level}", f"DeepSpeed ZeRO-{level}")
                for level in (1, 2, 3)
            ),
        ]
        lines += [*filter(None, pairs), ""]
    lines.append("![ratios of step time to DDP](results.png)")
    (folder / "RESULTS.md").write_text("\n".join(lines) + "\n")
    _plot(folder, found)


def _plot(folder: Path, found: Mapping[str, Mapping[str, Measured]]) -> None:
    figure, axes = pyplot.subplots(1, len(found), figsize=(6 * len(found), 4), squeeze=False)
    for axis, (size, results) in zip(axes[0], found.items(), strict=True):
        base = results[BASE]
        names = [name for name in results if name != BASE]
        spans = [quartiles(results[name].wall, base.wall) for name in names]
        medians = [median for _, median, _ in spans]
        errors = [[m - low for low, m, _ in spans], [high - m for _, m, high in spans]]
        colours = ["tab:blue" if name.startswith("shardwise") else "tab:gray" for name in names]
        axis.barh(names, medians, xerr=errors, color=colours)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_xlabel("wall time of a step / DDP")
        axis.set_title(size)
    figure.tight_layout()
    figure.savefig(folder / "results.png", dpi=120)
    figure.savefig(folder / "results.svg")
