"""How an optimizer steps a program's groups: which it sees cut, which whole, and in which calls.

[Note: a step in several calls]
Transforms that work element by element see flat groups, all in one call. What couples a whole
tensor is gathered: gradient, parameter and the state that has the parameter's shape; so whole
tensors never rest, and only one group is whole at a time, each group has a call of its own. A
tensor's step depends on its own tensors and on what all tensors share (the count of steps, the
rate, a factor), so each call starts from copies of the shared leaves, and those that the last call
leaves are kept. A transform that couples the whole tree gets one call with everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.optim.base import GradientTransform, apply_in_place
from shardwise.sharding.assembling import Assembly, assembly_items, own_tiles, run_assembly
from shardwise.sharding.buckets import Bucket, Group, Route
from shardwise.sharding.collectives import Collective
from shardwise.sharding.compat import copy_all
from shardwise.sharding.layout import Regroup
from shardwise.sharding.leaves import Flats
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Mover
from shardwise.sharding.opt_state import is_over, resting_keys, split
from shardwise.sharding.pytree import tree_map, tree_unflatten
from shardwise.sharding.redistribute import own_part, route_items, run_route

Call = tuple[Group, ...]
Place = Mapping[str, int]


class Gathering(NamedTuple):
    """What brings one flat tensor of a group to whole tensors, in two stages or one.

    Args:
        group: whose.
        route: over data axes, to whole blocks.
        assembly: over tensor axes, from blocks.
    """

    group: Group
    route: Route | None
    assembly: Assembly | None

    @property
    def items(self) -> tuple[Collective, ...]:
        """The collectives, in order."""
        return (*self.route_items, *self.assembly_items)

    @property
    def route_items(self) -> tuple[Collective, ...]:
        """Those over data axes."""
        return route_items(self.route, self.group.unit, "update") if self.route else ()

    @property
    def assembly_items(self) -> tuple[Collective, ...]:
        """Those over tensor axes."""
        made = self.assembly
        return assembly_items(made, self.group.unit, "update") if made else ()


@dataclass(frozen=True, eq=False)
class Stepping:
    """An optimizer over the groups of a program.

    Args:
        optimizer: over the keys of groups, and over paths where it must see whole tensors.
        groups: of all buckets.
        mesh: sizes of the axes.
    """

    optimizer: GradientTransform
    groups: tuple[Group, ...]
    mesh: Mesh

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether nothing must be seen whole."""
        return all(group.couples == "element" for group in self.groups)

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of dicts over parameters inside the optimizer state."""
        return resting_keys(self.groups)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The groups of each call; see [Note: a step in several calls]."""
        if self.is_elementwise or any(group.couples == "tree" for group in self.groups):
            return (self.groups,)
        cut = tuple(group for group in self.groups if group.couples == "element")
        whole = [(group,) for group in self.groups if group.couples != "element"]
        return (cut, *whole) if cut else tuple(whole)

    @cached_property
    def form(self) -> Any:
        """The optimizer state on the meta device."""
        first = dict.fromkeys(self.mesh.names, 0)
        return init_opt(self, first, torch.device("meta"))

    @cached_property
    def gathers(self) -> tuple[Gathering, ...]:
        """What is gathered in one step, in order: per call gradient, parameter, state."""
        leaves, _ = split(self.form, self.keys)
        dicts: list[Flats] = [leaf for leaf in leaves if is_over(leaf, self.keys)]
        found: list[Gathering] = []
        for call in self.calls:
            whole = [group for group in call if group.gather or group.assembly]
            found += [self.gathering(group, group.work) for group in whole for _ in range(2)]
            found += [
                self.gathering(group, group.working(values[group.key].dtype))
                for values in dicts
                for group in whole
                if group.key in values
            ]
        return tuple(found)

    @cached_property
    def items(self) -> tuple[Collective, ...]:
        """The collectives of `gathers`."""
        return tuple(item for one in self.gathers for item in one.items)

    def gathering(self, group: Group, dtype: torch.dtype) -> Gathering:
        """From a group's slice on this rank to whole tensors."""
        route = None
        if group.gather:
            source, target = group.layout.cast(dtype), group.blocks.cast(dtype)
            route = Route(source, target, Regroup(target, source, self.mesh), None)
        return Gathering(group, route, group.assembly and group.assembly.cast(dtype))


