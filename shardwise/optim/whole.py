"""Optimizers that must see whole tensors: lamb, adafactor, muon.

In a program their parameters are gathered for the update, one group at a time; see
[Note: a step in several calls]. Beside the elementwise ones that costs, per rank and step,
`(n - 1) / n` of the bytes of gradients, parameters and param-shaped state, where n ranks along data
and tensor axes have parts of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.optim.adamw import adamw
from shardwise.optim.base import GradientTransform, Tensors
from shardwise.optim.checks import check_fraction, check_non_negative, check_positive
from shardwise.optim.partition import Labels, partition
from shardwise.optim.rules import At, Rule, Slots, arrived, from_rule, like
from shardwise.optim.schedules import Schedule, as_schedule
from shardwise.sharding.errors import strict_keywords
from shardwise.sharding.tree import Where

# Zhan, Muon 2024: the quintic whose iterates bring singular values in (0, 1] near 1 fastest.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_NORM_FLOOR = 1e-7


class LambState(NamedTuple):
    """Steps taken, the rate of the last one, and two moments."""

    count: Tensor  # 0-dim int64
    learning_rate: Tensor  # 0-dim float64
    mu: Tensors  # like params
    nu: Tensors  # like params


class AdafactorState(NamedTuple):
    """Steps taken, the rate of the last one, and second moments: factored from two dims on."""

    count: Tensor  # 0-dim int64
    learning_rate: Tensor  # 0-dim float64
    rows: Tensors  # (..., rows, 1), of matrices
    columns: Tensors  # (..., 1, columns), of matrices
    nu: Tensors  # like params, of vectors and scalars


class MuonState(NamedTuple):
    """Steps taken, the rate of the last one, and the momentum."""

    count: Tensor  # 0-dim int64
    learning_rate: Tensor  # 0-dim float64
    mu: Tensors  # like params


@strict_keywords
def lamb(
    learning_rate: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> GradientTransform:
    """Adam's direction, scaled per tensor by `norm(param) / norm(direction)`: for large batches.

    State is `2 * nbytes(params)`. The scale is 1 where either norm is 0.

    Args:
        learning_rate: a rate, or a schedule from the count of steps taken.
        betas: decay of the first and second moment per step.
        eps: added to the root of the second moment.
        weight_decay: times the parameter, added to the direction.

    Raises:
        OptimError: a hyperparameter out of range.

    >>> optimizer = lamb(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> optimizer.apply(params, {"w": torch.tensor([1.0, 0.0])}, optimizer.init(params))[0]
    {'w': tensor([2.5000, 4.0000])}

    References:
        You et al., Large Batch Optimization for Deep Learning, 2020, algorithm 2.
    """
    beta1, beta2 = betas
    check_fraction("lamb", "betas[0]", beta1, usual="betas=(0.9, 0.999)")
    check_fraction("lamb", "betas[1]", beta2, usual="betas=(0.9, 0.999)")
    check_non_negative("lamb", "eps", eps, usual="eps=1e-6")
    check_non_negative("lamb", "weight_decay", weight_decay, usual="weight_decay=0.01")

    def step(at: At, param: Tensor, grad: Tensor, slots: Slots) -> tuple[Tensor, dict[str, Tensor]]:
        mu = beta1 * slots["mu"] + (1 - beta1) * grad
        nu = beta2 * slots["nu"] + (1 - beta2) * grad.square()
        root = (nu / arrived(beta2, at.count)).sqrt() + eps
        direction = mu / arrived(beta1, at.count) / root + weight_decay * param
        ours, theirs = _norm(param), _norm(direction)
        trust = torch.where((ours > 0) & (theirs > 0), ours / theirs, torch.ones_like(ours))
        return -at.rate * trust * direction, {"mu": mu, "nu": nu}

    schedule = as_schedule("lamb", learning_rate)
    rule = Rule(LambState, schedule, lambda param: like(param, "mu", "nu"), step, "tensor")
    return from_rule(rule, ("mu", "nu"))


@strict_keywords
def adafactor(
    learning_rate: float | Schedule,
    *,
    decay: float = 0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    clip: float = 1.0,
    weight_decay: float = 0.0,
) -> GradientTransform:
    """Second moments as row and column means; the same step as `torch.optim.Adafactor`.

    State is `rows + columns` numbers per matrix, whole on every rank, and `nbytes` of each vector.

    Args:
        learning_rate: the largest relative step; it falls as `1 / sqrt(count)` after that.
        decay: the mean at step t keeps `1 - t**-decay` of its past.
        eps: floor of the second moment's root (None: that of the dtype), and the smallest size
            that a parameter is taken to have.
        clip: the largest root mean square of a step before it is scaled.
        weight_decay: fraction of a parameter removed per step, times the rate.

    Raises:
        OptimError: a hyperparameter out of range.

    >>> optimizer = adafactor(0.1)
    >>> params = {"w": torch.full((2, 2), 3.0)}
    >>> optimizer.apply(params, {"w": torch.ones(2, 2)}, optimizer.init(params))[0]["w"][0]
    tensor([2.7000, 2.7000])

    References:
        Shazeer and Stern, Adafactor, 2018, algorithms 4 and 5.
    """
    check_non_negative("adafactor", "decay", decay, usual="decay=0.8")
    check_positive("adafactor", "clip", clip, usual="clip=1.0")
    check_non_negative("adafactor", "weight_decay", weight_decay, usual="weight_decay=0.0")

    def slots(param: Tensor) -> dict[str, Tensor]:
        if param.ndim < 2:
            return {"nu": torch.zeros_like(param)}
        rows, columns = param.shape[-2:]
        return {
            "rows": param.new_zeros(*param.shape[:-2], rows, 1),
            "columns": param.new_zeros(*param.shape[:-2], 1, columns),
        }

    def step(at: At, param: Tensor, grad: Tensor, slots: Slots) -> tuple[Tensor, dict[str, Tensor]]:
        floor = torch.finfo(param.dtype).eps if eps[0] is None else eps[0]
        fresh = torch.pow(at.count, -decay).to(param.dtype)
        means = _means(grad)
        new = {name: slots[name].lerp(means[name], fresh) for name in slots}
        if "nu" in new:
            spread = new["nu"]
        else:
            size = new["rows"].mean(-2, keepdim=True).clamp(min=floor)
            spread = new["rows"] @ new["columns"] / size
        change = grad * spread.clamp(min=floor**2).rsqrt()
        rate = at.rate.minimum(at.count.rsqrt())
        size = (_norm(param) / math.sqrt(max(param.numel(), 1))).clamp(min=eps[1])
        excess = (_norm(change) / (math.sqrt(max(change.numel(), 1)) * clip)).clamp(min=1.0)
        # The decay multiplies first, so that the two commute as they do in torch.
        return -at.rate * weight_decay * param - rate * size / excess * change, new

    schedule = as_schedule("adafactor", learning_rate)
    rule = Rule(AdafactorState, schedule, slots, step, "tensor")
    return from_rule(rule, ("rows", "columns", "nu"))


@strict_keywords
def muon(
    learning_rate: float | Schedule,
    *,
    where: Where | Callable[[str, tuple[int, ...]], bool] | None = None,
    rest: GradientTransform | None = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    iterations: int = 5,
) -> GradientTransform:
    """Orthogonalised momentum for matrices, and another optimizer for the rest.

    State of a matrix is its `nbytes`. Each step costs `iterations` times three products of the
    matrix with itself on every rank. Computed in the dtype of the parameter; `torch.optim.Muon`
    does the same in bfloat16.

    Args:
        learning_rate: of the matrices; scaled by `sqrt(max(1, rows / columns))`.
        where: which parameters: patterns, or a predicate on path and shape. Default: all matrices.
            Embeddings and output heads usually train better in `rest`.
        rest: the transform of all others; default: `adamw(3e-4)`.
        momentum: what remains of the running mean of gradients.
        nesterov: look one step of the mean ahead.
        weight_decay: fraction of a parameter removed per step, times the rate.
        iterations: of the quintic Newton-Schulz polynomial.

    Raises:
        OptimError: a hyperparameter out of range.
        PatternError: when lowered: `where` selects nothing.

    >>> optimizer = muon(0.1, weight_decay=0.0)
    >>> params = {"w": torch.eye(2), "b": torch.zeros(2)}
    >>> [part.couples for part in optimizer.parts({"w": (2, 2), "b": (2,)}).values()]
    ['tensor', 'element']

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    check_fraction("muon", "momentum", momentum, usual="momentum=0.95")
    check_non_negative("muon", "weight_decay", weight_decay, usual="weight_decay=0.1")
    check_positive("muon", "iterations", iterations, usual="iterations=5")

    def step(at: At, param: Tensor, grad: Tensor, slots: Slots) -> tuple[Tensor, dict[str, Tensor]]:
        mu = slots["mu"].lerp(grad, 1 - momentum)
        ahead = grad.lerp(mu, momentum) if nesterov else mu
        change = orthogonalised(ahead, iterations) * math.sqrt(_aspect(param))
        return -at.rate * (change + weight_decay * param), {"mu": mu}

    schedule = as_schedule("muon", learning_rate)
    rule = Rule(MuonState, schedule, lambda param: like(param, "mu"), step, "tensor")
    matrices = from_rule(rule, ("mu",))
    labels: Labels = {"muon": _is_matrix if where is None else where}
    others = adamw(3e-4) if rest is None else rest
    return partition({"muon": matrices, "rest": others}, labels, otherwise="rest")


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """Bring all singular values of a matrix near 1 and leave its singular vectors.

    >>> orthogonalised(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), 5).diagonal().round(decimals=1)
    tensor([0.8000, 1.1000])
    """
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_NORM_FLOOR)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def _is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    del path
    return len(shape) == 2


def _aspect(param: Tensor) -> float:
    rows, columns = param.shape
    return max(1.0, rows / max(columns, 1))


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def _means(grad: Tensor) -> dict[str, Tensor]:
    square = grad.square()
    if grad.ndim < 2:
        return {"nu": square}
    return {
        "rows": square.mean(-1, keepdim=True),
        "columns": square.mean(-2, keepdim=True),
    }
