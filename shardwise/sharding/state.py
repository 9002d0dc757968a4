"""The state of a training program: flat local buckets, seen from outside as named DTensors.

[Note: donation]
A step updates the buckets in place and returns a new handle on the same memory; the handle that was
passed in is dead, and every access through it raises `DonatedStateError` with the step and the
place that consumed it. Leaves taken out before are views of live memory and change with the next
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.errors import DonatedStateError, StateError, nearest, summarise
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.placements import as_dtensor
from shardwise.sharding.pytree import NAMESPACE, register, tree_leaves, tree_map
from shardwise.sharding.spec import Spec, local_range

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
    """

    buckets: tuple[Bucket, ...]
    specs: Mapping[str, Mapping[str, Spec]]
    aliases: Mapping[str, str]
    mesh: Mesh
    rank: int
    device_mesh: DeviceMesh

    def leaf(self, flat: Tensor, layout: Layout, path: str, home: str) -> DTensor:
        """One parameter-shaped leaf as a DTensor over a view of its bucket."""
        entry = layout.by_path[path]
        spec = self.specs[home][path]
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


class Leaves(Mapping[str, DTensor]):
    """Named DTensor leaves over flat buckets, made on demand; nothing is copied."""

    def __init__(
        self,
        home: Home,
        name: str,
        layouts: Mapping[str, tuple[Layout, Bucket]],
        flats: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.home = home
        self.name = name
        self._layouts = layouts
        self._flats = flats

    def __getitem__(self, path: str) -> DTensor:
        found = self._layouts.get(self.home.aliases.get(path, path))
        if found is None:
            raise KeyError(f"{self.name} has no leaf {path!r}; {nearest(path, self._layouts)}")
        layout, bucket = found
        path = self.home.aliases.get(path, path)
        return self.home.leaf(self._flats()[bucket.name], layout, path, self.name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __repr__(self) -> str:
        return f"Leaves({self.name}, {len(self)} leaves)"


def param_layouts(home: Home) -> dict[str, tuple[Layout, Bucket]]:
    """Path -> (layout, bucket) of the `params` home."""
    return {path: (b.params, b) for b in home.buckets for path in b.paths}


def opt_layouts(home: Home) -> dict[str, tuple[Layout, Bucket]]:
    """Path -> (layout, bucket) of the `opt` home; trainable parameters only."""
    return {path: (b.opt, b) for b in home.buckets if b.opt for path in b.paths}


def landing_layouts(home: Home) -> dict[str, tuple[Layout, Bucket]]:
    """Path -> (layout, bucket) of landed gradients; trainable parameters only."""
    return {path: (b.landing, b) for b in home.buckets if b.landing for path in b.paths}


@dataclass
class Life:
    """Whether a handle may still be used, and who ended it."""

    consumed_by: str = ""


class Loose(NamedTuple):
    """The leaves of a state that was built one by one, by path."""

    params: Mapping[str, Any]
    master: Mapping[str, Any]
    opt: Any
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class State:
    """Everything a program carries from step to step; a node of optree (namespace `shardwise`).

    Read `params["path"]`, `master["path"]`, `opt`, `buffers`, `step`, `scale` and `extra`. A state
    built by `optree.tree_map` holds what the function returned; `step` takes it in once.

    >>> # state.params["layers.0.weight"] is a DTensor; sw.to_global(state.params) the whole dict
    """

    home: Home
    flats: Flats
    masters: Flats
    opt_flats: Any
    buffer_values: dict[str, Tensor]
    seed: Tensor
    count: Tensor
    scale_value: Tensor
    extra_value: Any
    life: Life = field(default_factory=Life)
    loose: Loose | None = None

    def _alive(self) -> State:
        if self.life.consumed_by:
            raise DonatedStateError(
                "This state was donated to a step and is dead.",
                where=self.life.consumed_by,
                why="step(state, batch) reuses the memory of the state it is given.",
                fix="use the state that step returned, or call step(..., donate=False)",
            )
        return self

    def consume(self, by: str) -> None:
        """End this handle."""
        self.life.consumed_by = by

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters by path, in their `params` home."""
        self._alive()
        if self.loose is not None:
            return self.loose.params
        layouts = param_layouts(self.home)
        return Leaves(self.home, "params", layouts, lambda: self._alive().flats)

    @property
    def master(self) -> Mapping[str, Any]:
        """Master copies by path, for parameters whose `params` home is only their rounding."""
        self._alive()
        if self.loose is not None:
            return self.loose.master
        layouts = {p: found for p, found in opt_layouts(self.home).items() if found[1].has_master}
        return Leaves(self.home, "opt", layouts, lambda: self._alive().masters)

    @property
    def opt(self) -> Any:
        """Optimizer state; dicts over parameters have DTensor leaves by path."""
        self._alive()
        if self.loose is not None:
            return self.loose.opt
        layouts = opt_layouts(self.home)
        return map_groups(
            self.opt_flats,
            self.home,
            lambda group: Leaves(self.home, "opt", layouts, lambda: self._alive() and group),
        )

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Buffers by path; equal on all ranks."""
        self._alive()
        return self.buffer_values if self.loose is None else self.loose.buffers

    @property
    def step(self) -> Tensor:
        """Number of optimizer steps taken, a 0-dim int64 tensor."""
        return self._alive().count

    @property
    def scale(self) -> Tensor:
        """What the loss is multiplied by before backward; 1 without a loss scale."""
        return self._alive().scale_value

    @property
    def extra(self) -> Any:
        """The user's own values, carried along untouched."""
        return self._alive().extra_value

    def with_extra(self, extra: Any) -> State:
        """The same state with other values of the user's; both handles live and die together."""
        return replace(self._alive(), extra_value=extra)

    @property
    def nbytes(self) -> int:
        """Bytes at rest on this rank: parameters, masters, optimizer state and buffers."""
        self._alive()
        tensors = [
            *self.flats.values(),
            *self.masters.values(),
            *tree_leaves(self.opt_flats),
            *self.buffer_values.values(),
        ]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def clone(self) -> State:
        """The same values in new memory."""
        self._alive()

        def copied(tree: Any) -> Any:
            return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)

        return replace(
            self,
            flats=copied(self.flats),
            masters=copied(self.masters),
            opt_flats=copied(self.opt_flats),
            buffer_values=copied(self.buffer_values),
            life=Life(),
        )


def map_groups(tree: Any, home: Home, replace: Callable[[Flats], Any]) -> Any:
    """Replace every dict over trainable buckets inside an optimizer state."""
    names = {bucket.name for bucket in home.buckets if bucket.opt}

    def is_group(value: Any) -> bool:
        return isinstance(value, dict) and bool(names) and value.keys() == names

    return tree_map(
        lambda value: replace(value) if is_group(value) else value, tree, is_leaf=is_group
    )


def groups_of(tree: Any, home: Home) -> list[Flats]:
    """Every dict over trainable buckets inside an optimizer state, in order."""
    found: list[Flats] = []

    def note(group: Flats) -> Flats:
        found.append(group)
        return group

    map_groups(tree, home, note)
    return found


def fill_layout(target: Tensor, layout: Layout, leaves: Mapping[str, Any], home: Home) -> None:
    """Copy leaves (DTensors in the home's spec, or local blocks) into a flat buffer."""
    faults = []
    coords = home.mesh.coords(home.rank)
    for entry in layout.entries:
        value = leaves[entry.path]
        local = value.to_local() if isinstance(value, DTensor) else value
        slot = entry.view(target)
        if layout.axes:
            parts = home.mesh.product(layout.axes)
            place = home.mesh.index(layout.axes, coords)
            rows = -(-entry.shape[entry.dim] // parts)
            count = max(0, min(rows, entry.shape[entry.dim] - place * rows))
            slot = slot.narrow(entry.dim, 0, count)
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


def adopt(state: State) -> State:
    """Bring a state that was built leaf by leaf back into flat buckets; one copy of each leaf.

    Raises:
        DonatedStateError: the state is dead.
        StateError: leaves are missing or have other shapes.
    """
    loose = state._alive().loose
    if loose is None:
        return state
    home = state.home
    flats: Flats = {}
    masters: Flats = {}
    by_name = {bucket.name: bucket for bucket in home.buckets}

    def flat(layout: Layout, leaves: Mapping[str, Any]) -> Tensor:
        device = home.device_mesh.device_type
        target = torch.zeros(layout.length, dtype=layout.dtype, device=device)
        fill_layout(target, layout, leaves, home)
        return target

    for bucket in home.buckets:
        flats[bucket.name] = flat(bucket.params, loose.params)
        if bucket.has_master and bucket.opt:
            masters[bucket.name] = flat(bucket.opt, loose.master)
    paths = opt_layouts(home).keys()

    def is_group(value: Any) -> bool:
        return isinstance(value, dict) and bool(paths) and value.keys() == paths

    def rebuild(value: Any) -> Any:
        if not is_group(value):
            return value
        names = [bucket.name for bucket in home.buckets if bucket.opt]
        first = next(iter(value.values()))
        layouts = {n: by_name[n].opt for n in names}
        return {n: flat(layout.cast(first.dtype), value) for n, layout in layouts.items() if layout}

    return replace(
        state,
        flats=flats,
        masters=masters,
        opt_flats=tree_map(rebuild, loose.opt, is_leaf=is_group),
        buffer_values=dict(loose.buffers),
        loose=None,
    )


def _flatten(state: State) -> tuple[tuple[Any, ...], Home, None]:
    opt = tree_map(
        lambda value: dict(value) if isinstance(value, Leaves) else value,
        state.opt,
        is_leaf=lambda value: isinstance(value, Leaves),
    )
    children = (
        dict(state.params),
        dict(state.master),
        opt,
        dict(state.buffers),
        state.seed,
        state.step,
        state.scale,
        state.extra,
    )
    return children, state.home, None


def _unflatten(home: Home, children: tuple[Any, ...]) -> State:
    seed, count, scale, extra = children[4:]
    return State(home, {}, {}, None, {}, seed, count, scale, extra, loose=Loose(*children[:4]))


register(State, _flatten, _unflatten, namespace=NAMESPACE)
