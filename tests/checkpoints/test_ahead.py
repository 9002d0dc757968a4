"""Reading ahead: which blocks each rank asks for, when it ends, and what it leaves alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shardwise.sharding.checkpoint.ahead import ReadAhead

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="takes no advice")

BLOCK = 4 << 20
SIZES = {"a": 2 * BLOCK + 5, "b": 0, "c": 3}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    return tmp_path


def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """First bytes and sizes that the system is asked for, as they are."""
    asked: list[tuple[int, int]] = []
    real = os.posix_fadvise

    def advise(descriptor: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        real(descriptor, start, size, advice)
        asked.append((start, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return asked


def test_ranks_take_turns_at_the_blocks_of_all_files(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = advised(monkeypatch)
    totals = []
    for turn in range(2):
        with ReadAhead(files, SIZES, turn=turn, turns=2) as ahead:
            ahead.join()
        totals.append(ahead.nbytes)
    assert asked == [(0, BLOCK), (2 * BLOCK, 5), (BLOCK, BLOCK), (0, 3)]
    assert sum(totals) == sum(SIZES.values())


def test_it_ends_after_the_block_that_is_being_asked_for(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, goes_on = threading.Event(), threading.Event()
    calls = []

    def advise(descriptor: int, start: int, size: int, advice: int) -> None:
        calls.append(start)
        entered.set()
        assert goes_on.wait(10)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    ahead = ReadAhead(files, SIZES)
    with ahead:
        assert entered.wait(10)
        threading.Timer(0.05, goes_on.set).start()
    assert calls == [0]
    assert ahead.nbytes == BLOCK


def test_files_that_are_missing_or_outside_are_left_to_the_reader(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = advised(monkeypatch)
    inner = files / "inner"
    inner.mkdir()
    with ReadAhead(inner, ["../a", "none", str(files / "a")]) as ahead:
        ahead.join()
    assert not asked
    assert ahead.nbytes == 0


def test_descriptors_are_closed(files: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(3):
        with ReadAhead(files, SIZES):
            pass
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before
