"""Clipping by norms is one factor for all gradients, or one for each group of them.

[Note: clipped by the group]
A program reduces all norms in one packed reduction and passes them as `norms`; without them a
transform takes them from the gradients at hand, which must then be whole. Groups are chosen by
patterns over paths. A program steps flat groups, so each group of a clip is a label, see
[Note: labels]: its parameters lie side by side, and a flat group has the factor of its label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from shardwise.optim.base import (
    EmptyState,
    GradientTransform,
    Part,
    Scale,
    Shapes,
    Tensors,
    from_factor,
    multiply,
)
from shardwise.optim.checks import check_positive
from shardwise.optim.norms import ORDS, Norm, power_sum, root, select_all
from shardwise.sharding.errors import OptimError, strict_keywords
from shardwise.sharding.tree import as_patterns, selects

_NORM_FLOOR = 1e-6  # as torch.nn.utils.clip_grad_norm_, so that both clip alike

Groups: TypeAlias = Mapping[str | tuple[str, ...], float]
"""Patterns to the largest norm of the gradients that they select."""


def global_norm(grads: Mapping[str, Tensor], ord: float = 2.0) -> Tensor:
    """The norm of all gradients together, as a 0-dim float64 tensor.

    Right only where `grads` is whole; a program adds up `power_sum` over its ranks instead.

    Args:
        grads: tensors of any shape.
        ord: 1, 2 or infinity.

    >>> import torch
    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5., dtype=torch.float64)
    """
    return root(power_sum(list(grads.values()), ord), ord)


@strict_keywords
def clip_by_global_norm(max_norm: float, ord: float = 2.0) -> GradientTransform:
    """Multiply all gradients by `min(1, max_norm / (norm + 1e-6))`.

    In a program the norm comes from one packed reduction over all ranks, whatever mix of specs
    the gradients have: 8 bytes per distinct set of mesh axes. Without `norms=` it is computed from
    the gradients at hand. A norm that is not finite makes every gradient NaN.

    Args:
        max_norm: the norm above which gradients are scaled down; infinity never clips.
        ord: 1, 2 or infinity, as `norm_type` of `torch.nn.utils.clip_grad_norm_`.

    Raises:
        OptimError: `max_norm` is not positive, or `ord` is another number.

    >>> import torch
    >>> clip = clip_by_global_norm(1.0)
    >>> grads = {"w": torch.tensor([3.0, 4.0])}
    >>> clip.update(grads, clip.init(grads))[0]["w"]
    tensor([0.6000, 0.8000])
    >>> clip.update(grads, clip.init(grads), norms={Norm(): torch.tensor(10.0)})[0]["w"]
    tensor([0.3000, 0.4000])

    References:
        Pascanu et al., On the difficulty of training recurrent neural networks, 2013, section 3.2.
    """
    usual = "clip_by_global_norm(1.0)"
    check_positive("clip_by_global_norm", "max_norm", max_norm, usual=usual)
    whole = Norm(_checked_ord("clip_by_global_norm", ord, usual=usual))

    def factor(
        grads: Tensors, opt_state: EmptyState, *, scale: Scale | None = None, **extra: Any
    ) -> tuple[Tensor, EmptyState]:
        norm = _norm(whole, grads, scale, extra)
        return _factor(max_norm, norm), opt_state

    return from_factor(_init, factor, needs=frozenset({whole}))


class _Clip(NamedTuple):
    norms: tuple[Norm, ...]  # of each group
    limits: tuple[float, ...]
    fixed: Mapping[str, int | None] | None  # key to group, once a program has told

    def of(self, keys: Mapping[str, Any]) -> Mapping[str, int | None]:
        """Group by key; None is no group."""
        if self.fixed is not None:
            return {key: self.fixed[key] for key in keys}
        # Not an error here: a step may have no gradient for a whole group.
        return {key: self._first(key) for key in keys}

    def _first(self, path: str) -> int | None:
        groups = enumerate(self.norms)
        return next((n for n, norm in groups if selects(norm.where, (path,))), None)


@strict_keywords
def clip_by_group_norm(max_norms: Groups, ord: float = 2.0) -> GradientTransform:
    """Clip the gradients of each group by the norm of that group alone.

    Parameters in no group pass unchanged. All norms of a step travel in one packed reduction: 8
    bytes per group and distinct set of mesh axes. `metrics.group_norms` reports them; a largest
    norm of infinity only reports.

    Args:
        max_norms: the largest norm by pattern over paths, or by a tuple of patterns. A parameter
            belongs to the first group that selects it.
        ord: 1, 2 or infinity.

    Raises:
        OptimError: there is no group, a largest norm is not positive, or `ord` is another number.
        PatternError: when lowered: a pattern matches nothing, or only parameters of earlier groups.

    >>> import torch
    >>> clip = clip_by_group_norm({"a": 1.0})
    >>> grads = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([30.0])}
    >>> clip.update(grads, clip.init(grads))[0]
    {'a': tensor([0.6000, 0.8000]), 'b': tensor([30.])}
    """
    call, usual = "clip_by_group_norm", 'clip_by_group_norm({"layers.*": 1.0})'
    if not max_norms:
        raise OptimError(
            "clip_by_group_norm has no group.",
            where="argument max_norms of clip_by_group_norm()",
            facts="max_norms is empty.",
            why="A transform that changes nothing is an error.",
            fix=usual,
            num_groups=0,
        )
    order = _checked_ord(call, ord, usual=usual)
    norms: list[Norm] = []
    for where, limit in max_norms.items():
        check_positive(call, "max_norm", limit, usual=usual)
        earlier = tuple(norm.where for norm in norms)
        norms.append(Norm(order, as_patterns(where, ()), earlier))
    return _by_group(_Clip(tuple(norms), tuple(max_norms.values()), None))


def _by_group(clip: _Clip) -> GradientTransform:
    return GradientTransform(
        partial(_init_groups, clip),
        partial(_update, clip),
        needs=frozenset(clip.norms),
        factors=partial(_factors, clip),
        parts=partial(_parts, clip),
        over=partial(_over, clip),
    )


def _init(params: Tensors) -> EmptyState:
    del params
    return EmptyState()


def _init_groups(clip: _Clip, params: Tensors) -> EmptyState:
    if clip.fixed is None:
        select_all(clip.norms, tuple(params))  # raises for a group without parameters
    return EmptyState()


def _update(
    clip: _Clip,
    grads: Tensors,
    opt_state: EmptyState,
    params: Tensors | None = None,
    **extra: Any,
) -> tuple[Tensors, EmptyState]:
    del params
    factors, opt_state = _factors(clip, grads, opt_state, **extra)
    return multiply(grads, factors), opt_state


def _factors(
    clip: _Clip,
    grads: Tensors,
    opt_state: EmptyState,
    *,
    scale: Scale | None = None,
    **extra: Any,
) -> tuple[dict[str, Tensor], EmptyState]:
    members: dict[int, Tensors] = {}
    for key, group in clip.of(grads).items():
        if group is not None:
            members.setdefault(group, {})[key] = grads[key]
    factors: dict[str, Tensor] = {}
    for group, mine in members.items():
        norm = _norm(clip.norms[group], mine, scale, extra)
        factors |= dict.fromkeys(mine, _factor(clip.limits[group], norm))
    return factors, opt_state


def _groups(clip: _Clip, paths: tuple[str, ...]) -> dict[str, int | None]:
    found: dict[str, int | None] = dict.fromkeys(paths)
    selected = select_all(clip.norms, paths)
    for group, norm in enumerate(clip.norms):
        found |= dict.fromkeys(selected[norm], group)
    return {path: found[path] for path in paths}


def _parts(clip: _Clip, shapes: Shapes) -> dict[str, Part]:
    groups = _groups(clip, tuple(shapes))
    return {path: Part("" if n is None else f"clip{n}") for path, n in groups.items()}


def _over(clip: _Clip, shapes: Shapes, keys: Mapping[str, str]) -> GradientTransform:
    groups = _groups(clip, tuple(shapes))
    return _by_group(clip._replace(fixed={key: groups[path] for key, path in keys.items()}))


def _norm(norm: Norm, grads: Tensors, scale: Scale | None, extra: Mapping[str, Any]) -> Tensor:
    """The value that the caller gives, else that of the gradients at hand, after `scale`."""
    given: Mapping[Norm, Tensor] = extra.get("norms") or {}
    if norm in given:
        return given[norm]
    if not isinstance(scale, Mapping):
        value = global_norm(grads, norm.ord)
        return value if scale is None else value * scale.abs()
    return global_norm(multiply(grads, scale), norm.ord)


def _factor(max_norm: float, norm: Tensor) -> Tensor:
    # The last term is 0, and NaN for an infinite norm, whose quotient would be 0 and hide it.
    return (max_norm / (norm + _NORM_FLOOR)).clamp(max=1.0) + (norm - norm)


def _checked_ord(call: str, ord: float, *, usual: str) -> float:
    if not isinstance(ord, bool) and ord in ORDS:
        return float(ord)
    raise OptimError(
        f"{call}(ord={ord!r}) is no kind of norm.",
        where=f"argument ord of {call}()",
        facts=f"ord is {ord!r}; there are: {', '.join(f'{one:g}' for one in ORDS)}.",
        why="Norms are reduced over ranks as sums of magnitudes or squares, or as largest "
        "magnitudes.",
        fix=f"{usual}, which takes ord={ORDS[1]:g}; or ord={math.inf}",
        ord=ord,
    )


@strict_keywords
def clip_by_value(limit: float) -> GradientTransform:
    """Bring every element of the gradients into `[-limit, limit]`.

    Args:
        limit: the largest absolute value.

    Raises:
        OptimError: `limit` is not positive.

    >>> import torch
    >>> clip = clip_by_value(1.0)
    >>> clip.update({"w": torch.tensor([3.0, -0.5])}, EmptyState(), {})[0]
    {'w': tensor([ 1.0000, -0.5000])}
    """
    check_positive("clip_by_value", "limit", limit, usual="clip_by_value(1.0)")

    def update(
        grads: Tensors, opt_state: EmptyState, params: Tensors | None = None, **extra: Any
    ) -> tuple[Tensors, EmptyState]:
        del params, extra
        return {key: grad.clamp(-limit, limit) for key, grad in grads.items()}, opt_state

    return GradientTransform(_init, update)
