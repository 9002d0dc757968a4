"""Saves in the background, on real ranks: what they write, what they wait for, how they fail."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.sharding.checkpoint.latest import read_manifest, why_incomplete
from shardwise.sharding.errors import CheckpointError
from tests.checkpoints.runs import bits, lowered, train
from tests.checkpoints.slow import local, place, slow_disk

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(100)]

SLOW_SECONDS = 0.8


def make() -> tuple[sw.Program, Any]:
    program = lowered(sw.Mesh(fsdp=-1)).bind()
    return program, program.init(0)


def steps_go_on(folder: str) -> bool:
    """Donation: steps taken while the save is written use the memory that was saved."""
    slow_disk(SLOW_SECONDS)
    program, state = make()
    state = train(program, state, range(2))
    kept = local(state)
    writing = program.save_async(place(folder, "two"), state)
    state = train(program, state, range(2, 5))
    assert not writing.done
    writing.wait()
    loaded = program.restore(writing.path)
    same = all(torch.equal(a, b) for a, b in zip(kept, local(loaded), strict=True))
    return same and int(loaded.step) == 2 and int(state.step) == 5


def fails(folder: str, how: str) -> str:
    """The error that this rank sees, of a save that only rank 0 can know to fail."""
    program, state = make()
    taken = Path(place(folder, how))
    taken.mkdir(exist_ok=True)
    (taken / "thesis.txt").write_text("not yours")
    writing = program.save_async(taken, state)
    state = train(program, state, range(1))
    try:
        if how == "wait":
            writing.wait()
        elif how == "save":
            program.save_async(place(folder, "next"), state)
        else:
            program.restore(place(folder, "next"))
    except CheckpointError as error:
        # What was told is over: the next save works.
        program.save(place(folder, f"after-{how}"), state)
        return str(error)
    return ""


def leaves(folder: str) -> None:
    """End without waiting."""
    slow_disk(SLOW_SECONDS)
    program, state = make()
    program.save_async(place(folder, "left"), state)


def counts_collectives(folder: str) -> dict[str, Any]:
    """Which groups are used by the first and by later saves, and whether groups are made."""
    program, state = make()
    used: list[tuple[str, Any]] = []

    def record(name: str) -> None:
        run = getattr(dist, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            used.append((name, kwargs.get("group")))
            return run(*args, **kwargs)

        setattr(dist, name, recorded)

    for name in ("new_group", "all_gather_object", "all_to_all_single", "broadcast", "all_reduce"):
        record(name)
    report: dict[str, Any] = {}
    groups = set()
    for index in range(3):
        used.clear()
        program.save_async(place(folder, f"{index}"), state).wait()
        report[f"save {index}"] = [name for name, _ in used]
        groups |= {group for name, group in used if name != "new_group"}
    used.clear()
    train(program, state, range(1))
    report["apart"] = groups.isdisjoint({group for _, group in used}) and len(groups) == 1
    return report


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_go_on_while_a_save_is_written(ranks: int, tmp_path: Path) -> None:
    assert all(sw.spawn(steps_go_on, ranks, args=(str(tmp_path),), timeout=60))


@pytest.mark.parametrize("how", ["wait", "save", "restore"])
def test_a_failure_is_seen_on_all_ranks_at_the_next_call(how: str, tmp_path: Path) -> None:
    first, second = sw.spawn(fails, 2, args=(str(tmp_path), how), timeout=60)
    assert "it holds 1 files of others" in first
    assert "Rank 0 of 2 failed to save, so no rank has." in second
    assert "it holds 1 files of others" in second
    assert "Fix: see the failure of that rank above; then save again" in second
    assert not why_incomplete(tmp_path / f"after-{how}-on-2")
    assert sorted(os.listdir(tmp_path / f"{how}-on-2")) == ["thesis.txt"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_ends_when_its_save_has_ended(ranks: int, tmp_path: Path) -> None:
    sw.spawn(leaves, ranks, args=(str(tmp_path),), timeout=60)
    assert os.listdir(tmp_path) == [f"left-on-{ranks}"]
    assert not why_incomplete(tmp_path / f"left-on-{ranks}")


def test_later_saves_have_no_collective_but_their_votes(tmp_path: Path) -> None:
    for report in sw.spawn(counts_collectives, 2, args=(str(tmp_path),), timeout=60):
        assert report["save 0"] == ["new_group", *["all_gather_object"] * 3]
        assert report["save 1"] == report["save 2"] == ["all_gather_object"] * 2
        assert report["apart"]


def holds(folder: str) -> tuple[int, int, int]:
    """Bytes of copies after a small state, a second save, and what the file of this rank says."""
    program, state = make()
    first = program.save_async(place(folder, "one"), state)
    first.wait()
    again = program.save_async(place(folder, "two"), state)
    again.wait()
    own = f"__{os.environ['RANK']}_0.distcp"
    nbytes = sum(
        -(-c.box.numel * one.dtype.itemsize // 64) * 64
        for one in read_manifest(again.path).tensors
        for c in one.chunks
        if c.file == own
    )
    return first.copy_bytes, again.copy_bytes, nbytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_holds_what_this_rank_writes_and_no_more(ranks: int, tmp_path: Path) -> None:
    reports = sw.spawn(holds, ranks, args=(str(tmp_path),), timeout=60)
    for first, again, predicted in reports:
        assert first == again == predicted
    size = sum(path.stat().st_size for path in (tmp_path / f"two-on-{ranks}").glob("__*"))
    assert sum(again for _, again, _ in reports) < size


def test_in_a_simulation_it_has_ended_on_return(tmp_path: Path) -> None:
    with sw.simulate(sw.Mesh(fsdp=3)):
        program = lowered(sw.Mesh(fsdp=3)).bind()
        state = train(program, program.init(0), range(2))
        saved = bits(state)
        writing = program.save_async(tmp_path / "two", state)
        assert writing.done
        writing.wait()
        train(program, state, range(2, 3))
        assert bits(program.restore(writing.path)) == saved
        with pytest.raises(CheckpointError, match="There is a complete checkpoint of that name"):
            program.save_async(tmp_path / "two", program.init(0))


def test_a_failure_that_nobody_waited_for_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("not yours")
    program = lowered(sw.Mesh(fsdp=1)).bind()
    writing = program.save_async(tmp_path / "taken", program.init(0))
    while not writing.done:
        time.sleep(0.01)
    del writing, program

    gc.collect()
    told = capsys.readouterr().err
    assert "save_async 0 failed, and nothing waited for it" in told
    assert "it holds 1 files of others" in told
