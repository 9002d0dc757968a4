"""Bytes of one rank that rest off the device, by kind of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from shardwise.sharding.opt_state import is_over, split
from shardwise.sharding.tiers import DEVICE, Tier
from shardwise.transforms.lowering import Lowering


@dataclass(frozen=True)
class Held:
    """Bytes in one kind of memory on one rank.

    Args:
        params: the `params` home.
        master: master copies.
        opt: optimizer state.
        grads: landed gradients, between backward and update.
        acts: what modules save for backward, at its most; None while unknown.
        buffers: what streams from and to disk, and fetches in flight.
    """

    params: int = 0
    master: int = 0
    opt: int = 0
    grads: int = 0
    acts: int | None = 0
    buffers: int = 0

    @property
    def rest_bytes(self) -> int:
        """Bytes between steps."""
        return self.params + self.master + self.opt

    @property
    def peak_bytes(self) -> int:
        """Bytes at the most, without activations that are unknown."""
        return self.rest_bytes + self.grads + (self.acts or 0) + self.buffers

    def __str__(self) -> str:
        acts = "unknown" if self.acts is None else f"{self.acts:,} B"
        return (
            f"rest {self.rest_bytes:,} B (params {self.params:,}, master {self.master:,}, "
            f"opt {self.opt:,}), grads {self.grads:,} B, activations {acts}, "
            f"buffers {self.buffers:,} B"
        )


def held_by_tier(lowering: Lowering) -> dict[Tier, Held]:
    """What rests off the device, by tier."""
    found: dict[Tier, Held] = {}
    for part, tier, nbytes in _rests(lowering):
        if tier != DEVICE:
            held = found.get(tier, Held())
            found[tier] = replace(held, **{part: getattr(held, part) + nbytes})
    return found


def _rests(lowering: Lowering) -> Iterator[tuple[str, Tier, int]]:
    for bucket in lowering.all_buckets:
        rests = bucket.rests
        yield "params", rests.params, bucket.params.nbytes
        if bucket.opt and bucket.has_master:
            yield "master", rests.masters, bucket.opt.nbytes
        if bucket.landing:
            yield "grads", rests.grads, bucket.landing.nbytes
    stepping = lowering.stepping
    tiers = {group.key: group.rests.moments for group in stepping.groups}
    leaves, _ = split(stepping.form, stepping.keys)
    for leaf in leaves:
        if is_over(leaf, stepping.keys):
            for key, value in leaf.items():
                if isinstance(value, Tensor) and value.ndim == 1:
                    yield "opt", tiers.get(key, DEVICE), value.nbytes
