"""Checkpoints of two gloo ranks beside raw files and torch's DCP, written to CHECKPOINTS.md.

One run, in which all take turns round by round: a durable save of a program, of an FSDP2 model by
DCP (which flushes its files too), and raw files of as many writers and bytes, written in blocks and
flushed, through the page cache and past it. Then cold loads at another number of ranks: every file
is flushed and dropped from the page cache (`posix_fadvise`) before each. Ratios are of paired
rounds, of the slowest rank's wall time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.checkpoint_page import write
from benchmarks.page import FOLDER
from shardwise.demo.gpt import GPT, GPTConfig
from shardwise.launch import join_job

RANKS = 2
LAYERS, HEADS = 12, 8
BLOCK_BYTES = 4 << 20
_REQUESTS = 8  # of a rank, past the page cache
BYTES_PER_PARAMETER = 12  # fp32, and two moments of Adam
Seconds = dict[str, list[float]]


@dataclass
class Result:
    """What one pair of rank numbers showed, on rank 0.

    Args:
        nbytes: of the checkpoint.
        seconds: by what was timed, round by round.
        counts: gloo's operations by what was counted.
        bytes: by what was measured.
    """

    nbytes: int = 0
    seconds: Seconds = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


def make_model(megabytes: int) -> GPT:
    """A model whose checkpoint with Adam's moments has about so many bytes."""
    per_layer = megabytes * 1_000_000 / (BYTES_PER_PARAMETER * LAYERS)
    width = max(1, round((per_layer / 12) ** 0.5 / HEADS)) * HEADS  # 12 width^2 parameters
    return GPT(GPTConfig(layers=LAYERS, width=width, heads=HEADS))


def make_batch() -> Tensor:
    """A few tokens."""
    return torch.randint(0, 256, (2, 16))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """A scalar."""
    return model(batch).square().mean()


def join() -> None:
    """A gloo group of all ranks, also of one; DCP and FSDP2 want it."""
    join_job("cpu")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)


def make_program(megabytes: int) -> sw.Program:
    """A program of ZeRO-3."""
    mesh = sw.Mesh(fsdp=dist.get_world_size())
    plan = sw.plan(make_model(megabytes), mesh, sw.zero(3, "fsdp"))
    return sw.lower(plan, loss_fn, sw.optim.adamw(1e-3)).bind(device="cpu")


