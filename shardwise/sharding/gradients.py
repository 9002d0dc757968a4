"""Gradients as a value: landed, normalised flat buckets with their used flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.leaves import Flats, Home, Leaves, fill_layout, landing_layouts
from shardwise.sharding.pytree import NAMESPACE, register


@dataclass(frozen=True, eq=False)
class Grads:
    """Gradients of the mean loss over the global batch; a node of optree like `State`.

    `grads["path"]` is a DTensor in the layout where the gradient landed: its `grads` home, or its
    `opt` home when that is a part of it. A parameter that no rank used has a zero gradient and is
    not in `used`: an update leaves it and its optimizer state alone.

    Args:
        home: what turns buckets into leaves.
        flats: landed gradients by bucket name.
        used: paths of the parameters that some rank used.
        buffers: the module's buffers after the forward pass.
    """

    home: Home
    flats: Flats
    used: frozenset[str]
    buffers: dict[str, Tensor]
    loose: Mapping[str, Any] | None = None

    @property
    def leaves(self) -> Mapping[str, Any]:
        """Gradients by path."""
        if self.loose is not None:
            return self.loose
        return Leaves(self.home, "landing", landing_layouts(self.home), lambda: self.flats)

    def __getitem__(self, path: str) -> Any:
        """The gradient of one parameter."""
        return self.leaves[path]

    def finite(self) -> Tensor:
        """Whether this rank's gradients are all finite, a 0-dim bool tensor."""
        checks = [torch.isfinite(flat).all() for flat in self.flats.values()]
        return torch.stack(checks).all() if checks else torch.tensor(True)

    def adopted(self) -> Grads:
        """The same gradients in flat buckets, if they were built leaf by leaf."""
        if self.loose is None:
            return self
        flats: Flats = {}
        for bucket in self.home.buckets:
            if bucket.landing is not None:
                device = self.home.device_mesh.device_type
                layout = bucket.landing
                flats[bucket.name] = torch.zeros(layout.length, dtype=layout.dtype, device=device)
                fill_layout(flats[bucket.name], layout, self.loose, self.home)
        return Grads(self.home, flats, self.used, self.buffers)


def _flatten(grads: Grads) -> tuple[tuple[Any, ...], tuple[Any, ...], None]:
    return (dict(grads.leaves),), (grads.home, grads.used, grads.buffers), None


def _unflatten(meta: tuple[Any, ...], children: tuple[Any, ...]) -> Grads:
    home, used, buffers = meta
    return Grads(home, {}, used, buffers, loose=children[0])


register(Grads, _flatten, _unflatten, namespace=NAMESPACE)
