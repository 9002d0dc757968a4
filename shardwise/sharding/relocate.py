"""Moves tensors into a flat buffer from wherever they lie, over another mesh of the same ranks too.

[Note: who sends what]
A tensor lies in parts: its rows along one dimension, cut over some axes of some mesh. Ranks that
differ only in other axes hold the same part. A rank needs its target part, which overlaps some
source parts; what it holds itself it copies, and each other piece it gets from one holder, chosen
by its own number so that replicas share the work. All of that follows from the two layouts alone,
so every rank knows what it sends and receives, and the bytes are known before anything moves. A
buffer is filled by all-to-alls over the job, and a rank sends nothing that the other has already.
Each exchange carries a window of rows of every part, of whichever side has more parts, so that no
rank sends or receives more than about `MESSAGE_BYTES` at once: nothing larger than the buffer and
such messages is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.collectives import Collective
from shardwise.sharding.compat import copy_all
from shardwise.sharding.layout import Layout
from shardwise.sharding.lying import Grid, Lying, grids_of, lying_of, rectangle
from shardwise.sharding.movement import Mover, finish
from shardwise.sharding.pieces import (
    Held,
    Piece,
    Window,
    most_overlapping,
    needed,
    sent_by,
    stays,
)

MESSAGE_BYTES = 32 << 20
"""That one rank sends or receives in one exchange, unless one row is larger."""

JOB = "*"
"""The axis of a collective that all ranks of the job take part in, whatever their mesh."""


@dataclass(frozen=True)
class Fill:
    """A flat buffer and where its values come from.

    Args:
        unit: whose tensors they are.
        target: the buffer.
        layout: of the buffer.
        grid: of the layout.
        sources: by path; what has none stays as it is.
    """

    unit: str
    target: Tensor
    layout: Layout
    grid: Grid
    sources: Mapping[str, Held]

    def lying(self, path: str) -> Lying:
        """How a tensor lies in the target."""
        entry = self.layout.by_path[path]
        if entry.frame is None:
            return Lying(self.grid, entry)
        return lying_of(self._grids, self.layout, entry)

    @cached_property
    def _grids(self) -> Callable[[tuple[str, ...]], Grid]:
        return grids_of(self.grid.mesh)

    def wires(self) -> dict[torch.dtype, tuple[str, ...]]:
        """Paths by the dtype that travels: the narrower of source and target."""
        found: dict[torch.dtype, list[str]] = {}
        for entry in self.layout.entries:
            if entry.path in self.sources:
                given = self.sources[entry.path].block.dtype
                wide = given.itemsize > self.layout.dtype.itemsize
                found.setdefault(self.layout.dtype if wide else given, []).append(entry.path)
        return {dtype: tuple(paths) for dtype, paths in found.items()}


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of a fill: what this rank sends, receives and copies, in order."""

    fill: Fill
    dtype: torch.dtype
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    own: tuple[Piece, ...]
    item: Collective | None


def plan_fill(fill: Fill, rank: int) -> tuple[Exchange, ...]:
    """The exchanges of a fill, by dtype on the wire and of bounded messages; nothing moves.

    Args:
        fill: the buffer.
        rank: this rank.
    """
    return tuple(
        _plan(fill, dtype, windows, rank)
        for dtype, paths in fill.wires().items()
        for windows in _batches(fill, dtype, paths)
    )


def run_exchange(exchange: Exchange, mover: Mover) -> None:
    """Fill the target of an exchange.

    Args:
        exchange: from `plan_fill`.
        mover: the choke point; `exchange.item` is what it expects.
    """
    fill = exchange.fill
    received: list[Tensor] = []
    if exchange.item is not None:
        size, device = fill.grid.mesh.size, fill.target.device
        sends, sent = _message(exchange, exchange.sends, size, device)
        _copy(sends.parts, [_source_view(fill, piece) for piece in exchange.sends])
        receives, counts = _message(exchange, exchange.receives, size, device)
        finish(mover.all_to_all(receives.flat, sends.flat, counts, sent, exchange.item))
        received = receives.parts
    targets = [_target_view(fill, piece) for piece in exchange.receives]
    own = [_target_view(fill, piece) for piece in exchange.own]
    values = [_source_view(fill, piece) for piece in exchange.own]
    _copy([*targets, *own], [*received, *values])


def received_bytes(exchange: Exchange) -> int:
    """Bytes that an exchange brings to this rank."""
    numels = (_numel(exchange.fill, piece) for piece in exchange.receives)
    return exchange.dtype.itemsize * sum(numels)


def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        copy_all(targets, values)


def _batches(fill: Fill, dtype: torch.dtype, paths: Sequence[str]) -> Iterator[list[Window]]:
    """Windows in groups whose messages stay within the bound; alike on every rank."""
    batch: list[Window] = []
    held = 0
    for path in paths:
        for window, nbytes in _windows(fill, dtype, path):
            if batch and held + nbytes > MESSAGE_BYTES:
                yield batch
                batch, held = [], 0
            batch.append(window)
            held += nbytes
    if batch:
        yield batch


