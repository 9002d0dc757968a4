"""The compute buffer of one bucket: filled when its unit is entered, emptied when it is left.

The tensors that modules see are views of one buffer whose storage is emptied and refilled in place,
so tensors that autograd has saved see the values again when backward refills it. Views of the
buffers are made once; a fill is one resize, one collective and one copy for the whole bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.offload.store import Fetch, Store
from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective
from shardwise.sharding.compat import add_all, copy_all, zero_all
from shardwise.sharding.layout import Layout, Regroup
from shardwise.sharding.movement import Mover, Pending, finish, gather, scatter
from shardwise.sharding.tiers import DEVICE


class Storage:
    """A tensor whose memory can be given back and taken again without moving its views."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()

    def take(self) -> None:
        """Allocate."""
        self._storage.resize_(self.nbytes)

    def give_back(self) -> None:
        """Free."""
        self._storage.resize_(0)

    @property
    def is_taken(self) -> bool:
        """Whether there is memory behind the tensor."""
        return self._storage.nbytes() == self.nbytes


class BucketBuffers:
    """Compute views, gather stack and send stack of one bucket on one rank."""

    def __init__(self, bucket: Bucket, mover: Mover, device: torch.device, store: Store) -> None:
        self.bucket = bucket
        self._mover = mover
        self._device = device
        self._store = store
        self._fetch: Fetch | None = None
        self._lands_here = bucket.rests.grads == DEVICE
        self._flat: Tensor | None = None
        self._source: Callable[[], Tensor | None] = lambda: None
        self._pending: Pending | None = None
        self._summing: Pending | None = None
        self._scattered: tuple[Tensor, Pending | None] | None = None
        self._in_flight = 0
        self._casts = bucket.params.dtype != bucket.wire.dtype
        self._in_place = bucket.in_place
        self._gaps: list[tuple[int, Tensor]] | None = None
        self.views: list[Tensor] = []
        self._full: Storage | None = None
        self._stack: Storage | None = None
        self._send: Storage | None = None
        self._whole: Tensor | None = None  # unreduced gradients of earlier passes
        self._sums: Tensor | None = None  # what all passes so far have landed
        if not bucket.in_place:
            self._full = Storage([bucket.compute.length], bucket.compute.dtype, device)
            self.views = [entry.view(self._full.tensor) for entry in bucket.compute.entries]
        if bucket.gather:
            self._stack = Storage(bucket.gather.stack, bucket.wire.dtype, device)
            self._out, self._in = self._copy_out(self._stack.tensor)
            self._stack.give_back()
        if self._full:
            self._full.give_back()
        if bucket.reduce:
            self._send = Storage(bucket.reduce.stack, bucket.reduce.fine.dtype, device)
            count = len(bucket.paths)
            self._slots = [bucket.reduce.fine_pieces(i, self._send.tensor) for i in range(count)]
            self._padding = bucket.reduce.padding_pieces(self._send.tensor)
            self._send.give_back()

    @property
    def is_full(self) -> bool:
        """Whether the compute views hold values."""
        return self._full is None or self._full.is_taken

    @property
    def storage_pointer(self) -> int:
        """Where the values of the compute views lie; 0 when empty."""
        return self.views[0].untyped_storage().data_ptr() if self.views else 0

    def load(self, flat: Tensor) -> None:
        """Take the resting shard that the next fills read."""
        self._flat = flat
        if self._in_place and self._source() is not flat:
            # Neither the views nor this keep a state alive: the views go when it goes.
            self._source = weakref.ref(flat, self._forget)
            self.views = [entry.view(flat.data) for entry in self.bucket.params.entries]

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        if source is self._source:
            self.views = []

    def fetch(self) -> None:
        """Begin to bring the resting shard from its tier, for the next fill."""
        if self._fetch is None and not self.is_full and self.bucket.rests.params != DEVICE:
            assert self._flat is not None
            self._fetch = self._store.fetch(self._flat)

    def _shard(self) -> Tensor:
        """The resting shard, on the device."""
        assert self._flat is not None
        if self.bucket.rests.params == DEVICE:
            return self._flat
        fetch, self._fetch = self._fetch or self._store.fetch(self._flat), None
        return fetch.take()

    def start(self, items: Sequence[Collective]) -> None:
        """Begin to gather; `finish` or `drop` must follow.

        With prefetch a unit that is called again soon is gathered while an earlier gather of it is
        in flight; both bring the same values into one stack.
        """
        if self._stack is None:
            return
        assert self._flat is not None
        finish(self._pending)
        self._in_flight += 1
        self._stack.take()
        shard = self._shard()
        wire = shard.to(self.bucket.wire.dtype) if self._casts else shard
        self._pending = gather(self._mover, wire, self._stack.tensor, items)

    def finish(self) -> None:
        """Put the gathered values where the compute views show them, unless an earlier pass has."""
        if self._full is None or self._flat is None:
            return
        if self._full.is_taken if self._stack is None else self._in_flight == 0:
            return
        if self._stack is None:
            shard = self._shard()
            self._full.take()
            self._full.tensor.data.copy_(shard)
            return
        finish(self._pending)
        self._pending = None
        self._full.take()
        copy_all(self._out, self._in)
        self._arrived(self._stack)

    def drop(self) -> None:
        """End a gather whose result nobody on this rank needs."""
        if self._stack is not None:
            finish(self._pending)
            self._pending = None
            self._arrived(self._stack)

    def _arrived(self, stack: Storage) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            stack.give_back()

    def empty(self) -> None:
        """Free the compute views' memory."""
        if self._full is not None:
            self._full.give_back()

    def rest(self, *, keep: bool) -> None:
        """End a pass, whatever its state; what is in flight must not write freed memory.

        Args:
            keep: leave the compute views full for the next pass.
        """
        finish(self._pending)
        self._pending = None
        if self._fetch is not None:
            self._fetch.drop()
            self._fetch = None
        self.land()
        self._flat = None
        self._in_flight = 0
        for storage in (self._stack, self._send, None if keep else self._full):
            if storage is not None:
                storage.give_back()

    def reset(self) -> None:
        """Free everything, gradients included."""
        self.rest(keep=False)
        self._whole = self._sums = None

    def reduce(
        self, grads: Sequence[Tensor | None], items: Sequence[Collective], *, ends: bool
    ) -> None:
        """Add whole, unreduced gradients to those of earlier calls, and move them; None is zero.

        Args:
            grads: of the parameters in turn.
            items: what moves at this call; the last of it may be in flight until `land`.
            ends: whether this is the unit's last call in the step.
        """
        regroup = self.bucket.reduce
        scatters = 0
        if regroup is None or self._send is None:
            if self._lands_here:
                self._sums = self._add_whole(self._sums, grads)
            else:
                self._land(self._pack_whole(grads))
        elif not self.bucket.keeps_whole:
            self._scatter(regroup, grads, items)
            scatters = len(regroup.axes)
        else:
            self._whole = self._add_whole(self._whole, grads)
            if ends:
                self._scatter(regroup, self._take_whole(), items)
                scatters = len(regroup.axes)
        for item in items[scatters:]:
            self.land()
            self._sum_over(item)

    def _sum_over(self, item: Collective) -> None:
        """Add up the landed gradients of replicas."""
        sums, layout = self._sums, self.bucket.reduced
        assert sums is not None
        assert layout is not None
        if sums.dtype == layout.dtype and self._lands_here:
            self._summing = self._mover.all_reduce(sums, item)
            return
        # At once: a copy in the dtype of the wire would rest for as long as it is in flight.
        wire = sums.to(self._device, layout.dtype, copy=True)
        finish(self._mover.all_reduce(wire, item))
        sums.copy_(wire)

    def land(self) -> None:
        """Have the gradients that were last reduced arrive."""
        self.collect()
        finish(self._summing)
        self._summing = None

    def collect(self) -> None:
        """Have a reduce-scatter arrive, and free what it was sent from."""
        if self._scattered is None or self._send is None:
            return
        (part, pending), self._scattered = self._scattered, None
        finish(pending)
        self._send.give_back()
        self._land(part)

    def landed_views(self) -> list[Tensor | None]:
        """What whole gradients have landed so far, by parameter; None before the first."""
        if self._sums is None:
            return [None] * len(self.bucket.paths)
        return [entry.view(self._sums) for entry in self._whole_layout.entries]

    def take_landed(self) -> Tensor:
        """The landed gradients of all calls, which this no longer holds; zeros without a call.

        They are in the dtype that they were added up in.
        """
        self.land()
        sums, self._sums = self._sums, None
        layout = self.bucket.sums
        assert layout is not None
        if sums is None:
            return self._store.zeros(self.bucket.rests.grads, layout.length, layout.dtype)
        return sums

    def _land(self, part: Tensor) -> None:
        assert self.bucket.sums is not None
        if self._sums is None:
            dtype = self.bucket.sums.dtype
            part = part if part.dtype == dtype else part.to(dtype)
            self._sums = self._store.put(self.bucket.rests.grads, part)
        else:
            self._sums.add_(part.to(self._sums.device))

    def _scatter(
        self, regroup: Regroup, grads: Sequence[Tensor | None], items: Sequence[Collective]
    ) -> None:
        """Sum and cut whole gradients; they may be in flight until `collect`."""
        assert self._send is not None
        self.collect()
        self._send.take()
        self._pack_parts(regroup, grads)
        del grads  # those that were kept whole have no other holder: freed before they move
        self._scattered = scatter(self._mover, self._send.tensor, items[: len(regroup.axes)])
        if self._scattered[1] is None or not self.bucket.in_place:
            self.collect()  # gathered weights need the room; see `memory.flies`

    @property
    def _whole_layout(self) -> Layout:
        """Whole gradients in the dtype that they are added up in."""
        sums, compute = self.bucket.sums, self.bucket.compute
        assert sums is not None
        return compute.cast(sums.dtype) if sums.axes else sums

    def _take_whole(self) -> list[Tensor]:
        """Views of the kept gradients, which this no longer holds."""
        whole, self._whole = self._whole, None
        assert whole is not None
        return [entry.view(whole) for entry in self._whole_layout.entries]

    def _add_whole(self, sums: Tensor | None, grads: Sequence[Tensor | None]) -> Tensor:
        """Whole gradients in one flat tensor, added to what is there already."""
        if sums is None:
            return self._pack_whole(grads)
        entries = zip(self._whole_layout.entries, grads, strict=True)
        pairs = [(entry.view(sums), grad) for entry, grad in entries if grad is not None]
        if pairs:
            add_all([mine for mine, _ in pairs], [grad for _, grad in pairs])
        return sums

    def _pack_whole(self, grads: Sequence[Tensor | None]) -> Tensor:
        layout = self._whole_layout
        kept = [g for g in grads if g is not None and g.dtype == layout.dtype and g.is_contiguous()]
        if len(kept) == len(grads):  # nearly always, and half the host time
            return self._joined(layout, kept)
        flat = torch.empty(layout.length, dtype=layout.dtype, device=self._device)
        sizes, places, gaps = layout.cuts
        pieces = flat.split_with_sizes(sizes)
        empty = [pieces[place] for place in gaps]
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for entry, place, grad in zip(layout.entries, places, grads, strict=True):
            if grad is None:
                empty.append(pieces[place])
            else:
                piece = pieces[place]
                targets.append(piece if len(entry.block) == 1 else piece.view(entry.block))
                sources.append(grad)
        if targets:
            copy_all(targets, sources)
        if empty:
            zero_all(empty)
        return flat

    def _joined(self, layout: Layout, grads: Sequence[Tensor]) -> Tensor:
        """Gradients of the right dtype and order of elements one after the other."""
        if self._gaps is None:
            sizes, _, gaps = layout.cuts
            kind: dict[str, Any] = {"dtype": layout.dtype, "device": self._device}
            self._gaps = [(place, torch.zeros(sizes[place], **kind)) for place in gaps]
        pieces = [grad.view(-1) for grad in grads]
        for place, zeros in self._gaps:
            pieces.insert(place, zeros)
        return torch.cat(pieces)

    def _pack_parts(self, regroup: Regroup, grads: Sequence[Tensor | None]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        empty = list(self._padding)
        for index, (grad, slots) in enumerate(zip(grads, self._slots, strict=True)):
            if grad is None:
                empty += slots
            else:
                targets += slots
                sources += regroup.coarse_pieces(index, grad)
        if targets:
            copy_all(targets, sources)
        for piece in empty:
            piece.zero_()

    def _copy_out(self, stack: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Targets in the compute views and sources in the stack.

        The targets are made from `.data`: they share memory with the views that autograd saves,
        but not the version counter, since a refill restores the values that were saved.
        """
        regroup = self.bucket.gather
        assert regroup is not None
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, view in enumerate(self.views):
            targets += regroup.coarse_pieces(index, view.data)
            sources += regroup.fine_pieces(index, stack)
        return targets, sources
