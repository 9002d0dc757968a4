"""Where initial values come from, and how a rank keeps only its own blocks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.compat import copy_all
from shardwise.sharding.layout import Layout, Regroup, make_layout
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.state import Flats


@dataclass(frozen=True)
class FromModule:
    """Take initial values from a module; see `from_module`."""

    tensors: Mapping[str, Tensor]


def from_module(module: nn.Module) -> FromModule:
    """A source for `program.init`: the values that this module has now; it is not modified.

    Rank 0's values count: they are broadcast, so ranks whose modules differ still start equal.

    >>> sorted(from_module(nn.Linear(2, 2)).tensors)
    ['bias', 'weight']
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    return FromModule({name: value.detach() for name, value in named})


class Shards:
    """Takes whole parameters and keeps this rank's blocks of them, in flat buckets."""

    def __init__(
        self, buckets: Sequence[Bucket], mesh: Mesh, coords: Mapping[str, int], device: torch.device
    ) -> None:
        self._mesh = mesh
        self._coords = coords
        self._device = device
        self.flats: Flats = {}
        self.masters: Flats = {}
        self._targets: dict[str, list[tuple[Tensor, Layout]]] = {}
        for bucket in buckets:
            self.flats[bucket.name] = self._empty(bucket.params)
            targets = [(self.flats[bucket.name], bucket.params)]
            if bucket.has_master and bucket.opt:
                self.masters[bucket.name] = self._empty(bucket.opt)
                targets.append((self.masters[bucket.name], bucket.opt))
            for path in bucket.paths:
                self._targets[path] = targets

    def _empty(self, layout: Layout) -> Tensor:
        return torch.zeros(layout.length, dtype=layout.dtype, device=self._device)

    def put(self, path: str, whole: Tensor) -> None:
        """Keep this rank's blocks of one whole parameter."""
        for flat, layout in self._targets[path]:
            entry = layout.by_path[path]
            if not layout.axes:
                entry.view(flat).copy_(whole)
                continue
            one = [(path, entry.shape, entry.dim)]
            coarse = make_layout(one, (), self._mesh, layout.dtype)
            fine = make_layout(one, layout.axes, self._mesh, layout.dtype)
            cut = Regroup(coarse, fine, self._mesh)
            block = flat[entry.offset : entry.offset + fine.length]
            place = self._mesh.index(layout.axes, self._coords)
            pairs = cut.own_pieces(0, whole.detach().to(self._device), block, place)
            if pairs:
                copy_all([mine for _, mine in pairs], [part for part, _ in pairs])
