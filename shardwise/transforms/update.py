"""The update of one rank: landed gradients -> optimizer on flat groups -> the `params` home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.base import apply_in_place
from shardwise.optim.flat import squared_norm
from shardwise.sharding.buckets import Bucket
from shardwise.sharding.gradients import Grads
from shardwise.sharding.movement import Mover, packed_sum
from shardwise.sharding.redistribute import route_items, run_route
from shardwise.sharding.state import Flats, State, groups_of
from shardwise.transforms.lowering import Lowering


@torch.no_grad()
def run_update(
    mover: Mover, lowering: Lowering, state: State, grads: Grads
) -> tuple[Any, Tensor | None]:
    """Write the new parameters into the state's buckets; return optimizer state and norm."""
    members = [bucket for bucket in lowering.all_buckets if bucket.opt]
    groups: Flats = {}
    params: Flats = {}
    for bucket in members:
        to_grads, to_params, _ = lowering.routes[bucket.name]
        items = route_items(to_grads, bucket.unit, "update")
        landed = grads.flats[bucket.name]
        groups[bucket.name] = run_route(mover, to_grads, landed, items)
        if bucket.has_master:
            params[bucket.name] = state.masters[bucket.name]
        else:
            params[bucket.name] = run_route(mover, to_params, state.flats[bucket.name], ())
    norm = global_norm(mover, lowering, members, groups)
    extra = {} if norm is None else {"norm": norm}
    unused = Unused(members, grads.used, params, groups_of(state.opt_flats, state.home))
    params, opt_flats = apply_in_place(lowering.optimizer, params, groups, state.opt_flats, **extra)
    unused.restore(params, groups_of(opt_flats, state.home))
    for bucket in members:
        _, _, back = lowering.routes[bucket.name]
        flat = state.flats[bucket.name]
        if params[bucket.name] is not flat:
            items = route_items(back, bucket.unit, "update")
            run_route(mover, back, params[bucket.name], items, out=flat)
    return opt_flats, norm


def global_norm(
    mover: Mover, lowering: Lowering, members: Sequence[Bucket], groups: Flats
) -> Tensor | None:
    """The 2-norm of the whole gradient by one packed reduction; replicated parts count once."""
    if "norm" not in lowering.optimizer.needs:
        return None
    if not members:
        return torch.zeros((), dtype=torch.float64)
    squares = squared_norm(groups)
    values = torch.stack([squares[bucket.name] for bucket in members])
    items = lowering.norm_items
    axes = [set(bucket.opt.axes) if bucket.opt else set() for bucket in members]
    shared = torch.tensor(
        [[item.axis not in cut for cut in axes] for item in items], device=values.device
    )
    return packed_sum(mover, values, items, shared).sum().sqrt()


class Unused:
    """Keeps what belongs to parameters that no rank used as it was before an update."""

    def __init__(
        self, members: Sequence[Bucket], used: frozenset[str], params: Flats, state: list[Flats]
    ) -> None:
        self._kept = [
            (bucket, path)
            for bucket in members
            if not used.issuperset(bucket.paths)
            for path in bucket.paths
            if path not in used
        ]
        self._values = [view.clone() for view in self._views(params, state)]

    def _views(self, params: Flats, state: list[Flats]) -> Iterator[Tensor]:
        for bucket, path in self._kept:
            if bucket.opt is not None:
                entry = bucket.opt.by_path[path]
                for group in (params, *state):
                    yield entry.view(group[bucket.name])

    def restore(self, params: Flats, state: list[Flats]) -> None:
        """Write the old values back."""
        for view, value in zip(self._views(params, state), self._values, strict=True):
            view.copy_(value)
