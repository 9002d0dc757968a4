"""Bytes per rank, before anything runs: what rests, and the peak of a step beyond it.

[Note: the liveness walk]
The walk follows the schedule and adds and subtracts what the engine takes and gives back: the
compute buffer and gather stack of a unit at its entry, its whole gradients while its backward runs,
the send stack while it reduces. Reduced gradients fill up as backward proceeds; they are listed as
`grads` and are not part of the transient. Activations are the model's own and not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.pytree import tree_leaves
from shardwise.sharding.transport import all_reduce_scratch_bytes, scratch_bytes
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.order import Action, Walk


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. The worst rank holds this much: blocks are padded to equal length.

    Args:
        params: the `params` home.
        master: master copies in the `opt` home.
        opt: optimizer state.
        grads: landed gradients, between backward and update.
        buffers: the module's buffers.
        padding: how much of the above holds no element (alignment and uneven blocks).
        transient: peak of a step beyond rest and `grads`, without activations.
        activations: what the forward pass of one rank's batch saves; None while unknown.
        kind: memory kind.
    """

    params: int
    master: int
    opt: int
    grads: int
    buffers: int
    padding: int
    transient: int
    activations: int | None = None
    kind: str = "device"

    @property
    def rest_bytes(self) -> int:
        """Bytes between steps: `params + master + opt + buffers`."""
        return self.params + self.master + self.opt + self.buffers

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak of a step, without activations."""
        return self.rest_bytes + self.grads + self.transient

    def __str__(self) -> str:
        activations = "unknown" if self.activations is None else f"{self.activations:,} B"
        return (
            f"memory per rank ({self.kind}): rest {self.rest_bytes:,} B (params {self.params:,}, "
            f"master {self.master:,}, opt {self.opt:,}, buffers {self.buffers:,}), "
            f"grads {self.grads:,} B, transient {self.transient:,} B, activations {activations}"
        )


def predict_memory(lowering: Lowering) -> Memory:
    """Rest bytes from the layouts, transient bytes from the liveness walk."""
    buckets = lowering.all_buckets
    meta = {
        b.name: torch.empty(b.opt.length, dtype=b.opt.dtype, device="meta")
        for b in buckets
        if b.opt
    }
    opt_leaves = tree_leaves(lowering.optimizer.init(meta))
    opt_bytes = sum(leaf.nbytes for leaf in opt_leaves if isinstance(leaf, torch.Tensor))
    per_element = _state_bytes_per_element(opt_leaves, meta)
    return Memory(
        params=sum(b.params.nbytes for b in buckets),
        master=sum(b.opt.nbytes for b in buckets if b.opt and b.has_master),
        opt=opt_bytes,
        grads=sum(b.landing.nbytes for b in buckets if b.landing),
        buffers=_buffer_bytes(lowering),
        padding=sum(_padding(lowering, b, per_element) for b in buckets),
        transient=max(_passes_peak(lowering), _update_peak(lowering)),
        activations=lowering.activation_bytes,
    )


def _buffer_bytes(lowering: Lowering) -> int:
    return sum(buffer.nbytes for buffer in lowering.module.buffers())


def _state_bytes_per_element(leaves: list[object], groups: dict[str, torch.Tensor]) -> int:
    total = sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor) and t.ndim)
    elements = sum(group.numel() for group in groups.values())
    return total // elements if elements else 0


def _padding(lowering: Lowering, bucket: Bucket, state_bytes_per_element: int) -> int:
    """Bytes at rest that no element of a whole tensor needs on an average rank."""
    mesh = lowering.plan.mesh

    def extra(layout: Layout, itemsize: int) -> int:
        elements = sum(math.prod(entry.shape) for entry in layout.entries)
        return int((layout.length - elements / mesh.product(layout.axes)) * itemsize)

    total = extra(bucket.params, bucket.params.dtype.itemsize)
    if bucket.opt:
        own = bucket.opt.dtype.itemsize if bucket.has_master else 0
        total += extra(bucket.opt, own + state_bytes_per_element)
    return total


class _Level:
    """Bytes in use now and at most."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def remove(self, nbytes: int) -> None:
        self.now -= nbytes


