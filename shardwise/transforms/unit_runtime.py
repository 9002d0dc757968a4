"""One unit on one rank: its buffers, and where its parameters are bound in the template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.offload.store import Store
from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective
from shardwise.sharding.compat import storage_key
from shardwise.sharding.functional import Template
from shardwise.sharding.movement import Mover
from shardwise.transforms.binding import Binding
from shardwise.transforms.buffers import BucketBuffers
from shardwise.transforms.order import Action, Schedule, Walk, rests_bound


@dataclass(eq=False, slots=True)
class Call:
    """One run of a unit: the tensors that stand for its parameters in this run."""

    unit: UnitRuntime
    parameters: list[Tensor]


class UnitRuntime:
    """Buffers and binding sites of one unit.

    Args:
        name: module path; `""` is the root.
        stays: once entered, stay open until backward.
        buckets: the unit's buckets.
        template: where to bind.
        mover: the choke point.
        device: where the buffers live.
        store: what shards are fetched from that rest off the device.
    """

    def __init__(
        self,
        name: str,
        *,
        stays: bool,
        buckets: Sequence[Bucket],
        template: Template,
        mover: Mover,
        device: torch.device,
        store: Store,
    ) -> None:
        self.name = name
        self.stays = stays
        self.buffers = [BucketBuffers(bucket, mover, device, store) for bucket in buckets]
        self.paths = [path for bucket in buckets for path in bucket.paths]
        self.trainable = [path for bucket in buckets if bucket.trainable for path in bucket.paths]
        self.gathers = any(b.gather for b in buckets)
        self.moves = any(b.gather or b.reduce or b.sum_axes for b in buckets)
        self.rests_bound = rests_bound(buckets)
        self._binding = Binding(name, self.paths, template)
        self._leaves = [
            (buffers, _leaf(buffers.bucket, device))
            for buffers in self.buffers
            if buffers.bucket.trainable
        ]
        self.call: Call | None = None
        self.depth = 0
        self._landed: list[Tensor | None] = []

    @property
    def is_bound(self) -> bool:
        """Whether modules see values."""
        return self.call is not None

    @property
    def storage_pointers(self) -> set[int]:
        """Where the values lie that must not leave the unit."""
        return {buffers.storage_pointer for buffers in self.buffers}

    @property
    def storage_keys(self) -> set[int]:
        """What the compute views share with every tensor over the same memory, full or empty."""
        return {storage_key(buffers.views[0]) for buffers in self.buffers if buffers.views}

    @property
    def is_full(self) -> bool:
        """Whether the compute views hold values."""
        return all(buffers.is_full for buffers in self.buffers)

    def leaves(self) -> list[tuple[BucketBuffers, Tensor]]:
        """The differentiable inputs of `Enter`, one for each trainable bucket."""
        return self._leaves

    def load(self, flats: dict[str, Tensor]) -> None:
        """Take the resting shards of this step."""
        for buffers in self.buffers:
            buffers.load(flats[buffers.bucket.name])

    def fetch(self) -> None:
        """Begin to bring shards from their tiers."""
        for buffers in self.buffers:
            buffers.fetch()

    def start(self, items: Sequence[Sequence[Collective]]) -> None:
        """Begin to gather all buckets."""
        for buffers, bucket_items in zip(self.buffers, items, strict=True):
            buffers.start(bucket_items)

    def finish(self) -> None:
        """Have all buckets full."""
        for buffers in self.buffers:
            buffers.finish()

    def drop(self) -> None:
        """End gathers that this rank does not need."""
        for buffers in self.buffers:
            buffers.drop()

    def empty(self) -> None:
        """Free the compute buffers."""
        for buffers in self.buffers:
            buffers.empty()

    def rest(self, *, keep: bool) -> None:
        """Unbind at the end of a pass, whatever the state; `keep` leaves weights full."""
        if self.call is not None:
            self._binding.restore()
            self.call = None
        self.depth = 0
        for buffers in self.buffers:
            buffers.rest(keep=keep)

    def reset(self) -> None:
        """Unbind and free everything, gradients included."""
        self.rest(keep=False)
        for buffers in self.buffers:
            buffers.reset()

    def aliases(self) -> list[Tensor]:
        """Fresh tensors over the compute views of the trainable parameters.

        They have version counters of their own (`.data`): a refill writes the same values again and
        must not look like a modification of what autograd saved.
        """
        return [
            view.data
            for buffers in self.buffers
            if buffers.bucket.trainable
            for view in buffers.views
        ]

    def _frozen(self) -> Iterator[Tensor]:
        for buffers in self.buffers:
            if not buffers.bucket.trainable:
                yield from (view.data for view in buffers.views)

    def bind(self, call: Call) -> None:
        """Put the tensors of a call where the modules look for their parameters."""
        if len(call.parameters) < len(self.paths):
            call.parameters = [*call.parameters, *self._frozen()]
        self._binding.bind(call.parameters)
        self.call = call

    def bound(self, path: str) -> Tensor:
        """The tensor that stands for one parameter."""
        assert self.call is not None
        return self.call.parameters[self._binding.index[path]]

    def unbind(self) -> None:
        """Put the placeholders back; see `Binding.unbind`."""
        if self.call is not None:
            parameters, self.call = self.call.parameters, None
            self._binding.unbind(parameters)

    def bind_for_pass(self, used: Set[str], *, grad: bool) -> list[Tensor]:
        """Bind the weights where they rest; returns leaves for gradients, in the order of paths.

        Args:
            used: paths that have a gradient from earlier passes, to which backward adds in place.
            grad: whether there will be a backward pass.
        """
        leaves = self.aliases()
        if grad:
            landed = [view for buffers, _ in self._leaves for view in buffers.landed_views()]
            for path, leaf, view in zip(self.trainable, leaves, landed, strict=True):
                leaf.requires_grad_()
                if path in used:
                    leaf.grad = view
            self._landed = landed
        self.bind(Call(self, list(leaves)))
        return leaves if grad else []

    def check_bound(self) -> None:
        """Refuse another tensor in the place of a parameter; see `Binding.check`."""
        if self.call is not None:
            self._binding.check(self.call.parameters)

    def take_grads(self, leaves: Sequence[Tensor]) -> list[str]:
        """Keep what backward has left on the leaves of `bind_for_pass`; returns whose it is."""
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        used = [path for path, grad in zip(self.trainable, grads, strict=True) if grad is not None]
        pairs = zip(grads, self._landed, strict=True)
        new = [None if grad is landed else grad for grad, landed in pairs]
        del grads
        self._landed = []
        self.reduce(
            [g.to_dense() if g is not None and g.is_sparse else g for g in new], (), ends=False
        )
        return used

    def reduce(
        self,
        grads: Sequence[Tensor | None],
        items: Sequence[Sequence[Collective]],
        *,
        ends: bool,
    ) -> None:
        """Add and move the gradients of all trainable buckets; missing ones count as zero.

        Args:
            grads: of the trainable parameters in turn, or none at all.
            items: what moves, by bucket.
            ends: whether this is the unit's last call in the step.
        """
        position = 0
        for number, (buffers, _) in enumerate(self._leaves):
            count = len(buffers.bucket.paths)
            part = grads[position : position + count] or [None] * count
            buffers.reduce(part, items[number] if items else (), ends=ends)
            position += count

    def collect(self) -> None:
        """Have reduce-scatters that are in flight arrive."""
        for buffers, _ in self._leaves:
            buffers.collect()


def walk_along(
    actions: Sequence[Action], schedule: Schedule, units: Mapping[str, UnitRuntime]
) -> Walk:
    """A walk that gathers units in their turn, and fetches those that rest on a tier before.

    Args:
        actions: a pass of the schedule.
        schedule: how far ahead.
        units: by name.
    """
    return Walk(
        actions,
        schedule.prefetch,
        lambda action: units[action.event.unit].start(action.items),
        fetch=lambda action: units[action.event.unit].fetch(),
        fetch_ahead=schedule.fetch_ahead,
    )


def _leaf(bucket: Bucket, device: torch.device) -> Tensor:
    """A differentiable placeholder of the landing shape that holds one element of memory."""
    assert bucket.landing is not None
    one: Any = torch.zeros(1, dtype=bucket.landing.dtype, device=device)
    return one.expand(bucket.landing.length).requires_grad_()
