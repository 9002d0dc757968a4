"""How a global batch is cut into the parts of the data ranks when its rows do not divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import BatchError, nearest
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.pytree import tree_leaves, tree_map
from shardwise.transforms.micro import batch_rows, cut_rows

UNEVEN = ("split", "drop", "pad", "error")
"""What `shard_batch` may do with rows that do not divide."""


@dataclass(frozen=True)
class Parts:
    """Into how many parts the batch axes cut a batch.

    Args:
        mesh: of the plan.
        axes: that split the batch.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of parts."""
        return self.mesh.product(self.axes)

    def index(self, coords: Mapping[str, int]) -> int:
        """The part of the rank at these coordinates."""
        return self.mesh.index(self.axes, coords)

    def __str__(self) -> str:
        return f"parts: {self.count} (axes {' '.join(self.axes) or 'none'} of {self.mesh!r})"


def even_batch(batch: Any, parts: Parts, *, uneven: str, weight: str) -> Any:
    """The global batch as it will be cut: whole, without its last rows, or filled up.

    Args:
        batch: a pytree whose tensors have the same rows.
        parts: of the mesh.
        uneven: one of `UNEVEN`.
        weight: name of the leaf that `pad` adds to a dict.

    Raises:
        BatchError: tensors differ in rows or have none, rows do not divide and may not, nothing
            would be left, or there is no dict for the weights.
    """
    if uneven not in UNEVEN:
        raise BatchError(
            f"shard_batch(uneven={uneven!r}) is not a way to cut a batch.",
            where="argument uneven of program.shard_batch()",
            facts=f"allowed: {', '.join(map(repr, UNEVEN))}.",
            why="Rows that do not divide are split unevenly, dropped, filled up, or refused.",
            fix=nearest(uneven, UNEVEN),
            uneven=uneven,
        )
    rows = sorted(batch_rows(batch))
    if not rows and (parts.count > 1 or uneven == "pad"):
        raise _nothing_to_cut(batch, parts)
    if len(rows) > 1:
        raise _rows_differ(rows, parts)
    if not rows or uneven == "split":
        return batch
    rest = rows[0] % parts.count
    if uneven == "error" and rest:
        raise _does_not_divide(rows[0], parts)
    if uneven == "drop":
        return _dropped(batch, rows[0], rest, parts) if rest else batch
    return _padded(batch, rows[0], parts, weight) if uneven == "pad" else batch


def own_part(batch: Any, parts: Parts, coords: Mapping[str, int]) -> Any:
    """One rank's part of a global batch; None where too few rows leave it without one.

    >>> parts = Parts(Mesh(fsdp=2), ("fsdp",))
    >>> own_part(torch.arange(3), parts, {"fsdp": 1}), own_part(torch.ones(1), parts, {"fsdp": 1})
    (tensor([2]), None)
    """
    index = parts.index(coords)
    rows = batch_rows(batch)
    if rows and min(rows) <= index:
        return None
    return cut_rows(batch, parts.count, index)


def _dropped(batch: Any, rows: int, rest: int, parts: Parts) -> Any:
    if rows < parts.count:
        raise BatchError(
            "Nothing is left of the global batch.",
            where="program.shard_batch(batch, uneven='drop')",
            facts=[f"rows: {rows}; {rows} % {parts.count} == {rest}", str(parts)],
            why="uneven='drop' leaves out the rows that do not divide, here all of them.",
            fix="uneven='split', which leaves ranks without a batch, or uneven='pad'",
            rows=rows,
            parts=parts.count,
        )
    return _take(batch, slice(0, rows - rest))


def _padded(batch: Any, rows: int, parts: Parts, weight: str) -> Any:
    if not isinstance(batch, Mapping) or weight in batch or not rows:
        held = f"a {type(batch).__name__} of {rows} rows"
        if isinstance(batch, Mapping) and weight in batch:
            held += f" and has a {weight!r}"
        raise BatchError(
            "The global batch cannot be filled up.",
            where="program.shard_batch(batch, uneven='pad')",
            facts=f"it is {held}.",
            why=f"Repeated rows are marked by a new leaf {weight!r}: 1 for a row, 0 for a repeated "
            "one.",
            fix="pass a dict of tensors with at least one row, and another name with weight=...",
            rows=rows,
            weight=weight,
        )
    first: Tensor = next(leaf for leaf in tree_leaves(batch) if _has_rows(leaf))
    total = rows + -rows % parts.count
    index = torch.arange(total, device=first.device)
    dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()
    filled = _take(batch, index % rows)
    return {**filled, weight: (index < rows).to(dtype)}


def _take(batch: Any, rows: Any) -> Any:
    return tree_map(lambda leaf: leaf[rows] if _has_rows(leaf) else leaf, batch)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _does_not_divide(rows: int, parts: Parts) -> BatchError:
    rest = rows % parts.count
    return BatchError(
        "The global batch does not divide over the ranks.",
        where="program.shard_batch(batch, uneven='error')",
        facts=[f"rows: {rows}; {rows} % {parts.count} == {rest}", str(parts)],
        why="uneven='error' asks for parts of one size.",
        fix=f"a batch of {rows - rest} or {rows - rest + parts.count} rows, or uneven='split', "
        "'drop' or 'pad'",
        rows=rows,
        parts=parts.count,
        rest=rest,
    )


def _rows_differ(rows: Sequence[int], parts: Parts) -> BatchError:
    return BatchError(
        "The global batch cannot be cut into the parts of the ranks.",
        where="program.shard_batch(batch)",
        facts=[f"rows of its tensors: {', '.join(str(n) for n in rows)}", str(parts)],
        why="Dimension 0 of every tensor is cut alike.",
        fix="pass tensors of the same number of rows",
        parts=parts.count,
    )


def _nothing_to_cut(batch: Any, parts: Parts) -> BatchError:
    return BatchError(
        f"The global batch, a {type(batch).__name__}, holds no tensor with rows to cut.",
        where="program.shard_batch(batch)",
        facts=str(parts),
        why="Tensors in tuples, lists and dicts are cut; every rank would get all of this batch.",
        fix="pass a dict of tensors, or register the type of the batch with optree",
        parts=parts.count,
    )
