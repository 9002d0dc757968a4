"""Different transforms for different parameters, chosen by the user's own paths and shapes.

[Note: labels]
A program steps flat groups, and knows before it lays them out which label each parameter has:
`parts` tells it, from paths and shapes. It then tells the transform by `over` which parameter each
key stands for, so no label is looked up in a step. In plain use keys are paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from shardwise.optim.base import (
    GradientTransform,
    Part,
    Scale,
    Shapes,
    Tensors,
    apply_in_place,
    over_keys,
    parts_of,
    strongest,
)
from shardwise.optim.chain import chain
from shardwise.optim.norms import words
from shardwise.sharding.errors import OptimError, nearest
from shardwise.sharding.tree import Where, nothing_left, select

Predicate: TypeAlias = Callable[[str, tuple[int, ...]], bool]
"""Of a path and a shape."""
Labels: TypeAlias = Mapping[str, Where | Predicate]
"""Label to what selects its parameters; the first that selects a parameter decides."""


class PartitionState(NamedTuple):
    """The state of each part, by label."""

    parts: dict[str, Any]


class _Split(NamedTuple):
    transforms: Mapping[str, GradientTransform]
    labels: Labels
    otherwise: str | None
    fixed: Mapping[str, str] | None  # key to label, once a program has told

    def of(self, keys: Shapes) -> dict[str, str]:
        """Label by key."""
        if self.fixed is not None:
            return {key: self.fixed[key] for key in keys}
        return _label(self, keys)


def partition(
    transforms: Mapping[str, GradientTransform], labels: Labels, *, otherwise: str | None = None
) -> GradientTransform:
    """Step parameters of different labels by different transforms.

    Args:
        transforms: transform by label.
        labels: what selects the parameters of each label: a pattern over the model's own paths,
            several, or a predicate on path and shape. The first that selects a parameter decides.
        otherwise: the label of parameters that nothing selects.

    Raises:
        OptimError: labels without a transform, or a part that needs the norm of all gradients.
        PatternError: when lowered: a selection is empty, or parameters have no label.

    >>> from shardwise.optim.sgd import sgd
    >>> split = partition({"fast": sgd(1.0), "slow": sgd(0.1)}, {"fast": "*bias"}, otherwise="slow")
    >>> import torch
    >>> params = {"weight": torch.ones(1), "bias": torch.ones(1)}
    >>> grads = {"weight": torch.ones(1), "bias": torch.ones(1)}
    >>> split.apply(params, grads, split.init(params))[0]
    {'weight': tensor([0.9000]), 'bias': tensor([0.])}
    """
    _check(transforms, labels, otherwise)
    return _make(_Split(dict(transforms), dict(labels), otherwise, None))


def masked(transform: GradientTransform, where: Where | Predicate) -> GradientTransform:
    """A transform for some parameters; the gradients of all others pass unchanged.

    For use inside `chain`, in front of an optimizer.

    Args:
        transform: what to apply.
        where: patterns over paths, or a predicate on path and shape.

    Raises:
        PatternError: when lowered: `where` selects nothing.

    >>> import torch
    >>> from shardwise.optim.clip import clip_by_value
    >>> grads = {"a": torch.tensor([9.0]), "b": torch.tensor([9.0])}
    >>> clip = masked(clip_by_value(1.0), "a")
    >>> clip.update(grads, clip.init(grads), grads)[0]
    {'a': tensor([1.]), 'b': tensor([9.])}
    """
    return partition(
        {"inside": transform, "outside": chain()}, {"inside": where}, otherwise="outside"
    )


def _make(split: _Split) -> GradientTransform:
    return GradientTransform(
        init=partial(_init, split),
        update=partial(_update, split),
        apply=partial(_apply, split),
        couples=strongest(transform.couples for transform in split.transforms.values()),
        parts=partial(_parts, split),
        over=partial(_over, split),
    )


def _init(split: _Split, params: Tensors) -> PartitionState:
    found = _divided(split, params)
    return PartitionState({name: t.init(found[name]) for name, t in split.transforms.items()})


def _update(
    split: _Split, grads: Tensors, opt_state: PartitionState, params: Tensors, **extra: Any
) -> tuple[Tensors, PartitionState]:
    updates: Tensors = {}
    states: dict[str, Any] = {}
    each_params, each_grads = _divided(split, params), _divided(split, grads, like=params)
    for name, transform in split.transforms.items():
        change, states[name] = transform.update(
            each_grads[name], opt_state.parts[name], each_params[name], **extra
        )
        updates |= change
    return {key: updates[key] for key in grads}, PartitionState(states)


def _apply(
    split: _Split,
    params: Tensors,
    grads: Tensors,
    opt_state: PartitionState,
    *,
    scale: Scale | None = None,
    **extra: Any,
) -> tuple[Tensors, PartitionState]:
    each_params, each_grads = _divided(split, params), _divided(split, grads, like=params)
    for name, transform in split.transforms.items():
        _, opt_state.parts[name] = apply_in_place(
            transform,
            each_params[name],
            each_grads[name],
            opt_state.parts[name],
            scale=scale,
            **extra,
        )
    return params, opt_state


def _divided(split: _Split, tensors: Tensors, like: Tensors | None = None) -> dict[str, Tensors]:
    """Tensors by label and key."""
    shapes = {key: tuple(value.shape) for key, value in (like or tensors).items()}
    labels = split.of(shapes)
    found: dict[str, Tensors] = {name: {} for name in split.transforms}
    for key, value in tensors.items():
        found[labels[key]][key] = value
    return found


def _parts(split: _Split, shapes: Shapes) -> dict[str, Part]:
    labels = _label(split, shapes)
    found: dict[str, Part] = {}
    for name, transform in split.transforms.items():
        inner = {path: shape for path, shape in shapes.items() if labels[path] == name}
        for path, part in (parts_of(transform, inner) if inner else {}).items():
            found[path] = part._replace(label=f"{name}.{part.label}" if part.label else name)
    return {path: found[path] for path in shapes}


def _over(split: _Split, shapes: Shapes, keys: Mapping[str, str]) -> GradientTransform:
    labels = _label(split, shapes)
    fixed = {key: labels[path] for key, path in keys.items()}
    inner = {
        name: over_keys(
            transform,
            {path: shape for path, shape in shapes.items() if labels[path] == name},
            {key: path for key, path in keys.items() if fixed[key] == name},
        )
        for name, transform in split.transforms.items()
    }
    return _make(split._replace(transforms=inner, fixed=fixed))


def _label(split: _Split, shapes: Shapes) -> dict[str, str]:
    """Label of each path; every selection must find something."""
    found: dict[str, str] = {}
    if not shapes:
        return found
    for name, where in split.labels.items():
        for path in _selected(where, shapes):
            found.setdefault(path, name)
    left = [path for path in shapes if path not in found]
    if left and split.otherwise is None:
        raise OptimError(
            f"partition has no label for {len(left)} of {len(shapes)} parameters.",
            facts=left[:5],
            why="Every trainable parameter is stepped by exactly one transform.",
            fix='otherwise="label", or a pattern that selects them',
            count=len(left),
        )
    return found | {path: split.otherwise for path in left if split.otherwise is not None}


def _selected(where: Where | Predicate, shapes: Shapes) -> Sequence[str]:
    if not callable(where):
        return select(where, shapes)
    takes: Callable[..., bool] = where
    found = [path for path, shape in shapes.items() if takes(path, shape)]
    if not found:
        raise nothing_left(getattr(where, "__name__", "predicate"), tuple(shapes))
    return found


def _check(
    transforms: Mapping[str, GradientTransform], labels: Labels, otherwise: str | None
) -> None:
    for name in (*labels, *(() if otherwise is None else (otherwise,))):
        if name not in transforms:
            raise OptimError(
                f"partition has no transform for the label {name!r}.",
                where="argument transforms of partition()",
                facts=f"transforms: {', '.join(map(repr, transforms)) or 'none'}",
                why="Labels name the transforms of a partition.",
                fix=f"{nearest(name, transforms)}; or add {name!r}: adamw(3e-4)",
                label=name,
            )
    for name, transform in transforms.items():
        if transform.needs:
            needs = words(transform.needs)
            raise OptimError(
                f"partition's part {name!r} needs the {needs} of the gradients.",
                where=f"argument transforms[{name!r}] of partition()",
                facts=f"needs: {needs}",
                why=f"The {needs} is taken once, over the gradients of all parts.",
                fix="chain(clip_by_global_norm(1.0), partition(...)); or, for some parameters "
                'only, chain(clip_by_group_norm({"layers.*": 1.0}), partition(...))',
                label=name,
            )