def full_bytes(bucket: Bucket) -> int:
    """The compute buffer, if modules do not read the home itself."""
    return 0 if bucket.in_place else bucket.compute.nbytes


def stack_bytes(bucket: Bucket) -> int:
    """What a gather arrives in, and its source if that has to be cast first."""
    if bucket.gather is None:
        return 0
    cast = bucket.wire.nbytes if bucket.wire.dtype != bucket.params.dtype else 0
    stack = bucket.wire.nbytes * bucket.gather.parts
    axes = bucket.gather.outer_first
    partial = stack // bucket.gather.stack[0] if len(axes) > 1 else 0
    return stack + partial + cast


def grad_bytes(bucket: Bucket) -> int:
    """Whole gradients as autograd makes them."""
    if bucket.landing is None:
        return 0
    return sum(e.numel for e in bucket.compute.entries) * bucket.compute.dtype.itemsize


def send_bytes(bucket: Bucket) -> int:
    """The send stack of a reduce-scatter and the largest part in flight beside the result."""
    if bucket.reduce is None or bucket.landing is None:
        return 0
    innermost, several = bucket.reduce.stack[0], len(bucket.reduce.outer_first) > 1
    stack = bucket.landing.nbytes * bucket.reduce.parts
    partial = stack // innermost if several else 0
    return stack + partial + scratch_bytes(stack, innermost)


def _sum_bytes(bucket: Bucket, mesh: Mesh) -> int:
    """Beside the landed gradients, while replicas are summed."""
    if bucket.landing is None or not bucket.sum_axes:
        return 0
    nbytes = bucket.landing.nbytes
    return max(all_reduce_scratch_bytes(nbytes, mesh[axis]) for axis in bucket.sum_axes)


def _passes_peak(lowering: Lowering) -> int:
    """Peak of forward and backward."""
    level = _Level()
    buckets = lowering.buckets
    schedule = lowering.schedule

    def start(action: Action) -> None:
        level.add(sum(stack_bytes(b) for b in buckets[action.event.unit]))

    def fill(unit: str) -> None:
        for bucket in buckets[unit]:
            level.add(full_bytes(bucket))
            level.remove(stack_bytes(bucket))

    def empty(unit: str) -> None:
        level.remove(sum(full_bytes(b) for b in buckets[unit]))

    def stays(unit: str) -> bool:
        return unit in lowering.staying

    walk = Walk(schedule.forward, schedule.prefetch, start)
    for index, action in enumerate(schedule.forward):
        walk.meet(index)
        if action.kind == "gather":
            fill(action.event.unit)
        elif not stays(action.event.unit):
            empty(action.event.unit)
    walk = Walk(schedule.backward, schedule.prefetch, start)
    for index, action in enumerate(schedule.backward):
        walk.meet(index)
        unit = action.event.unit
        if action.kind == "gather":
            fill(unit)
            continue
        level.add(sum(grad_bytes(b) for b in buckets[unit]))
        if action.event.grad or stays(unit):
            empty(unit)
        for bucket in buckets[unit]:
            for nbytes in (send_bytes(bucket), _sum_bytes(bucket, lowering.plan.mesh)):
                level.add(nbytes)
                level.remove(nbytes)
        level.remove(sum(grad_bytes(b) for b in buckets[unit]))
    return level.peak


def _update_peak(lowering: Lowering) -> int:
    """Peak of the update: master slices that are not at rest, then one gather at a time."""
    slices = gathers = 0
    for bucket in lowering.all_buckets:
        if bucket.name not in lowering.routes or bucket.opt is None:
            continue
        grads, params, back = lowering.routes[bucket.name]
        if params.cut and not bucket.has_master:
            slices += bucket.opt.nbytes
        if back.gather:
            cast = back.source.nbytes if bucket.opt.dtype != bucket.params.dtype else 0
            middle = back.middle.nbytes if back.cut else 0
            gathers = max(gathers, back.source.nbytes * back.gather.parts + cast + middle)
        if grads.gather:
            gathers = max(gathers, grads.source.nbytes * grads.gather.parts + grads.target.nbytes)
    return slices + gathers