def _windows(fill: Fill, dtype: torch.dtype, path: str) -> Iterator[tuple[Window, int]]:
    """One tensor's windows, each with the most bytes that any rank sends or receives of it."""
    source, target = fill.sources[path].lying, fill.lying(path)
    of_source = len(source.grid.holders) > len(target.grid.holders)
    side = source if of_source else target
    entry = side.entry
    rows = entry.block[entry.dim] if entry.shape else 1
    if stays(source, target) or entry.numel == 0:
        yield Window(path, 0, rows, of_source), 0
        return
    takers = most_overlapping(source, target) * len(target.grid.holders[0])
    givers = most_overlapping(target, source) if of_source else 1
    factor = max(min(takers, source.grid.mesh.size), givers)
    row_bytes = entry.numel // rows * dtype.itemsize * factor
    count = max(1, MESSAGE_BYTES // row_bytes)
    for first in range(0, rows, count):
        stop = min(first + count, rows)
        yield Window(path, first, stop, of_source), (stop - first) * row_bytes


def _plan(fill: Fill, dtype: torch.dtype, windows: Sequence[Window], rank: int) -> Exchange:
    sends: list[Piece] = []
    receives: list[Piece] = []
    own: list[Piece] = []
    for window in windows:
        source, target = fill.sources[window.path].lying, fill.lying(window.path)
        sends += sent_by(window, source, target, rank)
        for piece in needed(window, source, target, rank):
            (own if piece.peer == rank else receives).append(piece)
    # The sort is stable: between two ranks the order stays that of the layout, on both sides.
    sends.sort(key=lambda piece: piece.peer)
    receives.sort(key=lambda piece: piece.peer)
    item = None
    if any(not stays(fill.sources[one.path].lying, fill.lying(one.path)) for one in windows):
        nbytes = dtype.itemsize * sum(_numel(fill, piece) for piece in sends)
        item = Collective("all_to_all", JOB, nbytes, fill.unit, "carry", dtype)
    return Exchange(fill, dtype, tuple(sends), tuple(receives), tuple(own), item)


def _source_view(fill: Fill, piece: Piece) -> Tensor:
    lying, block = fill.sources[piece.path]
    if piece.patch is not None:
        return rectangle(block, piece.patch.source_at, piece.patch.sizes)
    return _view(block, lying, piece.source_rows, fill.lying(piece.path), piece.target_rows)


def _target_view(fill: Fill, piece: Piece) -> Tensor:
    lying = fill.lying(piece.path)
    block = lying.entry.view(fill.target)
    if piece.patch is not None:
        return rectangle(block, piece.patch.target_at, piece.patch.sizes)
    other = fill.sources[piece.path].lying
    return _view(block, lying, piece.target_rows, other, piece.source_rows)


def _view(
    block: Tensor, here: Lying, rows: tuple[int, int], there: Lying, other: tuple[int, int]
) -> Tensor:
    """The rows of a piece in a block of one side; the other side cuts its own dimension."""
    if not here.entry.shape:
        return block
    dim, across = here.entry.dim, there.entry.dim
    chunk = max(1, here.entry.block[dim])
    first = rows[0] // chunk * chunk if len(here.grid.holders) > 1 else 0
    block = block.narrow(dim, rows[0] - first, rows[1] - rows[0])
    return block if across == dim else block.narrow(across, other[0], other[1] - other[0])


def _shape(fill: Fill, piece: Piece) -> tuple[int, ...]:
    if piece.patch is not None:
        return piece.patch.sizes
    entry, source = fill.layout.by_path[piece.path], fill.sources[piece.path].lying.entry
    shape = list(entry.shape)
    if shape:
        shape[source.dim] = piece.source_rows[1] - piece.source_rows[0]
        shape[entry.dim] = piece.target_rows[1] - piece.target_rows[0]
    return tuple(shape)


def _numel(fill: Fill, piece: Piece) -> int:
    return torch.Size(_shape(fill, piece)).numel()


class _Message(NamedTuple):
    flat: Tensor
    parts: list[Tensor]


def _message(
    exchange: Exchange, pieces: Sequence[Piece], ranks: int, device: torch.device
) -> tuple[_Message, list[int]]:
    """A flat buffer for pieces, views of it in their shapes, and elements by peer."""
    counts = [0] * ranks
    numels = [_numel(exchange.fill, piece) for piece in pieces]
    for piece, numel in zip(pieces, numels, strict=True):
        counts[piece.peer] += numel
    flat = torch.empty(sum(numels), dtype=exchange.dtype, device=device)
    cuts = flat.split(numels) if numels else ()
    shapes = [_shape(exchange.fill, piece) for piece in pieces]
    return _Message(flat, [c.view(s) for c, s in zip(cuts, shapes, strict=True)]), counts