def make_stepping(optimizer: GradientTransform, buckets: Sequence[Bucket], mesh: Mesh) -> Stepping:
    """The stepping of some buckets; tells the optimizer which parameters its keys stand for."""
    groups = tuple(group for bucket in buckets for group in bucket.groups)
    if optimizer.over is not None:
        shapes = {entry.path: entry.whole for group in groups for entry in group.layout.entries}
        keys = {path: path for path in shapes}
        keys |= {g.key: g.paths[0] for g in groups if g.couples == "element"}
        optimizer = optimizer.over(shapes, keys)
    return Stepping(optimizer, groups, mesh)


def init_opt(stepping: Stepping, place: Place, device: torch.device) -> Any:
    """A fresh optimizer state at rest.

    Args:
        stepping: the optimizer and its groups.
        place: coordinates of this rank.
        device: where tensors live.
    """
    merged: Any = None
    for number, call in enumerate(stepping.calls):
        params: Flats = {}
        for group in call:
            dtype = group.layout.dtype
            if group.couples == "element":
                params[group.key] = torch.empty(group.layout.length, dtype=dtype, device=device)
            else:
                for entry in group.layout.entries:
                    params[entry.path] = torch.empty(entry.whole, dtype=dtype, device=device)
        state = stepping.optimizer.init(params)
        if stepping.is_elementwise:
            return state

        def resting(value: Any, call: Call = call, over: Flats = params) -> Any:
            return _at_rest(stepping, call, value, place) if is_over(value, over) else value

        def is_leaf(value: Any, over: Flats = params) -> bool:
            return is_over(value, over)

        state = tree_map(resting, state, is_leaf=is_leaf)
        merged = _merged(merged, state, stepping.keys) if number else state
    return merged


def _at_rest(stepping: Stepping, call: Call, values: Flats, place: Place) -> Flats:
    """Whole tensors cut into flat groups, where a dict has all of a group in their shapes."""
    found: Flats = {}
    for group in call:
        if group.couples == "element":
            if group.key in values:
                found[group.key] = values[group.key]
            continue
        given = {path: values[path] for path in group.paths if path in values}
        shapes = {entry.path: entry.whole for entry in group.layout.entries}
        same = {path: tuple(value.shape) for path, value in given.items()} == shapes
        # One number per 0-dim parameter may be anything, such as a count: it stays whole.
        if same and any(shapes.values()):
            first = next(iter(given.values()))
            flat = torch.zeros(group.layout.length, dtype=first.dtype, device=first.device)
            _write(stepping, group, given, flat, place)
            found[group.key] = flat
        else:
            found |= given
    return found


