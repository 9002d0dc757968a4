"""Collectives as lowering predicts them: plain values with their axis, bytes and reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise.sharding.layout import Layout, Regroup
from shardwise.sharding.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over one mesh axis.

    Args:
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `all_to_all`.
        axis: the mesh axis it runs over; `*`: all ranks of the job.
        nbytes: payload bytes that leave one rank: `(n - 1) / n` of the full buffer, twice that
            for an all-reduce.
        unit: whose tensors move; `""` is the root.
        reason: `forward`, `backward`, `grads`, `scalars`, `buffers`, `norm`, `update`, `agree`,
            `activations`.
        dtype: of the elements.
    """

    kind: str
    axis: str
    nbytes: int
    unit: str
    reason: str
    dtype: torch.dtype = field(default=torch.float32, compare=False)

    def buffer_bytes(self, ranks: int) -> int:
        """Bytes of the whole buffer, of which `nbytes` leave one of so many ranks."""
        passes = 2 if self.kind == "all_reduce" else 1
        return -(-self.nbytes * ranks // (passes * (ranks - 1)))

    def __str__(self) -> str:
        return f"{self.kind:<14} {self.axis:<8} {self.nbytes:>14,} B  {self.reason:<8} {self.unit}"


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Payload bytes of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * nbytes * (ranks - 1) // ranks


def gather_items(group: Regroup, unit: str, reason: str) -> tuple[Collective, ...]:
    """The collectives that turn fine buffers into the stacked whole: outermost axis first."""
    items = []
    nbytes = group.fine.nbytes
    for axis, size in zip(group.outer_first, reversed(group.stack[:-1]), strict=True):
        dtype = group.fine.dtype
        items.append(Collective("all_gather", axis, (size - 1) * nbytes, unit, reason, dtype))
        nbytes *= size
    return tuple(items)


def scatter_items(group: Regroup, unit: str, reason: str) -> tuple[Collective, ...]:
    """The collectives that sum and cut the stacked whole: innermost axis first."""
    items = []
    nbytes = group.fine.nbytes * group.parts
    for axis, size in zip(reversed(group.outer_first), group.stack[:-1], strict=True):
        nbytes //= size
        dtype = group.fine.dtype
        items.append(Collective("reduce_scatter", axis, (size - 1) * nbytes, unit, reason, dtype))
    return tuple(items)


def reduce_items(
    layout: Layout, axes: Sequence[str], mesh: Mesh, unit: str, reason: str
) -> tuple[Collective, ...]:
    """All-reduces of one buffer over several axes: innermost first."""
    return tuple(
        Collective(
            "all_reduce",
            axis,
            all_reduce_bytes(layout.nbytes, mesh[axis]),
            unit,
            reason,
            layout.dtype,
        )
        for axis in reversed(axes)
    )


def packed_items(
    count: int, axes: Sequence[str], mesh: Mesh, reason: str
) -> tuple[Collective, ...]:
    """The collectives of one packed reduction of `count` float64 scalars: innermost axis first."""
    return tuple(
        Collective("all_gather", axis, (mesh[axis] - 1) * 8 * count, "", reason, torch.float64)
        for axis in reversed(axes)
    )


def payload_bytes(items: Sequence[Collective]) -> int:
    """Payload bytes that leave one rank."""
    return sum(item.nbytes for item in items)
