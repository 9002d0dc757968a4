"""The disk engine beside plain loops of O_DIRECT requests, and a streamed AdamW step.

Reads and writes of the same bytes take turns: a loop of `preadv` or `pwritev` of 4 MiB by as many
threads as the engine has, and the engine with nothing to compute. Then a whole update of AdamW
state on disk beside the larger of its input and output alone and its computation alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cpu_step import ABOUT, PAGE, RECIPE, quartiles
from benchmarks.page import machine, put, table
from shardwise.kernels.step import Group, step_
from shardwise.offload.engine import THREADS, Engine, Piece
from shardwise.offload.files import Folder
from shardwise.sharding.host_pages import host_pages

REQUEST = 4 << 20
STATE = 3
"""Parameter and two moments."""


def seconds(run: Callable[[], None]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Plain:
    """A file of its own, read or written by a loop of requests."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self._nbytes = nbytes
        name = Path(folder) / "plain"
        self._file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.unlink(name)
        os.posix_fallocate(self._file, 0, nbytes)
        pages = [host_pages(REQUEST) for _ in range(THREADS)]
        self._buffers = [memoryview(page.numpy()) for page in pages]
        self._threads = ThreadPoolExecutor(THREADS)

    def run(self, call: Callable[[int, Sequence[memoryview], int], int]) -> None:
        """Move all bytes."""

        def lane(number: int) -> None:
            for at in range(number * REQUEST, self._nbytes, THREADS * REQUEST):
                size = min(REQUEST, self._nbytes - at)
                assert call(self._file, [self._buffers[number][:size]], at) == size

        list(self._threads.map(lane, range(THREADS)))


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Folder(options.folder)
    count = options.elements
    flats = [folder.empty(count, torch.float32) for _ in range(STATE)]
    for flat in flats:
        flat.zero_()
    os.fsync(folder.descriptor)
    grad, engine = torch.rand(count), Engine(folder.region)
    plain = Plain(options.folder, STATE * 4 * count)

    def stay(number: int, start: int, stop: int, tensors: Sequence[Tensor]) -> None:
        """Compute nothing."""

    def step(number: int, start: int, stop: int, tensors: Sequence[Tensor]) -> None:
        param, mu, nu, gradient = tensors
        step_(RECIPE, [Group(param, gradient, (mu, nu))])

    here = [torch.zeros(count // 4) for _ in range(STATE)]

    def compute() -> None:
        for part in range(4):
            states = (here[1], here[2])
            step_(RECIPE, [Group(here[0], grad[part * (count // 4) :][: count // 4], states)])

    runs: dict[str, Callable[[], None]] = {
        "plain read": lambda: plain.run(os.preadv),
        "engine read": lambda: engine.stream([Piece((), tuple(flats))], stay),
        "plain write": lambda: plain.run(os.pwritev),
        "engine write": lambda: engine.stream([Piece((), (), tuple(flats))], stay),
        "engine read and write": lambda: engine.stream([Piece(tuple(flats), ())], stay),
        "compute": compute,
        "streamed step": lambda: engine.stream([Piece(tuple(flats), (grad,))], step),
    }
    moved = 0
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):
        order = list(runs.items())
        shift = number % len(order)
        for name, run in order[shift:] + order[:shift]:
            before = engine.read_bytes + engine.written_bytes
            spent = seconds(run)
            if name == "streamed step":
                moved = engine.read_bytes + engine.written_bytes - before
            if number:
                times[name].append(spent)
    nbytes = STATE * 4 * count
    grid = [
        [name, quartiles(values, ".2f"), f"{nbytes / sorted(values)[len(values) // 2] / 1e6:,.0f}"]
        for name, values in times.items()
    ]

    def ratio(one: str, *others: str) -> str:
        pairs = zip(times[one], *(times[other] for other in others), strict=True)
        return quartiles([rest[0] / max(rest[1:]) for rest in pairs], ".2f")

    both = [r + w for r, w in zip(times["plain read"], times["plain write"], strict=True)]
    moving = quartiles(
        [b / e for b, e in zip(both, times["engine read and write"], strict=True)], ".2f"
    )
    text = (
        f"State of {count:,} parameters, {nbytes / 1e6:,.0f} MB, on {machine()}; {options.rounds} "
        f"rounds, {THREADS} threads.\n\n"
        f"{table(['', 'seconds', 'MB/s of the state'], grid)}\n\n"
        f"- engine read / plain read, time: {ratio('engine read', 'plain read')} (rate target: at "
        "least 0.95)\n"
        f"- engine write / plain write, time: {ratio('engine write', 'plain write')} (rate target: "
        "at least 0.9)\n"
        f"- plain read and then write / engine, which does both at once, time: {moving}\n"
        f"- streamed step / the larger of moving and computing alone: "
        f"{ratio('streamed step', 'engine read and write', 'compute')} (target: at most 1.15)\n"
        f"- bytes per parameter of a step: {moved / count:.1f}"
    )
    print(text)
    put(options.page, ABOUT, {"The disk engine": text})


if __name__ == "__main__":
    main()
