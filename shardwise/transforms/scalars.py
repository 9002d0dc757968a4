"""The packed scalars of a pass: loss, counts, flags and metrics, reduced over the batch axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import BatchError, LossError
from shardwise.transforms.loss import Mean
from shardwise.transforms.lowering import Lowering


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


def check_counts(lowering: Lowering, told: Sequence[float], pairs: Sequence[float]) -> None:
    """Compare what `count_fn` told with what the loss counted; the same numbers on every rank.

    Args:
        lowering: names metrics and terms.
        told: global counts by `count_fn`, in the order of the terms.
        pairs: total and count of each metric, terms included, as reduced.

    Raises:
        LossError: they differ.
    """
    names = lowering.aux or ()
    for name, count in zip(lowering.terms, told, strict=True):
        found = pairs[2 * names.index(name) + 1]
        if not math.isclose(count, found, rel_tol=1e-9):
            raise wrong_counts(name, count, found)


def changed_metrics(given: tuple[str, ...], known: tuple[str, ...]) -> BatchError:
    """The error for metrics under other names than in the first step."""
    return BatchError(
        "The loss function returned other auxiliary metrics than in the first step.",
        where="loss_fn(model, batch)",
        facts=[f"now: {', '.join(given) or 'none'}", f"then: {', '.join(known) or 'none'}"],
        why="Metrics travel in one packed reduction whose slots are fixed by the first step.",
        fix="return every metric in every step and in eval, with count 0 where there is nothing",
    )


def changed_terms(
    given: tuple[str, ...], known: tuple[str, ...], notes: Sequence[str]
) -> LossError:
    """The error for loss terms that are not those that the program was lowered for."""
    return LossError(
        "The loss function returned other terms than the program was lowered for.",
        where="loss_fn(model, batch)",
        facts=[
            f"now: {', '.join(given) or 'no terms, or a single one'}",
            f"lowered: {', '.join(known) or 'no terms, or a single one'}",
            *notes,
        ],
        why="The counts of several terms are reduced before backward, in slots that are fixed by "
        "the first pass over the model or by the names that count_fn returns.",
        fix="return every term in every step, on every rank and in eval, with count 0 where there "
        "is nothing; where the first pass cannot be traced, lower(..., count_fn=)",
    )


def other_counts(given: tuple[str, ...], known: tuple[str, ...]) -> LossError:
    """The error for a `count_fn` that does not tell the counts of the terms."""
    return LossError(
        "count_fn returned counts of other terms than the loss has.",
        where="lower(..., count_fn=)",
        facts=[f"count_fn: {', '.join(given) or 'none'}", f"terms: {', '.join(known)}"],
        why="Every term is divided by its own count.",
        fix="return a dict with one count for each term of the loss",
    )


def wrong_counts(name: str, told: float, found: float) -> LossError:
    """The error for a `count_fn` that counts otherwise than the loss function."""
    return LossError(
        f"count_fn counted {told:g} elements of term {name!r} where the loss counted {found:g}.",
        where="lower(..., count_fn=)",
        facts=f"Over all ranks and micro-batches of this step {told:g} != {found:g}.",
        why="Gradients were divided by what count_fn told, so they would be off by a factor.",
        fix=f"let count_fn return for {name!r} what the loss passes to sw.Mean as its count",
        told=told,
        found=found,
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
