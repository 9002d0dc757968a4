"""Gradients that each tensor rank has a part of: of parameters that are whole where a layer is cut.

[Note: whole parameters in cut layers]
A norm over a cut sequence, a bias or a norm of single heads, the first matrix of a low-rank pair:
every rank has the whole parameter and applies it to its own part of the activations, so its
gradient is the sum over the ranks of the axis. Which parameters these are follows from the types of
activations (used as replicated). All of them are summed in one collective per axis and dtype, after
the last pass and in the layout in which data axes have cut them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective, all_reduce_bytes
from shardwise.sharding.compat import copy_all
from shardwise.sharding.leaves import Flats
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Mover, finish


class Piece(NamedTuple):
    """A parameter's elements in the landed gradients of a bucket."""

    bucket: str
    start: int
    stop: int


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
    sums: list[TensorSum] = []
    for axis, wanted in paths.items():
        found: dict[torch.dtype, list[Piece]] = {}
        for bucket in buckets:
            for entry in bucket.sums.entries if bucket.sums else ():
                if entry.path in wanted and bucket.sums:
                    piece = Piece(bucket.name, entry.offset, entry.offset + entry.numel)
                    found.setdefault(bucket.sums.dtype, []).append(piece)
        for dtype, pieces in found.items():
            nbytes = sum(piece.stop - piece.start for piece in pieces) * dtype.itemsize
            moved = all_reduce_bytes(nbytes, mesh[axis])
            item = Collective("all_reduce", axis, moved, "", "grads", dtype)
            sums.append(TensorSum(item, tuple(pieces)))
    return tuple(sums)


def run_sums(mover: Mover, sums: Sequence[TensorSum], landed: Flats) -> None:
    """Sum in place.

    Args:
        mover: the choke point.
        sums: from `plan_sums`.
        landed: gradients by bucket.
    """
    for one in sums:
        views = [landed[p.bucket][p.start : p.stop] for p in one.pieces]
        packed = torch.cat(views)
        finish(mover.all_reduce(packed, one.item))
        parts: list[Tensor] = list(packed.split([view.numel() for view in views]))
        copy_all(views, parts)