def make_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Without state."""
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def make_fsdp(megabytes: int) -> nn.Module:
    """The same model under FSDP2, with gradients."""
    model = make_model(megabytes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_fn(model, make_batch()).backward()
    return model


def timed(call: Callable[[], object]) -> float:
    """Wall seconds until the slowest rank is done."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def write_raw(path: Path, nbytes: int, *, direct: bool) -> None:
    """What dd does: blocks of one buffer, then a flush."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = os.open(path, flags, 0o600)
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to pages
    block.write(os.urandom(BLOCK_BYTES))
    try:
        for at in range(0, nbytes, BLOCK_BYTES):
            os.pwrite(fd, block, at)
        os.ftruncate(fd, nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_raw(files: Sequence[Path], rank: int, ranks: int) -> None:
    """A part of every file, in blocks."""
    block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    for file in files:
        share = -(-file.stat().st_size // ranks)
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            at, end = rank * share, (rank + 1) * share
            while at < end and (done := os.preadv(fd, [block[: min(BLOCK_BYTES, end - at)]], at)):
                at += done
        finally:
            os.close(fd)


def read_direct(files: Sequence[Path], rank: int, ranks: int) -> None:
    """A part of every file past the page cache, with several requests in flight."""
    blocks: list[tuple[int, int]] = []
    opened = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    for fd in opened:
        size = os.fstat(fd).st_size
        blocks += [(fd, at) for at in range(rank * BLOCK_BYTES, size, ranks * BLOCK_BYTES)]

    def lane(number: int) -> None:
        block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        for fd, at in blocks[number::_REQUESTS]:
            os.preadv(fd, [block], at)

    with ThreadPoolExecutor(_REQUESTS) as pool:
        list(pool.map(lane, range(_REQUESTS)))
    for fd in opened:
        os.close(fd)


def drop(folder: Path) -> None:
    """Take the files of a directory out of the page cache; they must be on disk."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def num_collectives(call: Callable[[], object]) -> int:
    """Operations that gloo runs for this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    return sum(event.name.startswith("gloo:") for event in seen.events() or [])


def save(folder: str, megabytes: int, rounds: int) -> Result:
    """Saves in turns; the last checkpoints of shardwise and DCP stay."""
    join()
    root, rank = Path(folder), dist.get_rank()
    program = make_program(megabytes)
    state, _ = program.step(program.init(0), make_batch())
    model = make_fsdp(megabytes)
    optimizer = make_adamw(model)
    optimizer.step()
    optimizer.zero_grad()
    result = Result()

    def ours(path: Path) -> None:
        program.save(path, state)

    def by_dcp(path: Path) -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)

    result.counts["first save"] = num_collectives(lambda: ours(root / "first"))
    result.counts["second save"] = num_collectives(lambda: ours(root / "second"))
    told: list[Any] = [None] * dist.get_world_size()
    result.counts["vote"] = num_collectives(lambda: dist.all_gather_object(told, "vote"))
    result.counts["DCP, second save"] = [
        num_collectives(lambda path=path: by_dcp(path)) for path in (root / "dcp1", root / "dcp2")
    ][1]
    program.save_async(root / "third", state).wait()  # makes its buffers
    result.nbytes = size_of(root / "second")
    share = size_of(root / "second", f"__{rank}_0.distcp")
    for name in ("first", "second", "third", "dcp1", "dcp2"):
        remove(root / name)

    def raw(path: Path, *, direct: bool) -> None:
        if rank == 0:
            path.mkdir()
        dist.barrier()
        write_raw(path / f"{rank}", share, direct=direct)

    def asynchronous(path: Path) -> None:
        start = time.perf_counter()
        writing = program.save_async(path, state)
        dist.barrier()
        stalls.append(time.perf_counter() - start)
        writing.wait()

    stalls: list[float] = []
    calls: dict[str, Callable[[Path], None]] = {
        "shardwise": ours,
        "raw, flushed": lambda path: raw(path, direct=False),
        "raw, direct": lambda path: raw(path, direct=True),
        "DCP": by_dcp,
        "async": asynchronous,
    }
    take_turns(calls, root, rounds, result, keep=("shardwise", "DCP"))
    result.seconds["stall"] = stalls
    return result


def take_turns(
    calls: dict[str, Callable[[Path], None]],
    root: Path,
    rounds: int,
    result: Result,
    keep: Sequence[str],
) -> None:
    """Time each call once a round, in an order that rotates; what is kept stays by its name."""
    names = list(calls)
    result.seconds = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            path = root / f"{name}-{number}".replace(", ", "-")
            if dist.get_rank() == 0:
                os.sync()  # nobody pays for what others have left in the cache
            call = calls[name]
            result.seconds[name].append(timed(lambda call=call, path=path: call(path)))
            if name in keep and number == rounds - 1:
                if dist.get_rank() == 0:
                    path.rename(root / name)
            else:
                remove(path)


def remove(path: Path) -> None:
    """On rank 0, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def size_of(folder: Path, name: str = "*.distcp") -> int:
    """Bytes of files of a checkpoint."""
    return sum(file.stat().st_size for file in folder.glob(name))


