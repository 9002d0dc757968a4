"""Bytes per rank, before anything runs: what rests, and the peak of a step beyond it.

[Note: the liveness walk]
The walk follows the schedule and adds and subtracts what the engine takes and gives back: the
compute buffer and gather stack of a unit at its entry, its whole gradients while its backward runs,
the send stack while it reduces, and the landed gradients that fill up as backward proceeds. The
transient is the peak of all that less `grads`, where landed gradients are listed; it is below the
largest sum of buffers whenever the peak comes before the last gradient has landed. Activations are
the model's own and not counted, but for what one of them takes while it crosses a boundary of
layers that a tensor axis cuts. What a step of several passes keeps between them is part of the
transient, and listed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective
from shardwise.sharding.layout import Layout
from shardwise.sharding.pytree import tree_leaves
from shardwise.sharding.tiers import DEVICE, Tier
from shardwise.transforms.bucket_bytes import (
    crossing_bytes,
    fetch_bytes,
    flies,
    full_bytes,
    grad_bytes,
    issue_bytes,
    landed_bytes,
    landing_bytes,
    scatter_bytes,
    send_bytes,
    stack_bytes,
    sum_bytes,
    whole_bytes,
)
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.order import Action, Schedule, Walk, rests_bound
from shardwise.transforms.tier_memory import Held, held_by_tier
from shardwise.transforms.update_memory import update_peak

_DISTINCT = 3
"""Passes that may differ in what they hold."""


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
        activations: what the forward pass of one rank's batch, or micro-batch, saves; None while
            unknown.
        recompute: what the largest recomputation of a module makes in backward, beside
            `activations`; 0 without remat, None while unknown.
        kept_grads: of the transient, whole gradients that are kept from pass to pass.
        kept_weights: of the transient, gathered weights that are kept likewise.
        kind: memory kind.
        tiers: what is held in other kinds of memory; all else is about the device.
    """

    params: int
    master: int
    opt: int
    grads: int
    buffers: int
    padding: int
    transient: int
    activations: int | None = None
    recompute: int | None = None
    kept_grads: int = 0
    kept_weights: int = 0
    kind: str = "device"
    tiers: Mapping[Tier, Held] = field(default_factory=dict)

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
        kept = [
            f"{words} {nbytes:,} B"
            for words, nbytes in (
                ("whole gradients", self.kept_grads),
                ("gathered weights", self.kept_weights),
            )
            if nbytes
        ]
        between = f" (kept between passes: {', '.join(kept)})" if kept else ""
        return (
            f"memory per rank ({self.kind}): rest {self.rest_bytes:,} B (params {self.params:,}, "
            f"master {self.master:,}, opt {self.opt:,}, buffers {self.buffers:,}), "
            f"grads {self.grads:,} B, transient {self.transient:,} B{between}, "
            f"activations {activations}"
            + (f" and {self.recompute:,} B while recomputing" if self.recompute else "")
            + "".join(f"\n  {tier}: {held}" for tier, held in self.tiers.items())
        )


def predict_memory(lowering: Lowering) -> Memory:
    """Rest bytes from the layouts, transient bytes from the liveness walk."""
    buckets = lowering.all_buckets
    opt_leaves = tree_leaves(lowering.stepping.form)
    opt_bytes = sum(leaf.nbytes for leaf in opt_leaves if isinstance(leaf, torch.Tensor))
    per_element = _state_bytes_per_element(opt_leaves, buckets)
    grads = sum(b.landing.nbytes for b in buckets if b.landing and b.rests.grads == DEVICE)
    tiers = held_by_tier(lowering)
    here = [b for b in buckets if b.rests.params == DEVICE]
    masters = [b for b in buckets if b.has_master and b.rests.masters == DEVICE]
    return Memory(
        params=sum(b.params.nbytes for b in here),
        master=sum(b.opt.nbytes for b in masters if b.opt),
        opt=opt_bytes - sum(held.opt for held in tiers.values()),
        grads=grads,
        buffers=_buffer_bytes(lowering),
        padding=sum(_padding(lowering, b, per_element) for b in buckets),
        transient=max(_passes_peak(lowering) - grads, update_peak(lowering)),
        activations=lowering.activation_bytes,
        recompute=lowering.recomputation.peak_bytes if lowering.recomputation else None,
        kept_grads=sum(whole_bytes(b) for b in buckets),
        kept_weights=sum(full_bytes(b) for b in buckets) if lowering.schedule.keeps else 0,
        tiers=tiers,
    )


