"""Stochastic gradient descent, with momentum: the definition, and the same step in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

from shardwise.kernels import recipes
from shardwise.kernels.recipes import Recipe
from shardwise.optim.base import GradientTransform, Scale, Tensors, scale_of
from shardwise.optim.checks import check_fraction, check_non_negative
from shardwise.optim.flat import Row, in_one_pass, on_rows, scaled, write_shadows
from shardwise.optim.schedules import Schedule, as_schedule, first_count
from shardwise.sharding.errors import OptimError, strict_keywords


class SGDState(NamedTuple):
    """Steps taken, the rate of the last one, and the running sum of gradients."""

    count: Tensor  # 0-dim int64
    learning_rate: Tensor  # 0-dim float64; before the first step, the rate that it will have
    mu: Tensors  # like params; empty without momentum


class _Settings(NamedTuple):
    schedule: Schedule
    momentum: float
    nesterov: bool
    weight_decay: float


@strict_keywords
def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> GradientTransform:
    """Gradient descent; the same step as `torch.optim.SGD` (dampening 0).

    State is `nbytes(params)` with momentum, nothing without. On the CPU the in-place form is one
    pass over memory; without a C compiler it needs at most 262,144 elements more, for gradients
    that are scaled or of another dtype; on other devices, or in 16 bits, up to two groups' size.
    Its bits do not depend on how a group is cut.

    Args:
        learning_rate: a rate, or a schedule from the count of steps taken.
        momentum: what remains of the running sum of gradients per step.
        nesterov: look one step of the running sum ahead.
        weight_decay: times the parameter, added to its gradient (coupled, as an L2 penalty).

    Raises:
        OptimError: a hyperparameter out of range, or nesterov without momentum.
        TypeError: an unknown keyword; the nearest is named.

    >>> optimizer = sgd(0.1, momentum=0.9)
    >>> params = {"w": torch.tensor([1.0])}
    >>> state = optimizer.init(params)
    >>> for _ in range(2):
    ...     params, state = optimizer.apply(params, {"w": torch.tensor([1.0])}, state)
    >>> params["w"]
    tensor([0.7100])

    References:
        Sutskever et al., On the importance of initialization and momentum, 2013, section 2.
    """
    check_fraction("sgd", "momentum", momentum, usual="momentum=0.9")
    check_non_negative("sgd", "weight_decay", weight_decay, usual="weight_decay=1e-4")
    _check_nesterov(nesterov, momentum)
    schedule = as_schedule("sgd", learning_rate)
    settings = _Settings(schedule, momentum, nesterov, weight_decay)
    return GradientTransform(
        init=partial(_init, settings),
        update=partial(_update, settings),
        apply=partial(_apply, settings),
        casts=True,
    )


def _check_nesterov(nesterov: bool, momentum: float) -> None:
    if nesterov and momentum == 0:
        raise OptimError(
            "sgd(nesterov=True, momentum=0) has nothing to look ahead along.",
            where="arguments nesterov and momentum of sgd()",
            facts=f"nesterov is {nesterov!r}; momentum is {momentum!r}.",
            why="Nesterov's step adds momentum times the running sum of gradients.",
            fix="momentum=0.9, or nesterov=False",
            momentum=momentum,
        )


def _init(settings: _Settings, params: Tensors) -> SGDState:
    count = first_count(params)
    moving = params if settings.momentum else {}
    return SGDState(
        count,
        settings.schedule(count).to(torch.float64),
        mu={key: torch.zeros_like(value) for key, value in moving.items()},
    )


@torch.no_grad()
def _update(
    settings: _Settings, grads: Tensors, opt_state: SGDState, params: Tensors, **_extra: Any
) -> tuple[Tensors, SGDState]:
    _, momentum, nesterov, weight_decay = settings
    rate = settings.schedule(opt_state.count).to(torch.float64)
    mu, updates = dict(opt_state.mu), {}
    for key in grads:
        change = scaled(grads[key], params[key], None) + weight_decay * params[key]
        if momentum:
            mu[key] = momentum * mu[key] + change
            change = change + momentum * mu[key] if nesterov else mu[key]
        updates[key] = (-rate * change).to(change.dtype)
    return updates, SGDState(opt_state.count + 1, rate, mu)


@torch.no_grad()
def _apply(
    settings: _Settings,
    params: Tensors,
    grads: Tensors,
    opt_state: SGDState,
    *,
    scale: Scale | None = None,
    reuse_grads: bool = False,
    shadows: Tensors | None = None,
    **_extra: Any,
) -> tuple[Tensors, SGDState]:
    rate = opt_state.learning_rate.copy_(settings.schedule(opt_state.count))
    opt_state.count.add_(1)
    rows: list[Row] = []
    for key, grad in grads.items():
        param, factor = params[key], scale_of(scale, key)
        written = [param, opt_state.mu[key]] if settings.momentum else [param]
        if _has_fused(param):
            shadow = shadows.get(key) if shadows else None
            rows.append(Row(written, grad, factor, shadow))
        else:
            _step_plain(settings, rate, written, scaled(grad, param, factor))
    others = in_one_pass(_recipe(settings, rate), rows) if rows else []
    if others:
        _step_fused(settings, rate, others, reuse_grads=reuse_grads)
        write_shadows(others)
    return params, opt_state


def _recipe(settings: _Settings, rate: Tensor) -> Recipe:
    return recipes.sgd(
        lr=rate.item(),
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
    )


def _has_fused(param: Tensor) -> bool:
    # The CPU kernel leaves whole vectors of 16-bit parameters unchanged: pytorch issue 191763,
    # seen on 2.13. Until the oldest supported torch has the fix, they take the plain step.
    return param.device.type == "cpu" and param.dtype in (torch.float32, torch.float64)


def _step_fused(
    settings: _Settings, rate: Tensor, rows: Sequence[Row], *, reuse_grads: bool
) -> None:
    """Torch's kernel on the CPU, three times as fast as `_step_plain`."""

    def kernel(params: list[Tensor], *rest: list[Tensor]) -> None:
        *mus, grads = rest
        torch_sgd(
            params,
            grads,
            [*mus[0]] if mus else [None] * len(params),
            fused=True,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            # Annotated float, but torch.optim.SGD passes tensors here too.
            lr=rate,  # pyright: ignore[reportArgumentType]
            dampening=0.0,
            nesterov=settings.nesterov,
            maximize=False,
        )

    on_rows(kernel, rows, reuse_grads=reuse_grads)


def _step_plain(settings: _Settings, rate: Tensor, written: list[Tensor], grad: Tensor) -> None:
    """Elementwise operations, with a 0-dim tensor for the rate."""
    param, *mu = written
    # No `alpha=`: in 16 bits its vector and scalar loops round differently, and cuts would show.
    change = (param * settings.weight_decay).add_(grad) if settings.weight_decay else grad
    if mu:
        mu[0].mul_(settings.momentum).add_(change)
        change = (mu[0] * settings.momentum).add_(change) if settings.nesterov else mu[0]
    param.sub_(change * rate)
