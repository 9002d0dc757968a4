"""One step of an optimizer over the groups of a program, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.base import apply_in_place
from shardwise.sharding.assembling import run_assembly
from shardwise.sharding.buckets import Group
from shardwise.sharding.leaves import Flats
from shardwise.sharding.movement import Mover
from shardwise.sharding.opt_state import is_over, split
from shardwise.sharding.pytree import tree_unflatten
from shardwise.sharding.redistribute import own_part, run_route
from shardwise.sharding.tiers import DEVICE
from shardwise.transforms.stepping import Call, Stepping, write_parts

_HOST = torch.device("cpu")
_CASTS = (torch.bfloat16, torch.float16)


class Step:
    """One step of an optimizer over all groups that are not streamed, in place.

    Args:
        stepping: the optimizer and its groups.
        mover: the choke point.
        device: where tensors live that no tier takes elsewhere.
        params: a slice per group, written.
        grads: a slice per group, read.
        used: parameters that some rank used.
        extra: what the optimizer needs beside gradients.
        outs: by group that is stepped on the host, what its new parameters are rounded to as they
            are made, so that they are not read a second time.
    """

    def __init__(
        self,
        stepping: Stepping,
        mover: Mover,
        *,
        device: torch.device,
        params: Flats,
        grads: Flats,
        used: frozenset[str],
        extra: Mapping[str, Any],
        outs: Flats,
    ) -> None:
        self.stepping = stepping
        self._mover = mover
        self._device = device
        self.params = params
        self.grads = grads
        self._used = used
        self.extra = extra
        self.outs = outs

    def run(self, opt: Any, done: list[Any] | None = None) -> Any:
        """The new optimizer state; parameters are written in place.

        Args:
            opt: before the step.
            done: leaves that streamed groups have left behind, as `split` gives them.
        """
        stepping = self.stepping
        if stepping.sees_rest:
            _, new = apply_in_place(stepping.optimizer, self.params, self.grads, opt, **self.extra)
            return new
        leaves, spec = split(opt, stepping.keys)
        if done is None:
            done = [dict(leaf) if is_over(leaf, stepping.keys) else leaf for leaf in leaves]
        for call in stepping.calls:
            self._call(call, leaves, done, spec)
        return tree_unflatten(spec, done)

    def apply(self, params: Flats, grads: Flats, opt: Any, shadows: Flats) -> Any:
        """Step parameters in place, round them to `shadows`, and return the new state."""
        optimizer = self.stepping.optimizer
        casts = {k: one for k, one in shadows.items() if optimizer.casts and one.dtype in _CASTS}
        extra = {**self.extra, "shadows": casts} if casts else self.extra
        _, new = apply_in_place(optimizer, params, grads, opt, **extra)
        for key in shadows.keys() - casts.keys():
            shadows[key].copy_(params[key])
        return new

    def _call(self, call: Call, leaves: list[Any], done: list[Any], spec: Any) -> None:
        """Step the groups of one call; their whole tensors die with it."""
        keys = self.stepping.keys
        last = call is self.stepping.calls[-1]
        params, grads, wholes = self._tensors(call)
        seen = [
            self._seen(call, leaf) if is_over(leaf, keys) else leaf if last else _copy(leaf)
            for leaf in leaves
        ]
        shadows = {group.key: self.outs[group.key] for group in call if group.key in self.outs}
        new = self.apply(params, grads, tree_unflatten(spec, seen), shadows)
        for index, leaf in enumerate(spec.flatten_up_to(new)):
            if is_over(leaves[index], keys):
                self._keep(call, done[index], leaf)
            elif last:
                done[index] = leaf
        for group in call:
            if group.couples == "element":
                _copy_back(self.params[group.key], params[group.key])
        for group, whole in wholes:
            mine = self.params[group.key]
            if group.assembly:
                views, place = dict(_views(group, whole)), self._mover.coords
                write_parts(self.stepping, group, views, mine, place)
            elif group.gather:
                own_part(self._mover, group.gather, whole, mine)
            else:
                _copy_back(mine, whole)

    def _tensors(self, call: Call) -> tuple[Flats, Flats, list[tuple[Group, Tensor]]]:
        """Parameters and gradients as the optimizer sees them, and the buffers behind them."""
        params: Flats = {}
        grads: Flats = {}
        wholes: list[tuple[Group, Tensor]] = []
        for group in call:
            if group.couples == "element":
                params[group.key] = self._seen_of(group, self.params[group.key])
                grads[group.key] = self._seen_of(group, self.grads[group.key])
                continue
            grad = self._whole(group, self.grads[group.key])
            param = self._whole(group, self.params[group.key])
            wholes.append((group, param))
            params |= _views(group, param)
            grads |= {p: view for p, view in _views(group, grad) if p in self._used}
        return params, grads, wholes

    def _seen_of(self, group: Group, flat: Tensor) -> Tensor:
        """A tensor where its group is stepped."""
        return flat.to(_HOST if group.on_host else self._device)

    def _whole(self, group: Group, flat: Tensor) -> Tensor:
        flat = flat.to(self._device)
        way = self.stepping.gathering(group, flat.dtype)
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
                    seen[group.key] = self._seen_of(group, value)
                else:
                    seen |= _views(group, self._whole(group, value))
            seen |= {path: values[path] for path in group.paths if path in values}
        return seen

    def _keep(self, call: Call, resting: Flats, seen: Flats) -> None:
        """Put what the optimizer has made of `_seen` back to rest."""
        for group in call:
            if group.couples != "element" and group.key in resting:
                place = self._mover.coords
                write_parts(self.stepping, group, seen, resting[group.key], place)
            elif group.rests.moments != DEVICE and group.key in resting:
                _copy_back(resting[group.key], seen[group.key])
            else:
                keys = (group.key, *group.paths)
                resting.update({key: seen[key] for key in keys if key in seen})


def _views(group: Group, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    return ((entry.path, entry.view(flat)) for entry in group.whole.entries)


def _copy_back(rest: Tensor, seen: Tensor) -> None:
    """Put to rest what was stepped elsewhere."""
    if seen.data_ptr() != rest.data_ptr():
        rest.copy_(seen)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
