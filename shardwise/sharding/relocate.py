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

from shardwise.sharding.compat import copy_all
from shardwise.sharding.frames import Tile
from shardwise.sharding.layout import Layout
from shardwise.sharding.lying import Grid, Lying, grids_of, lying_of, rectangle
from shardwise.sharding.movement import Collective, Mover, finish

MESSAGE_BYTES = 32 << 20
"""That one rank sends or receives in one exchange, unless one row is larger."""

JOB = "*"
"""The axis of a collective that all ranks of the job take part in, whatever their mesh."""


class Held(NamedTuple):
    """One tensor on this rank: its part as a padded block, and how all parts lie."""

    lying: Lying
    block: Tensor


class Window(NamedTuple):
    """Rows of every part of one tensor that one exchange moves, counted from the part's first.

    Args:
        path: of the tensor.
        first: first row.
        stop: end of the rows.
        of_source: whether parts are those of the source, else of the target.
    """

    path: str
    first: int
    stop: int
    of_source: bool


class Patch(NamedTuple):
    """A rectangle of one tensor: where it begins in the block of either side, and its sizes."""

    source_at: tuple[int, ...]
    target_at: tuple[int, ...]
    sizes: tuple[int, ...]


_NO_ROWS = (0, 0)


class Piece(NamedTuple):
    """Rows of one tensor that go from one rank to another: ranges of the two cut dimensions.

    Where tensor axes cut either side, rows say nothing and `patch` all.
    """

    path: str
    peer: int
    source_rows: tuple[int, int]
    target_rows: tuple[int, int]
    patch: Patch | None = None


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
    if _stays(source, target) or entry.numel == 0:
        yield Window(path, 0, rows, of_source), 0
        return
    takers = _overlap(source, target) * len(target.grid.holders[0])
    givers = _overlap(target, source) if of_source else 1
    factor = max(min(takers, source.grid.mesh.size), givers)
    row_bytes = entry.numel // rows * dtype.itemsize * factor
    count = max(1, MESSAGE_BYTES // row_bytes)
    for first in range(0, rows, count):
        stop = min(first + count, rows)
        yield Window(path, first, stop, of_source), (stop - first) * row_bytes


def _overlap(part: Lying, others: Lying) -> int:
    """How many parts of the other side one part overlaps at most."""
    count = len(others.grid.holders)
    if not part.entry.shape or count == 1:
        return 1
    if part.entry.dim != others.entry.dim or _is_framed(part, others):
        return count
    mine, theirs = part.entry.block[part.entry.dim], others.entry.block[others.entry.dim]
    return min(count, -(-mine // max(1, theirs)) + 1)


def _plan(fill: Fill, dtype: torch.dtype, windows: Sequence[Window], rank: int) -> Exchange:
    sends: list[Piece] = []
    receives: list[Piece] = []
    own: list[Piece] = []
    for window in windows:
        source, target = fill.sources[window.path].lying, fill.lying(window.path)
        sends += _sent(window, source, target, rank)
        for piece in _needed(window, source, target, rank):
            (own if piece.peer == rank else receives).append(piece)
    # The sort is stable: between two ranks the order stays that of the layout, on both sides.
    sends.sort(key=lambda piece: piece.peer)
    receives.sort(key=lambda piece: piece.peer)
    item = None
    if any(not _stays(fill.sources[one.path].lying, fill.lying(one.path)) for one in windows):
        nbytes = dtype.itemsize * sum(_numel(fill, piece) for piece in sends)
        item = Collective("all_to_all", JOB, nbytes, fill.unit, "carry", dtype)
    return Exchange(fill, dtype, tuple(sends), tuple(receives), tuple(own), item)


def _stays(source: Lying, target: Lying) -> bool:
    """Whether every rank has what it needs; the same answer on every rank."""
    axes, finer = source.grid.axes, target.grid.axes
    if not axes:
        return True
    same = source.grid.mesh == target.grid.mesh and source.entry.dim == target.entry.dim
    same = same and source.entry.frame == target.entry.frame
    return same and finer[: len(axes)] == axes


def _needed(window: Window, source: Lying, target: Lying, rank: int) -> Iterator[Piece]:
    """What this rank's target part is made of; the peer is the rank itself where it has it."""
    here = target.grid.part_of[rank]
    mine = source.grid.part_of[rank]
    if _is_framed(source, target):
        for part in range(len(source.grid.holders)):
            peer = rank if part == mine else source.grid.holder_for(part, rank)
            for patch in _patches(window, source, target, part, rank):
                yield Piece(window.path, peer, _NO_ROWS, _NO_ROWS, patch)
        return
    for part in _overlapping(source, target, target.rows(here)):
        rows = _common(window, source, target, source.rows(part), target.rows(here))
        if rows is not None:
            peer = rank if part == mine else source.grid.holder_for(part, rank)
            yield Piece(window.path, peer, *rows)


def _sent(window: Window, source: Lying, target: Lying, rank: int) -> Iterator[Piece]:
    """What other ranks need of this rank's part and take from this rank."""
    mine = source.grid.part_of[rank]
    if len(source.grid.holders) == 1:
        return
    if _is_framed(source, target):
        for peer, part in enumerate(source.grid.part_of):
            if part != mine and source.grid.holder_for(mine, peer) == rank:
                for patch in _patches(window, source, target, mine, peer):
                    yield Piece(window.path, peer, _NO_ROWS, _NO_ROWS, patch)
        return
    source_rows = source.rows(mine)
    for part in _overlapping(target, source, source_rows):
        rows = _common(window, source, target, source_rows, target.rows(part))
        if rows is None:
            continue
        for peer in target.grid.holders[part]:
            if source.grid.part_of[peer] != mine and source.grid.holder_for(mine, peer) == rank:
                yield Piece(window.path, peer, *rows)


def _is_framed(source: Lying, target: Lying) -> bool:
    return source.entry.frame is not None or target.entry.frame is not None


def _patches(rows: Window, source: Lying, target: Lying, part: int, rank: int) -> Iterator[Patch]:
    """What a rank takes of a part of the source; of copies it takes its own, else the first."""
    mine = source.grid.part_of[rank]
    tiles = source.tiles(mine)
    if part != mine:
        tiles = tuple(tile for tile in source.first_tiles(part) if tile not in tiles)
    side = (source if rows.of_source else target).entry
    for given in tiles:
        for wanted in target.tiles(target.grid.part_of[rank]):
            patch = _clipped_patch(rows, given, wanted, side.dim)
            if all(patch.sizes):
                yield patch


def _clipped_patch(rows: Window, given: Tile, wanted: Tile, dim: int) -> Patch:
    """What two tiles have in common inside of a window; sizes of 0 for nothing."""
    starts = [max(a, b) for a, b in zip(given.offsets, wanted.offsets, strict=True)]
    stops = [
        min(a + m, b + n)
        for a, m, b, n in zip(given.offsets, given.sizes, wanted.offsets, wanted.sizes, strict=True)
    ]
    side = given if rows.of_source else wanted
    shift = side.offsets[dim] - side.at[dim]
    starts[dim] = max(starts[dim], rows.first + shift)
    stops[dim] = min(stops[dim], rows.stop + shift)
    return Patch(
        _place(given, starts),
        _place(wanted, starts),
        tuple(max(0, stop - start) for start, stop in zip(starts, stops, strict=True)),
    )


def _place(tile: Tile, starts: Sequence[int]) -> tuple[int, ...]:
    """Where a row of the tensor is in the block that holds a tile."""
    return tuple(a - b + c for a, b, c in zip(starts, tile.offsets, tile.at, strict=True))


def _overlapping(parts: Lying, other: Lying, rows: tuple[int, int]) -> range:
    """The parts of one side that may overlap rows of the other."""
    if parts.entry.dim == other.entry.dim:
        return parts.parts_over(*rows)
    return range(len(parts.grid.holders))


def _common(
    window: Window,
    source: Lying,
    target: Lying,
    source_rows: tuple[int, int],
    target_rows: tuple[int, int],
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The rows that two parts have in common inside of a window."""
    if window.of_source:
        source_rows = _clipped(window, source_rows)
    else:
        target_rows = _clipped(window, target_rows)
    if source.entry.dim == target.entry.dim:
        start, stop = max(source_rows[0], target_rows[0]), min(source_rows[1], target_rows[1])
        source_rows = target_rows = (start, stop)
    empty = source_rows[0] >= source_rows[1] or target_rows[0] >= target_rows[1]
    return None if empty else (source_rows, target_rows)


def _clipped(window: Window, rows: tuple[int, int]) -> tuple[int, int]:
    return rows[0] + window.first, min(rows[1], rows[0] + window.stop)


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
