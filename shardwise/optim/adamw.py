"""AdamW: the definition as pure functions, and the same step in place on flat groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.kernels import recipes
from shardwise.kernels.recipes import Recipe
from shardwise.optim.base import GradientTransform, Scale, Tensors, scale_of
from shardwise.optim.checks import check_fraction, check_non_negative
from shardwise.optim.flat import (
    Row,
    in_one_pass,
    like_reals,
    on_rows,
    reals,
    scaled,
    write_shadows,
)
from shardwise.optim.schedules import Schedule, as_schedule, first_count
from shardwise.sharding.compat import fused_adamw
from shardwise.sharding.errors import strict_keywords


class AdamWState(NamedTuple):
    """Steps taken, the rate of the last one, and the two moments."""

    count: Tensor  # 0-dim int64; one for all parameters, also for those that a step leaves out
    learning_rate: Tensor  # 0-dim float64; before the first step, the rate that it will have
    mu: Tensors  # like params
    nu: Tensors  # like params


class _Settings(NamedTuple):
    schedule: Schedule
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@strict_keywords
def adamw(
    learning_rate: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> GradientTransform:
    """Adam with decoupled weight decay; the same step as `torch.optim.AdamW`.

    Keeps two moments per parameter: state is `2 * nbytes(params)`. On the CPU the in-place form is
    one pass over memory, which scales and widens gradients as it reads them; without a C compiler,
    or in 16 bits, it needs at most 262,144 elements more. On other devices it needs two groups'
    size. Its bits do not depend on how a group is cut.

    Args:
        learning_rate: a rate, or a schedule from the count of steps taken.
        betas: decay of the first and second moment per step.
        eps: added to the root of the second moment.
        weight_decay: fraction of a parameter removed per step, times the rate.

    Raises:
        OptimError: a hyperparameter out of range.
        TypeError: an unknown keyword; the nearest is named.

    >>> optimizer = adamw(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"w": torch.tensor([0.5, -3.0])}, state, params)
    >>> updates["w"]
    tensor([-0.1000,  0.1000])

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.
    """
    beta1, beta2 = betas
    check_fraction("adamw", "betas[0]", beta1, usual="betas=(0.9, 0.999)")
    check_fraction("adamw", "betas[1]", beta2, usual="betas=(0.9, 0.999)")
    check_non_negative("adamw", "eps", eps, usual="eps=1e-8")
    check_non_negative("adamw", "weight_decay", weight_decay, usual="weight_decay=0.01")
    schedule = as_schedule("adamw", learning_rate)
    settings = _Settings(schedule, beta1, beta2, eps, weight_decay)
    return GradientTransform(
        init=partial(_init, settings),
        update=partial(_update, settings),
        apply=partial(_apply, settings),
        casts=True,
    )


def _init(settings: _Settings, params: Tensors) -> AdamWState:
    count = first_count(params)
    return AdamWState(
        count,
        settings.schedule(count).to(torch.float64),
        mu={key: torch.zeros_like(value) for key, value in params.items()},
        nu={key: torch.zeros_like(value) for key, value in params.items()},
    )


@torch.no_grad()
def _update(
    settings: _Settings, grads: Tensors, opt_state: AdamWState, params: Tensors, **_extra: Any
) -> tuple[Tensors, AdamWState]:
    _, beta1, beta2, eps, weight_decay = settings
    rate = settings.schedule(opt_state.count).to(torch.float64)
    count = opt_state.count + 1
    mu, nu, updates = dict(opt_state.mu), dict(opt_state.nu), {}
    for key in grads:
        param, grad = params[key], scaled(grads[key], params[key], None)
        mu[key] = beta1 * mu[key] + (1 - beta1) * grad
        square = like_reals(reals(grad).square(), grad)
        nu[key] = beta2 * nu[key] + (1 - beta2) * square
        mean = reals(mu[key]) / _arrived(beta1, count)
        root = (reals(nu[key]) / _arrived(beta2, count)).sqrt()
        change = like_reals(mean / (root + eps), param)
        updates[key] = (-rate * (change + weight_decay * param)).to(param.dtype)
    return updates, AdamWState(count, rate, mu, nu)


@torch.no_grad()
def _apply(
    settings: _Settings,
    params: Tensors,
    grads: Tensors,
    opt_state: AdamWState,
    *,
    scale: Scale | None = None,
    reuse_grads: bool = False,
    shadows: Tensors | None = None,
    **_extra: Any,
) -> tuple[Tensors, AdamWState]:
    opt_state.learning_rate.copy_(settings.schedule(opt_state.count))
    opt_state.count.add_(1)
    rows: list[Row] = []
    for key, grad in grads.items():
        param, factor = params[key], scale_of(scale, key)
        if _has_fused(param):
            written = [reals(param), reals(opt_state.mu[key]), reals(opt_state.nu[key])]
            shadow = shadows.get(key) if shadows else None
            rows.append(Row(written, reals(grad), factor, shadow))
        else:
            _step_plain(settings, opt_state, key, param, scaled(grad, param, factor))
    others = in_one_pass(_recipe(settings, opt_state), rows) if rows else []
    if others:
        _step_fused(settings, opt_state, others, reuse_grads=reuse_grads)
        write_shadows(others)
    return params, opt_state


def _recipe(settings: _Settings, opt_state: AdamWState) -> Recipe:
    return recipes.adamw(
        lr=opt_state.learning_rate.item(),
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        count=int(opt_state.count.item()),
    )


def _has_fused(param: Tensor) -> bool:
    return param.device.type == "cpu"


def _arrived(beta: float, count: Tensor) -> Tensor:
    """The part of a moment, started at zero, that `count` steps have filled."""
    return 1 - torch.pow(beta, count.to(torch.float64))


def _step_fused(
    settings: _Settings, opt_state: AdamWState, rows: Sequence[Row], *, reuse_grads: bool
) -> None:
    """Torch's kernel on the CPU, three times as fast as `_step_plain`."""
    count = opt_state.count.to(torch.float32)

    def kernel(
        params: list[Tensor], mus: list[Tensor], nus: list[Tensor], grads: list[Tensor]
    ) -> None:
        fused_adamw(
            params,
            grads,
            mus,
            nus,
            [],
            [count] * len(params),
            lr=opt_state.learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
        )

    on_rows(kernel, rows, reuse_grads=reuse_grads)


def _step_plain(
    settings: _Settings, opt_state: AdamWState, key: str, param: Tensor, grad: Tensor
) -> None:
    """Elementwise operations, with 0-dim tensors for whatever depends on the count.

    torch's fused kernel wants the rate as float32 on other devices: too coarse for float64.
    """
    _, beta1, beta2, eps, weight_decay = settings
    rate, mu, nu = opt_state.learning_rate, reals(opt_state.mu[key]), reals(opt_state.nu[key])
    param, grad = reals(param), reals(grad)
    first = _arrived(beta1, opt_state.count)
    root = _arrived(beta2, opt_state.count).sqrt()
    mu.lerp_(grad, 1 - beta1)
    nu.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    # m/first / (sqrt(v)/root + eps), with both corrections moved into the two 0-dim numbers.
    change = nu.sqrt().add_(eps * root)
    torch.div(mu, change, out=change)
    param.mul_(1 - rate * weight_decay).sub_(change.mul_(rate * root / first))
