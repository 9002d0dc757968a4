"""Runs a `Route`: a flat buffer from one layout to another, without touching what stays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.sharding.buckets import Route
from shardwise.sharding.collectives import Collective, gather_items
from shardwise.sharding.compat import copy_all
from shardwise.sharding.layout import Regroup
from shardwise.sharding.movement import Mover, finish, gather


def route_items(route: Route, unit: str, reason: str) -> tuple[Collective, ...]:
    """The collectives of a route; cutting moves nothing."""
    return gather_items(route.gather, unit, reason) if route.gather else ()


def run_route(
    mover: Mover,
    route: Route,
    flat: Tensor,
    items: Sequence[Collective],
    out: Tensor | None = None,
) -> Tensor:
    """The values of `flat` in the target layout of the route, cast to its dtype before they move.

    Args:
        mover: the choke point.
        route: from `buckets.route`.
        flat: a buffer in the source layout.
        items: what `route_items` predicted.
        out: where to write; default: new memory, or `flat` itself if nothing changes.
    """
    if not (route.gather or route.cut):
        if out is None:
            return flat.to(route.target.dtype)
        return flat if flat is out else out.copy_(flat)
    flat = flat.to(route.target.dtype)
    if route.gather:
        flat = _gathered(mover, route.gather, flat, items, None if route.cut else out)
    return own_part(mover, route.cut, flat, out) if route.cut else flat


def own_part(mover: Mover, cut: Regroup, flat: Tensor, out: Tensor | None = None) -> Tensor:
    """This rank's part of a coarse buffer; padding is zero."""
    if out is None:
        out = torch.zeros(cut.fine.length, dtype=flat.dtype, device=flat.device)
    place = mover.mesh.index(cut.axes, mover.coords)
    pairs = [
        pair
        for index, entry in enumerate(cut.coarse.entries)
        for pair in cut.own_pieces(index, entry.view(flat), out, place)
    ]
    if pairs:
        copy_all([mine for _, mine in pairs], [whole for whole, _ in pairs])
    return out


def _gathered(
    mover: Mover, group: Regroup, flat: Tensor, items: Sequence[Collective], out: Tensor | None
) -> Tensor:
    stack = torch.empty(group.stack, dtype=flat.dtype, device=flat.device)
    finish(gather(mover, flat, stack, items))
    if out is None:
        out = torch.zeros(group.coarse.length, dtype=flat.dtype, device=flat.device)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for index, entry in enumerate(group.coarse.entries):
        targets += group.coarse_pieces(index, entry.view(out))
        sources += group.fine_pieces(index, stack)
    copy_all(targets, sources)
    return out
