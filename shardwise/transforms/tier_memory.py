"""Bytes of one rank that rest off the device, by kind of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from shardwise.offload.engine import pool_bytes
from shardwise.sharding.opt_state import is_over, split
from shardwise.sharding.tiers import DEVICE, PINNED_HOST, Tier
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
    pool = _pool_bytes(lowering)
    if pool:
        found[PINNED_HOST] = replace(found.get(PINNED_HOST, Held()), buffers=pool)
    known = lowering.activation_bytes is not None
    saving = {acts.tier for acts in lowering.plan.acts.values()}
    kept = (remat.tier for remat in lowering.plan.remat.values() if remat.tier)
    for tier in sorted(saving.union(map(Tier.parse, kept)), key=str):
        nbytes = lowering.tier_bytes.get(str(tier), 0) if known else None
        found[tier] = replace(found.get(tier, Held()), acts=nbytes)
    return found


def _pool_bytes(lowering: Lowering) -> int:
    """Host memory that state on disk is streamed through."""
    stepping = lowering.stepping
    leaves, _ = split(stepping.form, stepping.keys)
    buckets = {group.key: b for b in lowering.all_buckets for group in b.groups}
    pieces: list[tuple[int, int]] = []
    for group in stepping.streamed:
        bucket, rests = buckets[group.key], group.rests
        own = rests.masters if bucket.has_master else rests.params
        on_disk = [own, *([rests.params] if bucket.has_master else [])]
        sizes = [group.layout.nbytes for tier in on_disk if tier.memory == "disk"]
        if rests.moments.memory == "disk":
            flats = (leaf.get(group.key) for leaf in leaves if isinstance(leaf, dict))
            sizes += [flat.nbytes for flat in flats if isinstance(flat, Tensor) and flat.ndim == 1]
        pieces.append((len(sizes), max(sizes, default=0)))
    return pool_bytes(pieces)


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
