"""The disk engine: any cut gives the same values, chunks overlap, and failures end cleanly."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.offload.engine import Engine, Piece, pool_bytes
from shardwise.offload.files import Folder
from shardwise.sharding.errors import OffloadError
from shardwise.sharding.host_pages import PAGE_BYTES

pytestmark = pytest.mark.abstract

CHUNK = 16 * PAGE_BYTES


@pytest.fixture(scope="module")
def folder() -> Iterator[Folder]:
    with tempfile.TemporaryDirectory() as path:
        yield Folder(path)


def on_disk(folder: Folder, values: Tensor) -> Tensor:
    return folder.empty(values.numel(), values.dtype).copy_(values)


def mix(number: int, start: int, stop: int, tensors: Sequence[Tensor]) -> None:
    """What tells where each element was: value, place and piece."""
    first, second, read = tensors
    place = torch.arange(start, stop, dtype=torch.float32) + 1000 * number
    second.add_(first.double() + read)
    first.mul_(2).add_(place)


@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=3),
    st.integers(16, 40),
    st.integers(1, 3),
    st.integers(0, 40),
    st.booleans(),
)
def test_streaming_gives_what_memory_gives(
    folder: Folder, lengths: list[int], pages: int, sets: int, offset: int, read_on_disk: bool
) -> None:
    engine = Engine(folder.region, chunk_bytes=pages * PAGE_BYTES, sets=sets, threads=2, debug=True)
    pieces: list[Piece] = []
    expected: list[tuple[Tensor, Tensor]] = []
    keep: list[tuple[Tensor, Tensor]] = []
    skip = 32 * offset
    for number, length in enumerate(lengths):
        around = torch.randn(skip + length + 50)
        first, second = around.clone(), torch.randn(length, dtype=torch.float64)
        read = torch.randn(length)
        mapped = on_disk(folder, around)
        other = on_disk(folder, second)
        given_read = on_disk(folder, read) if read_on_disk else read
        pieces.append(Piece((mapped[skip : skip + length], other), (given_read,)))
        mix(number, 0, length, (first[skip : skip + length], second, read))
        expected.append((first, second))
        keep.append((mapped, other))
    engine.stream(pieces, mix)
    for (first, second), (mapped, other) in zip(expected, keep, strict=True):
        assert torch.equal(mapped, first)
        assert torch.equal(other, second)
    assert engine.pool is not None
    assert engine.pool.num_free == engine.pool.count


def test_24_bytes_per_parameter(folder: Folder) -> None:
    length = CHUNK
    state = tuple(on_disk(folder, torch.zeros(length)) for _ in range(3))
    engine = Engine(folder.region, chunk_bytes=CHUNK)
    engine.stream([Piece(state, (torch.ones(length),))], lambda *_: None)
    assert (engine.read_bytes, engine.written_bytes) == (12 * length, 12 * length)
    assert engine.pool is not None
    assert engine.pool.nbytes == pool_bytes([(3, state[0].nbytes)], CHUNK)
    assert engine.pool.high_water == engine.pool.count


@pytest.mark.parametrize("skip", [0, 7])
def test_what_is_only_written_is_not_read(folder: Folder, skip: int) -> None:
    length = 3 * CHUNK // 4 + 50
    around = on_disk(folder, torch.full((length + 2 * skip,), -1.0))
    fresh = around[skip : skip + length]
    engine = Engine(folder.region, chunk_bytes=CHUNK, threads=2, debug=True)
    source = torch.randn(length)

    def copy(number: int, start: int, stop: int, tensors: Sequence[Tensor]) -> None:
        target, values = tensors
        target.copy_(values)

    for _ in range(2):  # the second time debug knows a sum, of what is written over
        engine.stream([Piece((), (source,), (fresh,))], copy)
        assert torch.equal(fresh, source)
        source = source + 1
    assert engine.read_bytes == 0
    ends = torch.cat([around[:skip], around[skip + length :]])
    assert torch.equal(ends, torch.full_like(ends, -1.0))


def test_the_next_chunk_is_read_while_one_is_computed_on(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = on_disk(folder, torch.arange(8 * CHUNK // 4, dtype=torch.float32))
    engine = Engine(folder.region, chunk_bytes=CHUNK, threads=1)
    begun, real = [threading.Event() for _ in range(9)], os.preadv
    count = iter(range(9))

    def noted(*args: object) -> int:
        begun[next(count)].set()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", noted)
    seen: list[bool] = []

    def compute(number: int, start: int, stop: int, tensors: Sequence[Tensor]) -> None:
        seen.append(begun[min(start // (CHUNK // 4) + 1, 7)].wait(30))
        tensors[0].add_(1)

    engine.stream([Piece((flat,), ())], compute)
    assert seen == [True] * 8
    assert torch.equal(flat, torch.arange(8 * CHUNK // 4) + 1.0)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_error_of_the_drive_is_raised_where_the_step_is(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    flat = on_disk(folder, torch.zeros(4 * CHUNK))
    engine = Engine(folder.region, chunk_bytes=CHUNK, threads=2)
    name = "preadv" if verb == "read" else "pwritev"
    real, calls = getattr(os, name), iter(range(10_000))

    def broken(*args: object) -> int:
        if next(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, broken)
        with pytest.raises(OffloadError, match=f"Could not {verb} 65,536 bytes") as caught:
            engine.stream([Piece((flat,), ())], lambda n, a, b, t: t[0].add_(1))
    assert caught.value.numbers["errno"] == errno.EIO
    assert caught.value.numbers["path"] == str(folder.path)
    assert engine.pool is not None
    assert engine.pool.num_free == engine.pool.count
    flat.zero_()
    engine.stream([Piece((flat,), ())], lambda n, a, b, t: t[0].add_(1))
    assert flat.sum() == flat.numel()


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_what_the_computation_raises_ends_the_stream(folder: Folder, error: BaseException) -> None:
    flat = on_disk(folder, torch.zeros(4 * CHUNK))
    engine = Engine(folder.region, chunk_bytes=CHUNK)

    def compute(number: int, start: int, stop: int, tensors: Sequence[Tensor]) -> None:
        if start:
            raise error

    with pytest.raises(type(error)):
        engine.stream([Piece((flat,), ())], compute)
    assert engine.pool is not None
    assert engine.pool.num_free == engine.pool.count


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    own = Folder(tmp_path)
    flat = own.empty(4096, torch.float32)
    os.ftruncate(own.descriptor, PAGE_BYTES)
    with pytest.raises(OffloadError, match="the file ends there") as caught:
        Engine(own.region).fetch(flat).take()
    assert caught.value.numbers["offset"] == PAGE_BYTES


def test_debug_finds_bytes_that_have_changed(folder: Folder) -> None:
    flat = on_disk(folder, torch.zeros(2 * CHUNK))
    engine = Engine(folder.region, chunk_bytes=CHUNK, debug=True)
    piece = [Piece((flat,), ())]
    for _ in range(2):
        engine.stream(piece, lambda n, a, b, t: t[0].add_(1))
    flat[CHUNK // 4 + 5] = 7
    with pytest.raises(OffloadError, match="does not give back") as caught:
        engine.stream(piece, lambda n, a, b, t: t[0].add_(1))
    region = folder.region(flat)
    assert region is not None
    assert caught.value.numbers["offset"] == region.offset + CHUNK
    engine.forget(flat)
    engine.stream(piece, lambda n, a, b, t: t[0].add_(1))


def test_the_place_of_a_dead_tensor_raises_no_alarm(folder: Folder) -> None:
    engine = Engine(folder.region, chunk_bytes=CHUNK, debug=True)
    for value in range(3):
        flat = on_disk(folder, torch.full((4096,), float(value)))
        engine.stream([Piece((flat,), ())], lambda n, a, b, t: t[0].add_(1))
        assert flat[0] == value + 1
        del flat
