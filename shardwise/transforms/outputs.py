"""Walks what a unit returns, so that every tensor in it leaves the unit the same way."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.sharding.errors import UnitError
from shardwise.sharding.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Replace = Callable[[list[Tensor]], Sequence[Tensor]]


def replace_tensors(output: Any, unit: str, replace: Replace) -> Any:
    """Rebuild `output` with `replace(tensors)` in the place of its tensors.

    Tensors, tuples, lists, dicts, named tuples and dataclasses (nested) are walked.

    Raises:
        UnitError: an object of another type holds tensors.
    """
    if isinstance(output, Tensor):
        return replace([output])[0]
    leaves, structure = tree_flatten(output, none_is_leaf=True)
    tensors: list[Tensor] = []
    for leaf in leaves:
        tensors += _tensors_of(leaf, unit)
    if not tensors:
        return output
    new = iter(replace(tensors))
    return tree_unflatten(structure, [_rebuild(leaf, new) for leaf in leaves])


def _fields(leaf: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(leaf)]


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _tensors_of(leaf: Any, unit: str) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [leaf]
    if _is_record(leaf):
        nested = [tree_leaves(getattr(leaf, name)) for name in _fields(leaf)]
        return [
            tensor for values in nested for value in values for tensor in _tensors_of(value, unit)
        ]
    if _hides_tensors(leaf):
        kind = type(leaf)
        raise UnitError(
            f"Unit {unit or '(root)'!r} returns a {kind.__module__}.{kind.__qualname__} that holds "
            "tensors.",
            where=f"forward of {unit or 'the root module'}",
            why="Each tensor that leaves a unit must pass through it on the way back; tensors, "
            "tuples, lists, dicts and dataclasses are walked.",
            fix="return a tuple, a dict or a dataclass, or register the type with optree",
            unit=unit,
        )
    return []


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, Mapping):
        return any(isinstance(value, Tensor) for value in leaf.values())
    held = getattr(leaf, "__dict__", None)
    if not held or isinstance(leaf, type):
        return False
    return any(isinstance(value, Tensor) for value in tree_leaves(list(held.values())))


def _rebuild(leaf: Any, new: Any) -> Any:
    if isinstance(leaf, Tensor):
        return next(new)
    if not _is_record(leaf):
        return leaf
    rebuilt = copy.copy(leaf)
    for name in _fields(leaf):
        value = tree_map(lambda part: _rebuild(part, new), getattr(leaf, name))
        object.__setattr__(rebuilt, name, value)
    return rebuilt
