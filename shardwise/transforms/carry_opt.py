"""Optimizer state from one program to another: leaf by leaf, and by path inside dicts of params.

[Note: what of an optimizer state is carried]
Both states are trees of the same optimizer, over other groups of other parameters. A leaf that all
parameters share (a count, a rate) is taken over. A dict over parameters is taken over path by path:
what both programs train keeps its values, what only the new one trains keeps those of a fresh
state. A number that a whole group shares is taken from the parameters that were trained before;
they must agree. So a parameter that begins to train has new moments, but counts with the others:
Adam's first step for it is then up to three times its rate, as no bias is corrected any more. A
transform whose parameters are all new starts as a whole, its count included; `partition` makes one
of the parameters that are to train later, as its `otherwise`, if that is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor

from shardwise.sharding.buckets import Group
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.leaves import Flats
from shardwise.sharding.lying import Grid, Lying, lying_of
from shardwise.sharding.opt_state import is_over, resting_keys
from shardwise.sharding.pieces import Held
from shardwise.sharding.pytree import NAMESPACE
from shardwise.sharding.relocate import Fill


@dataclass
class OptCarry:
    """Fills the state of one optimizer from another state of it.

    Args:
        source_groups: of the program that the state comes from.
        target_groups: of the program that it goes to.
        source_grid: the grid of axes of the old mesh.
        target_grid: likewise of the new one.
        fills: found so far: buffers that are filled by moving.
        faults: found so far: what does not fit, in words.
    """

    source_groups: Sequence[Group]
    target_groups: Sequence[Group]
    source_grid: Any
    target_grid: Any
    fills: list[Fill] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._old_keys = resting_keys(self.source_groups)
        self._new_keys = resting_keys(self.target_groups)
        old = {path for group in self.source_groups for path in group.paths}
        new = {path for group in self.target_groups for path in group.paths}
        self._both = old & new

    def carry(self, old: Any, new: Any, at: str = "opt") -> Any:
        """`new` with the values of `old`; flat buffers are noted in `fills` and filled later.

        Args:
            old: the state that is carried, at rest; only read.
            new: a fresh state of the new program, at rest; its buffers are used.
            at: where in the state, for faults.
        """
        over = is_over(old, self._old_keys) or is_over(new, self._new_keys)
        if over and isinstance(old, dict) and isinstance(new, dict):
            return self._dict_over(old, new, at)
        if isinstance(old, Tensor) or isinstance(new, Tensor) or _is_leaf(old) or _is_leaf(new):
            return self._leaf(old, new, at)
        if type(old) is not type(new):
            self.faults.append(f"{at}: was {type(old).__name__}, is {type(new).__name__}")
            return new
        now = _one_level(new)
        if self._begins(now.children):
            return new
        if isinstance(new, dict):
            return self._dict(old, new, at)
        was = _one_level(old)
        if len(was.children) != len(now.children):
            self.faults.append(f"{at}: had {len(was.children)} parts, has {len(now.children)}")
            return new
        parts = [
            self.carry(one, other, f"{at}{_step(new, entry)}")
            for entry, one, other in zip(now.entries, was.children, now.children, strict=True)
        ]
        return now.unflatten_func(now.metadata, parts)

    def _begins(self, parts: Sequence[Any]) -> bool:
        """Whether these are the state of one transform, over new parameters only."""
        over = [part for part in parts if is_over(part, self._new_keys)]
        paths = {path for part in over for path in _paths(part, self.target_groups)}
        return bool(paths) and self._both.isdisjoint(paths)

    def _dict(self, old: dict[Any, Any], new: dict[Any, Any], at: str) -> dict[Any, Any]:
        """A dict by name; one side may lack what only parameters of its own have."""
        for key in old.keys() - new.keys():
            self._alone(old[key], self._old_keys, self.source_groups, f"{at}[{key!r}]", "gone")
        for key in new.keys() - old.keys():
            self._alone(new[key], self._new_keys, self.target_groups, f"{at}[{key!r}]", "new")
        return {
            key: self.carry(old[key], value, f"{at}[{key!r}]") if key in old else value
            for key, value in new.items()
        }

    def _alone(
        self, value: Any, keys: frozenset[str], groups: Sequence[Group], at: str, what: str
    ) -> None:
        """Only state of parameters that train on one side may be there on one side alone."""
        paths = _paths(value, groups) if is_over(value, keys) else self._both
        if self._both.intersection(paths):
            self.faults.append(f"{at}: is {what}")

    def _leaf(self, old: Any, new: Any, at: str) -> Any:
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if old.shape != new.shape or old.dtype != new.dtype:
                self.faults.append(f"{at}: was {_kind(old)}, is {_kind(new)}")
                return new
            return old.detach().to(_device(old, new), copy=True)
        if type(old) is not type(new):
            self.faults.append(f"{at}: was {_kind(old)}, is {_kind(new)}")
            return new
        return old

    def _dict_over(self, old: Flats, new: Flats, at: str) -> Flats:
        held, numbers = self._held(old)
        for path in sorted(self._both & (held.keys() | numbers.keys())):
            if path not in _paths(new, self.target_groups):
                self.faults.append(f"{at}[{path!r}]: is gone")
        found: Flats = {}
        for group in self.target_groups:
            if group.key in new:
                found[group.key] = self._group(group, new[group.key], held, numbers, at)
            for path in group.paths:
                if path in new:
                    found[path] = self._path(group, path, new[path], (held, numbers), at)
        return found

    def _held(self, old: Flats) -> tuple[dict[str, Held], Flats]:
        """By path: what is cut like the parameter or has its shape, and what is neither."""
        held: dict[str, Held] = {}
        numbers: Flats = {}
        for group in self.source_groups:
            value = old.get(group.key)
            for entry in group.layout.entries:
                if value is not None and value.shape == (group.layout.length,):
                    lying = lying_of(self.source_grid, group.layout, entry)
                    held[entry.path] = Held(lying, entry.view(value))
                elif value is not None:
                    numbers[entry.path] = value
                elif entry.path in old:
                    numbers[entry.path] = old[entry.path]
        return held, numbers

    def _group(
        self, group: Group, value: Tensor, held: Mapping[str, Held], numbers: Flats, at: str
    ) -> Tensor:
        paths = [path for path in group.paths if path in self._both]
        flat = value.shape == (group.layout.length,)
        sources = {path: held[path] for path in paths if path in held}
        for path in paths:
            entry = _entry(path, group.layout.by_path[path].whole)
            if flat and path in numbers and tuple(numbers[path].shape) == entry.shape:
                # It was whole on every rank, since others of its group had another shape or none.
                sources[path] = Held(Lying(self.source_grid(()), entry), numbers[path])
        if flat:
            self._missing(paths, sources, f"{_name(group.layout.dtype)} like the parameter", at)
            layout = group.layout.cast(value.dtype)
            grid: Grid = self.target_grid(layout.axes)
            self.fills.append(Fill(group.unit, value, layout, grid, sources))
            return value
        shared = [numbers[path] for path in paths if path in numbers]
        self._missing(paths, numbers, _kind(value), at)
        if any(not torch.equal(one, shared[0]) for one in shared):
            told = sorted({str(one.tolist()) for one in shared})
            self.faults.append(f"{at}[{group.key!r}]: one number of {', '.join(told)}")
        return self._leaf(shared[0], value, f"{at}[{group.key!r}]") if shared else value

    def _path(
        self,
        group: Group,
        path: str,
        value: Tensor,
        old: tuple[Mapping[str, Held], Flats],
        at: str,
    ) -> Tensor:
        held, numbers = old
        if path not in self._both:
            return value
        if path in held:
            was, name = held[path], f"{at}[{path!r}]"
            if not was.lying.shape:
                return self._leaf(was.block, value, name)
            if was.lying.shape == tuple(value.shape) and was.block.dtype == value.dtype:
                # It was cut, as its group had the shapes of parameters only.
                layout = Layout((), (_entry(path, was.lying.shape),), value.numel(), value.dtype)
                grid: Grid = self.target_grid(())
                self.fills.append(Fill(group.unit, value.view(-1), layout, grid, {path: was}))
                return value
        self._missing([path], numbers, _kind(value), at)
        return self._leaf(numbers[path], value, f"{at}[{path!r}]") if path in numbers else value

    def _missing(self, paths: Sequence[str], found: Mapping[str, Any], kind: str, at: str) -> None:
        lost = [path for path in paths if path not in found]
        self.faults += [f"{at}[{path!r}]: has no {kind} in the given state" for path in lost]


def _entry(path: str, shape: tuple[int, ...]) -> Entry:
    """A whole tensor alone in a buffer."""
    return Entry(path, shape, 0, shape, 0)


def _paths(values: Flats, groups: Sequence[Group]) -> set[str]:
    """The parameters that a dict at rest is over."""
    whole = {path for group in groups if group.key in values for path in group.paths}
    return whole.union(path for group in groups for path in group.paths if path in values)


def _one_level(node: Any) -> Any:
    return optree.tree_flatten_one_level(node, namespace=NAMESPACE)


def _is_leaf(value: Any) -> bool:
    return optree.treespec_is_leaf(
        optree.tree_structure(value, is_leaf=lambda part: part is not value, namespace=NAMESPACE)
    )


def _device(old: Tensor, new: Tensor) -> torch.device:
    """A fresh state says where its leaves belong; one on the meta device has no place."""
    return old.device if new.is_meta else new.device


def _step(node: Any, entry: Any) -> str:
    names = getattr(node, "_fields", None)
    if names is not None and isinstance(entry, int):
        return f".{names[entry]}"
    return f"[{entry!r}]" if isinstance(entry, int) else f".{entry}"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_name(value.dtype)} of shape {tuple(value.shape)}"
    return type(value).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
