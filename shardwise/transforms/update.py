"""The update of one rank: landed gradients -> optimizer on flat groups -> the `params` home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.offload.store import Store
from shardwise.optim.norms import Norm
from shardwise.sharding.buckets import Bucket, Route
from shardwise.sharding.gradients import Grads
from shardwise.sharding.leaves import Flats
from shardwise.sharding.movement import Mover, packed_sum
from shardwise.sharding.opt_state import is_over, split
from shardwise.sharding.redistribute import route_items, run_route
from shardwise.sharding.state import State
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.norms import run_norms
from shardwise.transforms.rounding import Rounding, narrowed, rounded_params, widened
from shardwise.transforms.settle import Failure, raise_failure
from shardwise.transforms.step import Step
from shardwise.transforms.stepping import Stepping
from shardwise.transforms.streaming import Streamed

_DEAD = "Some of the state may be stepped and some not: go on from the last checkpoint."


@torch.no_grad()
def run_update(
    mover: Mover,
    lowering: Lowering,
    state: State,
    grads: Grads,
    *,
    store: Store,
    reuse_grads: bool = False,
) -> tuple[Any, dict[Norm, Tensor]]:
    """Write the new parameters into the state's buckets; return optimizer state and norms.

    Args:
        mover: the choke point.
        lowering: what runs.
        state: written to.
        grads: normalised.
        store: the tiers of the program.
        reuse_grads: nobody else will read them, so a factor may be applied where they are.
    """
    members = [bucket for bucket in lowering.all_buckets if bucket.opt]
    landed: Flats = {}
    params: Flats = {}
    for bucket in members:
        to_grads, to_params, _ = lowering.routes[bucket.name]
        items = route_items(to_grads, bucket.unit, "update")
        flat = _moving(to_grads, grads.flats[bucket.name], store)
        landed[bucket.name] = run_route(mover, to_grads, flat, items)
        if bucket.has_master:
            params[bucket.name] = state.masters[bucket.name]
        else:
            items = route_items(to_params, bucket.unit, "update")
            flat = _moving(to_params, state.flats[bucket.name], store)
            params[bucket.name] = run_route(mover, to_params, flat, items).to(bucket.work)
    norms = run_norms(mover, lowering.norms, landed)
    outs = _outs(lowering, state)
    step = Step(
        lowering.stepping,
        mover,
        device=store.device,
        params=slices(members, params),
        grads=slices(members, landed),
        used=grads.used,
        extra={"norms": norms, "reuse_grads": reuse_grads} if norms else {},
        outs=slices(lowering.hosted, outs),
    )
    unused = Unused(lowering.stepping, grads.used)
    rounding = Rounding(int(state.seed), int(state.step), mover.mesh, mover.coords)
    opt_flats = widened(lowering.stepping, state.opt_flats)
    unused.note(step.params, opt_flats)

    def vote(failure: Failure) -> None:
        failed = torch.tensor([float(bool(str(failure)))], dtype=torch.float64, device=store.device)
        if packed_sum(mover, failed, lowering.drive_items).item():
            raise_failure(mover, failure, "the update", _DEAD)

    opt_flats = Streamed(step, store, rounding, vote).run(opt_flats)
    for view in unused.restore(step.params, opt_flats, step.outs):
        store.forget(view)
    opt_flats = narrowed(lowering.stepping, state.opt_flats, opt_flats, rounding)
    for bucket in members:
        _, _, back = lowering.routes[bucket.name]
        flat, new = state.flats[bucket.name], outs.get(bucket.name, params[bucket.name])
        if new is not flat:
            new = rounded_params(rounding, bucket, new) if bucket.rounds else new
            items = route_items(back, bucket.unit, "update")
            run_route(mover, back, _moving(back, new, store), items, out=flat)
    return opt_flats, norms


def _moving(route: Route, flat: Tensor, store: Store) -> Tensor:
    """What collectives move must be on the device, in the dtype that moves."""
    if route.gather is None or flat.device == store.device:
        return flat
    return flat.to(route.target.dtype).to(store.device)


def _outs(lowering: Lowering, state: State) -> Flats:
    """What masters on the host are rounded to as they are stepped; see `Step.outs`."""
    outs: Flats = {}
    for bucket in lowering.hosted:
        _, _, back = lowering.routes[bucket.name]
        flat, dtype = state.flats[bucket.name], back.target.dtype
        moves = back.gather is not None or back.cut is not None or flat.device.type != "cpu"
        outs[bucket.name] = torch.empty(back.source.length, dtype=dtype) if moves else flat
    return outs


def slices(members: Sequence[Bucket], flats: Flats) -> Flats:
    """The buffers of buckets, cut into groups."""
    return {
        group.key: group.slice(flats[bucket.name]) for bucket in members for group in bucket.groups
    }


class Unused:
    """Keeps what belongs to parameters that no rank used as it was before an update.

    Only elementwise groups need it: whole tensors without a gradient are not given to the
    optimizer at all.
    """

    def __init__(self, stepping: Stepping, used: frozenset[str]) -> None:
        self._stepping = stepping
        self._entries = [
            (group, entry)
            for group in stepping.groups
            if group.couples == "element" and not used.issuperset(group.paths)
            for entry in group.layout.entries
            if entry.path not in used
        ]
        self._values: list[Tensor] = []

    def _views(self, params: Flats, opt: Any) -> Iterator[Tensor]:
        if not self._entries:
            return
        leaves, _ = split(opt, self._stepping.keys)
        dicts: list[Flats] = [leaf for leaf in leaves if is_over(leaf, self._stepping.keys)]
        for group, entry in self._entries:
            for values in (params, *dicts):
                value = values.get(group.key)
                if value is not None and value.shape == (group.layout.length,):
                    yield entry.view(value)

    def note(self, params: Flats, opt: Any) -> None:
        """Copy the old values."""
        self._values = [view.clone() for view in self._views(params, opt)]

    def restore(self, params: Flats, opt: Any, outs: Flats) -> list[Tensor]:
        """Write the old values back, and round parameters to `outs` again.

        Returns:
            What was written.
        """
        written = list(self._views(params, opt))
        for view, value in zip(written, self._values, strict=True):
            view.copy_(value)
        for group, entry in self._entries:
            if group.key in outs:
                written.append(entry.view(outs[group.key]))
                written[-1].copy_(entry.view(params[group.key]))
        return written
