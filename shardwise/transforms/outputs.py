"""Walks what a unit returns, so that every tensor in it leaves the unit the same way.

[Note: caches]
A cache of keys and values (transformers' `Cache` and its layers, known by `get_seq_length`) is the
one kind of object that is changed in place: the model that passed it to its layers goes on with the
same object, so a copy with other tensors would never be read.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.errors import UnitError
from shardwise.sharding.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Replace = Callable[[list[Tensor]], Sequence[Tensor]]


def place(tensor: Tensor) -> int:
    """Where the values of a tensor lie; 0 for one without a storage of its own."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()


def replace_tensors(output: Any, unit: str, replace: Replace) -> Any:
    """Rebuild `output` with `replace(tensors)` in the place of its tensors.

    Tensors, tuples, lists, dicts and their subclasses, named tuples and dataclasses (nested) are
    walked; so are caches, see [Note: caches].

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


def convert_tensors(tree: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """`tree` with every tensor converted; itself, and each part of it, where nothing changes.

    Containers are walked as by `replace_tensors`, but caches and objects of other types are left as
    they are. A tensor that occurs twice is converted once.
    """
    if isinstance(tree, Tensor):
        return convert(tree)
    known: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = convert(tensor)
        return known[id(tensor)]

    return _converted(tree, once)


def _converted(tree: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    # One level at a time, so that a part in which nothing changes is the same object afterwards.
    leaves, structure = tree_flatten(tree, is_leaf=lambda part: part is not tree, none_is_leaf=True)
    if len(leaves) == 1 and leaves[0] is tree:
        return _converted_leaf(tree, convert)
    new = [_converted(leaf, convert) for leaf in leaves]
    if all(after is before for after, before in zip(new, leaves, strict=True)):
        return tree
    return tree_unflatten(structure, new)


def _converted_leaf(leaf: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return convert(leaf)
    parts = None if is_cache(leaf) else _parts(leaf)
    if parts is None:
        return leaf
    values = {name: _converted(part, convert) for name, part in parts.items()}
    if all(values[name] is part for name, part in parts.items()):
        return leaf
    rebuilt = copy.copy(leaf)
    for name, value in values.items():
        _put(rebuilt, name, value)
    return rebuilt


def _put(record: Any, name: str, value: Any) -> None:
    """Some outputs are dicts and dataclasses, with each value under its key and as attribute."""
    if isinstance(record, dict):
        dict.__setitem__(record, name, value)
    if not isinstance(record, dict) or _is_record(record):
        object.__setattr__(record, name, value)


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def is_cache(leaf: Any) -> bool:
    """Whether an object is a cache of keys and values, or a layer of one; see [Note: caches]."""
    known = callable(getattr(leaf, "get_seq_length", None)) and hasattr(leaf, "__dict__")
    return known and not isinstance(leaf, type | nn.Module)


def _parts(leaf: Any) -> Mapping[str, Any] | None:
    """What a dataclass, a cache or a subclass of dict holds, by name; some outputs are both."""
    if isinstance(leaf, dict):
        return leaf
    if is_cache(leaf):
        return vars(leaf)
    if _is_record(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _tensors_of(leaf: Any, unit: str) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [leaf]
    parts = _parts(leaf)
    if parts is not None:
        nested = tree_leaves(list(parts.values()))
        return [tensor for value in nested for tensor in _tensors_of(value, unit)]
    if _hides_tensors(leaf):
        kind = type(leaf)
        raise UnitError(
            f"Unit {unit or '(root)'!r} returns a {kind.__module__}.{kind.__qualname__} that holds "
            "tensors.",
            where=f"forward of {unit or 'the root module'}",
            why="Each tensor that leaves a unit must pass through it on the way back; tensors, "
            "tuples, lists, dicts, dataclasses and caches of transformers are walked.",
            fix="return a tuple, a dict or a dataclass, or register the type with optree",
            unit=unit,
        )
    return []


def _hides_tensors(leaf: Any, depth: int = 3) -> bool:
    """Whether there are tensors in it or in the objects it holds; objects may hold each other."""
    if isinstance(leaf, Tensor):
        return True
    if not depth or isinstance(leaf, type | nn.Module):
        return False
    return any(_hides_tensors(value, depth - 1) for value in tree_leaves(_held(leaf)))


def _held(leaf: Any) -> list[Any]:
    """What an object that is no node of a tree holds: as a container, in slots or attributes."""
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    if isinstance(leaf, set | frozenset):
        return list(leaf)
    slots = [name for kind in type(leaf).__mro__ for name in kind.__dict__.get("__slots__", ())]
    in_slots = [getattr(leaf, name, None) for name in slots]
    return [*in_slots, *getattr(leaf, "__dict__", {}).values()]


def _rebuild(leaf: Any, new: Any) -> Any:
    if isinstance(leaf, Tensor):
        return next(new)
    parts = _parts(leaf)
    if parts is None:
        return leaf
    in_place = not isinstance(leaf, dict) and is_cache(leaf)
    rebuilt = leaf if in_place else copy.copy(leaf)
    for name, part in list(parts.items()):
        value = tree_map(lambda leaf: _rebuild(leaf, new), part)
        _put(rebuilt, name, value)
    return rebuilt
