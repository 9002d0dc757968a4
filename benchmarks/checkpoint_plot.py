"""The plot of `benchmarks/checkpoints.py`: rates of saves and cold loads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

import matplotlib

from benchmarks.checkpoint_page import Measured

matplotlib.use("Agg")
from matplotlib import pyplot

_SAVES = ("shardwise", "raw, flushed", "raw, direct", "DCP")


def plot(folder: Path, saved: Measured, loads: Mapping[str, Measured]) -> None:
    """Write `checkpoints.png` and `checkpoints.svg`.

    Args:
        folder: of the page.
        saved: by `checkpoints.save`.
        loads: by `checkpoints.load`, by numbers of ranks.
    """
    groups = {"save on 2 ranks": {name: saved.seconds[name] for name in _SAVES}}
    groups |= {f"cold load, {ranks} ranks": one.seconds for ranks, one in loads.items()}
    figure, axes = pyplot.subplots(1, len(groups), figsize=(5 * len(groups), 3), squeeze=False)
    for axis, (title, seconds) in zip(axes[0], groups.items(), strict=True):
        rates = [saved.nbytes / 1e6 / statistics.median(times) for times in seconds.values()]
        colours = ["tab:blue" if name == "shardwise" else "tab:gray" for name in seconds]
        axis.barh(list(seconds), rates, color=colours)
        axis.invert_yaxis()
        axis.set_xlabel("MB/s")
        axis.set_title(title)
    figure.tight_layout()
    figure.savefig(folder / "checkpoints.png", dpi=120)
    figure.savefig(folder / "checkpoints.svg")
