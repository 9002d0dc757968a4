"""What a plan, a loss function and an optimizer amount to: buckets, order, collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardwise.optim.base import GradientTransform
from shardwise.optim.norms import Norm
from shardwise.sharding.buckets import Bucket, Route, route
from shardwise.sharding.collectives import Collective, packed_items
from shardwise.sharding.functional import refuse_written_views
from shardwise.sharding.plan import Plan
from shardwise.sharding.redistribute import route_items
from shardwise.transforms.activations import Recomputation
from shardwise.transforms.call_facts import CallFacts
from shardwise.transforms.crossings import Crossing
from shardwise.transforms.dropout import Dropout
from shardwise.transforms.event_orders import complete
from shardwise.transforms.loss import counts_unknown
from shardwise.transforms.norms import Reduction, plan_norms
from shardwise.transforms.order import (
    Event,
    Schedule,
    make_schedules,
    registration_order,
    stays_open,
)
from shardwise.transforms.stepping import Stepping, make_stepping
from shardwise.transforms.tensor_calls import Lengths
from shardwise.transforms.tensor_sums import TensorSum, plan_sums
from shardwise.transforms.trace import LossFunction, Trace

FIXED_SCALARS = 4
"""Total, count, failed, and not finite: the head of every packed reduction."""


@dataclass(frozen=True, eq=False)
class Lowering:
    """All that is known of a program before it is bound to devices.

    Args:
        plan: the layouts.
        loss_fn: `loss_fn(model, batch)`.
        optimizer: any gradient transform.
        module: the user's module.
        buckets: by unit name.
        events: the order of units, from a trace or from the order of registration.
        aux: names of auxiliary metrics; None while unknown.
        written_buffers: buffers that a forward pass changes.
        notes: what could not be found out, and why.
        traced: whether `events` come from a trace.
        activation_bytes: what a forward pass of one rank's batch saves on the device; None while
            unknown.
        tier_bytes: what it saves on tiers, by their text.
        forward_flops: of that forward pass; None while unknown.
        recomputation: what recomputed modules change in it; None while unknown.
        terms: names of the loss terms, if there are several; each has its own count.
        count_fn: `count_fn(batch)`, the counts of the terms without running the model.
        grad_norm: report the 2-norm of the gradient even if the optimizer does not need it.
        first_divisor: power of two near the elements of a global batch, as far as its tensors tell.
        calls_dropout: whether a trace has met a call of `sw.dropout` outside of `sw.Dropout`.
        crossings: how activations cross boundaries, by name.
        replicated: by tensor axis, whole parameters of whose gradient each rank has a part.
        lengths: see [Note: which dimension is cut].
        facts: about calls inside of modules; see [Note: places].
    """

    plan: Plan
    loss_fn: LossFunction
    optimizer: GradientTransform
    module: nn.Module
    buckets: Mapping[str, tuple[Bucket, ...]]
    events: tuple[Event, ...]
    aux: tuple[str, ...] | None = None
    written_buffers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    traced: bool = False
    activation_bytes: int | None = None
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    forward_flops: int | None = None
    recomputation: Recomputation | None = None
    terms: tuple[str, ...] = ()
    count_fn: Callable[[Any], Mapping[str, Any]] | None = None
    grad_norm: bool = False
    first_divisor: float = 1.0
    calls_dropout: bool = False
    crossings: Mapping[str, Crossing] = field(default_factory=dict)
    replicated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=dict)
    facts: CallFacts = field(default_factory=CallFacts)

    @cached_property
    def tensor_sums(self) -> tuple[TensorSum, ...]:
        """Gradients that are summed over tensor axes after the last pass."""
        return plan_sums(self.all_buckets, self.replicated, self.plan.mesh)

    @cached_property
    def agree_axes(self) -> tuple[str, ...]:
        """Axes over which flags are agreed: all that have more than one rank."""
        return tuple(axis for axis in self.plan.mesh if self.plan.mesh[axis] > 1)

    @cached_property
    def all_buckets(self) -> tuple[Bucket, ...]:
        """All buckets in unit order."""
        return tuple(bucket for members in self.buckets.values() for bucket in members)

    @cached_property
    def hosted(self) -> tuple[Bucket, ...]:
        """Buckets whose masters are stepped on the host, and rounded as they are made."""
        return tuple(
            bucket
            for bucket in self.all_buckets
            if bucket.has_master
            and not self.stepping.couples_all
            and all(group.on_host and group.couples == "element" for group in bucket.groups)
        )

    @cached_property
    def staying(self) -> frozenset[str]:
        """Units that stay open once they are entered."""
        return stays_open(self.plan, self.buckets)

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """What every event moves, in each pass of a step."""
        return make_schedules(self.plan, self.buckets, self.events)

    @property
    def schedule(self) -> Schedule:
        """The first pass of a step; its forward is that of an evaluation."""
        return self.schedules[0]

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Trainable parameters, in bucket order."""
        return tuple(path for b in self.all_buckets if b.trainable for path in b.paths)

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes that split the batch and have more than one rank."""
        return tuple(axis for axis in self.plan.batch if self.plan.mesh[axis] > 1)

    @cached_property
    def scalar_items(self) -> tuple[Collective, ...]:
        """The packed reduction of loss, counts and flags."""
        count = FIXED_SCALARS + len(self.trainable) + 2 * len(self.aux or ())
        return packed_items(count, self.agree_axes, self.plan.mesh, "scalars")

    @cached_property
    def check_items(self) -> tuple[Collective, ...]:
        """What `program.update` runs first for gradients that were rebuilt leaf by leaf.

        Whether they are finite, and which parameters they are for.
        """
        count = 1 + len(self.trainable)
        return packed_items(count, self.agree_axes, self.plan.mesh, "agree")

    @cached_property
    def narrows(self) -> bool:
        """Whether gradients rest in a dtype of less range than the one they are added up in."""
        pairs = [(b.sums, b.landing) for b in self.all_buckets if b.sums and b.landing]
        return any(rest.dtype == torch.float16 != sums.dtype for sums, rest in pairs)

    @cached_property
    def range_items(self) -> tuple[Collective, ...]:
        """What tells whether gradients are still finite in the dtype that they rest in."""
        if not self.narrows:
            return ()
        return packed_items(1, self.agree_axes, self.plan.mesh, "agree")

    @cached_property
    def eval_scalar_items(self) -> tuple[Collective, ...]:
        """The packed reduction of an evaluation."""
        count = FIXED_SCALARS + 2 * len(self.aux or ())
        return packed_items(count, self.agree_axes, self.plan.mesh, "scalars")

    @cached_property
    def count_items(self) -> tuple[Collective, ...]:
        """The packed reduction of the counts of loss terms, before backward."""
        if not self.terms:
            return ()
        return packed_items(len(self.terms), self.batch_axes, self.plan.mesh, "counts")

    @cached_property
    def draws(self) -> bool:
        """Whether a step draws layout-independent dropout; see [Note: draws]."""
        return self.calls_dropout or any(isinstance(m, Dropout) for m in self.module.modules())

    @property
    def locates(self) -> bool:
        """Whether every module has to say when it runs: some may call `sw.dropout` themselves."""
        return self.calls_dropout or (self.draws and bool(self.notes))

    @cached_property
    def row_items(self) -> tuple[Collective, ...]:
        """What tells each rank which rows of the global batch it has, if it draws by them."""
        if not self.draws:
            return ()
        return packed_items(1, self.batch_axes, self.plan.mesh, "rows")

    @cached_property
    def buffer_items(self) -> tuple[Collective, ...]:
        """The packed average of written buffers."""
        if not self.written_buffers:
            return ()
        sizes = {
            name: buffer.numel() * (2 if buffer.is_complex() else 1)
            for name, buffer in self.module.named_buffers()
        }
        count = 1 + sum(sizes[name] for name in self.written_buffers)
        return packed_items(count, self.batch_axes, self.plan.mesh, "buffers")

    @cached_property
    def norm_items(self) -> tuple[Collective, ...]:
        """The packed reduction of norms, if the optimizer or the user needs any."""
        return self.norms.items

    @cached_property
    def norms(self) -> Reduction:
        """How the norms of the gradient are computed."""
        asked = {Norm()} if self.grad_norm else set[Norm]()
        return plan_norms(self.optimizer.needs | asked, self.plan, self.all_buckets)

    @cached_property
    def stepping(self) -> Stepping:
        """How the optimizer steps the groups of all buckets."""
        return make_stepping(self.optimizer, self.all_buckets, self.plan.mesh)

    @cached_property
    def routes(self) -> dict[str, tuple[Route, Route, Route]]:
        """Per trainable bucket: landed gradient -> opt, params -> opt, opt -> params.

        The first in the dtype that the optimizer computes in, the others in that of the parameters.
        """
        mesh = self.plan.mesh
        found = {}
        for bucket in self.all_buckets:
            if bucket.opt and bucket.landing:
                grads = route(bucket.landing.cast(bucket.work), bucket.opt.cast(bucket.work), mesh)
                params = route(bucket.params, bucket.opt.cast(bucket.params.dtype), mesh)
                back = route(bucket.opt.cast(bucket.params.dtype), bucket.params, mesh)
                found[bucket.name] = (grads, params, back)
        return found

    @cached_property
    def pass_items(self) -> tuple[Collective, ...]:
        """Collectives of all passes of a step, and of the rows and counts that they need.

        A `count_fn` gives the counts before the first pass; else the one forward pass does.
        """
        if self.terms and self.count_fn is None:
            (only,) = self.schedules
            items = self.row_items + only.forward_items + self.count_items
            return items + only.backward_items
        passes = chain.from_iterable(schedule.items for schedule in self.schedules)
        return (*self.row_items, *self.count_items, *passes)

    @cached_property
    def grads_items(self) -> tuple[Collective, ...]:
        """Collectives of `program.grads`."""
        sums = tuple(one.item for one in self.tensor_sums)
        ends = self.buffer_items + self.scalar_items + self.range_items
        return self.pass_items + sums + ends

    @cached_property
    def drive_items(self) -> tuple[Collective, ...]:
        """What tells whether every rank's drive has given and taken its part of an update."""
        if not self.stepping.streamed:
            return ()
        return packed_items(1, self.agree_axes, self.plan.mesh, "agree")

    @cached_property
    def update_items(self) -> tuple[Collective, ...]:
        """Collectives of `program.update`."""
        items: list[Collective] = []
        for bucket in self.all_buckets:
            if bucket.name in self.routes:
                to_grads, to_params, _ = self.routes[bucket.name]
                items += route_items(to_grads, bucket.unit, "update")
                if not bucket.has_master:
                    items += route_items(to_params, bucket.unit, "update")
        items += (*self.norm_items, *self.drive_items, *self.stepping.items)
        for bucket in self.all_buckets:
            if bucket.name in self.routes:
                items += route_items(self.routes[bucket.name][2], bucket.unit, "update")
        return tuple(items)

    @cached_property
    def eval_items(self) -> tuple[Collective, ...]:
        """Collectives of `program.eval`."""
        return self.schedule.forward_items + self.count_items + self.eval_scalar_items

    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of one step of one rank, in the order in which it runs.

        Bytes of activations are those of a micro-batch of the traced shape; another one moves what
        its own shape takes, in the same order, and a pass without a micro-batch moves none.
        The first step runs one more, an exchange of Python objects in which ranks agree on the
        structure of the batch. A step that is skipped, because its loss or gradients are not
        finite, ends after those of `grads_items`, with an exchange of what each rank has found.
        """
        return self.grads_items + self.update_items

    def with_trace(self, seen: Trace, events: tuple[Event, ...]) -> Lowering:
        """The same program in the order that a first pass has shown.

        Raises:
            LowerError: the pass has written a buffer that is a view of another, or several passes
                need counts of loss terms that nothing gives.
        """
        if len(seen.terms) > 1 and self.plan.accumulation.steps > 1 and self.count_fn is None:
            raise counts_unknown(seen.terms, self.plan.accumulation.steps)
        refuse_written_views(self.module, seen.written)
        default = registration_order(self.plan, self.buckets)
        notes = (seen.note,) if seen.note else ()
        return replace(
            self,
            events=complete(events, self.plan, default),
            aux=seen.aux,
            terms=seen.terms,
            written_buffers=seen.written,
            notes=notes,
            traced=not seen.note,
            activation_bytes=seen.activation_bytes,
            tier_bytes=seen.tier_bytes,
            forward_flops=seen.forward_flops,
            recomputation=seen.recomputation,
            calls_dropout=seen.calls_dropout,
            crossings=seen.crossings,
            replicated=seen.replicated,
            lengths=seen.lengths,
            facts=seen.facts,
        )
