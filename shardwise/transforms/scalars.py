"""The packed scalars of a pass: loss, counts, flags and metrics, reduced over the batch axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import BatchError
from shardwise.transforms.loss import Mean


def pack_scalars(
    means: Sequence[Mean], num_means: int, plain: Sequence[float], device: torch.device
) -> Tensor:
    """`[total, count, *plain, aux total, aux count, ...]` in float64; zeros without means."""
    if not means:
        return torch.tensor(
            [0.0, 0.0, *plain, *[0.0] * (2 * num_means - 2)], dtype=torch.float64
        ).to(device)
    scalars = [part for mean in means for part in (mean.total, mean.count)]
    parts = [torch.as_tensor(p, device=device).detach().double().reshape(1) for p in scalars]
    flags = torch.tensor(plain, dtype=torch.float64).to(device)
    return torch.cat([*parts[:2], flags, *parts[2:]])


def changed_metrics(given: tuple[str, ...], known: tuple[str, ...]) -> BatchError:
    """The error for metrics under other names than in the first step."""
    return BatchError(
        "The loss function returned other auxiliary metrics than in the first step.",
        where="loss_fn(model, batch)",
        facts=[f"now: {', '.join(given) or 'none'}", f"then: {', '.join(known) or 'none'}"],
        why="Metrics travel in one packed reduction whose slots are fixed by the first step.",
        fix="return every metric in every step and in eval, with count 0 where there is nothing",
    )


def other_metrics(told: list[Any]) -> BatchError:
    """The error for ranks that return metrics under different names."""
    return BatchError(
        "Ranks return different auxiliary metrics.",
        where="loss_fn(model, batch)",
        facts=[f"rank {rank}: {names}" for rank, names in enumerate(told)],
        why="Metrics are reduced together, so every rank returns the same names.",
        fix="return every metric on every rank, with count 0 where there is nothing",
    )
