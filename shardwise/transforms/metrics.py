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
        tokens: number of those elements; of several loss terms, of the one that counts most.
        grad_norm: 2-norm of the whole gradient; None unless the optimizer asks for it, or if the
            step was skipped.
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
    applied: bool = True
    reason: str = ""
    skipped_steps: int = 0
    scale: Tensor | None = None
    aux: Mapping[str, Tensor] = field(default_factory=dict)
