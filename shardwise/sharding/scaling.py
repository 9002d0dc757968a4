"""What a state carries of the loss scale and of skipped steps: six numbers, all of them leaves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LossScaleState(NamedTuple):
    """The loss scale and its counters; the same on every rank, and saved like any leaf.

    Attributes:
        scale: what the loss of the next step is multiplied by; 1 without a loss scale.
        good_steps: steps since the last one that was skipped.
        hysteresis: how many overflows in all it takes until the scale falls.
        skipped: steps skipped so far.
        skipped_in_a_row: of those, the ones since the last step that was applied.
        divisor: power of two near the number of elements of the last global batch, which the loss
            of the next step is divided by; 1 without float16; 0 before the first step.
    """

    scale: Tensor  # 0-dim float64
    good_steps: Tensor  # 0-dim int64
    hysteresis: Tensor  # 0-dim int64
    skipped: Tensor  # 0-dim int64
    skipped_in_a_row: Tensor  # 0-dim int64
    divisor: Tensor  # 0-dim float64


def first_scaling(scale: float = 1.0, hysteresis: int = 1, divisor: float = 1.0) -> LossScaleState:
    """Nothing skipped, nothing counted.

    >>> first_scaling().scale
    tensor(1., dtype=torch.float64)
    """

    def whole(value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int64)

    def real(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    return LossScaleState(
        real(scale), whole(0), whole(hysteresis), whole(0), whole(0), real(divisor)
    )
