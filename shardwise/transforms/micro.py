"""Micro-batches: what each pass of a step runs on, cut from a rank's batch or given one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shardwise.sharding.errors import BatchError
from shardwise.sharding.pytree import tree_flatten, tree_leaves, tree_map


class MicroBatches:
    """The micro-batches of one rank's step, as a loader gives them; at most n for `accumulate(n)`.

    A rank that has fewer runs the passes that are left with nothing to add, so the last window of
    an epoch may be short, and on each rank by another number.

    Args:
        batches: pytrees of one structure; sizes may differ.

    >>> import torch
    >>> len(MicroBatches([{"x": torch.ones(2)}, {"x": torch.ones(1)}]))
    2
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = tuple(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __repr__(self) -> str:
        return f"MicroBatches({len(self)} of {structure_of(self.batches[:1])})"


def cut_batch(batch: Any, steps: int) -> tuple[Any, ...]:
    """The micro-batches of one rank, at most `steps`; fewer where it has less.

    Args:
        batch: a pytree whose tensors have the same rows, `MicroBatches`, or None for no batch.
        steps: passes of a step.

    Raises:
        BatchError: tensors differ in rows or have none, there are more micro-batches than passes,
            or these differ in structure.

    >>> import torch
    >>> [part.tolist() for part in cut_batch(torch.arange(5), 3)]
    [[0, 1], [2, 3], [4]]
    >>> cut_batch(None, 3), len(cut_batch(torch.arange(2), 3))
    ((), 2)
    """
    if batch is None:
        return ()
    if isinstance(batch, MicroBatches):
        return _checked(batch, steps)
    if steps == 1:
        return (batch,)
    rows = batch_rows(batch)
    if len(rows) != 1:
        raise _not_cut(batch, rows, steps)
    (count,) = rows
    return tuple(cut_rows(batch, steps, index) for index in range(min(steps, count)))


def first_micro(batch: Any, steps: int) -> Any:
    """The micro-batch that a program is traced with.

    Raises:
        BatchError: there is none.

    >>> import torch
    >>> first_micro(torch.arange(5), 2).tolist()
    [0, 1, 2]
    """
    micros = cut_batch(batch, steps)
    if micros:
        return micros[0]
    raise BatchError(
        "There is no micro-batch to trace.",
        where="lower(plan, loss_fn, optimizer, batch=)",
        facts=f"the batch is a {type(batch).__name__} without rows; micro-batches: {steps}.",
        why="The order of units, metrics and activations are those of a pass over a micro-batch.",
        fix="pass a batch with at least one row, or leave batch= out",
        steps=steps,
    )


def cut_rows(batch: Any, parts: int, index: int) -> Any:
    """One part of the rows of every tensor; sizes differ by one row at most.

    >>> import torch
    >>> cut_rows({"x": torch.arange(5)}, 2, 1)
    {'x': tensor([3, 4])}
    """

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return leaf.tensor_split(parts)[index]

    return tree_map(cut, batch)


def batch_rows(batch: Any) -> set[int]:
    """The sizes of dimension 0 that the tensors of a batch have.

    >>> import torch
    >>> batch_rows([torch.ones(3, 2), torch.ones(3), torch.ones(())])
    {3}
    """
    leaves = tree_leaves(batch)
    return {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}


def structure_of(batch: Any) -> str:
    """Keys, dtypes and numbers of dimensions; equal for batches that one program may run on.

    >>> import torch
    >>> structure_of({"x": torch.ones(2, 3)})
    "PyTreeSpec({'x': *}, NoneIsLeaf) with torch.float32 of 2 dims"
    """
    leaves, structure = tree_flatten(batch, none_is_leaf=True)
    kinds = [
        f"{leaf.dtype} of {leaf.ndim} dims" if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in leaves
    ]
    return f"{structure} with {', '.join(kinds)}"


def not_for_eval(count: int) -> BatchError:
    """The error for micro-batches in an evaluation."""
    return BatchError(
        f"program.eval was given MicroBatches, {count} of them.",
        where="program.eval(state, batch)",
        facts=f"micro-batches: {count}; passes of an evaluation: 1.",
        why="Without backward nothing is kept for it, so an evaluation is one forward pass.",
        fix="evaluate each micro-batch and weight its metrics by metrics.tokens",
        batches=count,
    )


def _checked(batch: MicroBatches, steps: int) -> tuple[Any, ...]:
    if len(batch) > steps:
        raise BatchError(
            f"There are {len(batch)} micro-batches for a step of {steps}.",
            where="program.step(state, sw.MicroBatches([...]))",
            facts=f"micro-batches: {len(batch)}; passes of a step: {steps}.",
            why="Every rank runs as many passes as the plan says, and no more.",
            fix=f"pass at most {steps}, or plan with accumulate({len(batch)})",
            batches=len(batch),
            steps=steps,
        )
    structures = [structure_of(one) for one in batch]
    other = next((i for i, one in enumerate(structures) if one != structures[0]), None)
    if other is not None:
        raise BatchError(
            f"Micro-batches 0 and {other} differ in structure.",
            where="program.step(state, sw.MicroBatches([...]))",
            facts=[f"micro-batch {index}: {structures[index]}" for index in (0, other)],
            why="All passes of a step run one program; sizes may differ, keys and dtypes may not.",
            fix="make the same keys with the same dtypes in every micro-batch",
            micro=other,
        )
    return batch.batches


def _not_cut(batch: Any, rows: set[int], steps: int) -> BatchError:
    shown = ", ".join(str(count) for count in sorted(rows)) or "none"
    return BatchError(
        f"This rank's batch, a {type(batch).__name__}, cannot be cut into micro-batches.",
        where="program.step(state, batch)",
        facts=f"rows of its tensors: {shown}; micro-batches: {steps}.",
        why="accumulate(n) cuts dimension 0 of every tensor of the batch into n parts alike.",
        fix="pass tensors of the same number of rows, or sw.MicroBatches([...]) of your own",
        steps=steps,
        rows=tuple(sorted(rows)),
    )
