"""Reads rectangles of stored tensors into memory, and nothing else; every byte is verified.

[Note: what a slice costs]
A rectangle is made of pieces of chunks. Where a piece lies in one run on both sides and dtypes
agree, the file is read straight into the target. Otherwise it goes through a staging buffer of
`STAGE_BYTES` and is scattered, and cast, from there. What is read is rounded out to blocks of
`SUM_BYTES`, the unit of checksums, so a slice costs its bytes and up to two blocks for each run of
elements that lie further apart than that. Pieces are read in the order of the files by a few
threads: reading and checksums leave Python's lock alone.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from shardwise.sharding.checkpoint.manifest import SUM_BYTES, Chunk, Stored
from shardwise.sharding.checkpoint.records import Box
from shardwise.sharding.errors import CheckpointError
from shardwise.sharding.host_pages import bytes_of

STAGE_BYTES = 8 << 20
"""Of the buffer of each thread, for what cannot be read into its place."""

THREADS = 2
"""That read at once; see `benchmarks/checkpoints.py`."""

_DIRECT_BYTES = 4 << 20
# A run of rows is read as a whole if it is no longer than this, whatever part of it is needed.
_PITCH_BYTES = 2 * SUM_BYTES


@dataclass(frozen=True)
class Job:
    """A rectangle of a stored tensor, and where it goes.

    Args:
        stored: the tensor.
        box: the rectangle.
        target: a tensor of its sizes, of any strides, dtype and device.
    """

    stored: Stored
    box: Box
    target: Tensor


class Piece(NamedTuple):
    """What one chunk has of a rectangle: where in the chunk, and where in the rectangle."""

    stored: Stored
    chunk: Chunk
    inside: Box
    target: Tensor


class Reader:
    """The files of one checkpoint, opened when they are needed; a context manager.

    Args:
        directory: of the checkpoint.
        threads: that read at once.
    """

    def __init__(self, directory: str | os.PathLike[str], *, threads: int = THREADS) -> None:
        self.directory = Path(directory)
        self._threads = threads
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all files."""
        self.close()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def fill(self, jobs: Iterable[Job]) -> None:
        """Read all rectangles into their targets.

        Args:
            jobs: in any order.

        Raises:
            CheckpointError: a file is missing, too short, or not what its checksums say.
        """
        pieces = sorted(
            itertools.chain.from_iterable(map(pieces_of, jobs)),
            key=lambda piece: (piece.chunk.file, piece.chunk.start),
        )
        if self._threads == 1 or sum(p.target.nbytes for p in pieces) <= SUM_BYTES:
            stage = _Stage(self)
            for piece in pieces:
                stage.read(piece)
            return
        local = threading.local()

        def read(piece: Piece) -> None:
            stage: _Stage | None = getattr(local, "stage", None)
            if stage is None:
                stage = local.stage = _Stage(self)
            stage.read(piece)

        with ThreadPoolExecutor(self._threads) as pool:
            try:
                for done in [pool.submit(read, piece) for piece in pieces]:
                    done.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def read_at(self, piece: Piece, start: int, into: memoryview) -> None:
        """Fill a buffer from a byte of a chunk's elements on, and verify nothing.

        Args:
            piece: of the chunk, for errors too.
            start: first byte, counted from the first element.
            into: as many bytes as are wanted.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        descriptor = self._open(piece)
        at, end = 0, len(into)
        while at < end:
            place = piece.chunk.start + start + at
            try:
                count = os.preadv(descriptor, [into[at:]], place)
            except OSError as error:
                raise self.fault(piece, place, f"reading failed: {error}") from error
            if count == 0:
                raise self.fault(piece, place, f"the file ends there, {end - at:,} bytes early")
            at += count

    def _open(self, piece: Piece) -> int:
        name = piece.chunk.file
        with self._lock:
            if name not in self._files:
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise self.fault(piece, 0, "the file lies outside of the checkpoint")
                try:
                    descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise self.fault(piece, 0, f"it cannot be opened: {error}") from error
                _advise(descriptor)
                self._files[name] = descriptor
            return self._files[name]

    def fault(self, piece: Piece, place: int, what: str) -> CheckpointError:
        """The error for bytes that are not what the manifest says.

        Args:
            piece: that was read.
            place: byte of the file.
            what: in words.
        """
        file = self.directory / piece.chunk.file
        return CheckpointError(
            f"{piece.stored.name} cannot be read: {what}.",
            where=f"{file}, byte {place:,}",
            facts=f"tensor of shape {piece.stored.shape}; chunk at {piece.chunk.offsets} of "
            f"{piece.chunk.sizes}",
            why="Every block is compared with its checksum, so that damage is never trained on.",
            fix="restore another checkpoint, or copy this one again from where it was written",
            tensor=piece.stored.name,
            file=str(file),
            byte=place,
        )


def pieces_of(job: Job) -> Iterator[Piece]:
    """What each chunk has of a rectangle.

    Args:
        job: the rectangle; of a tensor with other sizes nothing can be said.

    Raises:
        CheckpointError: the chunks do not cover the rectangle.
    """
    box, found = job.box, 0
    for chunk in job.stored.chunks:
        starts = tuple(map(max, box.offsets, chunk.offsets))
        stops = tuple(map(min, _ends(box), _ends(chunk.box)))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        if any(size <= 0 for size in sizes):
            continue
        inside = Box(tuple(a - b for a, b in zip(starts, chunk.offsets, strict=True)), sizes)
        target = job.target
        for dim, (start, first) in enumerate(zip(starts, box.offsets, strict=True)):
            target = target.narrow(dim, start - first, sizes[dim])
        found += inside.numel
        yield Piece(job.stored, chunk, inside, target)
    if found != box.numel:
        raise CheckpointError(
            f"{job.stored.name} is not whole.",
            where=f"elements at {box.offsets} of sizes {box.sizes}",
            facts=f"{len(job.stored.chunks)} chunks have {found:,} of {box.numel:,} elements",
            why="The chunks of a tensor cover it without overlap.",
            fix="restore another checkpoint, or run: shardwise checkpoint verify PATH",
            tensor=job.stored.name,
            found=found,
            needed=box.numel,
        )


class _Stage:
    """Reads pieces for one thread; its buffer is made at the first piece that needs it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._buffer: Tensor | None = None
        self._holds: tuple[Chunk | None, int, int] = (None, 0, 0)

    def read(self, piece: Piece) -> None:
        """Fill the target of a piece."""
        target = piece.target
        run = _run(piece.chunk.sizes, piece.inside)
        same = target.dtype == piece.stored.dtype and target.device.type == "cpu"
        if run is not None and same and target.is_contiguous():
            self._direct(piece, run[0] * target.dtype.itemsize)
            return
        for part in _parts(piece):
            self._scatter(part)
        self._holds = (None, 0, 0)

    def _direct(self, piece: Piece, low: int) -> None:
        """Read one run of bytes into its place, and its ends through the buffer."""
        into = bytes_of(piece.target)
        high = low + len(into)
        first = -(-low // SUM_BYTES) * SUM_BYTES
        last = high if high == _nbytes(piece) else high // SUM_BYTES * SUM_BYTES
        if first >= last:
            first = last = high
        self._copy(piece, low, min(first, high), into)
        for start in range(first, last, _DIRECT_BYTES):
            block = into[start - low : min(start + _DIRECT_BYTES, last) - low]
            self._reader.read_at(piece, start, block)
            self._verify(piece, start, block)
        self._copy(piece, last, high, into[last - low :])
        self._holds = (None, 0, 0)

    def _copy(self, piece: Piece, low: int, high: int, into: memoryview) -> None:
        step = STAGE_BYTES - 2 * SUM_BYTES
        for start in range(low, high, step):
            stop = min(start + step, high)
            into[start - low : stop - low] = bytes_of(self._load(piece, start, stop))

    def _scatter(self, piece: Piece) -> None:
        """Read rows of a chunk into the buffer, and copy what is wanted from there."""
        item = piece.stored.dtype.itemsize
        sizes, inside = piece.chunk.sizes, piece.inside
        strides = _strides(sizes)
        low = sum(map(math.prod, zip(inside.offsets, strides, strict=True)))
        ends = [at + size - 1 for at, size in zip(inside.offsets, inside.sizes, strict=True)]
        high = sum(map(math.prod, zip(ends, strides, strict=True))) + 1
        flat = self._load(piece, low * item, high * item).view(piece.stored.dtype)
        piece.target.copy_(flat.as_strided(inside.sizes, strides, flat.storage_offset()))

    def _load(self, piece: Piece, low: int, high: int) -> Tensor:
        """Verified bytes of a chunk: a view of the buffer."""
        if self._buffer is None:
            pinned = piece.target.device.type == "cuda"
            self._buffer = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        buffer = self._buffer
        first = low // SUM_BYTES * SUM_BYTES
        last = min(-(-high // SUM_BYTES) * SUM_BYTES, _nbytes(piece))
        chunk, begin, end = self._holds
        start = first
        if chunk is piece.chunk and begin <= first < end:
            # Rows do not end where blocks do: the block between two loads is read once.
            kept = min(end, last) - first
            buffer[:kept] = buffer[first - begin : first - begin + kept].clone()
            start = first + kept
        if start < last:
            block = bytes_of(buffer)[start - first : last - first]
            self._reader.read_at(piece, start, block)
            self._verify(piece, start, block)
        self._holds = (piece.chunk, first, last)
        return buffer[low - first : high - first]

    def _verify(self, piece: Piece, start: int, data: memoryview) -> None:
        """Compare bytes of a chunk from the start of a block on with its running sums."""
        sums = piece.chunk.sums
        if not sums:
            return
        number = start // SUM_BYTES
        for at in range(0, len(data), SUM_BYTES):
            before = sums[number - 1] if number else 0
            found = crc32(data[at : at + SUM_BYTES], before)
            if number >= len(sums) or found != sums[number]:
                wanted = f"{sums[number]:08x}" if number < len(sums) else "nothing"
                place = piece.chunk.start + start + at
                what = f"the checksum of its block {number} is {found:08x}, not {wanted}"
                raise self._reader.fault(piece, place, what)
            number += 1


def _parts(piece: Piece) -> Iterator[Piece]:
    """Cut a piece so that the rows it lies in fit into the buffer."""
    item, sizes, inside = piece.stored.dtype.itemsize, piece.chunk.sizes, piece.inside
    strides = _strides(sizes)
    if not sizes:
        yield piece
        return
    dim = next(d for d, stride in enumerate(strides) if stride * item <= _PITCH_BYTES)
    rows = max(1, (STAGE_BYTES - 2 * SUM_BYTES) // (strides[dim] * item))
    starts = range(0, inside.sizes[dim], rows)
    for outer in itertools.product(*map(range, inside.sizes[:dim])):
        for start in starts:
            count = min(rows, inside.sizes[dim] - start)
            lead = (*outer, start)
            offsets = tuple(at + lead[d] if d <= dim else at for d, at in enumerate(inside.offsets))
            box = Box(offsets, (*[1] * dim, count, *inside.sizes[dim + 1 :]))
            target = piece.target
            for d, at in enumerate(outer):
                target = target.narrow(d, at, 1)
            yield piece._replace(inside=box, target=target.narrow(dim, start, count))


def _run(sizes: Sequence[int], inside: Box) -> tuple[int, int] | None:
    """First element and number of a rectangle that lies in one run of a chunk; None if not."""
    whole = True
    for size, wanted in zip(reversed(sizes), reversed(inside.sizes), strict=True):
        if not whole and wanted != 1:
            return None
        whole = whole and wanted == size
    strides = _strides(sizes)
    return sum(map(math.prod, zip(inside.offsets, strides, strict=True))), inside.numel


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next, by dimension, of a row-major chunk."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(map(sum, zip(box.offsets, box.sizes, strict=True)))


def _nbytes(piece: Piece) -> int:
    return math.prod(piece.chunk.sizes) * piece.stored.dtype.itemsize


def _advise(descriptor: int) -> None:
    """Have the kernel read ahead; not all systems take advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
