"""Gradients that each tensor rank has a part of: of what is whole where a layer is cut.

[Note: whole parameters in cut layers]
A norm over a cut sequence, a bias or a norm of single heads, the first matrix of a low-rank pair:
every rank has the whole parameter and applies it to its own part of the activations, so its
gradient is the sum over the ranks of the axis. Which parameters these are follows from the types of
activations (used as replicated). Likewise rows of a fused tensor that several ranks hold; see
[Note: copies inside of blocks]. All of them are summed in one collective per axis and dtype, after
the last pass and in the layout in which data axes have cut them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective, all_reduce_bytes
from shardwise.sharding.compat import copy_all
from shardwise.sharding.copies import Copied, copies_of
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.leaves import Flats
from shardwise.sharding.lying import rectangle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Mover, finish


class Piece(NamedTuple):
    """One parameter's gradient in a bucket: all of its block, or its copied rows.

    Args:
        bucket: name of the bucket.
        entry: of the parameter in its landed gradients.
        numel: elements that are moved: the most that any rank has.
        copied: what is a copy, where only that is summed.
    """

    bucket: str
    entry: Entry
    numel: int
    copied: Copied | None = None


class TensorSum(NamedTuple):
    """One collective over a tensor axis, and what it sums."""

    item: Collective
    pieces: tuple[Piece, ...]


def plan_sums(
    buckets: Sequence[Bucket], paths: Mapping[str, frozenset[str]], mesh: Mesh
) -> tuple[TensorSum, ...]:
    """What is summed; see [Note: whole parameters in cut layers].

    Args:
        buckets: all buckets.
        paths: by tensor axis, the parameters that are used as replicated.
        mesh: sizes of the axes.
    """
    found: dict[tuple[str, torch.dtype], list[Piece]] = {}
    for axis, wanted in paths.items():
        for bucket, sums, entry in _landing(buckets):
            if entry.path in wanted:
                piece = Piece(bucket, entry, entry.numel)
                found.setdefault((axis, sums.dtype), []).append(piece)
    for bucket, sums, entry in _landing(buckets):
        axes = {axis for some in copies_of(entry.frame, mesh) for axis in some}
        copied = Copied(entry, sums, mesh)
        for axis in (one for one in mesh if one in axes):
            piece = Piece(bucket, entry, copied.most(axis), copied)
            found.setdefault((axis, sums.dtype), []).append(piece)
    return tuple(_sum(axis, dtype, pieces, mesh) for (axis, dtype), pieces in found.items())


def _landing(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Layout, Entry]]:
    for bucket in buckets:
        for entry in bucket.sums.entries if bucket.sums else ():
            assert bucket.sums is not None
            yield bucket.name, bucket.sums, entry


def _sum(axis: str, dtype: torch.dtype, pieces: Sequence[Piece], mesh: Mesh) -> TensorSum:
    nbytes = sum(piece.numel for piece in pieces) * dtype.itemsize
    moved = all_reduce_bytes(nbytes, mesh[axis])
    return TensorSum(Collective("all_reduce", axis, moved, "", "grads", dtype), tuple(pieces))


def run_sums(mover: Mover, sums: Sequence[TensorSum], landed: Flats) -> None:
    """Sum in place.

    Args:
        mover: the choke point.
        sums: from `plan_sums`.
        landed: gradients by bucket.
    """
    for one in sums:
        views = [_views(mover, one.item.axis, piece, landed) for piece in one.pieces]
        first = landed[one.pieces[0].bucket]
        packed = first.new_zeros(sum(piece.numel for piece in one.pieces))
        slots = packed.split([piece.numel for piece in one.pieces])
        parts = [
            part
            for slot, here in zip(slots, views, strict=True)
            for part in _cut(slot, [view.shape for view in here])
        ]
        values = [view for here in views for view in here]
        if parts:
            copy_all(parts, values)
        finish(mover.all_reduce(packed, one.item))
        if parts:
            copy_all(values, parts)


def _views(mover: Mover, axis: str, piece: Piece, landed: Flats) -> list[Tensor]:
    """What this rank sums of one parameter."""
    block = piece.entry.view(landed[piece.bucket])
    if piece.copied is None:
        return [block]
    tiles = piece.copied.along(mover.coords, axis)
    return [rectangle(block, tile.at, tile.sizes) for tile in tiles]


def _cut(slot: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """Views of the beginning of a flat buffer in some shapes, one after the other."""
    start = 0
    for shape in shapes:
        yield slot[start : start + shape.numel()].view(shape)
        start += shape.numel()
