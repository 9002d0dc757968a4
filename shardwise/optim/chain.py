"""Transforms in a row: factors first, folded into one scale, then one fused step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.optim.base import (
    GradientTransform,
    Part,
    Scale,
    Shapes,
    Tensors,
    join,
    multiply,
    over_keys,
    parts_of,
    scale_of,
    strongest,
)
from shardwise.optim.norms import Norm, words
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
        factors=_factors(transforms),
        parts=_parts(transforms),
        over=_over(transforms),
        casts=bool(transforms) and transforms[-1].casts,
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
            factor = transform.factor or transform.factors
            if factor is None:
                grads, new = transform.update(grads, state, params, **extra)
            else:
                value, new = factor(grads, state, **extra)
                grads, extra = multiply(grads, value), _rescaled(extra, value)
            states.append(new)
        return grads, tuple(states)

    return update


class _Folded(NamedTuple):
    product: Scale | None  # of all factors; None: of no factor
    states: tuple[Any, ...]
    scale: Scale | None  # the product times the scale that was given
    extra: dict[str, Any]


def _fold(
    transforms: Sequence[GradientTransform],
    grads: Tensors,
    opt_state: tuple[Any, ...],
    scale: Scale | None,
    extra: dict[str, Any],
) -> _Folded:
    """Each factor sees the gradients as the earlier ones left them."""
    states = []
    product: Scale | None = None
    for transform, state in zip(transforms, opt_state, strict=True):
        factor = transform.factor or transform.factors
        assert factor is not None
        value, new = factor(grads, state, scale=scale, **extra)
        product, scale = _times(product, value, grads), _times(scale, value, grads)
        extra = _rescaled(extra, value)
        states.append(new)
    return _Folded(product, tuple(states), scale, extra)


def _only_multiply(transforms: Sequence[GradientTransform]) -> bool:
    return all(one.factor is not None or one.factors is not None for one in transforms)


def _factor(
    transforms: Sequence[GradientTransform],
) -> Callable[..., tuple[Tensor, tuple[Any, ...]]] | None:
    """The product of all factors, if each is one factor for all gradients."""
    if any(transform.factor is None for transform in transforms):
        return None

    def factor(
        grads: Tensors, opt_state: tuple[Any, ...], *, scale: Scale | None = None, **extra: Any
    ) -> tuple[Tensor, tuple[Any, ...]]:
        folded = _fold(transforms, grads, opt_state, scale, extra)
        one = torch.ones((), dtype=torch.float64)
        return folded.product if isinstance(folded.product, Tensor) else one, folded.states

    return factor


def _factors(
    transforms: Sequence[GradientTransform],
) -> Callable[..., tuple[Mapping[str, Tensor], tuple[Any, ...]]] | None:
    """The products of the factors of each key, if there are such."""
    if not _only_multiply(transforms) or all(one.factors is None for one in transforms):
        return None

    def factors(
        grads: Tensors, opt_state: tuple[Any, ...], *, scale: Scale | None = None, **extra: Any
    ) -> tuple[Mapping[str, Tensor], tuple[Any, ...]]:
        folded = _fold(transforms, grads, opt_state, scale, extra)
        assert isinstance(folded.product, Mapping)
        return folded.product, folded.states

    return factors


def _apply(
    transforms: Sequence[GradientTransform],
) -> Callable[..., tuple[Tensors, tuple[Any, ...]]] | None:
    """The last transform's in-place form, with the product of the others' factors as scale."""
    last = transforms[-1].apply if transforms else None
    if last is None or not _only_multiply(transforms[:-1]):
        return None

    def apply(
        params: Tensors,
        grads: Tensors,
        opt_state: tuple[Any, ...],
        *,
        scale: Scale | None = None,
        **extra: Any,
    ) -> tuple[Tensors, tuple[Any, ...]]:
        # Only the last one has parameters to round.
        shadows = {"shadows": extra.pop("shadows")} if "shadows" in extra else {}
        _, states, scale, extra = _fold(transforms[:-1], grads, opt_state[:-1], scale, extra)
        params, new = last(params, grads, opt_state[-1], scale=scale, **extra, **shadows)
        return params, (*states, new)

    return apply


def _times(scale: Scale | None, value: Scale, keys: Iterable[str]) -> Scale:
    """Both after one another; a key without a factor in either has none."""
    if scale is None:
        return value
    if isinstance(scale, Tensor) and isinstance(value, Tensor):
        return scale * value
    found: dict[str, Tensor] = {}
    for key in keys:
        one, other = scale_of(scale, key), scale_of(value, key)
        product = other if one is None else one if other is None else one * other
        if product is not None:
            found[key] = product
    return found


def _rescaled(extra: dict[str, Any], value: Scale) -> dict[str, Any]:
    """Norms follow the gradients that they describe; factors by key leave nothing to follow."""
    norms: Mapping[Norm, Tensor] | None = extra.get("norms")
    if not norms:
        return extra
    if isinstance(value, Mapping):
        return {name: given for name, given in extra.items() if name != "norms"}
    size = value.abs()
    return {**extra, "norms": {norm: given * size for norm, given in norms.items()}}


def _check_order(transforms: Sequence[GradientTransform]) -> None:
    other: int | None = None
    for position, transform in enumerate(transforms):
        if transform.needs and other is not None:
            needs = words(transform.needs)
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
