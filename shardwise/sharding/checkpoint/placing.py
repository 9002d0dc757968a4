"""Which rank writes which rectangle of which tensor, and at which byte of its file.

[Note: who writes what]
Every part of a tensor is cut into chunks: rectangles of at most `CHUNK_BYTES` whose elements follow
each other in the row-major order of the part. A chunk has one writer among the ranks that hold the
part, the one with the fewest bytes so far; so replicas share the work, and a part that several
ranks hold is cut finely enough for all of them. A rank's file holds its chunks in the order of the
tensors. All of that follows from layouts alone: every rank knows it without asking.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.manifest import Chunk, Stored
from shardwise.sharding.checkpoint.records import Box, Record
from shardwise.sharding.checkpoint.zipped import ALIGN, after, before

CHUNK_BYTES = 64 << 20
"""At most, unless one element is larger."""

_SHARED_BYTES = 4 << 20
"""What replicas divide among them has chunks of this size at least."""


def file_of(rank: int) -> str:
    """The file that a rank writes, named as torch's DCP does.

    >>> file_of(3)
    '__3_0.distcp'
    """
    return f"__{rank}_0.distcp"


def place(records: Sequence[Record], ranks: int) -> tuple[Stored, ...]:
    """Every chunk of a checkpoint, with no sums yet; see [Note: who writes what].

    Args:
        records: to be saved, in the order that the files shall have; derived ones are left out.
        ranks: of the job.
    """
    written = [0] * ranks
    ends = [0] * ranks
    tensors: list[Stored] = []
    for record in records:
        if record.derived:
            continue
        chunks: list[Chunk] = []
        for part in _filled(record):
            holders = record.lying.grid.holders[part]
            boxes = record.first_boxes(part) or (Box((0,) * len(record.shape), record.shape),)
            for box in (one for whole in boxes for one in cut(whole, record.dtype, len(holders))):
                rank = min(holders, key=lambda one: (written[one], one))
                begin = -(-ends[rank] // ALIGN) * ALIGN
                head = len(before(box.sizes, record.dtype))
                tail = len(after(box.sizes, record.dtype, 0))
                length = head + box.numel * record.dtype.itemsize + tail
                entry, start = (begin, length), begin + head
                chunk = Chunk(box.offsets, box.sizes, file_of(rank), entry, start, ())
                ends[rank] = begin + length
                written[rank] += length
                chunks.append(chunk)
        tensors.append(Stored(record.name, record.shape, record.dtype, tuple(chunks), record.of))
    return tuple(tensors)


def own_chunks(
    tensors: Sequence[Stored], records: Sequence[Record], rank: int
) -> Iterator[tuple[Chunk, Tensor]]:
    """What a rank writes, in the order of its file, with views of live memory.

    Args:
        tensors: from `place`.
        records: those that were placed.
        rank: this rank.
    """
    mine = file_of(rank)
    named = {record.name: record for record in records if not record.derived}
    for stored in tensors:
        own = [chunk for chunk in stored.chunks if chunk.file == mine]
        if own:
            record = named[stored.name]
            for chunk in own:
                yield chunk, record.inside(rank, chunk.box)


def with_sums(
    tensors: Sequence[Stored], sums: Sequence[Sequence[tuple[int, ...]]]
) -> tuple[Stored, ...]:
    """The same chunks with their checksums.

    Args:
        tensors: from `place`.
        sums: by rank, in the order of its file.
    """
    rest = {file_of(rank): iter(own) for rank, own in enumerate(sums)}
    return tuple(
        replace(
            stored,
            chunks=tuple(replace(chunk, sums=next(rest[chunk.file])) for chunk in stored.chunks),
        )
        for stored in tensors
    )


def file_sizes(tensors: Sequence[Stored]) -> dict[str, int]:
    """Bytes by file; files without a chunk are left out."""
    sizes: dict[str, int] = {}
    for stored in tensors:
        for chunk in stored.chunks:
            sizes[chunk.file] = max(sizes.get(chunk.file, 0), sum(chunk.entry))
    return sizes


def digest(tensors: Sequence[Stored]) -> str:
    """What ranks compare to see that they write parts of one checkpoint."""
    return hashlib.sha256(repr(tensors).encode()).hexdigest()[:16]


def cut(box: Box, dtype: torch.dtype, holders: int = 1) -> Iterator[Box]:
    """A rectangle in pieces of bounded size, in row-major order.

    >>> [(b.offsets, b.sizes) for b in cut(Box((4, 0), (2, 40 << 20)), torch.int8)]
    [((4, 0), (1, 41943040)), ((5, 0), (1, 41943040))]
    """
    nbytes = box.numel * dtype.itemsize
    limit = min(CHUNK_BYTES, max(_SHARED_BYTES, -(-nbytes // holders)))
    if nbytes <= limit:
        yield box
        return
    dim, inner = 0, nbytes // box.sizes[0]  # bytes of one index of dimensions up to `dim`
    while inner > limit and dim + 1 < len(box.sizes):
        dim += 1
        inner //= box.sizes[dim]
    rows = max(1, limit // inner)
    starts = range(0, box.sizes[dim], rows)
    for outer in itertools.product(*(range(size) for size in box.sizes[:dim])):
        for start in starts:
            lead = (*outer, start)
            offsets = [at + lead[d] if d <= dim else at for d, at in enumerate(box.offsets)]
            count = min(rows, box.sizes[dim] - start)
            yield Box(tuple(offsets), (*([1] * dim), count, *box.sizes[dim + 1 :]))


def _filled(record: Record) -> Sequence[int]:
    """Parts that have elements; of a tensor that has none, the first."""
    return [part for part in range(record.parts) if record.first_boxes(part)] or [0]
