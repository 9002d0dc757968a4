"""Kills saves at random calls: `python -m tests.checkpoints.killing 200 [SEED]`.

Each round forks a process that saves and dies by SIGKILL in the middle of a random call of Python
or C, in any of its threads; so it may leave a half-written file, a directory without manifest, or
one that was not yet renamed. Then what is there is read, and a whole save goes over it.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.sharding.checkpoint import disk, folders
from shardwise.sharding.checkpoint.folders import remove, resolve
from shardwise.sharding.checkpoint.latest import latest, read_manifest
from shardwise.sharding.checkpoint.verify import verify
from shardwise.sharding.checkpoint.writing import Session

MESH = sw.Mesh(fsdp=2)
OLD, NEW = "step-10", "step-20"


def build() -> tuple[sw.Program, Any, Any]:
    """A program on two simulated ranks, and its state after one and after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 300))
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    program = sw.lower(plan, lambda model, x: model(x).square().mean(), sw.optim.adamw(0.01)).bind()
    batch = program.shard_batch(torch.ones(2, 64))
    first, _ = program.step(program.init(0), batch)
    second, _ = program.step(first, batch, donate=False)
    return program, first, second


def count_calls(run: Callable[[], None]) -> int:
    """How many calls a save makes, in all threads."""
    calls = itertools.count()
    profile(lambda *_: next(calls))
    run()
    profile(None)
    return next(calls)


def dies_at(call: int, run: Callable[[], None]) -> bool:
    """Fork; the child dies at one of its calls. False: it got through before."""
    pid = os.fork()
    if pid == 0:
        calls = itertools.count()

        def kill(*_: object) -> None:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)

        profile(kill)
        run()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def profile(function: Any) -> None:
    """Have every call in this and in later threads seen."""
    threading.setprofile(function)
    sys.setprofile(function)


def whole(path: Path) -> int:
    """The step of a checkpoint that must be complete, down to its checksums."""
    path = resolve(path)
    report = verify(path)
    assert not report.faults, report.faults
    assert report.tensors == 22, report
    return read_manifest(path).step


def restart(program: sw.Program) -> None:
    """Forget the token, as a new job would have another one."""
    for rank in program._ranks:
        rank.saver._session = Session()


def kill(directory: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Rounds that died, and that found the new checkpoint complete."""
    rng = random.Random(seed)
    disk.BLOCK_BYTES = 1 << 16  # so that a save of this size is written by its thread
    with sw.simulate(MESH):
        program, first, second = build()
        program.save(directory / OLD, first)

        def save(name: str, *, overwrite: bool = False) -> None:
            program.save(directory / name, second, overwrite=overwrite)

        totals = [
            count_calls(lambda: save(NEW)),
            count_calls(lambda: save(NEW, overwrite=True)),
        ]
        died = found = 0
        for number in range(rounds):
            over = number % 3 == 2
            if not over:
                remove(directory / NEW)
            elif whole(directory / NEW) == 2:
                program.save(directory / NEW, first, overwrite=True)
            # The end of a save, where names change, is a small part of its calls.
            call = rng.randrange(0 if number % 2 else totals[over] * 19 // 20, totals[over])
            restart(program)
            with pytest.MonkeyPatch.context() as patch:
                if number % 6 == 5:  # where names cannot be exchanged in one step
                    patch.setattr(folders, "_exchange", lambda *_: False)
                died += dies_at(call, lambda over=over: save(NEW, overwrite=over))
            left = sorted(os.listdir(directory))
            newest = latest(directory)
            assert newest.path is not None, (call, left)
            assert whole(directory / OLD) == 1
            assert newest.step == whole(newest.path), (call, left)
            assert newest.step == 1 or newest.path.name == NEW or over, (call, left)
            if over:
                assert whole(directory / NEW) in (1, 2), (call, left)
            found += newest.step == 2
            restart(program)
            save(NEW, overwrite=True)
            assert whole(directory / NEW) == 2
            assert sorted(os.listdir(directory)) == [OLD, NEW], (call, left)
    return died, found


if __name__ == "__main__":
    asked = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as made:
        dead, complete = kill(Path(made), asked, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{asked} saves: {dead} killed, {complete} had completed, none torn")