def load(folder: str, megabytes: int, rounds: int) -> Result:
    """Cold loads in turns, of what any number of ranks has saved."""
    join()
    root, rank = Path(folder), dist.get_rank()
    program = make_program(megabytes)
    files = sorted((root / "shardwise").glob("*.distcp"))
    result = Result(nbytes=size_of(root / "shardwise"))
    states: list[Any] = []

    def ours() -> None:
        states[:] = [program.restore(root / "shardwise")]

    with Peak() as peak:  # first of all: later on memory is taken that others have given back
        ours()
    result.bytes = {"restore peak": peak.nbytes, "shard": states[0].nbytes}
    model = make_fsdp(megabytes)
    model.zero_grad()

    def by_dcp() -> None:
        optimizer = make_adamw(model)  # as after a start: get_state_dict makes its tensors
        weights, moments = get_state_dict(model, optimizer)
        values: dict[str, Any] = {"model": weights, "optim": moments}
        dcp.load(values, checkpoint_id=root / "DCP")
        set_state_dict(
            model, optimizer, model_state_dict=values["model"], optim_state_dict=values["optim"]
        )

    calls: dict[str, tuple[str, Callable[[], None]]] = {
        "shardwise": ("shardwise", ours),
        "raw": ("shardwise", lambda: read_raw(files, rank, dist.get_world_size())),
        "raw, direct": ("shardwise", lambda: read_direct(files, rank, dist.get_world_size())),
        "DCP": ("DCP", by_dcp),
    }
    result.seconds = {name: [] for name in calls}
    for number in range(rounds):
        shift = number % len(calls)
        for name in [*calls][shift:] + [*calls][:shift]:
            source, call = calls[name]
            states.clear()
            if rank == 0:
                drop(root / source)
            result.seconds[name].append(timed(call))
    return result


class Peak:
    """The most anonymous memory of this process beyond what it began with, looked at every ms."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._start = anonymous()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.nbytes = max(self.nbytes, anonymous() - self._start)


def anonymous() -> int:
    """Bytes of memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def moves() -> dict[str, tuple[int, int]]:
    """Bytes that ranks receive when a state goes from plan to plan, and the least they could."""
    old = sw.Mesh(a=2, b=2)
    plans = {
        "ZeRO-3 to ZeRO-1": (old, sw.zero(3, ("a", "b")), sw.zero(1, ("a", "b"))),
        "ZeRO-3 to replicas": (old, sw.zero(3, ("a", "b")), sw.zero(0, ("a", "b"))),
        "ZeRO-3 to half as many shards": (old, sw.zero(3, ("a", "b")), sw.zero(3, "b")),
        "half as many shards to ZeRO-3": (old, sw.zero(3, "b"), sw.zero(3, ("a", "b"))),
        "axes in the other order": (old, sw.zero(3, ("a", "b")), sw.zero(3, ("b", "a"))),
        "ZeRO-1 to ZeRO-3": (old, sw.zero(1, ("a", "b")), sw.zero(3, ("a", "b"))),
    }
    model = make_model(1)
    found: dict[str, tuple[int, int]] = {}
    for name, (mesh, before, after) in plans.items():
        first, second = sw.plan(model, mesh, before), sw.plan(model, mesh, after)
        told: list[Any] = []
        with sw.simulate(mesh):
            state = sw.lower(first, loss_fn, sw.optim.adamw(1e-3)).bind().init(0)
            sw.reshard(state, first, second, report=told.append)
        received = sum(one.received_bytes for one in told)
        found[name] = received, sum(one.bound_bytes for one in told)
    return found


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1300, help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="on the disk to measure")
    parser.add_argument("--page", type=Path, default=FOLDER / "CHECKPOINTS.md")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.dir.absolute()))
    sizes = (options.mb, options.rounds)
    loads: dict[str, Result] = {}
    try:
        (root / "two").mkdir()
        saved = sw.spawn(save, RANKS, args=(str(root / "two"), *sizes), timeout=3600)[0]
        loads["2 to 1"] = sw.spawn(load, 1, args=(str(root / "two"), *sizes), timeout=3600)[0]
        shutil.rmtree(root / "two")
        (root / "one").mkdir()
        sw.spawn(save, 1, args=(str(root / "one"), options.mb, 1), timeout=3600)
        loads["1 to 2"] = sw.spawn(load, RANKS, args=(str(root / "one"), *sizes), timeout=3600)[0]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(write(options.page, saved, loads, moves(), options.rounds))
    if importlib.util.find_spec("matplotlib"):
        from benchmarks.checkpoint_plot import plot  # noqa: PLC0415 - of the extra `bench`

        plot(options.page.parent, saved, loads)


if __name__ == "__main__":
    main()
