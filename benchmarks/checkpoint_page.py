"""Tables of `benchmarks/checkpoints.py`, with the targets beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.page import machine, put, table

ABOUT = """# Checkpoints beside raw files and DCP

Written by `make bench`. All take turns round by round in one pair of processes, and saves are on
disk when they end. Times are wall times of the slower rank, medians with quartiles; ratios are
medians of paired rounds. Cold: every file was dropped from the page cache before it was read."""

_ROOM_BYTES = 64 << 20


class Measured(Protocol):
    """See `checkpoints.Result`."""

    nbytes: int
    seconds: dict[str, list[float]]
    counts: dict[str, int]
    bytes: dict[str, int]


def spread(values: Sequence[float], how: str = ".2f") -> str:
    """A median with its quartiles; of fewer than two values, the one.

    >>> spread([1.0, 2.0, 3.0])
    '2.00 (1.00 - 3.00)'
    """
    if len(values) == 1:
        return format(values[0], how)
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{how}} ({low:{how}} - {high:{how}})"


def ratio(ours: Sequence[float], base: Sequence[float]) -> str:
    """How often `base` takes as long as `ours`, pair by pair."""
    return spread([b / a for a, b in zip(ours, base, strict=True)])


def write(
    page: Path,
    saved: Measured,
    loads: Mapping[str, Measured],
    moved: Mapping[str, tuple[int, int]],
    rounds: int,
) -> str:
    """Write the page, and return its tables."""
    said = f"{saved.nbytes / 1e6:,.0f} MB, {rounds} rounds; {machine()}."
    written = {
        "Saving on two ranks": f"{said}\n\n{_saves(saved)}",
        "Cold load on another number of ranks": f"{said}\n\n{_loads(loads)}",
        "Collectives": _collectives(saved.counts),
        "Memory of a restore": _memory(loads),
        "From plan to plan in memory": _moves(moved),
        "Rates": "![rates of saves and cold loads](checkpoints.png)",
    }
    put(page, ABOUT, written)
    return "\n\n".join(written.values())


def _rate(nbytes: int, seconds: Sequence[float]) -> str:
    return f"{nbytes / 1e6 / statistics.median(seconds):,.0f}"


def _saves(saved: Measured) -> str:
    seconds = saved.seconds
    targets = {"raw, flushed": "0.9", "DCP": "1"}
    rows = [
        [
            name,
            spread(seconds[name]),
            _rate(saved.nbytes, seconds[name]),
            "" if name == "shardwise" else ratio(seconds["shardwise"], seconds[name]),
            targets.get(name, ""),
        ]
        for name in ("shardwise", "raw, flushed", "raw, direct", "DCP")
    ]
    stall = [a / b for a, b in zip(seconds["stall"], seconds["shardwise"], strict=True)]
    head = ["save", "seconds", "MB/s", "our rate / this one", "target, at least"]
    return (
        f"{table(head, rows)}\n\nAn asynchronous save holds training up for "
        f"{spread(seconds['stall'])} s, {spread(stall, '.3f')} of a synchronous one (target: at "
        f"most 0.1), and is on disk after {spread(seconds['async'])} s. `raw, flushed` "
        "writes through the page cache and then flushes it, `raw, direct` goes past it."
    )


def _loads(loads: Mapping[str, Measured]) -> str:
    rows = [
        [
            f"{ranks} ranks, {name}",
            spread(one.seconds[name]),
            _rate(one.nbytes, one.seconds[name]),
            "" if name == "shardwise" else ratio(one.seconds["shardwise"], one.seconds[name]),
            "3" if name == "DCP" else "",
        ]
        for ranks, one in loads.items()
        for name in one.seconds
    ]
    head = ["load", "seconds", "MB/s", "our rate / this one", "target, at least"]
    allowed = [
        f"{ranks}: {spread(_allowed(one.seconds))} times DCP's rate" for ranks, one in loads.items()
    ]
    return (
        f"{table(head, rows)}\n\nThe faster of the two raw reads, which keep nothing of what they "
        f"read, is what the disk allows a load: {', '.join(allowed)}. `raw` reads in blocks "
        "through the page cache, `raw, direct` goes past it with eight requests at once."
    )


def _allowed(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """How often DCP takes as long as the faster raw read, round by round."""
    rounds = zip(seconds["raw"], seconds["raw, direct"], seconds["DCP"], strict=True)
    return [dcp / min(raw, direct) for raw, direct, dcp in rounds]


def _collectives(counts: Mapping[str, int]) -> str:
    planning = counts["second save"] - 2 * counts["vote"]
    rows = [[name, f"{count}"] for name, count in counts.items()]
    return (
        f"{table(['of one rank', 'operations of gloo'], rows)}\n\nA vote is one exchange of "
        f"objects; a save has two. So a second save has {planning} planning collectives (target: "
        "0)."
    )


def _memory(loads: Mapping[str, Measured]) -> str:
    rows = [
        [
            f"{ranks} ranks",
            f"{one.bytes['shard'] / 2**20:,.0f}",
            f"{one.bytes['restore peak'] / 2**20:,.0f}",
            f"{(one.bytes['restore peak'] - one.bytes['shard']) / 2**20:,.0f}",
            f"{_ROOM_BYTES >> 20}",
        ]
        for ranks, one in loads.items()
    ]
    head = ["load", "shard, MiB", "peak, MiB", "beyond the shard, MiB", "target, at most"]
    return f"Anonymous memory of rank 0, sampled every millisecond.\n\n{table(head, rows)}"


def _moves(moved: Mapping[str, tuple[int, int]]) -> str:
    rows = [
        [
            name,
            f"{received:,}",
            f"{bound:,}",
            f"{received / bound:.2f}" if bound else "-",
            "1.2",
        ]
        for name, (received, bound) in moved.items()
    ]
    head = ["four ranks", "bytes received", "bytes lacked", "ratio", "target, at most"]
    return (
        "What all ranks receive, beside what they lack: parts of the new state that they had not. "
        f"Ratios do not depend on the size.\n\n{table(head, rows)}"
    )
