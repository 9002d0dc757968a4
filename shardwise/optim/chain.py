"""Transforms in a row: factors first, folded into one scale, then one fused step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.base import (
    GradientTransform,
    Part,
    Shapes,
    Tensors,
    join,
    multiply,
    over_keys,
    parts_of,
    strongest,
)
from shardwise.sharding.errors import OptimError


def chain(*transforms: GradientTransform) -> GradientTransform:
    """Feed the updates of each transform to the next; the state is the tuple of their states.

    The chain keeps the in-place form of its last transform when all earlier ones only multiply
    by a factor: `chain(clip_by_global_norm(1.0), adamw(3e-4))` is one fused pass.

    Args:
        transforms: in the order in which the gradients pass through them. None is the identity.

    Raises:
        OptimError: a transform needs an extra that describes gradients, such as the norm, after
            one that has turned them into something else.

    >>> import torch
    >>> from shardwise.optim.clip import clip_by_global_norm
    >>> twice = chain(clip_by_global_norm(10.0), clip_by_global_norm(1.0))
    >>> params = {"w": torch.tensor([30.0, 40.0])}
    >>> twice.update(params, twice.init(params), params)[0]
    {'w': tensor([0.6000, 0.8000])}
    """
    _check_order(transforms)

    def init(params: Tensors) -> tuple[Any, ...]:
        return tuple(transform.init(params) for transform in transforms)

    return GradientTransform(
        init,
        _update(transforms),
        _apply(transforms),
        couples=strongest(transform.couples for transform in transforms),
        needs=frozenset().union(*(transform.needs for transform in transforms)),
        factor=_factor(transforms),
        parts=_parts(transforms),
        over=_over(transforms),
    )


def _parts(
    transforms: Sequence[GradientTransform],
) -> Callable[[Shapes], dict[str, Part]] | None:
    if all(transform.parts is None for transform in transforms):
        return None

    def parts(shapes: Shapes) -> dict[str, Part]:
        each = [parts_of(transform, shapes) for transform in transforms]
        return {path: join([one[path] for one in each]) for path in shapes}

    return parts


def _over(
    transforms: Sequence[GradientTransform],
) -> Callable[[Shapes, Mapping[str, str]], GradientTransform] | None:
    if all(transform.over is None for transform in transforms):
        return None
    return lambda shapes, keys: chain(*(over_keys(one, shapes, keys) for one in transforms))


def _update(transforms: Sequence[GradientTransform]) -> Callable[..., tuple[Tensors, Any]]:
    def update(
        grads: Tensors, opt_state: tuple[Any, ...], params: Tensors | None = None, **extra: Any
    ) -> tuple[Tensors, tuple[Any, ...]]:
        states = []
        for transform, state in zip(transforms, opt_state, strict=True):
            if transform.factor is None:
                grads, new = transform.update(grads, state, params, **extra)
            else:
                value, new = transform.factor(grads, state, **extra)
                grads, extra = multiply(grads, value), _rescaled(extra, value)
            states.append(new)
        return grads, tuple(states)

    return update


def _factor(
    transforms: Sequence[GradientTransform],
) -> Callable[..., tuple[Tensor, tuple[Any, ...]]] | None:
    """The product of all factors; each one sees the gradients as the earlier ones left them."""
    factors = [transform.factor for transform in transforms if transform.factor is not None]
    if len(factors) < len(transforms):
        return None

    def factor(
        grads: Tensors, opt_state: tuple[Any, ...], *, scale: Tensor | None = None, **extra: Any
    ) -> tuple[Tensor, tuple[Any, ...]]:
        states = []
        product = torch.ones((), dtype=torch.float64)
        for one, state in zip(factors, opt_state, strict=True):
            value, new = one(grads, state, scale=scale, **extra)
            product, scale = product * value, _times(scale, value)
            extra = _rescaled(extra, value)
            states.append(new)
        return product, tuple(states)

    return factor


def _apply(
    transforms: Sequence[GradientTransform],
) -> Callable[..., tuple[Tensors, tuple[Any, ...]]] | None:
    """The last transform's in-place form, with the product of the others' factors as scale."""
    head = _factor(transforms[:-1])
    last = transforms[-1].apply if transforms else None
    if head is None or last is None:
        return None

    def apply(
        params: Tensors,
        grads: Tensors,
        opt_state: tuple[Any, ...],
        *,
        scale: Tensor | None = None,
        **extra: Any,
    ) -> tuple[Tensors, tuple[Any, ...]]:
        states: tuple[Any, ...] = ()
        if len(transforms) > 1:
            value, states = head(grads, opt_state[:-1], scale=scale, **extra)
            scale, extra = _times(scale, value), _rescaled(extra, value)
        params, new = last(params, grads, opt_state[-1], scale=scale, **extra)
        return params, (*states, new)

    return apply


def _times(scale: Tensor | None, value: Tensor) -> Tensor:
    return value if scale is None else scale * value


def _rescaled(extra: dict[str, Any], value: Tensor) -> dict[str, Any]:
    """The norm follows the gradients that it describes."""
    norm = extra.get("norm")
    return extra if norm is None else {**extra, "norm": norm * value.abs()}


def _check_order(transforms: Sequence[GradientTransform]) -> None:
    other: int | None = None
    for position, transform in enumerate(transforms):
        if transform.needs and other is not None:
            needs = ", ".join(sorted(transform.needs))
            raise OptimError(
                f"chain(...) has transform {position} after transform {other}, "
                f"but it needs the {needs} of the gradients.",
                where=f"argument {position} of chain(), counted from 0",
                facts=f"transform {other} does more than multiply all gradients by one factor.",
                why="Extras such as the norm are reduced once per step, from the gradients.",
                fix=f"move transform {position} before transform {other}, "
                "as in chain(clip_by_global_norm(1.0), adamw(3e-4))",
                position=position,
                after=other,
            )
        if transform.factor is None and other is None:
            other = position
