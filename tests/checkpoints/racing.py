"""Two jobs that save one path at once: `python -m tests.checkpoints.racing DIRECTORY ROUNDS`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import shardwise as sw
from shardwise.sharding.checkpoint.verify import verify
from shardwise.sharding.errors import CheckpointError
from tests.checkpoints.killing import MESH, build, restart

SAVED, REFUSED, FAILED = 0, 3, 4


def race(directory: Path, rounds: int) -> str:
    """Fork two jobs twice: to be the first, and to overwrite each other."""
    with sw.simulate(MESH):
        program, state, _ = build()

        def once() -> int:
            try:
                program.save(directory / "one", state)
            except CheckpointError as error:
                return REFUSED if "There is a complete checkpoint" in str(error) else FAILED
            return SAVED

        def often() -> int:
            for _ in range(rounds):
                program.save(directory / "two", state, overwrite=True)
            return SAVED

        first = _both(program, once)
        both = _both(program, often)
    for name in ("one", "two"):
        report = verify(directory / name)
        assert not report.faults, report.faults
    assert sorted(os.listdir(directory)) == ["one", "two"], os.listdir(directory)
    assert both == [SAVED, SAVED], both
    counts = first.count(SAVED), first.count(REFUSED)
    return f"first: {counts[0]} saved, {counts[1]} refused; overwritten {2 * rounds} times, whole"


def _both(program: sw.Program, work: Callable[[], int]) -> list[int]:
    children = [_fork(program, work) for _ in range(2)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _fork(program: sw.Program, work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        restart(program)
        code = 1
        try:
            code = work()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


if __name__ == "__main__":
    print(race(Path(sys.argv[1]), int(sys.argv[2])))
