"""Brings the parts of a save that is spread over nodes to the ranks that read them.

[Note: from stores to a checkpoint]
A rank's view of a spread save is a checkpoint directory in its own store: files that some store of
its node holds are linked into it, and of any other file it has the size and the chunks that this
rank reads, at their places; all else in it is a hole. Which chunks a rank reads follows from
layouts alone, so every rank knows what all of them send and receive. Bytes move in rounds, so that
a rank holds `ROUND_BYTES` of what it sends and as much of what it receives, and a piece more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.disk import disk_error
from shardwise.sharding.checkpoint.manifest import MANIFEST, Manifest, Stored
from shardwise.sharding.checkpoint.records import Box, Record
from shardwise.sharding.checkpoint.stores import Spread
from shardwise.sharding.movement import Transport

ROUND_BYTES = 16 << 20
_PIECE_BYTES = 4 << 20


class Slice(NamedTuple):
    """Bytes of a file that go from one rank to another."""

    source: int
    target: int
    file: str
    start: int
    nbytes: int


def slices(
    spread: Spread, manifest: Manifest, records: Sequence[Record], ranks: int
) -> list[list[Slice]]:
    """What moves, in rounds; the same on every rank.

    Args:
        spread: who sees which file.
        manifest: of the save.
        records: of the state that is to be filled, derived ones too.
        ranks: of the job.
    """
    rounds: list[list[Slice]] = []
    sent, received = [0] * ranks, [0] * ranks
    for source, target, file, start, nbytes in _pieces(spread, manifest, records, ranks):
        at = max(sent[source], received[target])
        sent[source] = received[target] = at + nbytes
        while len(rounds) <= at // ROUND_BYTES:
            rounds.append([])
        rounds[at // ROUND_BYTES].append(Slice(source, target, file, start, nbytes))
    return rounds


def _pieces(
    spread: Spread, manifest: Manifest, records: Sequence[Record], ranks: int
) -> Iterator[Slice]:
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    for target in range(ranks):
        for stored in manifest.tensors:
            wanted = [one for one in by_name.get(stored.name, ()) if one.shape == stored.shape]
            boxes = [box for one in wanted for box in one.boxes(one.part_of(target))]
            yield from _of_tensor(spread, stored, boxes if wanted else None, target)


def _of_tensor(
    spread: Spread, stored: Stored, boxes: Sequence[Box] | None, target: int
) -> Iterator[Slice]:
    """Chunks that some box overlaps; None: nobody knows, so all of them."""
    for chunk in stored.chunks:
        holders = spread.holders[chunk.file]
        if target in holders:
            continue
        if boxes is None or any(_overlap(chunk.box, box) for box in boxes):
            source = sorted(holders)[target % len(holders)]
            nbytes = chunk.box.numel * stored.dtype.itemsize
            for at in range(0, nbytes, _PIECE_BYTES):
                size = min(_PIECE_BYTES, nbytes - at)
                yield Slice(source, target, chunk.file, chunk.start + at, size)


def _overlap(one: Box, two: Box) -> bool:
    return all(
        a < b + n and b < a + m
        for a, m, b, n in zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    )


def lay_out(
    place: Path, spread: Spread, manifest: str, rank: int, sizes: Mapping[str, int]
) -> None:
    """Make this rank's view of a spread save, with holes where bytes are still to come.

    Args:
        place: of the directory; what was there goes.
        spread: who sees which file.
        manifest: its text.
        rank: this rank.
        sizes: bytes by file.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file, holders in spread.holders.items():
        if rank in holders:
            os.symlink(Path(holders[rank]) / file, place / file)
        else:
            with (place / file).open("wb") as made:
                made.truncate(sizes[file])
    (place / MANIFEST).write_text(manifest)


def move(
    place: Path,
    rounds: Sequence[Sequence[Slice]],
    *,
    rank: int,
    ranks: int,
    transport: Transport,
) -> Exception | None:
    """Send and receive; a collective of all ranks of the job.

    Args:
        place: this rank's view.
        rounds: from `slices`.
        rank: this rank.
        ranks: of the job.
        transport: of the job, for tensors on the host.

    Returns:
        What this rank could not read or write; it takes part to the end all the same.
    """
    fault: Exception | None = None
    for one in rounds:
        sends = sorted((s for s in one if s.source == rank), key=lambda s: s.target)
        receives = sorted((s for s in one if s.target == rank), key=lambda s: s.source)
        out = torch.empty(sum(s.nbytes for s in receives), dtype=torch.uint8)
        mine = torch.zeros(sum(s.nbytes for s in sends), dtype=torch.uint8)
        try:
            _read(place, sends, mine)
        except OSError as error:
            fault = fault or disk_error(error, place, "read", mine.numel())
        pending = transport.all_to_all(
            out,
            mine,
            [sum(s.nbytes for s in receives if s.source == peer) for peer in range(ranks)],
            [sum(s.nbytes for s in sends if s.target == peer) for peer in range(ranks)],
        )
        if pending is not None:
            pending.wait()
        try:
            _write(place, receives, out)
        except OSError as error:
            fault = fault or disk_error(error, place, "write", out.numel())
    return fault


def _read(place: Path, sends: Sequence[Slice], data: Tensor) -> None:
    memory = memory_of(data)
    at = 0
    for one in sends:
        with (place / one.file).open("rb") as file:
            file.seek(one.start)
            file.readinto(memory[at : at + one.nbytes])
        at += one.nbytes


def _write(place: Path, receives: Sequence[Slice], data: Tensor) -> None:
    memory = memory_of(data)
    at = 0
    for one in receives:
        with (place / one.file).open("r+b") as file:
            file.seek(one.start)
            file.write(memory[at : at + one.nbytes])
        at += one.nbytes


def memory_of(data: Tensor) -> memoryview:
    """The bytes of a tensor on the host, for files.

    >>> memory_of(torch.zeros(2, dtype=torch.uint8)).nbytes
    2
    """
    array: Any = data.numpy()
    return memoryview(array)
