"""Is a checkpoint what its manifest says: every file, every chunk, every byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from isal.isal_zlib import crc32

from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.checkpoint.manifest import SUM_BYTES, Chunk, Manifest, Stored
from shardwise.sharding.checkpoint.zipped import after, before
from shardwise.sharding.errors import CheckpointError


class Report(NamedTuple):
    """What `verify` has found.

    Args:
        faults: one line each; none: the checkpoint is whole.
        tensors: how many were verified.
        nbytes: of their elements.
    """

    faults: tuple[str, ...]
    tensors: int
    nbytes: int


def verify(path: str | os.PathLike[str]) -> Report:
    """Read every byte of a checkpoint and compare it with the manifest; holds 1 MiB of it.

    Files have their sizes, every element of every tensor is in exactly one chunk, every chunk is a
    zip entry that `torch.load` reads, and all checksums are right.

    Args:
        path: of the checkpoint.
    """
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Report((f"{error.what} {' '.join(error.facts)}",), 0, 0)
    faults = [*_files(folder, manifest)]
    for stored in manifest.tensors:
        faults += _coverage(stored)
    chunks = [(stored, chunk) for stored in manifest.tensors for chunk in stored.chunks]
    for name in manifest.files:
        own = [pair for pair in chunks if pair[1].file == name]
        own.sort(key=lambda pair: pair[1].entry)
        faults += _contents(folder / name, own)
    unlisted = sorted({chunk.file for _, chunk in chunks} - set(manifest.files))
    faults += [f"{name}: has chunks, and is not in the list of files" for name in unlisted]
    return Report(tuple(faults), len(manifest.tensors), manifest.nbytes)


def _files(folder: Path, manifest: Manifest) -> list[str]:
    faults: list[str] = []
    for name, nbytes in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            faults.append(f"{name}: {error.strerror}")
            continue
        if size != nbytes:
            faults.append(f"{name}: has {size} bytes, and must have {nbytes}")
    return faults


def _coverage(stored: Stored) -> list[str]:
    """Faults of chunks that leave elements out or hold them twice."""
    for chunk in stored.chunks:
        ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=False)]
        known = len(chunk.offsets) == len(chunk.sizes) == len(stored.shape)
        if not known or any(end > size for end, size in zip(ends, stored.shape, strict=True)):
            return [f"{stored.name}: chunk {chunk.offsets} + {chunk.sizes} is not in its shape"]
    if not torch.Size(stored.shape).numel():
        return []
    cuts = [_cuts(stored, dim) for dim in range(len(stored.shape))]
    cells = torch.zeros([len(cut) - 1 for cut in cuts], dtype=torch.int32)
    for chunk in stored.chunks:
        span = [
            slice(cut[at], cut[at + size])
            for cut, at, size in zip(cuts, chunk.offsets, chunk.sizes, strict=True)
        ]
        cells[tuple(span)] += 1
    missing, twice = int((cells == 0).sum()), int((cells > 1).sum())
    if missing or twice:
        return [f"{stored.name}: {missing} rectangles are in no chunk, {twice} in several"]
    return []


def _cuts(stored: Stored, dim: int) -> dict[int, int]:
    """Where chunks begin and end along a dimension, by number."""
    ends = {0, stored.shape[dim]}
    for chunk in stored.chunks:
        ends |= {chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]}
    return {at: index for index, at in enumerate(sorted(ends))}


def _contents(path: Path, chunks: Sequence[tuple[Stored, Chunk]]) -> list[str]:
    faults: list[str] = []
    end = 0
    try:
        with path.open("rb") as file:
            for stored, chunk in chunks:
                what = f"{stored.name} {chunk.offsets} in {path.name} at byte {chunk.start}"
                if chunk.entry[0] < end:
                    faults.append(f"{what}: overlaps the entry before it")
                end = sum(chunk.entry)
                faults += [f"{what}: {fault}" for fault in _chunk(file, stored, chunk)]
    except OSError as error:
        faults.append(f"{path.name}: {error.strerror}")
    return faults


def _chunk(file: BinaryIO, stored: Stored, chunk: Chunk) -> list[str]:
    """Faults of one entry: its frame, and its elements at every sum."""
    faults: list[str] = []
    nbytes = chunk.box.numel * stored.dtype.itemsize
    if len(chunk.sums) != max(1, -(-nbytes // SUM_BYTES)):
        return [f"{nbytes} bytes have {len(chunk.sums)} sums"]
    head = before(chunk.sizes, stored.dtype)
    tail = after(chunk.sizes, stored.dtype, chunk.sums[-1])
    if (chunk.entry[0] + len(head), len(head) + nbytes + len(tail)) != (
        chunk.start,
        chunk.entry[1],
    ):
        return [f"the entry {chunk.entry} is not that of its shape and dtype"]
    file.seek(chunk.entry[0])
    if file.read(len(head)) != head:
        faults.append("what precedes the elements is damaged")
    running = 0
    for index, right in enumerate(chunk.sums):
        count = min(SUM_BYTES, nbytes - index * SUM_BYTES)
        data = file.read(count)
        if len(data) < count:
            return [*faults, f"the file ends {count - len(data)} bytes early in MiB {index}"]
        running = crc32(data, running)
        if running != right:
            return [*faults, f"the checksum of MiB {index} is {running}, and must be {right}"]
    if file.read(len(tail)) != tail:
        faults.append("what follows the elements is damaged")
    return faults
