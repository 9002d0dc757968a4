"""Optimizer state: dicts over groups of parameters at rest, dicts over paths as seen from outside.

[Note: optimizer state at rest]
A transform's state is any pytree. Where it holds a dict over parameters, the dict rests in one of
three ways. By group: the key of a `Group` and a flat tensor, cut like the group's slice of the
`opt` home; so are all dicts of elementwise transforms. By group, one number: a tensor of another
shape under the key of an elementwise group holds for all its parameters. By path: what a transform
that sees whole tensors keeps in another shape than the parameter's, such as row and column means;
this is whole on every rank. All other leaves are whole on every rank too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.sharding.buckets import Group
from shardwise.sharding.leaves import Flats, Home, Leaves, fill_layout
from shardwise.sharding.pytree import tree_flatten, tree_map


def groups_of(home: Home) -> tuple[Group, ...]:
    """All groups, in bucket order."""
    return tuple(group for bucket in home.buckets for group in bucket.groups)


def resting_keys(groups: Collection[Group]) -> frozenset[str]:
    """Keys that dicts over parameters may have at rest; see [Note: optimizer state at rest]."""
    paths = (path for group in groups if group.couples != "element" for path in group.paths)
    return frozenset({group.key for group in groups}.union(paths))


def is_over(value: Any, keys: Collection[str]) -> TypeGuard[Flats]:
    """Whether a value is a dict of tensors over some of these keys."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(key in keys and isinstance(leaf, Tensor) for key, leaf in value.items())
    )


def split(tree: Any, keys: Collection[str]) -> tuple[list[Any], Any]:
    """Flatten a state, but leave dicts over parameters whole."""
    return tree_flatten(tree, is_leaf=lambda value: is_over(value, keys))


def by_path(tree: Any, home: Home, live: Callable[[Flats], Flats]) -> Any:
    """The state with dicts over paths in the place of dicts over groups.

    Args:
        tree: at rest.
        home: of the state.
        live: called at each access with the dict at rest; raises when the state is dead.
    """
    groups = groups_of(home)
    keys = resting_keys(groups)
    layouts = {path: (group.layout, group.key) for group in groups for path in group.paths}

    def named(value: Any) -> Any:
        if not is_over(value, keys):
            return value
        found = {p: at for p, at in layouts.items() if at[1] in value or p in value}
        return _OptLeaves(home, "opt", found, lambda: live(value))

    return tree_map(named, tree, is_leaf=lambda value: is_over(value, keys))


class _OptLeaves(Leaves):
    """Leaves of which some are not cut like their parameter."""

    def __getitem__(self, path: str) -> Any:
        path = self.home.aliases.get(path, path)
        if path not in self.layouts:
            return super().__getitem__(path)
        layout, _ = self.layouts[path]
        value = self._value(path)
        return self.home.leaf(value, layout, path, self.name) if self._is_cut(path) else value

    def block(self, path: str) -> Tensor | None:
        """See `Leaves.block`."""
        path = self.home.aliases.get(path, path)
        return super().block(path) if self._is_cut(path) else None

    def _value(self, path: str) -> Tensor:
        values = self.flats()
        return values[path] if path in values else values[self.layouts[path][1]]

    def _is_cut(self, path: str) -> bool:
        return path not in self.flats() and self._value(path).shape == (
            self.layouts[path][0].length,
        )


def by_group(tree: Any, home: Home) -> Any:
    """The inverse of `by_path`, for a state that was built leaf by leaf; copies.

    Raises:
        StateError: leaves have other shapes than the program's.
    """
    groups = groups_of(home)
    paths = {path for group in groups for path in group.paths}

    def resting(value: Any) -> Any:
        if not is_over(value, paths):
            return value
        found: Flats = {}
        for group in groups:
            given = {path: value[path] for path in group.paths if path in value}
            if not given:
                continue
            if len(given) == len(group.paths) and _is_cut(group, given):
                first = next(iter(given.values()))
                layout = group.layout.cast(first.dtype)
                tier = group.rests.moments
                found[group.key] = home.memories.zeros(tier, layout.length, layout.dtype)
                fill_layout(found[group.key], layout, given, home)
            elif group.couples == "element":
                found[group.key] = next(iter(given.values()))
            else:
                found.update(given)
        return found

    return tree_map(resting, tree, is_leaf=lambda value: is_over(value, paths))


def _is_cut(group: Group, given: Mapping[str, Tensor]) -> bool:
    """Whether leaves are this rank's blocks; `by_path` gives those out as DTensors or as blocks."""
    entries = group.layout.by_path
    if all(
        isinstance(value, DTensor)
        or (entries[path].frame is not None and value.shape == entries[path].block)
        for path, value in given.items()
    ):
        return True
    return group.couples == "element" and any(value.ndim for value in given.values())
