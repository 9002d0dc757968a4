"""What turns flat buckets into named DTensor leaves on one rank, and leaves into buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.derived import LossScale
from shardwise.sharding.errors import StateError, nearest, summarise
from shardwise.sharding.frames import tiles_of
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.lying import local_runs, rectangle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.placements import as_dtensor, on_whole_dims
from shardwise.sharding.spec import Spec, local_range
from shardwise.sharding.tiers import Memories
from shardwise.sharding.units import dtype_name

Flats = dict[str, Tensor]


@dataclass(frozen=True)
class Home:
    """What turns flat buckets into named leaves on one rank: specs, layouts, a place in the mesh.

    Args:
        buckets: all buckets, in order.
        specs: home name (`params`, `grads`, `opt`) to path to spec.
        aliases: other names of tied parameters, to the path that holds them.
        mesh: the mesh of the plan.
        rank: this rank.
        device_mesh: torch's view of the mesh, for DTensor leaves.
        loss_scale: of the plan; what the numbers of a state's loss scale follow.
        half: whether float16 computes or carries gradients, so that the loss has a divisor.
        transient: buffers that modules do not save (`persistent=False`).
        origin: what made the state, for `reshard`; None for a state without a job.
        memories: what allocates its buffers.
    """

    buckets: tuple[Bucket, ...]
    specs: Mapping[str, Mapping[str, Spec]]
    aliases: Mapping[str, str]
    mesh: Mesh
    rank: int
    device_mesh: DeviceMesh
    loss_scale: LossScale | None = None
    half: bool = False
    transient: frozenset[str] = frozenset()
    origin: Any = field(default=None, compare=False, repr=False)
    memories: Memories = field(
        default_factory=lambda: Memories(torch.device("cpu")), compare=False, repr=False
    )

    def leaf(self, flat: Tensor, layout: Layout, path: str, home: str) -> Tensor:
        """One parameter-shaped leaf over a view of its bucket.

        A DTensor wherever torch has placements for its layout. Parts of a fused dimension that
        tensor axes cut have none, nor have blocks of an uneven cut that data axes cut again on the
        same dimension: such a leaf is the plain local block, padded. `to_global` of the mapping
        joins blocks.
        """
        entry = layout.by_path[path]
        spec = self.specs[home][path]
        local = entry.view(flat)
        if entry.frame is not None:
            whole_dims = on_whole_dims(spec, self.mesh, entry.whole)
            if whole_dims is None:
                return local
            spec = whole_dims
            local = rectangle(local, (0,) * local.ndim, owned(self, layout, entry))
        elif layout.axes:
            coords = self.mesh.coords(self.rank)
            start, stop = local_range(spec, entry.shape, self.mesh, coords, entry.dim)
            local = local.narrow(entry.dim, 0, stop - start)
        if flat.dtype != layout.dtype:  # optimizer state of a dtype of its own
            spec = spec.with_(dtype=dtype_name(flat.dtype))
        return as_dtensor(local, spec, self.mesh, entry.whole, self.device_mesh)

    @property
    def form(self) -> tuple[Any, ...]:
        """What two programs must have in common to exchange flat buckets."""
        layouts = [(b.name, b.params, b.landing, b.opt, b.has_master) for b in self.buckets]
        return (self.mesh, self.rank, *layouts)

    def check(self, other: Home, what: str) -> None:
        """Refuse buckets of another program, whose bytes would be read as other parameters.

        Raises:
            StateError: the layouts differ.
        """
        if other is self or other.form == self.form:
            return
        raise StateError(
            f"This {what} belongs to another program: its buckets are laid out differently.",
            where=f"the {what} that was passed in",
            facts=[
                f"has {other.mesh!r}, rank {other.rank}, {len(other.buckets)} buckets",
                f"needs {self.mesh!r}, rank {self.rank}, {len(self.buckets)} buckets",
            ],
            why="A program reads flat buckets; another plan puts other elements in their places.",
            fix="use what this program's init, step or grads returned",
        )


Layouts: TypeAlias = Mapping[str, tuple[Layout, str]]
"""Path to the layout that holds it and the key of the buffer with that layout."""


class Leaves(Mapping[str, Tensor]):
    """Named leaves over flat buckets, made on demand; nothing is copied."""

    def __init__(
        self,
        home: Home,
        name: str,
        layouts: Layouts,
        flats: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.home = home
        self.name = name
        self.layouts = layouts
        self.flats = flats

    def __getitem__(self, path: str) -> Tensor:
        found = self.layouts.get(self.home.aliases.get(path, path))
        if found is None:
            raise KeyError(f"{self.name} has no leaf {path!r}; {nearest(path, self.layouts)}")
        layout, key = found
        path = self.home.aliases.get(path, path)
        return self.home.leaf(self.flats()[key], layout, path, self.name)

    def block(self, path: str) -> Tensor | None:
        """The padded local block of a leaf that tensor axes cut; None for others."""
        path = self.home.aliases.get(path, path)
        layout, key = self.layouts[path]
        entry = layout.by_path[path]
        return None if entry.frame is None else entry.view(self.flats()[key])

    def joined(self, path: str, blocks: Sequence[Tensor]) -> Tensor:
        """The global tensor behind a leaf that tensor axes cut, in the model's own order.

        Args:
            path: of the leaf.
            blocks: of all ranks, from `block`.
        """
        path = self.home.aliases.get(path, path)
        layout, mesh = self.layouts[path][0], self.home.mesh
        entry = layout.by_path[path]
        whole = blocks[0].new_empty(entry.whole)
        for rank, block in enumerate(blocks):
            for tile in tiles_of(local_runs(entry, layout, mesh, mesh.coords(rank))):
                rectangle(whole, tile.offsets, tile.sizes).copy_(
                    rectangle(block, tile.at, tile.sizes)
                )
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, and so saved by torch, as a plain dict of copies of the leaves.

        A DTensor that begins inside a storage, as views of buckets do, cannot be pickled: torch
        takes it for a plain tensor. A single leaf is saved as `leaf.clone()`.
        """
        return dict, ({path: leaf.clone() for path, leaf in self.items()},)

    def __repr__(self) -> str:
        return f"Leaves({self.name}, {len(self)} leaves)"


