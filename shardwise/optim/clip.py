"""Clipping by the global norm is one factor for all gradients, and one number to reduce."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.optim.base import EmptyState, GradientTransform, Tensors, from_factor
from shardwise.optim.checks import check_positive
from shardwise.optim.flat import squared_norm
from shardwise.sharding.errors import strict_keywords

_NORM_FLOOR = 1e-6  # as torch.nn.utils.clip_grad_norm_, so that both clip alike


def global_norm(grads: Tensors) -> Tensor:
    """The 2-norm of all gradients together, as a 0-dim float64 tensor.

    Right only where `grads` is whole; a program reduces `squared_norm` over its ranks instead.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5., dtype=torch.float64)
    """
    squares = list(squared_norm(grads).values())
    if not squares:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(squares).sum().sqrt()


@strict_keywords
def clip_by_global_norm(max_norm: float) -> GradientTransform:
    """Multiply all gradients by `min(1, max_norm / (norm + 1e-6))`.

    In a program the norm comes from one packed reduction over all ranks, whatever mix of specs
    the gradients have: 8 bytes per distinct set of mesh axes. Without `norm=` it is computed from
    the gradients at hand.

    Args:
        max_norm: the norm above which gradients are scaled down; infinity never clips.

    Raises:
        OptimError: `max_norm` is not positive.

    >>> clip = clip_by_global_norm(1.0)
    >>> grads = {"w": torch.tensor([3.0, 4.0])}
    >>> clip.update(grads, clip.init(grads))[0]["w"]
    tensor([0.6000, 0.8000])
    >>> clip.update(grads, clip.init(grads), norm=torch.tensor(10.0))[0]["w"]
    tensor([0.3000, 0.4000])

    References:
        Pascanu et al., On the difficulty of training recurrent neural networks, 2013, section 3.2.
    """
    usual = "clip_by_global_norm(1.0)"
    check_positive("clip_by_global_norm", "max_norm", max_norm, usual=usual)

    def init(params: Tensors) -> EmptyState:
        del params
        return EmptyState()

    def factor(
        grads: Tensors,
        opt_state: EmptyState,
        *,
        scale: Tensor | None = None,
        norm: Tensor | None = None,
        **extra: Any,
    ) -> tuple[Tensor, EmptyState]:
        del extra
        if norm is None:
            norm = global_norm(grads)
            norm = norm if scale is None else norm * scale.abs()
        return (max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0), opt_state

    return from_factor(init, factor, needs=frozenset({"norm"}))


@strict_keywords
def clip_by_value(limit: float) -> GradientTransform:
    """Bring every element of the gradients into `[-limit, limit]`.

    Args:
        limit: the largest absolute value.

    Raises:
        OptimError: `limit` is not positive.

    >>> clip = clip_by_value(1.0)
    >>> clip.update({"w": torch.tensor([3.0, -0.5])}, EmptyState(), {})[0]
    {'w': tensor([ 1.0000, -0.5000])}
    """
    check_positive("clip_by_value", "limit", limit, usual="clip_by_value(1.0)")

    def init(params: Tensors) -> EmptyState:
        del params
        return EmptyState()

    def update(
        grads: Tensors, opt_state: EmptyState, params: Tensors | None = None, **extra: Any
    ) -> tuple[Tensors, EmptyState]:
        del params, extra
        return {key: grad.clamp(-limit, limit) for key, grad in grads.items()}, opt_state

    return GradientTransform(init, update)
