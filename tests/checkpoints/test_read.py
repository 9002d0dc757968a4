"""Rectangles of stored tensors come back bit for bit, and damage is named."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.sharding.checkpoint import read as reading
from shardwise.sharding.checkpoint.manifest import SUM_BYTES
from shardwise.sharding.checkpoint.read import Job, Reader, pieces_of
from shardwise.sharding.checkpoint.records import Box
from shardwise.sharding.errors import CheckpointError
from tests.checkpoints.written import write

pytestmark = pytest.mark.abstract

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), generator=generator)
    if dtype != torch.bool:
        bits = torch.randint(0, 120, bits.shape, generator=generator)
    return bits.to(torch.uint8).view(dtype).reshape(shape)


def bits(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    cuts = [sorted({*draw(st.lists(st.integers(1, max(1, s)), max_size=2)), s}) for s in shape]
    cuts = [[end for end in ends if end <= s] for ends, s in zip(cuts, shape, strict=True)]
    starts = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, s - a)) for s, a in zip(shape, starts, strict=True)]
    return shape, cuts, Box(tuple(starts), tuple(sizes))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(slices(), st.sampled_from(DTYPES), st.booleans())
def test_any_rectangle_of_any_cut_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[tuple[int, ...], list[list[int]], Box],
    dtype: torch.dtype,
    strided: bool,
) -> None:
    shape, cuts, box = drawn
    directory = tmp_path_factory.mktemp("slices")
    value = values(shape, dtype)
    stored = write(directory, "params/w", value, cuts)
    target = torch.zeros(box.sizes, dtype=dtype)
    if strided:
        order = tuple(reversed(range(len(shape))))
        target = torch.zeros(tuple(reversed(box.sizes)), dtype=dtype).permute(order)
    with Reader(directory) as reader:
        reader.fill([Job(stored, box, target)])
    wanted = value
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        wanted = wanted.narrow(dim, start, size)
    assert bits(target) == bits(wanted)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 64 bytes, so that small tensors have many; the manifest's sums follow."""
    for module in ("shardwise.sharding.checkpoint.read", "tests.checkpoints.written"):
        monkeypatch.setattr(f"{module}.SUM_BYTES", 64)
    monkeypatch.setattr(reading, "STAGE_BYTES", 512)
    monkeypatch.setattr(reading, "_DIRECT_BYTES", 256)
    monkeypatch.setattr(reading, "_PITCH_BYTES", 128)
    return 64


