"""Chunks as zip entries of `torch.save`, where they lie, and files written in one pass."""

from __future__ import annotations

import errno
import io
import math
import os
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise.sharding.checkpoint import disk, placing
from shardwise.sharding.checkpoint.disk import DiskFile
from shardwise.sharding.checkpoint.manifest import SUM_BYTES
from shardwise.sharding.checkpoint.placing import cut, digest, file_sizes, own_chunks, place
from shardwise.sharding.checkpoint.records import Box, Record
from shardwise.sharding.checkpoint.zipped import ALIGN, after, before
from shardwise.sharding.errors import CheckpointError
from shardwise.sharding.layout import Entry, make_layout
from shardwise.sharding.lying import Grid, Lying

pytestmark = pytest.mark.abstract

CPU = torch.device("cpu")
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    raw = torch.arange(math.prod(shape) * dtype.itemsize) % (2 if dtype == torch.bool else 119)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def raw(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# -- entries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3), (1, 1, 7)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_entry_is_what_torch_saves(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = filled(shape, dtype)
    head = before(shape, dtype)
    entry = head + raw(value) + after(shape, dtype, zlib.crc32(raw(value)))
    assert len(head) % ALIGN == 0
    loaded = torch.load(io.BytesIO(entry), weights_only=True)
    assert (loaded.shape, loaded.dtype) == (value.shape, dtype)
    assert raw(loaded) == raw(value)
    mine = zipfile.ZipFile(io.BytesIO(entry))
    assert mine.testzip() is None
    theirs = io.BytesIO()
    torch.save(value, theirs)
    assert mine.read("archive/data.pkl") == zipfile.ZipFile(theirs).read("archive/data.pkl")


def test_a_wrong_sum_is_seen_by_others() -> None:
    value = filled((2, 3), torch.float32)
    entry = before((2, 3), torch.float32) + raw(value) + after((2, 3), torch.float32, 1)
    assert zipfile.ZipFile(io.BytesIO(entry)).testzip() == "archive/data/0"


# -- cutting and placing ------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_pieces_cover_a_rectangle_in_row_major_order(
    sizes: list[int], holders: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "CHUNK_BYTES", data.draw(st.sampled_from([4, 16, 64, 400])))
        patch.setattr(placing, "_SHARED_BYTES", 8)
        pieces = list(cut(Box((3,) * len(sizes), tuple(sizes)), torch.float32, holders))
        limit = placing.CHUNK_BYTES
    numbers = torch.arange(math.prod(sizes)).reshape(sizes)
    seen = []
    for piece in pieces:
        spans = [slice(a - 3, a - 3 + n) for a, n in zip(piece.offsets, piece.sizes, strict=True)]
        seen.append(numbers[tuple(spans)].reshape(-1))
        assert piece.numel * 4 <= limit
    assert torch.equal(torch.cat(seen), numbers.reshape(-1))


def record(name: str, shape: tuple[int, ...], mesh: sw.Mesh, axes: tuple[str, ...]) -> Record:
    layout = make_layout([(name, shape, 0)], axes, mesh, torch.float32)
    block = torch.zeros(layout.length)
    entry = layout.entries[0]
    return Record(f"params/{name}", Lying(Grid(mesh, axes), entry), entry.view(block), name)


def test_replicas_share_the_bytes() -> None:
    """ZeRO-0 on four ranks: each writes about a quarter, and every element is written once."""
    mesh = sw.Mesh(dp=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "_SHARED_BYTES", 10_000)
        placed = place([record(n, (100, 500), mesh, ()) for n in "abc"], 4)
    written = file_sizes(placed)
    assert len(written) == 4
    assert max(written.values()) <= 1.3 * min(written.values())
    assert sum(chunk.box.numel for one in placed for chunk in one.chunks) == 3 * 50000
    assert sum(written.values()) <= 1.1 * 3 * 50000 * 4


def test_a_part_is_written_by_one_of_its_holders() -> None:
    mesh = sw.Mesh(dp=2, fsdp=2)
    placed = place([record("w", (5, 3), mesh, ("fsdp",))], 4)
    writers = [(chunk.offsets, chunk.sizes, chunk.file) for chunk in placed[0].chunks]
    assert writers == [((0, 0), (3, 3), "__0_0.distcp"), ((3, 0), (2, 3), "__1_0.distcp")]
    assert digest(placed) != digest(place([record("w", (5, 4), mesh, ("fsdp",))], 4))


def test_what_has_no_elements_has_one_chunk() -> None:
    entry = Entry("empty", (0, 4), 0, (0, 4), 0)
    mesh = sw.Mesh(fsdp=2)
    empty = Record("buffers/empty", Lying(Grid(mesh, ()), entry), torch.zeros(0, 4))
    placed = place([empty], 2)
    assert [chunk.sizes for chunk in placed[0].chunks] == [(0, 4)]
    [(_, values)] = own_chunks(placed, [empty], 0)
    assert values.shape == (0, 4)


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [4096, 3 * 4096, 1 << 22])
def test_a_file_holds_what_was_appended(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "BLOCK_BYTES", block)
    square = torch.randn(300, 70)
    given_ = [square, square.t(), torch.zeros(()), square[:0], square.to(torch.float8_e4m3fn)]
    expected = b""
    with DiskFile(tmp_path / "file", 10 * square.nbytes, CPU) as file:
        for value in given_:
            file.append(b"abc")
            file.append(b"")
            sums = file.append_tensor(value)
            assert sums == (zlib.crc32(raw(value)),)
            expected += b"abc" + raw(value)
            assert file.position == len(expected)
    assert (tmp_path / "file").read_bytes() == expected


def test_sums_run_and_have_one_number_a_mebibyte(tmp_path: Path) -> None:
    value = torch.randn(5 * SUM_BYTES // 8)
    with DiskFile(tmp_path / "file", value.nbytes, CPU) as file:
        sums = file.append_tensor(value)
    data = raw(value)
    assert len(sums) == 3
    assert list(sums) == [zlib.crc32(data[: n * SUM_BYTES]) for n in (1, 2, 3)]


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"others")
    with pytest.raises(CheckpointError, match="create of 0 bytes failed with EEXIST") as caught:
        DiskFile(tmp_path / "file", 1, CPU)
    assert caught.value.numbers["errno"] == errno.EEXIST
    assert (tmp_path / "file").read_bytes() == b"others"


def test_a_failed_write_says_byte_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block meets a full disk: told by the thread, raised where it is used."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 4096)
    whole = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if offset >= 8192:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(CheckpointError, match="write of 4096 bytes failed with ENOSPC") as caught,
        DiskFile(tmp_path / "file", 1 << 20, CPU) as file,
    ):
        file.append_tensor(torch.zeros(1 << 18))
    error = caught.value
    assert str(tmp_path / "file") in str(error)
    assert "byte 8192 of the file; the system says: No space left on device" in str(error)
    assert "Fix: free space, or save elsewhere; then save again" in str(error)
    assert (error.numbers["nbytes"], error.numbers["offset"]) == (4096, 8192)


def test_short_writes_go_on_and_advice_may_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, advised = os.pwrite, []

    def refuses(fd: int, start: int, nbytes: int, advice: int) -> None:
        advised.append((start, nbytes, advice))
        raise OSError(errno.EINVAL, "no advice here")

    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:3], offset))
    monkeypatch.setattr(os, "posix_fadvise", refuses)
    with DiskFile(tmp_path / "file", 8, CPU) as file:
        file.append(b"abcdefgh")
    assert advised == [(0, 8, os.POSIX_FADV_DONTNEED)]
    assert (tmp_path / "file").read_bytes() == b"abcdefgh"
