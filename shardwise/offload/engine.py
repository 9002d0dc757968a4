"""Reads, computes on and writes tensors on disk, in chunks that overlap.

[Note: three chunks in flight]
While one chunk is computed on, the next is read and the last one is written; each has a set of pool
buffers, one for each of its tensors that is on disk. The pipeline runs on from tensor to tensor.
With one set only, it works without overlap. A chunk is cut into requests for several threads, since
one thread does not reach a drive's bandwidth. Chunks begin at whole pages of every tensor's file;
where a tensor does not (it is a part of another one), its first and last bytes, less than a page
each, go through the mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from isal.isal_zlib import crc32
from torch import Tensor

from shardwise.offload.files import Region
from shardwise.offload.pool import Pool
from shardwise.offload.requests import read_bytes, write_bytes
from shardwise.sharding.errors import OffloadError
from shardwise.sharding.host_pages import PAGE_BYTES, bytes_of, host_pages, padded

CHUNK_BYTES = 16 << 20
"""Of one tensor: four requests."""

THREADS = 8
"""Requests in flight."""

_REQUEST_BYTES = 4 << 20
_MIN_CHUNK_BYTES = 16 * PAGE_BYTES
"""Whole pages of the narrowest dtype, in the widest."""

_SETS = 3

RegionOf = Callable[[Tensor], Region | None]
Compute = Callable[[int, int, int, Sequence[Tensor]], None]


class Piece(NamedTuple):
    """Tensors of equal length that are computed on together; those not on disk are passed as is.

    Attributes:
        written: changed by what is computed.
        read: only read.
        fresh: only written, every element of them.
    """

    written: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    fresh: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order in which they are computed on."""
        return (*self.written, *self.fresh, *self.read)


class _Part(NamedTuple):
    """A tensor's elements of one chunk: `values` is what is computed on."""

    values: Tensor
    mapped: Tensor
    region: Region
    buffer: Tensor
    is_read: bool
    is_written: bool


class _Chunk(NamedTuple):
    number: int
    start: int
    stop: int
    tensors: list[Tensor]
    parts: list[_Part]
    reads: list[Future[None]]


def pool_bytes(pieces: Sequence[tuple[int, int]], chunk_bytes: int = CHUNK_BYTES) -> int:
    """Bytes of the buffers that stream such pieces.

    Args:
        pieces: of each, how many of its tensors are on disk, and the bytes of the largest.
        chunk_bytes: of one tensor.
    """
    count = max((count for count, _ in pieces), default=0)
    largest = max((nbytes for _, nbytes in pieces), default=0)
    return _SETS * count * _buffer_bytes(largest, chunk_bytes)


def _buffer_bytes(largest: int, chunk_bytes: int) -> int:
    # A part of a tensor may begin and end in the middle of a page.
    return padded(min(largest, max(chunk_bytes, _MIN_CHUNK_BYTES))) + PAGE_BYTES


