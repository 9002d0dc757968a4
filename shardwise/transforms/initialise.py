"""Where initial values come from, and how a rank keeps only its own blocks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.compat import copy_all
from shardwise.sharding.errors import InitError, summarise
from shardwise.sharding.frames import tiles_of
from shardwise.sharding.layout import Layout, Regroup, make_layout
from shardwise.sharding.leaves import Flats
from shardwise.sharding.lying import local_runs, rectangle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Transport
from shardwise.sharding.tiers import Memories, Tier
from shardwise.sharding.units import ParamInfo


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


def check_source(
    source: FromModule, infos: Sequence[ParamInfo], buffers: Mapping[str, Tensor]
) -> None:
    """Check that a source has a value of the right shape for every parameter and buffer.

    Raises:
        InitError: it has not, by name.
    """
    needed = {info.path: info.shape for info in infos}
    needed |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    faults = []
    for name, shape in needed.items():
        given = source.tensors.get(name)
        if given is None or tuple(given.shape) != shape or given.is_meta:
            got = "nothing" if given is None else f"{tuple(given.shape)} on {given.device.type}"
            faults.append(f"{name}: needs shape {shape}; the module gives {got}")
    if faults:
        raise InitError(
            f"from_module has no values for {len(faults)} of {len(needed)} tensors.",
            facts=summarise(faults),
            why="Initial values are taken by the path of parameters and buffers.",
            fix="pass a module with the plan's parameters, off the meta device",
            count=len(faults),
        )


def take_module(
    source: FromModule,
    infos: Sequence[ParamInfo],
    shards: Shards,
    transport: Transport,
    device: torch.device,
) -> None:
    """Keep this rank's blocks of rank 0's parameters, one whole tensor at a time."""
    for info in infos:
        whole = source.tensors[info.path].to(device, copy=True)
        transport.broadcast(whole)
        shards.put(info.path, whole)


class Shards:
    """Takes whole parameters and keeps this rank's blocks of them, in flat buckets."""

    def __init__(
        self, buckets: Sequence[Bucket], mesh: Mesh, coords: Mapping[str, int], memories: Memories
    ) -> None:
        self._mesh = mesh
        self._coords = coords
        self._memories = memories
        self.flats: Flats = {}
        self.masters: Flats = {}
        self._targets: dict[str, list[tuple[Tensor, Layout]]] = {}
        for bucket in buckets:
            self.flats[bucket.name] = self._zeros(bucket.params, bucket.rests.params)
            targets = [(self.flats[bucket.name], bucket.params)]
            if bucket.has_master and bucket.opt:
                self.masters[bucket.name] = self._zeros(bucket.opt, bucket.rests.masters)
                targets.append((self.masters[bucket.name], bucket.opt))
            for path in bucket.paths:
                self._targets[path] = targets

    def _zeros(self, layout: Layout, tier: Tier) -> Tensor:
        return self._memories.zeros(tier, layout.length, layout.dtype)

    def put(self, path: str, whole: Tensor) -> None:
        """Keep this rank's blocks of one whole parameter."""
        for flat, layout in self._targets[path]:
            entry = layout.by_path[path]
            if entry.frame is not None:
                block = entry.view(flat)
                for tile in tiles_of(local_runs(entry, layout, self._mesh, self._coords)):
                    values = rectangle(whole.detach(), tile.offsets, tile.sizes)
                    rectangle(block, tile.at, tile.sizes).copy_(values)
                continue
            if not layout.axes:
                entry.view(flat).copy_(whole)
                continue
            one = [(path, entry.shape, entry.dim)]
            coarse = make_layout(one, (), self._mesh, layout.dtype)
            fine = make_layout(one, layout.axes, self._mesh, layout.dtype)
            cut = Regroup(coarse, fine, self._mesh)
            block = flat[entry.offset : entry.offset + fine.length]
            place = self._mesh.index(layout.axes, self._coords)
            pairs = cut.own_pieces(0, whole.detach().to(flat.device), block, place)
            if pairs:
                copy_all([mine for _, mine in pairs], [part for part, _ in pairs])
