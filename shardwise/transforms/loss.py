"""What a loss function returns, and how it becomes one exact global mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from shardwise.sharding.errors import BatchError, LossError


@dataclass(frozen=True)
class Mean:
    """A sum and how many elements it sums: the exact mean over all ranks is sum / sum.

    Args:
        total: scalar tensor, the sum over this rank's elements.
        count: number of those elements (a number or a scalar tensor).

    >>> mean = Mean(torch.tensor(6.0), 3)
    >>> float(mean.total), mean.count
    (6.0, 3)
    """

    total: Tensor
    count: Tensor | float

    @staticmethod
    def of_tokens(loss: Tensor, labels: Tensor, ignore: int = -100) -> Mean:
        """From a mean over the labels that are not `ignore`, as cross entropy returns it.

        >>> mean = Mean.of_tokens(torch.tensor(2.0), torch.tensor([1, -100, 3]))
        >>> float(mean.total), float(mean.count)
        (4.0, 2.0)
        """
        count = (labels != ignore).sum()
        total = torch.where(count > 0, loss, loss.new_zeros(())) * count
        return Mean(total, count)


@dataclass(frozen=True)
class Loss:
    """A parsed result of a loss function."""

    total: Tensor
    count: Tensor
    aux: Mapping[str, Mean] = field(default_factory=dict)


def parse_loss(result: Any, batch: Any) -> Loss:
    """Read a scalar or a `Mean`, optionally with a dict of auxiliary `Mean`s.

    A scalar is a mean over this rank's rows (dimension 0 of the first tensor in the batch).

    Raises:
        LossError: anything else.
    """
    aux: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, aux = result
    if isinstance(result, Mean):
        total = result.total
        count = torch.as_tensor(result.count, dtype=torch.float64, device=total.device)
    elif isinstance(result, Tensor):
        rows = num_rows(batch)
        total = result * rows if isinstance(result, Tensor) and result.ndim == 0 else result
        count = torch.tensor(float(rows), dtype=torch.float64, device=result.device)
    else:
        raise _not_a_loss(f"a {type(result).__name__}")
    if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point():
        shape = f"of shape {tuple(total.shape)} and dtype {total.dtype}" if isinstance(total, Tensor) else ""
        raise _not_a_loss(f"a {type(total).__name__} {shape}".strip())
    if count.ndim:
        raise _not_a_loss(f"a Mean whose count has shape {tuple(count.shape)}")
    for name, value in aux.items():
        if not isinstance(value, Mean):
            raise _not_a_loss(f"the auxiliary metric {name!r} as a {type(value).__name__}")
    return Loss(total, count.detach(), dict(sorted(aux.items())))


def _not_a_loss(got: str) -> LossError:
    return LossError(
        f"The loss function returned {got}.",
        where="loss_fn(model, batch)",
        why="A loss is a floating scalar (the mean over this rank's rows) or sw.Mean(total, count), "
        "optionally in a tuple with a dict of sw.Mean metrics.",
        fix="return loss.mean(), or sw.Mean(loss.sum(), loss.numel())",
    )


def num_rows(batch: Any) -> int:
    """Rows of a batch: dimension 0 of its first tensor."""
    for leaf in optree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise BatchError(
        "The batch holds no tensor with a dimension, so a scalar loss has no weight.",
        where="program.step(state, batch)",
        why="A scalar loss is weighted by the rows of the batch.",
        fix="return sw.Mean(total, count) from the loss function",
    )