def param_layouts(home: Home) -> Layouts:
    """Where each parameter lies in the `params` home."""
    return {path: (b.params, b.name) for b in home.buckets for path in b.paths}


def master_layouts(home: Home) -> Layouts:
    """Where each master copy lies; only parameters that have one."""
    members = [(b, b.opt) for b in home.buckets if b.has_master]
    return {path: (opt, b.name) for b, opt in members if opt for path in b.paths}


def landing_layouts(home: Home) -> Layouts:
    """Where each landed gradient lies; trainable parameters only."""
    members = [(b, b.landing) for b in home.buckets]
    return {path: (landing, b.name) for b, landing in members if landing for path in b.paths}


def fill_layout(target: Tensor, layout: Layout, leaves: Mapping[str, Any], home: Home) -> None:
    """Copy leaves (DTensors in the home's spec, or local blocks) into a flat buffer of zeros."""
    faults = []
    coords = home.mesh.coords(home.rank)
    for entry in layout.entries:
        value = leaves[entry.path]
        local = value.to_local() if isinstance(value, DTensor) else value
        slot = rectangle(entry.view(target), (0,) * len(entry.block), owned(home, layout, entry))
        padded = entry.frame is not None and not isinstance(value, DTensor)
        shape = torch.Size(entry.block) if padded else slot.shape
        if not isinstance(local, Tensor) or local.shape != shape:
            got = tuple(local.shape) if isinstance(local, Tensor) else type(local).__name__
            faults.append(f"{entry.path}: has {got}, needs {tuple(shape)} on rank {home.rank}")
        elif padded:
            # What was padding may be anything by now.
            for tile in tiles_of(local_runs(entry, layout, home.mesh, coords)):
                rows = rectangle(entry.view(target), tile.at, tile.sizes)
                rows.copy_(rectangle(local, tile.at, tile.sizes))
        else:
            slot.copy_(local)
    if faults:
        raise StateError(
            f"{len(faults)} leaves of the state do not have the program's local shapes.",
            facts=summarise(faults),
            why="step takes any state of the program's structure.",
            fix="map leaves to tensors of the same shape",
            faults=len(faults),
        )


def owned(home: Home, layout: Layout, entry: Entry) -> tuple[int, ...]:
    """How much of a padded block is this rank's, by dimension; the rest is padding.

    Args:
        home: of the rank.
        layout: of the block.
        entry: of the layout.
    """
    if entry.frame is None and not layout.axes:
        return entry.block
    runs = local_runs(entry, layout, home.mesh, home.mesh.coords(home.rank))
    return tuple(sum(run.count for run in along) for along in runs)
