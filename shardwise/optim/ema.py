"""A running average of the parameters, kept beside an optimizer's state and cut like it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.optim.base import (
    GradientTransform,
    Scale,
    Shapes,
    Tensors,
    apply_in_place,
    over_keys,
)
from shardwise.optim.checks import check_fraction
from shardwise.optim.schedules import first_count
from shardwise.sharding.errors import strict_keywords


class EMAState(NamedTuple):
    """Steps averaged, the average (zero before the first step), and the inner state."""

    count: Tensor  # 0-dim int64
    average: Tensors  # like params
    inner: Any


@strict_keywords
def ema(optimizer: GradientTransform, *, decay: float = 0.999) -> GradientTransform:
    """An optimizer that also keeps an exponential moving average of the parameters.

    The first step copies the parameters, as `torch.optim.swa_utils.AveragedModel` does; each later
    one keeps `decay` of the average. In a program `state.opt.average["path"]` is a DTensor in the
    `opt` home, and follows the master copy where there is one. Costs `nbytes(params)` of state. A
    parameter that no rank used in a step keeps its average.

    Args:
        optimizer: what steps the parameters.
        decay: share of the average that one step keeps.

    Raises:
        OptimError: `decay` is out of range.

    >>> from shardwise.optim.sgd import sgd
    >>> optimizer = ema(sgd(1.0), decay=0.5)
    >>> params = {"w": torch.tensor([4.0])}
    >>> state = optimizer.init(params)
    >>> for _ in range(2):
    ...     params, state = optimizer.apply(params, {"w": torch.tensor([1.0])}, state)
    >>> params["w"], state.average["w"]
    (tensor([2.]), tensor([2.5000]))
    """
    check_fraction("ema", "decay", decay, usual="decay=0.999")
    return _make(optimizer, decay)


def _make(optimizer: GradientTransform, decay: float) -> GradientTransform:
    return GradientTransform(
        init=partial(_init, optimizer),
        update=partial(_update, optimizer, decay),
        apply=partial(_apply, optimizer, decay),
        couples=optimizer.couples,
        needs=optimizer.needs,
        parts=optimizer.parts,
        over=None if optimizer.over is None else partial(_over, optimizer, decay),
    )


def _over(
    optimizer: GradientTransform, decay: float, shapes: Shapes, keys: Mapping[str, str]
) -> GradientTransform:
    return _make(over_keys(optimizer, shapes, keys), decay)


def _init(optimizer: GradientTransform, params: Tensors) -> EMAState:
    average = {key: torch.zeros_like(value) for key, value in params.items()}
    return EMAState(first_count(params), average, optimizer.init(params))


def _weight(count: Tensor, decay: float) -> Tensor:
    """The share of the new value: all of it in the first step."""
    later = torch.full_like(count, 1.0 - decay, dtype=torch.float64)
    return torch.where(count == 0, torch.ones_like(later), later)


@torch.no_grad()
def _update(
    optimizer: GradientTransform,
    decay: float,
    grads: Tensors,
    opt_state: EMAState,
    params: Tensors,
    **extra: Any,
) -> tuple[Tensors, EMAState]:
    updates, inner = optimizer.update(grads, opt_state.inner, params, **extra)
    weight = _weight(opt_state.count, decay)
    average = dict(opt_state.average)
    for key, change in updates.items():
        old, new = average[key], params[key] + change
        average[key] = old.lerp(new, weight.to(old.dtype))
    return updates, EMAState(opt_state.count + 1, average, inner)


@torch.no_grad()
def _apply(
    optimizer: GradientTransform,
    decay: float,
    params: Tensors,
    grads: Tensors,
    opt_state: EMAState,
    *,
    scale: Scale | None = None,
    **extra: Any,
) -> tuple[Tensors, EMAState]:
    params, inner = apply_in_place(optimizer, params, grads, opt_state.inner, scale=scale, **extra)
    weight = _weight(opt_state.count, decay)
    opt_state.count.add_(1)
    for key in grads:
        average = opt_state.average[key]
        average.lerp_(params[key], weight.to(average.dtype))
    return params, opt_state._replace(inner=inner)
