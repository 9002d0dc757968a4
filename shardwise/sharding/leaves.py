"""What turns flat buckets into named DTensor leaves on one rank, and leaves into buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.derived import LossScale
from shardwise.sharding.errors import StateError, nearest, summarise
from shardwise.sharding.frames import Frame, tiles_of
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.lying import local_runs, rectangle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.placements import as_dtensor
from shardwise.sharding.spec import Spec, local_range
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

    def leaf(self, flat: Tensor, layout: Layout, path: str, home: str) -> Tensor:
        """One parameter-shaped leaf over a view of its bucket.

        A DTensor, but for a parameter that tensor axes cut: that is the plain local block, padded,
        as its runs of rows have no placements in general. `to_global` of the mapping joins blocks.
        """
        entry = layout.by_path[path]
        if entry.frame is not None:
            return entry.view(flat)
        spec = self.specs[home][path]
        if flat.dtype != layout.dtype:  # optimizer state of a dtype of its own
            spec = spec.with_(dtype=dtype_name(flat.dtype))
        local = entry.view(flat)
        if layout.axes:
            coords = self.mesh.coords(self.rank)
            start, stop = local_range(spec, entry.shape, self.mesh, coords, entry.dim)
            local = local.narrow(entry.dim, 0, stop - start)
        return as_dtensor(local, spec, self.mesh, entry.shape, self.device_mesh)

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

    def frame(self, path: str) -> Frame | None:
        """How tensor axes cut a leaf, which is then a plain local block."""
        path = self.home.aliases.get(path, path)
        return self.layouts[path][0].by_path[path].frame

    def joined(self, path: str, blocks: Sequence[Tensor]) -> Tensor:
        """The global tensor behind a leaf that tensor axes cut, in the model's own order.

        Args:
            path: of the leaf.
            blocks: of all ranks.
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
    """Copy leaves (DTensors in the home's spec, or local blocks) into a flat buffer."""
    faults = []
    for entry in layout.entries:
        value = leaves[entry.path]
        local = value.to_local() if isinstance(value, DTensor) else value
        slot = entry.view(target)
        if layout.axes and entry.frame is None:
            slot = slot.narrow(entry.dim, 0, _owned_rows(home, layout, entry))
        if not isinstance(local, Tensor) or local.shape != slot.shape:
            got = tuple(local.shape) if isinstance(local, Tensor) else type(local).__name__
            faults.append(f"{entry.path}: has {got}, needs {tuple(slot.shape)} on rank {home.rank}")
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


def _owned_rows(home: Home, layout: Layout, entry: Entry) -> int:
    """How many rows of a block are this rank's; the rest is padding."""
    parts = home.mesh.product(layout.axes)
    place = home.mesh.index(layout.axes, home.mesh.coords(home.rank))
    rows = -(-entry.shape[entry.dim] // parts)
    return max(0, min(rows, entry.shape[entry.dim] - place * rows))
