"""Files without a name: regions, coherence, room, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.offload.engine import Engine
from shardwise.offload.files import Folder
from shardwise.offload.requests import read_bytes, write_bytes
from shardwise.sharding.errors import OffloadError
from shardwise.sharding.host_pages import PAGE_BYTES

pytestmark = pytest.mark.abstract

ROOT = Path(__file__).parents[2]


def test_tensors_lie_in_page_aligned_regions_that_nobody_can_see(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    tensors = [folder.empty(length, torch.float32) for length in (1, 1024, 1025, 5000)]
    regions = [folder.region(tensor) for tensor in tensors]
    assert [region and region.offset % PAGE_BYTES for region in regions] == [0] * 4
    assert [region and region.nbytes for region in regions] == [4, 4096, 4100, 20000]
    assert os.listdir(tmp_path) == []
    assert folder.in_use_bytes == folder.peak_bytes == (1 + 1 + 2 + 5) * PAGE_BYTES
    assert folder.empty(0, torch.float32).shape == (0,)


def test_a_slice_has_its_own_place_and_strangers_have_none(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path), Folder(tmp_path)
    flat = folder.empty(4096, torch.float64)
    whole, part = folder.region(flat), folder.region(flat[100:200])
    assert whole is not None
    assert part is not None
    assert (part.offset - whole.offset, part.nbytes, part.end) == (800, 800, whole.end)
    assert folder.region(flat[::2]) is None
    assert folder.holds(flat[::2])
    assert folder.region(torch.ones(3)) is None
    assert other.region(flat) is None
    assert folder.region(flat.to("meta")) is None


def test_blocks_are_used_again_when_a_tensor_dies(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    one, two = folder.empty(100_000, torch.float32), folder.empty(10, torch.float32)
    two.fill_(7)
    first = folder.region(one)
    held = os.fstat(folder.descriptor).st_blocks
    view = one[5:]
    del one
    gc.collect()
    assert folder.in_use_bytes == 98 * PAGE_BYTES + PAGE_BYTES  # a view keeps it
    del view
    gc.collect()
    assert folder.in_use_bytes == PAGE_BYTES
    assert os.fstat(folder.descriptor).st_blocks < held
    again = folder.empty(50_000, torch.float32)
    second = folder.region(again)
    assert first is not None
    assert second is not None
    assert second.offset == first.offset
    assert second.number != first.number
    assert two.tolist() == [7.0] * 10


def test_mapping_and_requests_see_the_same_values(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    flat = folder.empty(1024 * 8, torch.float32)
    flat.copy_(torch.arange(flat.numel()))
    region = folder.region(flat)
    assert region is not None
    buffer = Engine(folder.region).fetch(flat)
    assert torch.equal(buffer.take(), flat)
    values = buffer.take() * 2
    pages = torch.empty(flat.nbytes + PAGE_BYTES, dtype=torch.uint8)
    pages = pages[-pages.data_ptr() % PAGE_BYTES :][: flat.nbytes]
    pages.copy_(values.view(torch.uint8))
    write_bytes(region, region.offset, pages)
    assert torch.equal(flat, values)
    flat[3] = -1
    read_bytes(region, region.offset, pages)
    assert pages.view(torch.float32)[3] == -1


def test_a_tensor_outlives_its_folder(tmp_path: Path) -> None:
    flat = Folder(tmp_path).empty(3000, torch.float32)
    gc.collect()
    assert flat.fill_(2).sum() == 6000


@pytest.mark.parametrize("case", ["missing", "a file"])
def test_a_folder_that_is_none(tmp_path: Path, case: str) -> None:
    path = tmp_path / "gone"
    if case == "a file":
        path.write_text("")
    with pytest.raises(OffloadError, match=str(path)) as caught:
        Folder(path, rank=3)
    assert caught.value.numbers == {"path": str(path), "rank": 3}
    assert ("does not exist" if case == "missing" else "is no folder") in str(caught.value)
    assert "make the folder" in str(caught.value)


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(OffloadError, match="cannot be written to"):
        Folder(tmp_path)


def test_too_little_room_is_told_before_anything_is_made(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(OffloadError, match="no room for") as caught:
        folder.check(1 << 60)
    assert caught.value.numbers["needed"] == 1 << 60
    assert caught.value.numbers["free"] < 1 << 60


def test_a_full_disk_leaves_what_is_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    kept = folder.empty(2000, torch.float32).fill_(3)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OffloadError, match="8,192 bytes") as caught:
            folder.empty(2000, torch.float32)
    assert caught.value.numbers["errno"] == errno.ENOSPC
    assert folder.in_use_bytes == 2 * PAGE_BYTES
    assert kept.sum() == 6000
    assert folder.empty(2000, torch.float32).shape == (2000,)


def run(code: str, *, prefix: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{prefix} exec {sys.executable} -c '{code}'"
    return subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, torch; from shardwise.offload.files import Folder;"
        f'flat = Folder("{tmp_path}").empty(1 << 20, torch.float32).fill_(1);'
        f'assert os.listdir("{tmp_path}") == [];'
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run(code).returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_hundreds_of_regions_take_two_descriptors(tmp_path: Path) -> None:
    code = (
        "import torch; from shardwise.offload.files import Folder;"
        f'folder = Folder("{tmp_path}");'
        "all = [folder.empty(10, torch.float32).fill_(n) for n in range(600)];"
        "print(sum(float(one.sum()) for one in all))"
    )
    done = run(code, prefix="ulimit -n 256;")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(10.0 * sum(range(600)))
