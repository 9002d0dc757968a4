"""The table of optimizers that every property is run for, each beside its torch.optim twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.optim import GradientTransform, adamw, sgd


class Case(NamedTuple):
    """One optimizer with its options, ours and torch's."""

    name: str
    ours: GradientTransform
    torch: Callable[..., torch.optim.Optimizer]


CASES = [
    Case("adamw", adamw(0.01), partial(torch.optim.AdamW, lr=0.01)),
    Case(
        "adamw-options",
        adamw(0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
        partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    ),
    Case(
        "adamw-no-memory",
        adamw(0.02, betas=(0.0, 0.0), weight_decay=0.0),
        partial(torch.optim.AdamW, lr=0.02, betas=(0.0, 0.0), weight_decay=0.0),
    ),
    Case("sgd", sgd(0.1), partial(torch.optim.SGD, lr=0.1)),
    Case(
        "sgd-decay", sgd(0.1, weight_decay=0.3), partial(torch.optim.SGD, lr=0.1, weight_decay=0.3)
    ),
    Case("sgd-momentum", sgd(0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    Case(
        "sgd-nesterov",
        sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.3),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.3),
    ),
]

SHAPES = {"a": (3, 5), "b": (), "c": (130,), "d": (0,)}
"""A matrix, a scalar, more than one vector with a remainder, and nothing."""


def random_tensors(
    seed: int, dtype: torch.dtype, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    """Normal values, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES if shapes is None else shapes
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for key, shape in shapes.items()
    }


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values in other storage."""
    return {key: tensor.clone() for key, tensor in tensors.items()}
