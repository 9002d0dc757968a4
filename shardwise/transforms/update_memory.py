"""Bytes that an update takes beyond what rests and beyond the landed gradients, at its peak.

Gradients and weights that are not in the `opt` home, or not in the dtype that the optimizer
computes in, are brought there first and held until the end. Beside them there is one movement, one
optimizer group, or one bucket that is rounded at a time.
"""

from __future__ import annotations

import torch

from shardwise.optim.flat import PIECE_ELEMENTS
from shardwise.optim.norms import scratch_bytes
from shardwise.sharding.buckets import Bucket, Route
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.rounding import piece_bytes, widened_bytes
from shardwise.transforms.stepping import Gathering, Stepping


def update_peak(lowering: Lowering) -> int:
    """The peak over the parts of an update, in the order in which `run_update` runs them."""
    members = [b for b in lowering.all_buckets if b.name in lowering.routes and b.opt]
    held = peak = 0
    for bucket in members:
        for kept, moving in (_grads_bytes(lowering, bucket), _params_bytes(lowering, bucket)):
            peak = max(peak, held + kept + moving)
            held += kept
    norm = max((_norm_bytes(lowering, bucket.work) for bucket in members), default=0)
    widened = widened_bytes(lowering.stepping)
    narrow = max((_narrow_bytes(bucket) for bucket in members), default=0) if widened else 0
    back = max((_back_bytes(lowering, bucket) for bucket in members), default=0)
    stepped = widened + max(_whole_bytes(lowering.stepping), narrow)
    return max(peak, held + max(norm, stepped, back))


def _grads_bytes(lowering: Lowering, bucket: Bucket) -> tuple[int, int]:
    """Landed gradients as the optimizer reads them: what is kept, and beside it what moves."""
    route = lowering.routes[bucket.name][0]
    casts = bucket.landing is not None and bucket.landing.dtype != bucket.work
    if not (route.gather or route.cut):
        return (route.target.nbytes if casts else 0), 0
    return route.target.nbytes, _route_bytes(route) + (route.source.nbytes if casts else 0)


def _params_bytes(lowering: Lowering, bucket: Bucket) -> tuple[int, int]:
    """Weights as the optimizer writes them, where that is neither a master nor the home itself."""
    if bucket.has_master or bucket.opt is None:
        return 0, 0
    route = lowering.routes[bucket.name][1]
    moved = route.target.nbytes if route.gather or route.cut else 0
    if not bucket.rounds:
        return moved, _route_bytes(route)
    kept = bucket.opt.cast(bucket.work).nbytes
    return kept, max(moved, moved + _route_bytes(route) - kept)


def _norm_bytes(lowering: Lowering, dtype: torch.dtype) -> int:
    """What is cast at a time to take norms, or what is scaled at a time by their factor."""
    elements = lowering.norms.num_elements
    scaled = min(elements, PIECE_ELEMENTS) * dtype.itemsize if lowering.optimizer.needs else 0
    return max(scaled, scratch_bytes(elements, dtype))


def _narrow_bytes(bucket: Bucket) -> int:
    """One part of the optimizer state of a bucket, rounded to rest in 16 bits."""
    if bucket.opt is None or bucket.opt.dtype == bucket.work:
        return 0
    return bucket.opt.nbytes + piece_bytes(bucket.opt)


def _back_bytes(lowering: Lowering, bucket: Bucket) -> int:
    """Beside updated weights and their home: what it takes to round, cast and move them."""
    route = lowering.routes[bucket.name][2]
    moves = route.gather is not None or route.cut is not None
    if bucket.opt is None or (bucket.opt.dtype == bucket.params.dtype and not bucket.rounds):
        return _route_bytes(route)
    cast = route.source.nbytes if moves or bucket.rounds else 0
    return cast + max(piece_bytes(bucket.opt) if bucket.rounds else 0, _route_bytes(route))


def _whole_bytes(stepping: Stepping) -> int:
    """The largest call's whole tensors, the last of them with what its gather takes.

    What a transform takes beside them is its own and not counted.
    """
    peak = 0
    for call in stepping.calls:
        held = 0
        for one in stepping.gathers:
            if one.group in call:
                kept, most = _gathering_bytes(one)
                peak = max(peak, held + most)
                held += kept
    return peak


def _gathering_bytes(one: Gathering) -> tuple[int, int]:
    """Whole tensors, and with them what bringing them together takes at its peak."""
    blocks = most = 0
    if one.route:
        blocks = one.route.target.nbytes
        most = blocks + _route_bytes(one.route)
    if one.assembly is None:
        return blocks, most
    made, whole = one.assembly, one.assembly.whole.nbytes
    partial = made.stack_bytes // made.sizes[-1] if len(made.sizes) > 1 else 0
    return whole, max(most, blocks + made.stack_bytes + max(partial, whole))


def _route_bytes(route: Route) -> int:
    """What a movement takes beside its source and target."""
    if route.gather is None:
        return 0
    middle = route.middle.nbytes if route.cut else 0
    axes = route.gather.outer_first
    stack = route.source.nbytes * route.gather.parts
    partial = stack // route.gather.stack[0] if len(axes) > 1 else 0
    return stack + partial + middle
