"""Bytes per rank, before anything runs: what rests, and the peak of a step beyond it.

[Note: the liveness walk]
The walk follows the schedule and adds and subtracts what the engine takes and gives back: the
compute buffer and gather stack of a unit at its entry, its whole gradients while its backward runs,
the send stack while it reduces, and the landed gradients that fill up as backward proceeds. The
transient is the peak of all that less `grads`, where landed gradients are listed; it is below the
largest sum of buffers whenever the peak comes before the last gradient has landed. Activations are
the model's own and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.sharding.buckets import Bucket, Route
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.pytree import tree_leaves
from shardwise.sharding.transport import all_reduce_scratch_bytes, scratch_bytes
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.order import Action, Walk
from shardwise.transforms.stepping import Stepping


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
    opt_leaves = tree_leaves(lowering.stepping.form)
    opt_bytes = sum(leaf.nbytes for leaf in opt_leaves if isinstance(leaf, torch.Tensor))
    per_element = _state_bytes_per_element(opt_leaves, buckets)
    grads = sum(b.landing.nbytes for b in buckets if b.landing)
    return Memory(
        params=sum(b.params.nbytes for b in buckets),
        master=sum(b.opt.nbytes for b in buckets if b.opt and b.has_master),
        opt=opt_bytes,
        grads=grads,
        buffers=_buffer_bytes(lowering),
        padding=sum(_padding(lowering, b, per_element) for b in buckets),
        transient=max(_passes_peak(lowering) - grads, _update_peak(lowering)),
        activations=lowering.activation_bytes,
    )


def _buffer_bytes(lowering: Lowering) -> int:
    return sum(buffer.nbytes for buffer in lowering.module.buffers())


def _state_bytes_per_element(leaves: list[object], buckets: Sequence[Bucket]) -> int:
    total = sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor) and t.ndim)
    elements = sum(bucket.opt.length for bucket in buckets if bucket.opt)
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
    """What a gather arrives in."""
    return bucket.wire.nbytes * bucket.gather.parts if bucket.gather else 0


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
    """Reduced gradients; 0 for a frozen bucket."""
    return bucket.landing.nbytes if bucket.landing else 0


def scatter_bytes(bucket: Bucket) -> int:
    """A reduce-scatter at its peak: send stack, parts between axes, scratch, and the result."""
    if bucket.reduce is None or bucket.landing is None:
        return landing_bytes(bucket)
    held = whole = bucket.landing.nbytes * bucket.reduce.parts
    peak = 0
    for size in bucket.reduce.stack[:-1]:
        scratch = scratch_bytes(whole, size)
        whole //= size
        held += whole
        peak = max(peak, held + scratch)
    return peak


def _sum_bytes(bucket: Bucket, mesh: Mesh) -> int:
    """Beside the landed gradients, while replicas are summed."""
    if bucket.landing is None or not bucket.sum_axes:
        return 0
    nbytes = bucket.landing.nbytes
    return max(all_reduce_scratch_bytes(nbytes, mesh[axis]) for axis in bucket.sum_axes)


def _passes_peak(lowering: Lowering) -> int:
    """Peak of forward and backward, landed gradients included."""
    level = _Level()
    buckets = lowering.buckets
    schedule = lowering.schedule

    def start(action: Action) -> None:
        for bucket in buckets[action.event.unit]:
            level.add(stack_bytes(bucket) + issue_bytes(bucket))
            level.remove(issue_bytes(bucket))

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
    landed: set[str] = set()
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
            level.add(scatter_bytes(bucket))
            level.remove(scatter_bytes(bucket) - landing_bytes(bucket))
            level.add(_sum_bytes(bucket, lowering.plan.mesh))
            level.remove(_sum_bytes(bucket, lowering.plan.mesh))
            if unit in landed:  # of an earlier call; the engine adds the two
                level.remove(landing_bytes(bucket))
        landed.add(unit)
        level.remove(sum(grad_bytes(b) for b in buckets[unit]))
    return level.peak


def _update_peak(lowering: Lowering) -> int:
    """Peak of the update.

    Gradients and weights that are not in the `opt` home are brought there first and held until the
    end; beside them there is one movement or one optimizer group at a time.
    """
    held = peak = 0
    for bucket in lowering.all_buckets:
        if bucket.name not in lowering.routes or bucket.opt is None:
            continue
        grads, params, _ = lowering.routes[bucket.name]
        if grads.gather or grads.cut or grads.source.dtype != bucket.opt.dtype:
            held += bucket.opt.nbytes
            peak = max(peak, held + _route_bytes(grads))
        if params.cut and not bucket.has_master:
            held += bucket.opt.nbytes
    peak = max(peak, held + _whole_bytes(lowering.stepping))
    for bucket in lowering.all_buckets:
        if bucket.name in lowering.routes and bucket.opt is not None:
            group = _group_bytes(bucket.opt) if "norm" in lowering.optimizer.needs else 0
            back = _route_bytes(lowering.routes[bucket.name][2])
            peak = max(peak, held + max(group, back))
    return max(peak, held)


def _whole_bytes(stepping: Stepping) -> int:
    """The largest call's whole tensors, the last of them with what its gather takes.

    What a transform takes beside them is its own and not counted.
    """
    peak = 0
    for call in stepping.calls:
        held = 0
        for group, route in stepping.gathers:
            if group in call:
                peak = max(peak, held + route.target.nbytes + _route_bytes(route))
                held += route.target.nbytes
    return peak


def _group_bytes(group: Layout) -> int:
    """One group scaled, or its float64 copy: on the CPU that is how torch takes a norm in it."""
    copy = group.length * torch.float64.itemsize if group.dtype != torch.float64 else 0
    return max(group.nbytes, copy)


def _route_bytes(route: Route) -> int:
    """What a movement takes beside its source and target."""
    if route.gather is None:
        return 0
    middle = route.middle.nbytes if route.cut else 0
    axes = route.gather.outer_first
    stack = route.source.nbytes * route.gather.parts
    partial = stack // route.gather.stack[0] if len(axes) > 1 else 0
    return stack + partial + middle
