"""Gradients as a value: landed, normalised flat buckets, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.leaves import Flats, Home, Leaves, fill_layout, landing_layouts
from shardwise.sharding.pytree import NAMESPACE, register
from shardwise.sharding.tiers import Memories


@dataclass(frozen=True, eq=False)
class Grads:
    """Gradients of the mean loss over the global batch; a node of optree like `State`.

    `grads["path"]` is a DTensor in the layout where the gradient landed: its `grads` home, or its
    `opt` home when that is a part of it. A parameter that no rank used has a zero gradient and is
    not in `used`: an update leaves it and its optimizer state alone.

    Gradients that `optree.tree_map` has built, from one set or from several, carry buffers and
    count of the first. What their values mean is found out again by the update: it checks that they
    are finite, and a parameter whose gradient is not zero on some rank counts as used.

    Args:
        home: what turns buckets into leaves.
        flats: landed gradients by bucket name.
        used: paths of the parameters that some rank used.
        buffers: the module's buffers after the forward pass.
        fault: what was not finite, in words that are the same on all ranks; "" if everything was;
            None until an update has checked.
        count: number of elements of the global batch.
    """

    home: Home
    flats: Flats
    used: frozenset[str]
    buffers: dict[str, Tensor]
    fault: str | None
    count: float
    loose: Mapping[str, Any] | None = None

    @property
    def finite(self) -> bool | None:
        """Whether loss and gradients are finite on every rank; None until an update has checked."""
        return None if self.fault is None else not self.fault

    @property
    def leaves(self) -> Mapping[str, Any]:
        """Gradients by path."""
        if self.loose is not None:
            return self.loose
        return Leaves(self.home, "landing", landing_layouts(self.home), lambda: self.flats)

    def __getitem__(self, path: str) -> Any:
        """The gradient of one parameter."""
        return self.leaves[path]

    def adopted(self) -> Grads:
        """The same gradients in flat buckets, if they were built leaf by leaf."""
        if self.loose is None:
            return self
        flats: Flats = {}
        for bucket in self.home.buckets:
            if bucket.landing is not None:
                layout, zeros = bucket.landing, self.home.memories.zeros
                flats[bucket.name] = zeros(bucket.rests.grads, layout.length, layout.dtype)
                fill_layout(flats[bucket.name], layout, self.loose, self.home)
        return replace(self, flats=flats, loose=None)


def rest_gradients(
    buckets: Iterable[Bucket], landed: Flats, factor: float | Tensor, memories: Memories
) -> None:
    """Normalise landed gradients where they are, and put them to rest in the dtype of their home.

    Args:
        buckets: all of them.
        landed: by bucket, in the dtype that they were added up in; entries are replaced.
        factor: what gradients are multiplied by, before they are rounded.
        memories: what allocates.
    """
    for bucket in buckets:
        if bucket.landing is not None:
            flat, dtype = landed[bucket.name].mul_(factor), bucket.landing.dtype
            if flat.dtype != dtype:
                landed[bucket.name] = memories.put(bucket.rests.grads, flat.to(dtype))


class _Rest:
    """What `tree_map` carries over beside the leaves; any two of one program go together."""

    def __init__(self, grads: Grads) -> None:
        self.grads = replace(grads, flats={}, fault=None, loose=None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Rest):
            return NotImplemented
        ours, theirs = self.grads.home, other.grads.home
        return ours is theirs or ours.form == theirs.form

    def __hash__(self) -> int:
        return hash(self.grads.home.rank)

    def __repr__(self) -> str:
        home = self.grads.home
        return f"gradients of {len(home.buckets)} buckets on rank {home.rank} of {home.mesh!r}"


def _flatten(grads: Grads) -> tuple[tuple[Any, ...], _Rest, None]:
    return (dict(grads.leaves),), _Rest(grads), None


def _unflatten(rest: _Rest, children: tuple[Any, ...]) -> Grads:
    return replace(rest.grads, loose=children[0])


register(Grads, _flatten, _unflatten, namespace=NAMESPACE)
