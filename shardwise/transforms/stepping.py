"""How an optimizer steps a program's groups: which it sees cut, which whole, and in which calls.

[Note: a step in several calls]
Transforms that work element by element see flat groups, all in one call. What couples a whole
tensor is gathered: gradient, parameter and the state that has the parameter's shape; so whole
tensors never rest, and only one group is whole at a time, each group has a call of its own. A
tensor's step depends on its own tensors and on what all tensors share (the count of steps, the
rate, a factor), so each call starts from copies of the shared leaves, and those that the last call
leaves are kept. A transform that couples the whole tree gets one call with everything.

Groups whose state rests off the device are stepped on the host, in calls of their own; those with
state on disk are streamed through in chunks, each of them one more call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.optim.base import GradientTransform
from shardwise.sharding.assembling import Assembly, assembly_items, own_tiles
from shardwise.sharding.buckets import Bucket, Group, Route
from shardwise.sharding.collectives import Collective
from shardwise.sharding.compat import copy_all
from shardwise.sharding.layout import Regroup
from shardwise.sharding.leaves import Flats
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.opt_state import is_over, resting_keys, split
from shardwise.sharding.pytree import tree_map
from shardwise.sharding.redistribute import route_items
from shardwise.sharding.tiers import DEVICE, NOWHERE, Memories

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
    def keys(self) -> frozenset[str]:
        """Keys of dicts over parameters inside the optimizer state."""
        return resting_keys(self.groups)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The groups of each call; see [Note: a step in several calls]."""
        if self.couples_all:
            return (self.groups,) if self.groups else ()
        cut = [g for g in self.groups if g.couples == "element" and not g.is_streamed]
        here = tuple(group for group in cut if not group.on_host)
        hosted = tuple(group for group in cut if group.on_host)
        alone = [(group,) for group in self.groups if group.couples != "element"]
        return tuple(call for call in (here, hosted, *alone) if call)

    @cached_property
    def streamed(self) -> tuple[Group, ...]:
        """Groups that are stepped in chunks, each chunk in a call of its own."""
        return () if self.couples_all else tuple(g for g in self.groups if g.is_streamed)

    @cached_property
    def couples_all(self) -> bool:
        """Whether the optimizer must see the whole tree."""
        return any(group.couples == "tree" for group in self.groups)

    @cached_property
    def sees_rest(self) -> bool:
        """Whether the optimizer works on what rests on the device, in one call."""
        return all(group.couples == "element" and group.is_here for group in self.groups)

    @cached_property
    def form(self) -> Any:
        """The optimizer state on the meta device."""
        first = dict.fromkeys(self.mesh.names, 0)
        return init_opt(self, first, NOWHERE)

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


def init_opt(stepping: Stepping, place: Place, memories: Memories) -> Any:
    """A fresh optimizer state at rest.

    Args:
        stepping: the optimizer and its groups.
        place: coordinates of this rank.
        memories: what allocates.
    """
    merged: Any = None
    calls = (*stepping.calls, *((group,) for group in stepping.streamed))
    for number, call in enumerate(calls or ((),)):
        params: Flats = {}
        for group in call:
            dtype, device = group.layout.dtype, memories.host(group.rests.moments)
            if group.couples == "element":
                params[group.key] = torch.empty(group.layout.length, dtype=dtype, device=device)
            else:
                for entry in group.layout.entries:
                    params[entry.path] = torch.empty(entry.whole, dtype=dtype, device=device)
        state = stepping.optimizer.init(params)
        if stepping.sees_rest:
            return state

        def resting(value: Any, call: Call = call, over: Flats = params) -> Any:
            if not is_over(value, over):
                return value
            return _stowed(_at_rest(stepping, call, value, place), call, memories)

        def is_leaf(value: Any, over: Flats = params) -> bool:
            return is_over(value, over)

        state = tree_map(resting, state, is_leaf=is_leaf)
        merged = _merged(merged, state, stepping.keys) if number else state
    return merged


def _stowed(values: Flats, call: Call, memories: Memories) -> Flats:
    """Flat tensors, each on the tier of its group."""
    tiers = {group.key: group.rests.moments for group in call}
    return {
        key: memories.put(tiers.get(key, DEVICE), value) if value.ndim == 1 else value
        for key, value in values.items()
    }


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
            write_parts(stepping, group, given, flat, place)
            found[group.key] = flat
        else:
            found |= given
    return found


def write_parts(
    stepping: Stepping, group: Group, values: Flats, flat: Tensor, place: Place
) -> None:
    """This rank's parts of whole tensors, into its slice.

    Args:
        stepping: the optimizer and its groups.
        group: whose.
        values: by path.
        flat: written.
        place: coordinates of this rank.
    """
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
