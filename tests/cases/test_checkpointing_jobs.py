"""Cases CKP-5, CKP-7 and CKP-11 where training goes on: a run that is saved in the background."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.sharding.checkpoint.latest import why_incomplete
from shardwise.sharding.errors import CheckpointError
from tests.checkpoints.runs import batch, lowered, train
from tests.checkpoints.slow import local, place, slow_disk

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(100)]

SLOW_SECONDS = 0.8


def make(timeout: float | None = None) -> tuple[sw.Program, Any]:
    program = lowered(sw.Mesh(fsdp=-1)).bind(timeout=timeout)
    return program, program.init(0)


def mutates(folder: str) -> dict[str, bool]:
    """Ones, a slow save, twos at once; a second save and a load as soon as possible."""
    slow_disk(SLOW_SECONDS)
    program, state = make()

    def fill(value: float) -> None:
        for path in state.params:
            state.params[path].to_local().fill_(value)

    fill(1.0)
    ones = place(folder, "ones")
    first = program.save_async(ones, state)
    report = {"it returned before it was done": not first.done}
    fill(2.0)
    start = time.perf_counter()
    second = program.save_async(place(folder, "twos"), state)
    report["the second waited"] = time.perf_counter() - start > 0.5 * SLOW_SECONDS
    report["the first was done by then"] = first.done
    start = time.perf_counter()
    twos = program.restore(second.path)
    report["the load waited"] = time.perf_counter() - start > 0.5 * SLOW_SECONDS
    report["twos are twos"] = all(bool((one == 2).all()) for one in local(twos))
    report["ones are ones"] = all(bool((one == 1).all()) for one in local(program.restore(ones)))
    return report


@pytest.mark.parametrize("ranks", [1, 2])
def test_ckp_5_what_is_written_is_what_was_there(ranks: int, tmp_path: Path) -> None:
    for report in sw.spawn(mutates, ranks, args=(str(tmp_path),), timeout=60):
        assert all(report.values()), report


def follows(folder: str) -> tuple[int, str | None, bool]:
    """Rank 1 would see a run without checkpoints, and reads the newest right after `wait`."""
    if os.environ["RANK"] == "0":
        slow_disk(SLOW_SECONDS)
    program, state = make()
    run = sw.Checkpointer(program, place(folder, "run"), every=2)
    state = train(program, state, range(2))
    run.after_step(state)
    run.wait()
    complete = not why_incomplete(run.folder / "step-00000002")
    if os.environ["RANK"] == "1":
        os.scandir = os.listdir = lambda *_: []  # this process ends with the test
    other = sw.Checkpointer(program, run.folder, every=2)
    other.resume_or_init(0)
    return other.step, other.resumed_from, complete


def test_ckp_7_all_ranks_follow_rank_0_and_wait_for_it(tmp_path: Path) -> None:
    newest = str(Path(place(str(tmp_path), "run", ranks=2)) / "step-00000002")
    assert sw.spawn(follows, 2, args=(str(tmp_path),), timeout=60) == [(2, newest, True)] * 2


def gated(folder: str) -> str:
    """`if rank == 0: save_async()`, once the group is made."""
    program, state = make(timeout=3)
    program.save_async(place(folder, "all"), state).wait()
    if os.environ["RANK"] != "0":
        time.sleep(4)
        return ""
    try:
        program.save_async(place(folder, "one"), state).wait()
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_ckp_11_a_save_on_one_rank_ends_and_names_the_others(tmp_path: Path) -> None:
    told, _ = sw.spawn(gated, 2, args=(str(tmp_path),), timeout=60)
    assert "program.save was not joined by all ranks: Rank 0 waited in vain for rank 1" in told
    assert "have not called it: rank 1" in told
    assert "test_checkpointing_jobs.py" in told
    assert "Fix: call save on every rank" in told
    assert os.listdir(tmp_path) == ["all-on-2"]


def asked(folder: str) -> tuple[int, bool]:
    """Rank 1 alone gets SIGTERM, between two steps."""
    program, state = make()
    with sw.Checkpointer(program, place(folder, "run"), every=100) as run:
        while run.step < 9 and not run.stopping:
            state, _ = program.step(state, program.shard_batch(batch(run.step)))
            if os.environ["RANK"] == "1" and run.step == 3:
                signal.raise_signal(signal.SIGTERM)
            run.after_step(state)
        return run.step, run.stopping


def test_ckp_11_ranks_stop_at_one_step_if_any_was_asked(tmp_path: Path) -> None:
    assert sw.spawn(asked, 2, args=(str(tmp_path),), timeout=60) == [(4, True)] * 2
    assert os.listdir(place(str(tmp_path), "run", ranks=2)) == ["step-00000004"]
