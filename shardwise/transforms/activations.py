"""What a forward pass saves for backward, and what recomputed modules cost, counted in a trace.

[Note: counting a recomputation]
A trace runs no backward, so a region's forward has to tell what its recomputation will do. Torch
stops a recomputation at the last tensor that the region has saved; an operation saves its inputs
before it runs. So the flops of a recomputation are those of the operations before the last save,
without those whose results the policy keeps. Its bytes are what the region would have saved. Until
then the region holds its inputs, if no region around it is to recompute them, and what is kept. A
region inside of another one keeps its values twice while that one is recomputed, unless both keep
them: the recomputation runs the inner region as forward did.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.offload.saved import MIN_BYTES, span
from shardwise.transforms.regions import Region
from shardwise.transforms.replaying import Kept, Recording


@dataclass(frozen=True)
class Recomputation:
    """What remat changes in one forward and backward pass over one rank's batch.

    Args:
        plain_bytes: what the forward pass would save without remat.
        peak_bytes: what the largest recomputation makes beside what is saved.
        flops: of all recomputations.
    """

    plain_bytes: int
    peak_bytes: int
    flops: int


class _Storages:
    """Adds up bytes, each storage once; holds what it has counted, lest its number comes again."""

    def __init__(self, known: Sequence[Any]) -> None:
        self.nbytes = 0
        self._seen = {_storage(leaf) for leaf in known if isinstance(leaf, Tensor)}
        self._held: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            self._held.append(tensor.detach())
            self.nbytes += tensor.untyped_storage().nbytes()


class _Call(NamedTuple):
    """One call of a module whose saved values go to a tier."""

    tier: str
    prefetch: int
    saved: _Storages


@dataclass
class _Open:
    """A region while its forward runs.

    Args:
        start: flops before it.
        last: flops at the last save inside of it.
        packed: what it has saved.
        inner_kept: what regions inside keep.
        inner_bytes: what the largest recomputation inside makes.
    """

    start: int
    last: int
    packed: list[Tensor] = field(default_factory=list[Tensor])
    inner_kept: list[Tensor] = field(default_factory=list[Tensor])
    inner_bytes: int = 0


class Activations:
    """Counts saved tensors of one forward pass.

    Args:
        known: tensors that are there anyway: parameters, batch, buffers.
        meter: flops so far.
    """

    def __init__(self, known: Sequence[Any], meter: Callable[[], int]) -> None:
        self._known = known
        self._meter = meter
        self._saved = _Storages(known)
        self._plain = _Storages(known)
        self._calls: list[_Call] = []
        self._around: list[_Call] = []
        self._open: list[_Open] = []
        self._recomputed: list[Region] = []
        self._flops = 0
        self._peak_bytes = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Context of the whole pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    @contextmanager
    def on_tier(self, tier: str, prefetch: int) -> Generator[None]:
        """Context of a module whose saved values go to a tier; inside of a region it has none."""
        self._around.append(self._new_call(tier, prefetch))
        try:
            yield
        finally:
            self._around.pop()

    def _new_call(self, tier: str, prefetch: int) -> _Call:
        call = _Call(tier, prefetch, _Storages(self._known))
        self._calls.append(call)
        return call

    def tier_bytes(self) -> dict[str, int]:
        """What is held on tiers from forward to backward."""
        totals: dict[str, int] = {}
        for call in self._calls:
            totals[call.tier] = totals.get(call.tier, 0) + call.saved.nbytes
        return totals

    def fetched_bytes(self) -> int:
        """What of that is back on the device at the most: of a call, and of those fetched ahead."""
        sizes = [call.saved.nbytes for call in self._calls]
        spans = (
            sum(sizes[max(0, last - call.prefetch) : last + 1])
            for last, call in enumerate(self._calls)
        )
        return max(spans, default=0)

    def saved_bytes(self, written: Sequence[str]) -> int:
        """What is held from forward to backward; `written` are the buffers that forward writes."""
        return self._saved.nbytes + sum(r.snapshot_bytes(written) for r in self._recomputed)

    def recomputation(self) -> Recomputation:
        """What remat changes."""
        return Recomputation(self._plain.nbytes, self._peak_bytes, self._flops)

    @contextmanager
    def region(self, region: Region, inputs: Sequence[Tensor]) -> Generator[None]:
        """Context of one call of a region."""
        now = self._meter()
        opened = _Open(now, now)
        around = self._open[-1] if self._open else None
        if around is not None:
            self._pack(around, inputs)
        kept = Kept(region.name)
        keeps = region.keeps_values
        device = torch.device("cpu")
        mode = Recording(kept, region.policy, device, self._meter) if keeps else nullcontext()

        def pack(tensor: Tensor) -> None:
            self._plain.add(tensor)
            self._pack(opened, [tensor])

        self._open.append(opened)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _never), mode:
                yield
        finally:
            self._open.pop()
        if opened.packed:
            self._close(region, opened, around, inputs, kept)

    def _close(
        self,
        region: Region,
        opened: _Open,
        around: _Open | None,
        inputs: Sequence[Tensor],
        kept: Kept,
    ) -> None:
        self._recomputed.append(region)
        call = self._new_call(region.policy.tier, 1) if region.policy.tier else None
        for tensor in kept.tensors:
            self._add(tensor, call)
        for tensor in inputs if around is None else ():
            self._add(tensor, self._around[-1] if self._around else None)
        again = [made.flops for made in kept.made.values() if made.at_flops < opened.last]
        self._flops += opened.last - opened.start - sum(again)
        made = _Storages([*self._known, *inputs, *kept.tensors])
        for tensor in opened.packed:
            made.add(tensor)
        after = made.nbytes + opened.inner_bytes
        for tensor in opened.inner_kept:
            made.add(tensor)
        nbytes = max(after, made.nbytes)
        self._peak_bytes = max(self._peak_bytes, nbytes)
        if around is not None:
            around.inner_bytes = max(around.inner_bytes, nbytes)
            around.inner_kept += [*kept.tensors, *opened.inner_kept]

    def _pack(self, opened: _Open, tensors: Sequence[Tensor]) -> None:
        opened.last = self._meter()
        opened.packed += [tensor.detach() for tensor in tensors]

    def _add(self, tensor: Tensor, call: _Call | None) -> None:
        """Count what is held from forward to backward, on a tier or, without one, on the device."""
        if call is None or span(tensor)[1] < MIN_BYTES:
            self._saved.add(tensor)
        else:
            call.saved.add(tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        self._add(tensor, self._around[-1] if self._around else None)
        self._plain.add(tensor)
        return tensor.detach()


def _never(_: None) -> Tensor:
    raise AssertionError("a trace runs no backward")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
