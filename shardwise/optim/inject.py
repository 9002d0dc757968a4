"""Hyperparameters in the state: to be read, logged, checkpointed and set while training.

[Note: injected hyperparameters]
A transform takes its hyperparameters as Python numbers when it is made. `inject` keeps them in the
state as 0-dim float64 tensors on the CPU, whatever device the parameters are on, and makes the
transform anew in each step: reading a CPU tensor waits for nothing, and making a transform costs
some microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from shardwise.sharding.errors import OptimError, nearest
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.pytree import tree_leaves, tree_map


class InjectState(NamedTuple):
    """Hyperparameters by name, and the state of the transform that they make."""

    hyperparameters: dict[str, Any]  # 0-dim float64 on the CPU, or tuples of such
    inner: Any


class _Made(NamedTuple):
    factory: Callable[..., GradientTransform]
    fixed: Mapping[str, Any]
    first: Mapping[str, Any]
    over: tuple[Shapes, Mapping[str, str]] | None

    def build(self, values: Mapping[str, Any]) -> GradientTransform:
        numbers = {
            name: tree_map(lambda leaf: leaf.item() if isinstance(leaf, Tensor) else leaf, value)
            for name, value in values.items()
        }
        transform = self.factory(**self.fixed, **numbers)
        return transform if self.over is None else over_keys(transform, *self.over)


def inject(factory: Callable[..., GradientTransform], **hyperparameters: Any) -> GradientTransform:
    """A transform whose numbers lie in its state, where `set_hyperparameters` changes them.

    Numbers and tuples of numbers are kept in the state; everything else (schedules, booleans,
    transforms) is passed on as it is. Which slots the state has is decided by the first values:
    a momentum that starts at 0 has no room to grow.

    Args:
        factory: makes the transform from keywords, such as `adamw`.
        hyperparameters: its keywords.

    >>> from shardwise.optim.sgd import sgd
    >>> optimizer = inject(sgd, learning_rate=1.0)
    >>> params = {"w": torch.tensor([1.0])}
    >>> state = optimizer.init(params)
    >>> set_hyperparameters(state, learning_rate=0.25)
    >>> optimizer.apply(params, {"w": torch.tensor([1.0])}, state)[0]
    {'w': tensor([0.7500])}
    """
    first = {name: value for name, value in hyperparameters.items() if _is_number(value)}
    fixed = {name: value for name, value in hyperparameters.items() if name not in first}
    return _make(_Made(factory, fixed, first, None))


def set_hyperparameters(opt_state: Any, **values: Any) -> None:
    """Set injected hyperparameters in place; the next step uses them.

    Args:
        opt_state: a state that has one `InjectState` or more: `state.opt` of a program too, also
            in a simulation. Every node that knows a name gets its value.
        values: numbers by name.

    Raises:
        OptimError: nothing was injected under a name.

    >>> optimizer = inject(lambda rate: GradientTransform(lambda params: rate, print), rate=0.5)
    >>> state = optimizer.init({})
    >>> set_hyperparameters(state, rate=0.125)
    >>> state.hyperparameters["rate"].item()
    0.125
    """
    states = opt_state.ranks if isinstance(opt_state, Lifted) else (opt_state,)
    nodes = [node for state in states for node in _nodes(state)]
    known = {name for node in nodes for name in node.hyperparameters}
    for name, value in values.items():
        if name not in known:
            raise OptimError(
                f"No hyperparameter {name!r} was injected.",
                where="set_hyperparameters(opt_state, ...)",
                facts=f"injected: {', '.join(sorted(known)) or 'none'}",
                why="Only what inject keeps in the state can be set while training.",
                fix=f"{nearest(name, known)}; or inject(adamw, {name}=...)",
                name=name,
            )
        for node in nodes:
            if name in node.hyperparameters:
                targets = tree_leaves(node.hyperparameters[name])
                for target, number in zip(targets, tree_leaves(value), strict=True):
                    target.fill_(number)


def _nodes(tree: Any) -> list[InjectState]:
    """Every `InjectState` in a tree, also inside of others."""
    found = [
        leaf
        for leaf in tree_leaves(tree, is_leaf=lambda value: isinstance(value, InjectState))
        if isinstance(leaf, InjectState)
    ]
    return found + [node for outer in found for node in _nodes(outer.inner)]


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_number(part) for part in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _make(made: _Made) -> GradientTransform:
    example = made.build(made.first)
    return GradientTransform(
        init=partial(_init, made),
        update=partial(_update, made),
        apply=partial(_apply, made),
        couples=example.couples,
        needs=example.needs,
        parts=example.parts,
        over=None if example.over is None else lambda *over: _make(made._replace(over=over)),
        factor=None if example.factor is None else partial(_factor, made),
        factors=None if example.factors is None else partial(_factors, made),
    )


def _init(made: _Made, params: Tensors) -> InjectState:
    values = {
        name: tree_map(lambda number: torch.tensor(float(number), dtype=torch.float64), value)
        for name, value in made.first.items()
    }
    return InjectState(values, made.build(made.first).init(params))


def _factor(
    made: _Made, grads: Tensors, opt_state: InjectState, **extra: Any
) -> tuple[Tensor, InjectState]:
    transform = made.build(opt_state.hyperparameters)
    assert transform.factor is not None
    value, inner = transform.factor(grads, opt_state.inner, **extra)
    return value, opt_state._replace(inner=inner)


def _factors(
    made: _Made, grads: Tensors, opt_state: InjectState, **extra: Any
) -> tuple[Mapping[str, Tensor], InjectState]:
    transform = made.build(opt_state.hyperparameters)
    assert transform.factors is not None
    values, inner = transform.factors(grads, opt_state.inner, **extra)
    return values, opt_state._replace(inner=inner)


def _update(
    made: _Made, grads: Tensors, opt_state: InjectState, params: Tensors, **extra: Any
) -> tuple[Tensors, InjectState]:
    transform = made.build(opt_state.hyperparameters)
    updates, inner = transform.update(grads, opt_state.inner, params, **extra)
    return updates, opt_state._replace(inner=inner)


def _apply(
    made: _Made,
    params: Tensors,
    grads: Tensors,
    opt_state: InjectState,
    *,
    scale: Scale | None = None,
    **extra: Any,
) -> tuple[Tensors, InjectState]:
    transform = made.build(opt_state.hyperparameters)
    params, inner = apply_in_place(transform, params, grads, opt_state.inner, scale=scale, **extra)
    return params, opt_state._replace(inner=inner)
