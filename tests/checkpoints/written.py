"""Tensors on disk as a writer would leave them, made by hand: what readers are tested against."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.manifest import SUM_BYTES, Chunk, Stored


def write(directory: Path, name: str, value: Tensor, cuts: Sequence[Sequence[int]]) -> Stored:
    """Write a tensor in rectangles, each with a gap before it.

    Args:
        directory: that exists.
        name: of the tensor.
        value: the tensor.
        cuts: by dimension, where rectangles end, the size of the dimension included.
    """
    chunks: list[Chunk] = []
    spans = [list(itertools.pairwise([0, *ends])) for ends in cuts]
    for number, box in enumerate(itertools.product(*spans)):
        file = f"__{number % 2}_0.distcp"
        part = value[tuple(slice(start, stop) for start, stop in box)]
        raw = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        with (directory / file).open("ab") as out:
            begin = out.tell()
            out.write(b"\xff" * 7 + raw)
        chunks.append(
            Chunk(
                offsets=tuple(start for start, _ in box),
                sizes=tuple(stop - start for start, stop in box),
                file=file,
                entry=(begin, len(raw) + 7),
                start=begin + 7,
                sums=running(raw),
            )
        )
    return Stored(name, tuple(value.shape), value.dtype, tuple(chunks))


def running(raw: bytes) -> tuple[int, ...]:
    """Checksums of all bytes up to the end of each block."""
    ends = range(SUM_BYTES, len(raw) + SUM_BYTES, SUM_BYTES) if raw else [0]
    return tuple(zlib.crc32(raw[:end]) for end in ends)