def _write(stepping: Stepping, group: Group, values: Flats, flat: Tensor, place: Place) -> None:
    """This rank's parts of whole tensors, into its slice."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for index, entry in enumerate(group.layout.entries):
        value = values.get(entry.path)
        if value is None:
            continue
        if group.assembly:
            mesh = stepping.mesh
            pairs += own_tiles(entry, group.layout, value, flat, mesh=mesh, place=place)
        elif group.gather is None:
            pairs.append((value, entry.view(flat)))
        else:
            at = stepping.mesh.index(group.gather.axes, place)
            pairs += group.gather.own_pieces(index, value, flat, at)
    if pairs:
        copy_all([mine for _, mine in pairs], [whole for whole, _ in pairs])


def _merged(one: Any, other: Any, keys: frozenset[str]) -> Any:
    """Two states of one structure over different parameters, as one."""
    if isinstance(one, dict):
        if is_over(one, keys):
            return {**one, **other}
        both = {key: _merged(one[key], other[key], keys) for key in one if key in other}
        return {**one, **other, **both}
    if isinstance(one, tuple | list):
        parts = [_merged(a, b, keys) for a, b in zip(one, other, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    # A transform that got no parameter in this call has made its count on the CPU.
    return other if isinstance(other, Tensor) and other.device.type != "cpu" else one


class Step:
    """One step of an optimizer over all groups, in place.

    Args:
        stepping: the optimizer and its groups.
        mover: the choke point.
        params: a slice per group, written.
        grads: a slice per group, read.
        used: parameters that some rank used.
        extra: what the optimizer needs beside gradients.
    """

    def __init__(
        self,
        stepping: Stepping,
        mover: Mover,
        *,
        params: Flats,
        grads: Flats,
        used: frozenset[str],
        extra: Mapping[str, Any],
    ) -> None:
        self._stepping = stepping
        self._mover = mover
        self.params = params
        self._grads = grads
        self._used = used
        self._extra = extra

    def run(self, opt: Any) -> Any:
        """The new optimizer state; parameters are written in place."""
        stepping = self._stepping
        if stepping.is_elementwise:
            params, grads = self.params, self._grads
            _, new = apply_in_place(stepping.optimizer, params, grads, opt, **self._extra)
            return new
        leaves, spec = split(opt, stepping.keys)
        done = [dict(leaf) if is_over(leaf, stepping.keys) else leaf for leaf in leaves]
        for call in stepping.calls:
            self._call(call, leaves, done, spec)
        return tree_unflatten(spec, done)

    def _call(self, call: Call, leaves: list[Any], done: list[Any], spec: Any) -> None:
        """Step the groups of one call; their whole tensors die with it."""
        keys = self._stepping.keys
        last = call is self._stepping.calls[-1]
        params, grads, wholes = self._tensors(call)
        seen = [
            self._seen(call, leaf) if is_over(leaf, keys) else leaf if last else _copy(leaf)
            for leaf in leaves
        ]
        _, new = apply_in_place(
            self._stepping.optimizer, params, grads, tree_unflatten(spec, seen), **self._extra
        )
        for index, leaf in enumerate(spec.flatten_up_to(new)):
            if is_over(leaves[index], keys):
                self._keep(call, done[index], leaf)
            elif last:
                done[index] = leaf
        for group, whole in wholes:
            if group.assembly:
                views, place = dict(_views(group, whole)), self._mover.coords
                _write(self._stepping, group, views, self.params[group.key], place)
            elif group.gather:
                own_part(self._mover, group.gather, whole, self.params[group.key])

    def _tensors(self, call: Call) -> tuple[Flats, Flats, list[tuple[Group, Tensor]]]:
        """Parameters and gradients as the optimizer sees them, and the buffers behind them."""
        params: Flats = {}
        grads: Flats = {}
        wholes: list[tuple[Group, Tensor]] = []
        for group in call:
            if group.couples == "element":
                params[group.key] = self.params[group.key]
                grads[group.key] = self._grads[group.key]
                continue
            grad = self._whole(group, self._grads[group.key])
            param = self._whole(group, self.params[group.key])
            wholes.append((group, param))
            params |= _views(group, param)
            grads |= {p: view for p, view in _views(group, grad) if p in self._used}
        return params, grads, wholes

    def _whole(self, group: Group, flat: Tensor) -> Tensor:
        way = self._stepping.gathering(group, flat.dtype)
        if way.route:
            flat = run_route(self._mover, way.route, flat, way.route_items)
        if way.assembly:
            flat = run_assembly(self._mover, way.assembly, flat, way.assembly_items)
        return flat

    def _seen(self, call: Call, values: Flats) -> Flats:
        """One dict of the state as the optimizer sees it in this call."""
        seen: Flats = {}
        for group in call:
            if group.key in values:
                value = values[group.key]
                if group.couples == "element":
                    seen[group.key] = value
                else:
                    seen |= _views(group, self._whole(group, value))
            seen |= {path: values[path] for path in group.paths if path in values}
        return seen

    def _keep(self, call: Call, resting: Flats, seen: Flats) -> None:
        """Put what the optimizer has made of `_seen` back to rest."""
        for group in call:
            if group.couples != "element" and group.key in resting:
                place = self._mover.coords
                _write(self._stepping, group, seen, resting[group.key], place)
            else:
                keys = (group.key, *group.paths)
                resting.update({key: seen[key] for key in keys if key in seen})


def _views(group: Group, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    return ((entry.path, entry.view(flat)) for entry in group.whole.entries)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