BOXES = [
    Box((0, 0), (40, 50)),
    Box((3, 0), (30, 50)),
    Box((3, 7), (30, 11)),
    Box((39, 49), (1, 1)),
    Box((0, 10), (40, 1)),
    Box((17, 0), (1, 50)),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("cuts", [[[40], [50]], [[13, 26, 40], [50]], [[40], [20, 50]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_of_many_blocks(
    tmp_path: Path, small_blocks: int, box: Box, cuts: list[list[int]], dtype: torch.dtype
) -> None:
    """Rows that end inside of blocks, runs through the buffer, casts."""
    value = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    stored = write(tmp_path, "params/w", value, cuts)
    assert max(len(chunk.sums) for chunk in stored.chunks) > 30
    target = torch.zeros(box.sizes, dtype=dtype)
    with Reader(tmp_path, threads=1) as reader:
        reader.fill([Job(stored, box, target)])
    (r, c), (rows, columns) = box
    assert torch.equal(target, value[r : r + rows, c : c + columns].to(dtype))


def test_bytes_read_are_those_of_the_slice_and_two_blocks(
    tmp_path: Path, small_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(4000.0).reshape(80, 50)
    stored = write(tmp_path, "params/w", value, [[80], [50]])
    counted: list[int] = []
    original = os.preadv

    def count(descriptor: int, into: list[memoryview], place: int) -> int:
        counted.append(len(into[0]))
        return original(descriptor, into, place)

    monkeypatch.setattr(os, "preadv", count)
    for rows, start in [(20, 3), (1, 17), (77, 1)]:
        for dtype in (torch.float32, torch.float64):
            counted.clear()
            target = torch.zeros((rows, 50), dtype=dtype)
            with Reader(tmp_path) as reader:
                reader.fill([Job(stored, Box((start, 0), (rows, 50)), target)])
            assert rows * 200 <= sum(counted) <= rows * 200 + 2 * small_blocks
            assert torch.equal(target, value[start : start + rows].to(dtype))


def test_real_blocks_straight_and_through_the_buffer(tmp_path: Path) -> None:
    """More than one buffer of true blocks, from an odd byte on."""
    value = torch.randn(3000, 1001, generator=torch.Generator().manual_seed(0))
    stored = write(tmp_path, "params/w", value, [[1500, 3000], [1001]])
    straight, cast, columns = torch.zeros(2500, 1001), torch.zeros(2500, 1001).double(), None
    columns = torch.zeros(3000, 17)
    with Reader(tmp_path) as reader:
        reader.fill(
            [
                Job(stored, Box((333, 0), (2500, 1001)), straight),
                Job(stored, Box((333, 0), (2500, 1001)), cast),
                Job(stored, Box((0, 900), (3000, 17)), columns),
            ]
        )
    assert torch.equal(straight, value[333:2833])
    assert torch.equal(cast, value[333:2833].double())
    assert torch.equal(columns, value[:, 900:917])


def damaged(tmp_path: Path, at: int) -> Any:
    value = torch.zeros(2 * SUM_BYTES, dtype=torch.int8)
    stored = write(tmp_path, "params/w", value, [[2 * SUM_BYTES]])
    file = tmp_path / "__0_0.distcp"
    with file.open("r+b") as out:
        out.seek(stored.chunks[0].start + at)
        out.write(b"\x01")
    return stored


def test_damage_is_found_where_it_is_read(tmp_path: Path) -> None:
    stored = damaged(tmp_path, SUM_BYTES + 5)
    target = torch.zeros(SUM_BYTES, dtype=torch.int8)
    with Reader(tmp_path) as reader:
        reader.fill([Job(stored, Box((0,), (SUM_BYTES,)), target)])  # the sound half
        with pytest.raises(CheckpointError) as caught:
            reader.fill([Job(stored, Box((SUM_BYTES,), (SUM_BYTES,)), target)])
    error = caught.value
    assert "params/w cannot be read: the checksum of its block 1 is" in str(error)
    assert f"byte {SUM_BYTES + 7:,}" in str(error)
    assert "restore another checkpoint" in error.fix
    assert error.numbers["byte"] == SUM_BYTES + 7
    assert error.numbers["file"].endswith("__0_0.distcp")


def test_a_short_a_missing_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    value = torch.zeros(100)
    stored = write(tmp_path, "params/w", value, [[100]])
    job = Job(stored, Box((0,), (100,)), torch.zeros(100))
    file = tmp_path / "__0_0.distcp"
    os.truncate(file, 107)
    with (
        Reader(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"the file ends there, 300 bytes early"),
    ):
        reader.fill([job])
    file.unlink()
    with (
        Reader(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"it cannot be opened: .*No such file"),
    ):
        reader.fill([job])
    for name in ("/etc/hostname", "../x"):
        other = replace(stored, chunks=(replace(stored.chunks[0], file=name),))
        with (
            Reader(tmp_path) as reader,
            pytest.raises(CheckpointError, match="lies outside of the checkpoint"),
        ):
            reader.fill([replace(job, stored=other)])


def test_chunks_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    stored = write(tmp_path, "params/w", torch.zeros(10, 4), [[5, 10], [4]])
    half = replace(stored, chunks=stored.chunks[:1])
    with pytest.raises(CheckpointError) as caught:
        list(pieces_of(Job(half, Box((0, 0), (10, 4)), torch.zeros(10, 4))))
    assert "params/w is not whole" in str(caught.value)
    assert "1 chunks have 20 of 40 elements" in str(caught.value)
    assert "checkpoint verify" in caught.value.fix