def _buffer_bytes(lowering: Lowering) -> int:
    dtypes = lowering.plan.precision.buffers
    return sum(
        buffer.numel() * getattr(torch, dtypes[name]).itemsize if name in dtypes else buffer.nbytes
        for name, buffer in lowering.module.named_buffers()
    )


def _state_bytes_per_element(leaves: list[object], buckets: Sequence[Bucket]) -> int:
    total = sum(t.nbytes for t in leaves if isinstance(t, torch.Tensor) and t.ndim)
    elements = sum(bucket.opt.length for bucket in buckets if bucket.opt)
    return total // elements if elements else 0


def _padding(lowering: Lowering, bucket: Bucket, state_bytes_per_element: int) -> int:
    """Bytes at rest that no element of a whole tensor needs on an average rank."""
    mesh = lowering.plan.mesh

    def extra(layout: Layout, itemsize: int) -> int:
        elements = sum(
            math.prod(entry.whole) / mesh.product(entry.frame.axes if entry.frame else ())
            for entry in layout.entries
        )
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


def _passes_peak(lowering: Lowering) -> int:
    """Peak of forward and backward, landed gradients included."""
    walk = _StepWalk(lowering)
    schedules = lowering.schedules
    # The passes between the first two and the last one are alike, and leave what they found.
    for schedule in schedules if len(schedules) <= _DISTINCT else (*schedules[:2], schedules[-1]):
        walk.forward(schedule)
        walk.backward(schedule)
    walk.sum([one.item for one in lowering.tensor_sums])
    walk.rest()
    return walk.level.peak


def first_backward_bytes(lowering: Lowering) -> int:
    """What backward takes for its first unit, while all activations are still there.

    What lives at the turn from forward to backward only, such as a tile of logits, may take as much
    without a higher peak.
    """
    walk = _StepWalk(lowering)
    walk.forward(lowering.schedules[0])
    walk.level.peak = before = walk.level.now
    walk.backward(lowering.schedules[0], units=1)
    return walk.level.peak - before


