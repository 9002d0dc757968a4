"""What a checkpoint of another system holds, in terms that any program can take.

[Note: flat runs]
Others store parameters as runs of flat buffers. A run of a row-major tensor is a few rectangles:
the rest of a row, whole rows, the beginning of a row, and so on inwards. As chunks they are read
like any others, by the ranks that hold them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.sharding.checkpoint.manifest import Chunk, Stored
from shardwise.sharding.checkpoint.records import Box
from shardwise.sharding.errors import CheckpointError


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another system.

    Args:
        where: it was found, for errors.
        root: directory that the files of chunks are named from.
        weights: parameters and buffers by name.
        slots: optimizer state by torch's name for it, such as `exp_avg`, and parameter.
        steps: optimizer steps by parameter.
        step: optimizer steps taken; None: it does not say.
        loss_scale: of float16; None: it does not say.
    """

    where: str
    root: Path
    weights: Mapping[str, Stored]
    slots: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    loss_scale: float | None = None

    def only_weights(self) -> Foreign:
        """Parameters and buffers."""
        return Foreign(self.where, self.root, self.weights)


class Run(NamedTuple):
    """Elements of a flat tensor that lie in a row in a file."""

    file: str
    start: int
    numel: int


def run_of(flat: Stored, start: int, numel: int) -> Run:
    """A part of a stored flat tensor.

    Args:
        flat: in one chunk.
        start: first element.
        numel: how many.

    Raises:
        CheckpointError: it is shorter.
    """
    if start < 0 or start + numel > flat.shape[0]:
        raise CheckpointError(
            f"{flat.name} is too short.",
            where=flat.chunks[0].file,
            facts=f"elements {start} to {start + numel} of {flat.shape[0]} are needed",
            why="It holds parameters one after the other, as other files of the checkpoint say.",
            fix="copy the checkpoint again from where it was written",
            name=flat.name,
        )
    chunk = flat.chunks[0]
    return Run(chunk.file, chunk.start + start * flat.dtype.itemsize, numel)


def from_runs(name: str, shape: tuple[int, ...], dtype: torch.dtype, runs: Sequence[Run]) -> Stored:
    """A tensor whose elements are those of several runs, one after the other.

    Args:
        name: of the tensor.
        shape: of it.
        dtype: of its elements.
        runs: what is beyond the last element is padding.

    Raises:
        CheckpointError: they have fewer elements.

    >>> runs = [Run("a", 0, 4), Run("b", 80, 4)]
    >>> [(c.file, c.offsets, c.sizes) for c in from_runs("w", (2, 3), torch.float32, runs).chunks]
    [('a', (0, 0), (1, 3)), ('a', (1, 0), (1, 1)), ('b', (1, 1), (1, 2))]
    """
    total, at = math.prod(shape), 0
    chunks: list[Chunk] = []
    for run in runs:
        stop = min(at + run.numel, total)
        for box, first in _rectangles(shape, at, stop):
            start = run.start + (first - at) * dtype.itemsize
            nbytes = box.numel * dtype.itemsize
            chunks.append(Chunk(box.offsets, box.sizes, run.file, (start, nbytes), start, ()))
        at = stop
    if at != total:
        raise CheckpointError(
            f"{name} is not whole.",
            where=", ".join(dict.fromkeys(run.file for run in runs)) or "no file",
            facts=f"{at:,} of {total:,} elements of shape {shape}",
            why="Each rank of the job that wrote it has saved a part.",
            fix="copy the files of all ranks",
            name=name,
            found=at,
            needed=total,
        )
    return Stored(name, shape, dtype, tuple(chunks))


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[Box, int]]:
    """Rectangles that a flat range is made of, and the first element of each, in order."""
    if start >= stop:
        return []
    if not shape:
        return [(Box((), ()), start)]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        return _inside(shape, start // inner, start, stop)
    found = _inside(shape, first - 1, start, first * inner) if start < first * inner else []
    if first < last:
        offsets = (first, *[0] * (len(shape) - 1))
        found.append((Box(offsets, (last - first, *shape[1:])), first * inner))
    return found + (_inside(shape, last, last * inner, stop) if stop > last * inner else [])


def _inside(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[tuple[Box, int]]:
    base = row * math.prod(shape[1:])
    return [
        (Box((row, *box.offsets), (1, *box.sizes)), base + first)
        for box, first in _rectangles(shape[1:], start - base, stop - base)
    ]
