"""Which directories are complete checkpoints, and every kind of damage is found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.sharding.checkpoint.folders import remove
from shardwise.sharding.checkpoint.latest import latest, read_manifest, why_incomplete
from shardwise.sharding.checkpoint.manifest import MANIFEST
from shardwise.sharding.checkpoint.verify import verify
from shardwise.sharding.errors import CheckpointError
from tests.checkpoints.test_save import PLANS, trained

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(directory / "step-1", state)
    return directory / "step-1"


def copied(saved: Path, target: Path) -> Path:
    target.mkdir()
    for file in saved.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_latest_passes_over_what_is_not_complete(saved: Path, tmp_path: Path) -> None:
    """CKP-6: it says what it has passed over, and why."""
    assert latest(tmp_path / "nowhere") == (None, -1, ())
    copied(saved, tmp_path / "good")
    (copied(saved, tmp_path / "no-manifest") / MANIFEST).unlink()
    short = copied(saved, tmp_path / "short") / "__1_0.distcp"
    size = short.stat().st_size
    os.truncate(short, size - 1)
    (copied(saved, tmp_path / "lost") / "__2_0.distcp").unlink()
    damaged = copied(saved, tmp_path / "damaged") / MANIFEST
    damaged.write_text(damaged.read_text().replace('"step": 1', '"step": 7'))
    copied(saved, tmp_path / ".good.saving-dead.1")
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    found = latest(tmp_path)
    assert (found.path, found.step) == (tmp_path / "good", 1)
    told = dict(line.split(": ", 1) for line in found.skipped)
    assert told.pop(".good.saving-dead.1") == "this save was not completed"
    assert told.keys() == {"no-manifest", "short", "lost", "damaged"}
    assert told["no-manifest"] == "it has no shardwise.json"
    assert told["short"] == f"__1_0.distcp has {size - 1} bytes, and must have {size}"
    assert told["lost"] == "__2_0.distcp is missing"
    assert "checksum" in told["damaged"]
    assert why_incomplete(tmp_path / "good") == ""
    assert why_incomplete(tmp_path / "lost") == "__2_0.distcp is missing"


def test_a_path_without_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint at that path") as caught:
        read_manifest(tmp_path)
    assert "it has no shardwise.json" in str(caught.value)
    assert "Fix: pass the path that program.save was given" in str(caught.value)


def test_verify_finds_every_damaged_byte_range(saved: Path, tmp_path: Path) -> None:
    assert verify(saved).nbytes == read_manifest(saved).nbytes
    manifest = read_manifest(saved)
    stored = manifest.by_name["opt/mu/2.weight"]
    chunk = stored.chunks[0]
    places = {
        "the checksum of MiB 0 is": chunk.start,
        "what precedes the elements is damaged": chunk.entry[0],
        "what follows the elements is damaged": sum(chunk.entry) - 1,
    }
    for number, (text, at) in enumerate(places.items()):
        file = copied(saved, tmp_path / f"{number}") / chunk.file
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
        [fault] = verify(file.parent).faults
        assert fault.startswith(f"opt/mu/2.weight (0, 0) in {chunk.file} at byte {chunk.start}: ")
        assert text in fault


def test_verify_finds_lost_files_and_rectangles(saved: Path, tmp_path: Path) -> None:
    lost = copied(saved, tmp_path / "lost")
    (lost / "__0_0.distcp").unlink()
    assert any("No such file" in fault for fault in verify(lost).faults)
    short = copied(saved, tmp_path / "short")
    os.truncate(short / "__0_0.distcp", 700)
    faults = verify(short).faults
    assert any("has 700 bytes" in fault for fault in faults)
    assert any("bytes early in MiB 0" in fault for fault in faults)
    holes = copied(saved, tmp_path / "holes")
    manifest = read_manifest(holes)
    first, second, *others = manifest.tensors
    first = replace(first, chunks=first.chunks[1:])
    second = replace(second, chunks=(*second.chunks, second.chunks[0]))
    text = replace(manifest, tensors=(first, second, *others)).to_json()
    (holes / MANIFEST).write_text(text)
    faults = verify(holes).faults
    assert f"{first.name}: 1 rectangles are in no chunk, 0 in several" in faults
    assert f"{second.name}: 0 rectangles are in no chunk, 1 in several" in faults
    assert verify(tmp_path).faults[0].startswith("There is no complete checkpoint")


def test_removing_hides_first(saved: Path, tmp_path: Path) -> None:
    one = copied(saved, tmp_path / "one")
    (tmp_path / ".two.removed-1").mkdir()
    remove(one)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match="rename of 0 bytes failed with ENOENT"):
        remove(one)