class _StepWalk:
    """What the engine takes and gives back in the passes of one step."""

    def __init__(self, lowering: Lowering) -> None:
        self.level = _Level()
        self._buckets = lowering.buckets
        self._staying = lowering.staying
        self._mesh = lowering.plan.mesh
        self._held: set[str] = set()  # buckets with gradients of an earlier call
        self._flying: dict[str, int] = {}  # bytes that landing frees, by bucket
        self._fetched: set[str] = set()  # buckets that are on their way from a tier

    def forward(self, schedule: Schedule) -> None:
        """Fill units as they are entered, empty them as they are left."""
        walk = self._along(schedule.forward, schedule)
        for index, action in enumerate(schedule.forward):
            walk.meet(index)
            unit = action.event.unit
            if action.kind == "gather":
                self._fill(unit)
            elif action.kind == "cross":
                self._cross(action)
            elif action.event.kind == "leave" and unit not in self._staying:
                self._empty(unit)

    def backward(self, schedule: Schedule, units: int | None = None) -> None:
        """Fill units again, empty them, add and move their gradients; of all units, or the first.

        Gradients of weights that are used where they rest come one by one, and are joined at last.
        """
        walk = self._along(schedule.backward, schedule)
        for index, action in enumerate(schedule.backward):
            walk.meet(index)
            unit = action.event.unit
            if action.kind == "gather":
                self._fill(unit)
                continue
            if action.kind == "cross":
                self._cross(action)
                continue
            if action.kind == "none":  # the end of a unit in a recomputation around it
                self._empty(unit)
                continue
            if units == 0:
                return
            units = None if units is None else units - 1
            self.level.add(sum(grad_bytes(b) for b in self._buckets[unit]))
            if not schedule.keeps and (action.event.grad or unit in self._staying):
                self._empty(unit)
            if action.event.grad:
                self._land()
                for bucket in self._buckets[unit]:
                    self._reduce(bucket, ends=action.ends)
            self.level.remove(sum(grad_bytes(b) for b in self._buckets[unit]))
        self._land()
        if units is None:
            self._join([b for b in self._buckets.values() if rests_bound(b)])

    def _join(self, bound: Sequence[Sequence[Bucket]]) -> None:
        new = [b for b in bound if not self._held.issuperset(one.name for one in b)]
        self.level.add(sum(grad_bytes(bucket) for bucket in chain(*new)))
        for buckets in new:
            self.level.add(sum(landing_bytes(bucket) for bucket in buckets))
            self.level.remove(sum(grad_bytes(bucket) for bucket in buckets))
            self._held.update(bucket.name for bucket in buckets)

    def _cross(self, action: Action) -> None:
        """What an activation takes while it crosses a boundary, its result included."""
        taken = sum(crossing_bytes(item, self._mesh) for item in chain(*action.items))
        self.level.add(taken)
        self.level.remove(taken)

    def _land(self) -> None:
        """What is in flight arrives."""
        self.level.remove(sum(self._flying.values()))
        self._flying = {}

    def sum(self, items: Sequence[Collective]) -> None:
        """Pack, sum and unpack gradients that each tensor rank has a part of."""
        for item in items:
            self.level.add(crossing_bytes(item, self._mesh))
            self.level.remove(crossing_bytes(item, self._mesh))

    def rest(self) -> None:
        """Bring the landed gradients to the dtype of their home, bucket by bucket."""
        for bucket in chain.from_iterable(self._buckets.values()):
            if bucket.rests.grads != DEVICE:
                continue
            if bucket.sums and bucket.landing and bucket.sums.dtype != bucket.landing.dtype:
                self.level.add(bucket.landing.nbytes)
                self.level.remove(bucket.sums.nbytes)

    def _along(self, actions: Sequence[Action], schedule: Schedule) -> Walk:
        ahead = schedule.fetch_ahead
        return Walk(actions, schedule.prefetch, self._start, fetch=self._fetch, fetch_ahead=ahead)

    def _fetch(self, action: Action) -> None:
        """A shard is on its way from its tier until its unit is full."""
        for bucket in self._buckets[action.event.unit]:
            if bucket.name not in self._fetched:
                self._fetched.add(bucket.name)
                self.level.add(fetch_bytes(bucket))

    def _start(self, action: Action) -> None:
        self._fetch(action)
        for bucket in self._buckets[action.event.unit]:
            self.level.add(stack_bytes(bucket) + issue_bytes(bucket))
            self.level.remove(issue_bytes(bucket))

    def _fill(self, unit: str) -> None:
        for bucket in self._buckets[unit]:
            self.level.add(full_bytes(bucket))
            self.level.remove(stack_bytes(bucket))
            if bucket.name in self._fetched:
                self._fetched.remove(bucket.name)
                self.level.remove(fetch_bytes(bucket))

    def _empty(self, unit: str) -> None:
        self.level.remove(sum(full_bytes(b) for b in self._buckets[unit]))

    def _reduce(self, bucket: Bucket, *, ends: bool) -> None:
        level, before = self.level, bucket.name in self._held
        self._held.add(bucket.name)
        if bucket.keeps_whole:
            level.add(0 if before else whole_bytes(bucket))
            if not ends:
                return
            # The whole gradients are freed once they are packed, before they move.
            level.add(send_bytes(bucket))
            level.remove(whole_bytes(bucket))
            level.add(scatter_bytes(bucket) - send_bytes(bucket))
            self._scattered(bucket, scatter_bytes(bucket) - landed_bytes(bucket), ends=ends)
        elif bucket.reduce is not None or not before or bucket.rests.grads != DEVICE:
            level.add(scatter_bytes(bucket))
            left = 0 if before else landed_bytes(bucket)
            self._scattered(bucket, scatter_bytes(bucket) - left, ends=ends)
        if ends:
            level.add(sum_bytes(bucket, self._mesh))
            level.remove(sum_bytes(bucket, self._mesh))

    def _scattered(self, bucket: Bucket, freed: int, *, ends: bool) -> None:
        """A reduce-scatter is under way; `freed` goes when it has landed."""
        if flies(bucket) and not (ends and bucket.sum_axes):
            self._flying[bucket.name] = freed
        else:
            self.level.remove(freed)
