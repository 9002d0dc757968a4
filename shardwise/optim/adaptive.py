"""Elementwise optimizers as rules: adam, lion, adagrad, rmsprop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels import recipes
from shardwise.kernels.recipes import Recipe
from shardwise.optim.base import GradientTransform, Tensors
from shardwise.optim.checks import check_fraction, check_non_negative
from shardwise.optim.rules import At, Rule, Slots, arrived, decayed, from_rule, like
from shardwise.optim.schedules import Schedule, as_schedule
from shardwise.sharding.errors import strict_keywords


class AdamState(NamedTuple):
    """Steps taken by all parameters together, the rate of the last one, and two moments."""

    count: Tensor  # 0-dim int64
    learning_rate: Tensor  # 0-dim float64
    mu: Tensors  # like params
    nu: Tensors  # like params


class LionState(NamedTuple):
    """Steps taken, the rate of the last one, and the momentum."""

    count: Tensor  # 0-dim int64
    learning_rate: Tensor  # 0-dim float64
    mu: Tensors  # like params


class AdagradState(NamedTuple):
    """Steps taken, the rate of the last one, and the sum of squares."""

    count: Tensor  # 0-dim int64
    learning_rate: Tensor  # 0-dim float64
    nu: Tensors  # like params


class RMSpropState(NamedTuple):
    """Steps taken, the rate of the last one, mean square, mean if centred, momentum if any."""

    count: Tensor  # 0-dim int64
    learning_rate: Tensor  # 0-dim float64
    nu: Tensors  # like params
    mean: Tensors  # like params, or empty
    mu: Tensors  # like params, or empty


@strict_keywords
def adam(
    learning_rate: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> GradientTransform:
    """Adam with weight decay inside the gradient; the same step as `torch.optim.Adam`.

    State is `2 * nbytes(params)`. For decoupled decay, and for a fused pass, take `adamw`.

    Args:
        learning_rate: a rate, or a schedule from the count of steps taken.
        betas: decay of the first and second moment per step.
        eps: added to the root of the second moment.
        weight_decay: times the parameter, added to its gradient.

    Raises:
        OptimError: a hyperparameter out of range.

    >>> optimizer = adam(0.1)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.apply(params, {"w": torch.tensor([5.0])}, optimizer.init(params))[0]
    {'w': tensor([0.9000])}

    References:
        Kingma and Ba, Adam, 2015, algorithm 1.
    """
    beta1, beta2 = betas
    check_fraction("adam", "betas[0]", beta1, usual="betas=(0.9, 0.999)")
    check_fraction("adam", "betas[1]", beta2, usual="betas=(0.9, 0.999)")
    check_non_negative("adam", "eps", eps, usual="eps=1e-8")
    check_non_negative("adam", "weight_decay", weight_decay, usual="weight_decay=0.0")

    def step(at: At, param: Tensor, grad: Tensor, slots: Slots) -> tuple[Tensor, dict[str, Tensor]]:
        grad = decayed(grad, param, weight_decay)
        mu = beta1 * slots["mu"] + (1 - beta1) * grad
        nu = beta2 * slots["nu"] + (1 - beta2) * grad.square()
        root = (nu / arrived(beta2, at.count)).sqrt() + eps
        return -at.rate * (mu / arrived(beta1, at.count)) / root, {"mu": mu, "nu": nu}

    schedule = as_schedule("adam", learning_rate)
    rule = Rule(AdamState, schedule, lambda param: like(param, "mu", "nu"), step)
    return from_rule(rule, ("mu", "nu"))


@strict_keywords
def lion(
    learning_rate: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> GradientTransform:
    """The sign of an interpolated momentum, with decoupled weight decay.

    State is `nbytes(params)`. Rates are usually 3 to 10 times smaller than AdamW's, decay larger.

    Args:
        learning_rate: a rate, or a schedule from the count of steps taken.
        betas: the share of the momentum in the step, and its decay.
        weight_decay: fraction of a parameter removed per step, times the rate.

    Raises:
        OptimError: a hyperparameter out of range.

    >>> optimizer = lion(0.1)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.apply(params, {"w": torch.tensor([5.0, -0.1])}, optimizer.init(params))[0]
    {'w': tensor([0.9000, 1.1000])}

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2.
    """
    beta1, beta2 = betas
    check_fraction("lion", "betas[0]", beta1, usual="betas=(0.9, 0.99)")
    check_fraction("lion", "betas[1]", beta2, usual="betas=(0.9, 0.99)")
    check_non_negative("lion", "weight_decay", weight_decay, usual="weight_decay=0.1")

    def step(at: At, param: Tensor, grad: Tensor, slots: Slots) -> tuple[Tensor, dict[str, Tensor]]:
        mu = slots["mu"]
        sign = (beta1 * mu + (1 - beta1) * grad).sign()
        return -at.rate * (sign + weight_decay * param), {"mu": beta2 * mu + (1 - beta2) * grad}

    def recipe(rate: float) -> Recipe:
        return recipes.lion(lr=rate, beta1=beta1, beta2=beta2, weight_decay=weight_decay)

    schedule = as_schedule("lion", learning_rate)
    rule = Rule(LionState, schedule, lambda param: like(param, "mu"), step, recipe=recipe)
    return from_rule(rule, ("mu",))


@strict_keywords
def adagrad(
    learning_rate: float | Schedule,
    *,
    eps: float = 1e-10,
    initial: float = 0.0,
    weight_decay: float = 0.0,
) -> GradientTransform:
    """Steps divided by the root of the sum of all squares; the same as `torch.optim.Adagrad`.

    State is `nbytes(params)`.

    Args:
        learning_rate: a rate, or a schedule from the count of steps taken.
        eps: added to the root.
        initial: the sum of squares before the first step.
        weight_decay: times the parameter, added to its gradient.

    Raises:
        OptimError: a hyperparameter out of range.

    >>> optimizer = adagrad(0.1)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.apply(params, {"w": torch.tensor([5.0])}, optimizer.init(params))[0]
    {'w': tensor([0.9000])}

    References:
        Duchi et al., Adaptive Subgradient Methods, 2011, figure 1.
    """
    check_non_negative("adagrad", "eps", eps, usual="eps=1e-10")
    check_non_negative("adagrad", "initial", initial, usual="initial=0.0")
    check_non_negative("adagrad", "weight_decay", weight_decay, usual="weight_decay=0.0")

    def step(at: At, param: Tensor, grad: Tensor, slots: Slots) -> tuple[Tensor, dict[str, Tensor]]:
        grad = decayed(grad, param, weight_decay)
        nu = slots["nu"] + grad.square()
        return -at.rate * grad / (nu.sqrt() + eps), {"nu": nu}

    def slots(param: Tensor) -> dict[str, Tensor]:
        return {"nu": torch.full_like(param, initial)}

    def recipe(rate: float) -> Recipe:
        return recipes.adagrad(lr=rate, eps=eps, weight_decay=weight_decay)

    schedule = as_schedule("adagrad", learning_rate)
    return from_rule(Rule(AdagradState, schedule, slots, step, recipe=recipe), ("nu",))


@strict_keywords
def rmsprop(
    learning_rate: float | Schedule,
    *,
    decay: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    centred: bool = False,
    weight_decay: float = 0.0,
) -> GradientTransform:
    """Steps divided by the root of a running mean square; the same as `torch.optim.RMSprop`.

    State is `nbytes(params)`, and as much again with momentum and when centred.

    Args:
        learning_rate: a rate, or a schedule from the count of steps taken.
        decay: of the mean square per step (`alpha` in torch).
        eps: added to the root.
        momentum: what remains of the running sum of steps.
        centred: divide by the standard deviation: the square of the running mean is taken off.
        weight_decay: times the parameter, added to its gradient.

    Raises:
        OptimError: a hyperparameter out of range.

    >>> optimizer = rmsprop(0.1, decay=0.75)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.apply(params, {"w": torch.tensor([5.0])}, optimizer.init(params))[0]
    {'w': tensor([0.8000])}

    References:
        Hinton, Neural Networks for Machine Learning, 2012, lecture 6e.
    """
    check_fraction("rmsprop", "decay", decay, usual="decay=0.99")
    check_fraction("rmsprop", "momentum", momentum, usual="momentum=0.9")
    check_non_negative("rmsprop", "eps", eps, usual="eps=1e-8")
    check_non_negative("rmsprop", "weight_decay", weight_decay, usual="weight_decay=0.0")
    fields = ("nu", *(("mean",) if centred else ()), *(("mu",) if momentum else ()))

    def step(at: At, param: Tensor, grad: Tensor, slots: Slots) -> tuple[Tensor, dict[str, Tensor]]:
        grad = decayed(grad, param, weight_decay)
        new = {"nu": decay * slots["nu"] + (1 - decay) * grad.square()}
        spread = new["nu"]
        if centred:
            new["mean"] = decay * slots["mean"] + (1 - decay) * grad
            spread = spread - new["mean"].square()
        change = grad / (spread.sqrt() + eps)
        if momentum:
            change = new["mu"] = momentum * slots["mu"] + change
        return -at.rate * change, new

    schedule = as_schedule("rmsprop", learning_rate)
    rule = Rule(RMSpropState, schedule, lambda param: like(param, *fields), step)
    return from_rule(rule, ("nu", "mean", "mu"))
