"""What a step reports: 0-dim tensors, reduced over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.transforms.lowering import Lowering


@dataclass(frozen=True, eq=False)
class Metrics:
    """The figures of one step, the same on every rank.

    Args:
        loss: mean over all elements of the global batch.
        tokens: number of those elements; of several loss terms, of the one that counts most.
        grad_norm: norm of the whole gradient before it was clipped: the 2-norm, or that by which
            the optimizer clips. None unless the optimizer or `lower(..., grad_norm=True)` asks for
            it, or if the step was skipped.
        group_norms: likewise of the groups of `clip_by_group_norm`, by their patterns.
        applied: whether parameters were updated; of `program.grads`, whether an update would.
        reason: why not, else "".
        skipped_steps: how many updates were not applied so far, this one included.
        scale: what the loss was multiplied by before backward; None in `eval`.
        aux: means of the auxiliary metrics and, without their weights, of the loss terms; NaN where
            nothing counts.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor | None = None
    group_norms: Mapping[str, Tensor] = field(default_factory=dict)
    applied: bool = True
    reason: str = ""
    skipped_steps: int = 0
    scale: Tensor | None = None
    aux: Mapping[str, Tensor] = field(default_factory=dict)


def read_metrics(lowering: Lowering, values: Tensor, offset: int, **about: Any) -> Metrics:
    """Metrics from the packed sums of all ranks.

    Args:
        lowering: names auxiliary metrics and loss terms.
        values: the sums; loss and count first.
        offset: where total and count of each auxiliary metric begin.
        about: the other figures.
    """
    names = lowering.aux or ()
    aux = {
        name: values[offset + 2 * index] / values[offset + 2 * index + 1]
        for index, name in enumerate(names)
    }
    if not lowering.terms:
        return Metrics(loss=values[0] / values[1], tokens=values[1], aux=aux, **about)
    counts = [values[offset + 2 * names.index(name) + 1] for name in lowering.terms]
    return Metrics(loss=values[0], tokens=torch.stack(counts).max(), aux=aux, **about)
