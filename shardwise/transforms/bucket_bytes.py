"""Bytes that one bucket of a step takes, by purpose; see [Note: the liveness walk]."""

from __future__ import annotations

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.tiers import DEVICE
from shardwise.sharding.transport import (
    all_reduce_scratch_bytes,
    scratch_bytes,
    stays_in_flight,
)


def full_bytes(bucket: Bucket) -> int:
    """The compute buffer, if modules do not read the home itself."""
    return 0 if bucket.in_place else bucket.compute.nbytes


def stack_bytes(bucket: Bucket) -> int:
    """What a gather arrives in."""
    return bucket.wire.nbytes * bucket.gather.parts if bucket.gather else 0


def fetch_bytes(bucket: Bucket) -> int:
    """A shard that is brought from its tier; host memory is the CPU's own, and there it is less."""
    return 0 if bucket.rests.params == DEVICE else bucket.params.nbytes


def issue_bytes(bucket: Bucket) -> int:
    """Beside the stack, only until a gather is in flight: a cast, and all but the last axis."""
    if bucket.gather is None:
        return 0
    cast = bucket.wire.nbytes if bucket.wire.dtype != bucket.params.dtype else 0
    several = len(bucket.gather.outer_first) > 1
    return cast + (stack_bytes(bucket) // bucket.gather.stack[0] if several else 0)


def grad_bytes(bucket: Bucket) -> int:
    """Whole gradients as autograd makes them."""
    if bucket.landing is None:
        return 0
    return sum(e.numel for e in bucket.compute.entries) * bucket.compute.dtype.itemsize


def landing_bytes(bucket: Bucket) -> int:
    """Reduced gradients, as the passes of a step add them up; 0 for a frozen bucket."""
    return bucket.sums.nbytes if bucket.sums else 0


def landed_bytes(bucket: Bucket) -> int:
    """What of that stays on the device once it has landed."""
    return landing_bytes(bucket) if bucket.rests.grads == DEVICE else 0


def scatter_bytes(bucket: Bucket) -> int:
    """A reduce-scatter at its peak: send stack, parts between axes, scratch, and the result."""
    if bucket.reduce is None or bucket.reduced is None:
        return landing_bytes(bucket)
    held = whole = bucket.reduced.nbytes * bucket.reduce.parts
    peak = 0
    for size in bucket.reduce.stack[:-1]:
        scratch = scratch_bytes(whole, size)
        whole //= size
        held += whole
        peak = max(peak, held + scratch)
    return max(peak, bucket.reduced.nbytes + landing_bytes(bucket))


def flies(bucket: Bucket) -> bool:
    """Whether a reduce-scatter is in flight until another unit reduces.

    Where modules read the home itself, what it holds meanwhile takes the room that gathered weights
    would take; where weights are gathered, it would come on top.
    """
    if bucket.reduce is None or bucket.reduced is None or not bucket.in_place:
        return False
    several = len(bucket.reduce.axes) > 1
    return not several and stays_in_flight(bucket.reduced.nbytes * bucket.reduce.parts)


def sum_bytes(bucket: Bucket, mesh: Mesh) -> int:
    """Beside the landed gradients, while replicas are summed: a cast and scratch."""
    if bucket.reduced is None or bucket.sums is None or not bucket.sum_axes:
        return 0
    nbytes = bucket.reduced.nbytes
    copies = bucket.reduced.dtype != bucket.sums.dtype or bucket.rests.grads != DEVICE
    cast = nbytes if copies else 0
    return cast + max(all_reduce_scratch_bytes(nbytes, mesh[axis]) for axis in bucket.sum_axes)


def crossing_bytes(item: Collective, mesh: Mesh) -> int:
    """A whole tensor and a copy of it that is packed or joined, or scratch beside it."""
    ranks = mesh[item.axis]
    whole = item.buffer_bytes(ranks)
    if item.kind == "all_gather":
        return 2 * whole
    if item.kind == "reduce_scatter":
        return whole + whole // ranks + scratch_bytes(whole, ranks)
    return whole + all_reduce_scratch_bytes(whole, ranks)


def whole_bytes(bucket: Bucket) -> int:
    """Whole gradients that the passes of a step add up, if they do."""
    if bucket.sums is None or not bucket.keeps_whole:
        return 0
    return bucket.compute.cast(bucket.sums.dtype).nbytes


def send_bytes(bucket: Bucket) -> int:
    """What gradients are packed into before they are scattered."""
    if bucket.reduce is None or bucket.reduced is None:
        return 0
    return bucket.reduced.nbytes * bucket.reduce.parts
