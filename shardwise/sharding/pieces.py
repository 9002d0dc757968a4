"""Pieces of tensors that one rank has and another needs, from how both sides lie alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from shardwise.sharding.frames import Tile
from shardwise.sharding.lying import Lying


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


def most_overlapping(part: Lying, others: Lying) -> int:
    """How many parts of the other side one part overlaps at most."""
    count = len(others.grid.holders)
    if not part.entry.shape or count == 1:
        return 1
    if part.entry.dim != others.entry.dim or is_framed(part, others):
        return count
    mine, theirs = part.entry.block[part.entry.dim], others.entry.block[others.entry.dim]
    return min(count, -(-mine // max(1, theirs)) + 1)


def stays(source: Lying, target: Lying) -> bool:
    """Whether every rank has what it needs; the same answer on every rank."""
    axes, finer = source.grid.axes, target.grid.axes
    if not axes:
        return True
    same = source.grid.mesh == target.grid.mesh and source.entry.dim == target.entry.dim
    same = same and source.entry.frame == target.entry.frame
    return same and finer[: len(axes)] == axes


def needed(window: Window, source: Lying, target: Lying, rank: int) -> Iterator[Piece]:
    """What this rank's target part is made of; the peer is the rank itself where it has it."""
    here = target.grid.part_of[rank]
    mine = source.grid.part_of[rank]
    if is_framed(source, target):
        wanted = target.tiles(here)
        for part in _touching(source, wanted):
            peer = rank if part == mine else source.grid.holder_for(part, rank)
            given = _given(source, part, rank)
            for patch in _patches(window, source, target, given, wanted):
                yield Piece(window.path, peer, _NO_ROWS, _NO_ROWS, patch)
        return
    for part in _overlapping(source, target, target.rows(here)):
        rows = _common(window, source, target, source.rows(part), target.rows(here))
        if rows is not None:
            peer = rank if part == mine else source.grid.holder_for(part, rank)
            yield Piece(window.path, peer, *rows)


def sent_by(window: Window, source: Lying, target: Lying, rank: int) -> Iterator[Piece]:
    """What other ranks need of this rank's part and take from this rank."""
    mine = source.grid.part_of[rank]
    if len(source.grid.holders) == 1:
        return
    if is_framed(source, target):
        parts = _touching(target, source.first_tiles(mine))
        for peer in sorted(peer for part in parts for peer in target.grid.holders[part]):
            if source.grid.part_of[peer] != mine and source.grid.holder_for(mine, peer) == rank:
                given = _given(source, mine, peer)
                wanted = target.tiles(target.grid.part_of[peer])
                for patch in _patches(window, source, target, given, wanted):
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


def is_framed(source: Lying, target: Lying) -> bool:
    """Whether a tensor axis cuts either side."""
    return source.entry.frame is not None or target.entry.frame is not None


def _touching(lying: Lying, tiles: Sequence[Tile]) -> list[int]:
    """The parts of one side that may overlap rectangles, in order."""
    return sorted({part for tile in tiles for part in lying.parts_touching(tile)})


def _given(source: Lying, part: int, rank: int) -> tuple[Tile, ...]:
    """What a rank takes of a part of the source; of copies it takes its own, else the first."""
    mine = source.grid.part_of[rank]
    tiles = source.tiles(mine)
    if part == mine:
        return tiles
    return tuple(tile for tile in source.first_tiles(part) if tile not in tiles)


def _patches(
    rows: Window, source: Lying, target: Lying, given: Sequence[Tile], wanted: Sequence[Tile]
) -> Iterator[Patch]:
    """What rectangles of both sides have in common."""
    side = (source if rows.of_source else target).entry
    for one, other in itertools.product(given, wanted):
        patch = _clipped_patch(rows, one, other, side.dim)
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
