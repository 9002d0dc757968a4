"""What a step reports: 0-dim tensors, reduced over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Metrics:
    """The figures of one step, the same on every rank.

    Args:
        loss: mean over all elements of the global batch.
        tokens: number of those elements.
        grad_norm: 2-norm of the whole gradient; None unless the optimizer asks for it.
        applied: whether parameters were updated.
        reason: why not, else "".
        skipped_steps: how many updates were not applied so far.
        aux: means of the auxiliary metrics.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor | None = None
    applied: bool = True
    reason: str = ""
    skipped_steps: int = 0
    aux: Mapping[str, Tensor] = field(default_factory=dict)
