"""What a step of an optimizer does to one element: constants for the kernel, and the definition.

[Note: one order of operations]
A recipe fixes every operation on an element and their order. `reference` does them with torch, one
tensor at a time, and the C kernel in one pass; both give the same bits, in float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Reference = Callable[[Tensor, Tensor, Sequence[Tensor]], None]


class Recipe(NamedTuple):
    """A step of one optimizer.

    Attributes:
        which: of the kernel's steps.
        constants: as the kernel reads them.
        flags: likewise.
        num_states: tensors of state beside the parameter.
        reference: changes parameter and state; called with parameter, gradient and state.
    """

    which: int
    constants: tuple[float, ...]
    flags: int
    num_states: int
    reference: Reference


def adamw(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, count: int
) -> Recipe:
    """AdamW; the state is two moments.

    Args:
        lr: the rate of this step.
        beta1: decay of the first moment.
        beta2: decay of the second.
        eps: added to the root.
        weight_decay: fraction of the parameter removed, times the rate.
        count: steps taken, with this one.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.
    """
    keep = 1 - lr * weight_decay
    size = lr / (1 - beta1**count)
    root = (1 - beta2**count) ** -0.5  # a factor: a root is divided by once
    first, second = 1 - beta1, 1 - beta2

    def reference(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> None:
        mean, square = states
        mean.copy_(mean + (grad - mean) * first)
        square.copy_(square * beta2 + (grad * grad) * second)
        param.copy_(param * keep - (mean * size) / (_root(square) * root + eps))

    return Recipe(0, (first, beta2, second, keep, size, root, eps), 0, 2, reference)


def lion(*, lr: float, beta1: float, beta2: float, weight_decay: float) -> Recipe:
    """Lion; the state is the momentum.

    Args:
        lr: the rate of this step.
        beta1: the share of the momentum in the step.
        beta2: its decay.
        weight_decay: fraction of the parameter removed, times the rate.

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2.
    """
    keep = 1 - lr * weight_decay
    first, second = 1 - beta1, 1 - beta2

    def reference(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> None:
        (momentum,) = states
        sign = (momentum + (grad - momentum) * first).sign()
        param.copy_(param * keep - sign * lr)
        momentum.copy_(momentum + (grad - momentum) * second)

    return Recipe(1, (first, second, keep, lr), 0, 1, reference)


def sgd(*, lr: float, momentum: float, nesterov: bool, weight_decay: float) -> Recipe:
    """Gradient descent; the state is the running sum of gradients, with momentum.

    Args:
        lr: the rate of this step.
        momentum: what remains of the sum.
        nesterov: look one step ahead.
        weight_decay: times the parameter, added to the gradient.

    References:
        Sutskever et al., On the importance of initialization and momentum, 2013, section 2.
    """

    def reference(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> None:
        grad = grad + param * weight_decay
        change = grad
        if momentum:
            states[0].copy_(states[0] * momentum + grad)
            change = grad + states[0] * momentum if nesterov else states[0]
        param.copy_(param - change * lr)

    flags = bool(momentum) + 2 * bool(nesterov)
    return Recipe(2, (lr, weight_decay, momentum), flags, int(bool(momentum)), reference)


def adagrad(*, lr: float, eps: float, weight_decay: float) -> Recipe:
    """Adagrad; the state is the sum of squares.

    Args:
        lr: the rate of this step.
        eps: added to the root.
        weight_decay: times the parameter, added to the gradient.

    References:
        Duchi et al., Adaptive Subgradient Methods, 2011, figure 1.
    """

    def reference(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> None:
        grad = grad + param * weight_decay
        states[0].copy_(states[0] + grad * grad)
        param.copy_(param - (grad * lr) / (_root(states[0]) + eps))

    return Recipe(3, (lr, weight_decay, eps), 0, 1, reference)


def _root(values: Tensor) -> Tensor:
    """Rounded as IEEE says: the library that torch takes roots with on the CPU is off at times."""
    if values.device.type != "cpu" or type(values) is not Tensor:
        return values.sqrt()
    return torch.from_numpy(np.sqrt(values.numpy()))