class Engine:
    """Threads and buffers; both start with the first use.

    Args:
        region_of: where a tensor is on disk.
        threads: requests in flight.
        chunk_bytes: of one tensor.
        sets: of buffers; see [Note: three chunks in flight].
        pin: buffers for copies to an accelerator.
        debug: sum up what is written, and compare when it is read again.
    """

    def __init__(
        self,
        region_of: RegionOf,
        *,
        threads: int = THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        sets: int = _SETS,
        pin: bool = False,
        debug: bool = False,
    ) -> None:
        self._region_of = region_of
        self._num_threads = threads
        self._chunk_bytes = max(chunk_bytes, _MIN_CHUNK_BYTES)
        self._sets = sets
        self._pin = pin
        self._sums: dict[tuple[int, int, int], int] | None = {} if debug else None
        self._threads: ThreadPoolExecutor | None = None
        self._pool: Pool | None = None
        self.read_bytes = 0
        self.written_bytes = 0

    @property
    def pool(self) -> Pool | None:
        """The buffers, once something was streamed."""
        return self._pool

    def stream(self, pieces: Sequence[Piece], compute: Compute) -> None:
        """Compute on all elements of all pieces, chunk by chunk, in order.

        Args:
            pieces: see `Piece`.
            compute: called with the number of the piece, the first element, the one after the last,
                and these elements of `written`, `fresh` and `read`, to be changed in place.

        Raises:
            OffloadError: a file cannot be read or written. What was computed on before is changed,
                the rest is not.
        """
        pool = self._pool_for(pieces)
        cuts = list(self._cuts(pieces))
        ahead: list[_Chunk] = []
        writing: list[tuple[list[Future[None]], list[Tensor]]] = []
        position = 0

        def settle(kept: int) -> None:
            while len(writing) > kept:
                futures, buffers = writing.pop(0)
                wait(futures)
                for buffer in buffers:
                    pool.give_back(buffer)
                _settle(futures)

        try:
            while position < len(cuts) or ahead:
                while position < len(cuts) and len(ahead) < min(2, self._sets):
                    in_use = len(ahead) + len(writing)
                    if in_use == self._sets:
                        if not writing:
                            break
                        settle(len(writing) - 1)
                    ahead.append(self._begin(pieces, cuts[position], pool))
                    position += 1
                chunk = ahead.pop(0)
                buffers = [part.buffer for part in chunk.parts]
                writing.append((chunk.reads, buffers))
                _settle(chunk.reads)
                self._check(chunk)
                compute(chunk.number, chunk.start, chunk.stop, chunk.tensors)
                writing[-1] = (self._write(chunk), buffers)
            settle(0)
        finally:
            # Nothing may be in flight to a buffer that is given back.
            writing += [(chunk.reads, [part.buffer for part in chunk.parts]) for chunk in ahead]
            for futures, buffers in writing:
                wait(futures)
                for buffer in buffers:
                    pool.give_back(buffer)

    def fetch(self, tensor: Tensor) -> Reading:
        """Begin to read a whole tensor that is on disk."""
        region = self._region(tensor)
        skipped = region.offset % PAGE_BYTES
        buffer = host_pages(skipped + region.nbytes + PAGE_BYTES, pin=self._pin)
        values = buffer[skipped : skipped + region.nbytes].view(tensor.dtype)
        return Reading(values.view(tensor.shape), self._read(region, buffer))

    def forget(self, tensor: Tensor) -> None:
        """A tensor was changed past the engine: what debug knows of it is no longer so."""
        region = self._region_of(tensor)
        if self._sums and region is not None:
            ends = region.offset + region.nbytes
            for key in [k for k in self._sums if k[0] == region.number]:
                if key[1] < ends and region.offset < key[1] + key[2]:
                    del self._sums[key]

    def _region(self, tensor: Tensor) -> Region:
        region = self._region_of(tensor)
        assert region is not None, "not on disk"
        return region

    def _pool_for(self, pieces: Sequence[Piece]) -> Pool:
        counts, largest = [0], [0]
        for piece in pieces:
            on_disk = [t for t in piece.tensors if self._region_of(t) is not None]
            counts.append(len(on_disk))
            largest += [tensor.nbytes for tensor in on_disk]
        count = self._sets * max(counts)
        size = _buffer_bytes(max(largest), self._chunk_bytes)
        if self._pool is None or self._pool.count < count or self._pool.buffer_bytes < size:
            self._pool = None
            self._pool = Pool(count, size, pin=self._pin)
        return self._pool

    def _cuts(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, int, int]]:
        """Piece, start and stop of each chunk; whole pages of every dtype."""
        for number, piece in enumerate(pieces):
            tensors = piece.tensors
            widest = max(tensor.element_size() for tensor in tensors)
            step = max(self._chunk_bytes // widest // PAGE_BYTES, 1) * PAGE_BYTES
            length = tensors[0].numel()
            for start in range(0, length, step):
                yield number, start, min(start + step, length)

    def _begin(self, pieces: Sequence[Piece], cut: tuple[int, int, int], pool: Pool) -> _Chunk:
        number, start, stop = cut
        piece = pieces[number]
        tensors: list[Tensor] = []
        parts: list[_Part] = []
        reads: list[Future[None]] = []
        num_old = len(piece.written)
        num_written = num_old + len(piece.fresh)
        for index, whole in enumerate(piece.tensors):
            mapped = whole[start:stop]
            region = self._region_of(mapped)
            if region is None:
                tensors.append(mapped)
                continue
            buffer = pool.take()
            skipped = region.offset % PAGE_BYTES
            values = buffer[skipped : skipped + region.nbytes].view(mapped.dtype)
            is_read, is_written = not num_old <= index < num_written, index < num_written
            parts.append(_Part(values, mapped, region, buffer, is_read, is_written))
            tensors.append(values)
            if is_read:
                reads += self._read(region, buffer)
        return _Chunk(number, start, stop, tensors, parts, reads)

    def _read(self, region: Region, buffer: Tensor) -> list[Future[None]]:
        """Requests for all pages that a region touches, into a buffer."""
        first = region.offset - region.offset % PAGE_BYTES
        nbytes = padded(region.offset + region.nbytes - first)
        self.read_bytes += nbytes
        return [
            self._submit(read_bytes, region, first + at, buffer[at : at + size])
            for at, size in _requests(nbytes)
        ]

    def _write(self, chunk: _Chunk) -> list[Future[None]]:
        futures: list[Future[None]] = []
        for part in chunk.parts:
            if not part.is_written:
                continue
            if self._sums is not None:
                self._sums[_sum_key(part.region)] = _sum(part.values)
            region = part.region
            stop = region.offset + region.nbytes
            first = padded(region.offset)
            # The buffer has what lies behind the tensor in its last page, if it was read.
            whole = part.is_read and padded(stop) == region.end
            last = region.end if whole else stop - stop % PAGE_BYTES
            if first >= last:
                part.mapped.copy_(part.values)
                continue
            width = part.values.element_size()
            _copy_ends(part, (first - region.offset) // width, (last - region.offset) // width)
            base = region.offset - region.offset % PAGE_BYTES
            self.written_bytes += last - first
            for at, size in _requests(last - first):
                begin = first + at - base
                data = part.buffer[begin : begin + size]
                futures.append(self._submit(write_bytes, region, first + at, data))
        return futures

    def _submit(
        self, request: Callable[[Region, int, Tensor], None], region: Region, at: int, data: Tensor
    ) -> Future[None]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, "shardwise-disk")
        return self._threads.submit(request, region, at, data)

    def _check(self, chunk: _Chunk) -> None:
        """In debug mode: what is read is what was written."""
        if not self._sums:
            return
        for part in chunk.parts:
            known = self._sums.get(_sum_key(part.region)) if part.is_read else None
            found = _sum(part.values) if known is not None else None
            if known != found:
                raise _changed(part.region, known, found)


class Reading:
    """A tensor that is being read."""

    def __init__(self, values: Tensor, futures: Sequence[Future[None]]) -> None:
        self._values = values
        self._futures = futures

    def take(self) -> Tensor:
        """The values, once they are there.

        Raises:
            OffloadError: the file cannot be read.
        """
        _settle(self._futures)
        return self._values

    def drop(self) -> None:
        """Wait, for nothing."""
        wait(self._futures)


def _settle(futures: Sequence[Future[None]]) -> None:
    """Wait for all, then raise what the first one has met."""
    wait(futures)
    for future in futures:
        future.result()


def _requests(nbytes: int) -> Iterator[tuple[int, int]]:
    for at in range(0, nbytes, _REQUEST_BYTES):
        yield at, min(_REQUEST_BYTES, nbytes - at)


def _copy_ends(part: _Part, first: int, last: int) -> None:
    """The elements outside of the whole pages, through the mapping."""
    count = part.values.numel()
    if first:
        part.mapped[:first].copy_(part.values[:first])
    if last < count:
        part.mapped[last:].copy_(part.values[last:])


def _sum_key(region: Region) -> tuple[int, int, int]:
    return region.number, region.offset, region.nbytes


def _sum(values: Tensor) -> int:
    return crc32(bytes_of(values))


def _changed(region: Region, known: int | None, found: int | None) -> OffloadError:
    return OffloadError(
        f"A file in {str(region.folder.path)!r} does not give back what was written to it.",
        facts=[
            f"{region.nbytes:,} bytes at {region.offset:,}: crc32 {found:#010x}, was {known:#010x}"
        ],
        why="In debug mode what is streamed to disk is summed up, and compared when it is read.",
        fix="check the drive; if the state was changed in place between two steps, that is it",
        path=str(region.folder.path),
        offset=region.offset,
        nbytes=region.nbytes,
    )
