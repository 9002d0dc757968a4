"""What a state holds, as global tensors by name, and how each lies over the ranks of a mesh.

[Note: names of a state]
`params/<path>` is the true value of a parameter: its master copy where it has one. `opt/...`
follows the tree of the optimizer state, with the parameter's path last where a dict is over
parameters. `buffers/<path>`, `seed`, `step` and `loss_scale/<field>` are whole on every rank.
Nothing in a name depends on the mesh, on buckets or on groups, so two states of one model and one
optimizer have the same names on any plan. What is no tensor, such as a Python number in an
optimizer state, is a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardwise.sharding.buckets import Group
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.leaves import Flats
from shardwise.sharding.lying import Grid, Lying, grids_of, lying_of, rectangle
from shardwise.sharding.opt_state import groups_of, is_over, resting_keys
from shardwise.sharding.pytree import NAMESPACE
from shardwise.sharding.state import State

PARAMS, OPT, BUFFERS, SCALE = "params", "opt", "buffers", "loss_scale"


class Box(NamedTuple):
    """A rectangle of a global tensor: where it begins and how large it is, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside."""
        return torch.Size(self.sizes).numel()


@dataclass(frozen=True)
class Record:
    """One global tensor of a state, on one rank.

    Args:
        name: see [Note: names of a state].
        lying: how its parts lie over the ranks; over no axes: every rank has the whole.
        block: this rank's part, padded as its bucket pads it; a view of live memory.
        of: the parameter that it belongs to; "" for none.
        derived: a copy of what another record of the same name holds, such as the bfloat16 rounding
            of a master; filled on load, never saved.
    """

    name: str
    lying: Lying
    block: Tensor
    of: str = ""
    derived: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global tensor."""
        return self.lying.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.block.dtype

    @property
    def parts(self) -> int:
        """How many parts the tensor is cut into."""
        return len(self.lying.grid.holders)

    def boxes(self, part: int) -> tuple[Box, ...]:
        """The rectangles of the global tensor that one part holds; none if it is empty."""
        return tuple(Box(tile.offsets, tile.sizes) for tile in self.lying.tiles(part))

    def first_boxes(self, part: int) -> tuple[Box, ...]:
        """Those that no part before it holds: over all parts, each element once."""
        return tuple(Box(tile.offsets, tile.sizes) for tile in self.lying.first_tiles(part))

    def part_of(self, rank: int) -> int:
        """The part that a rank holds."""
        return self.lying.grid.part_of[rank]

    def pieces(self, rank: int) -> tuple[tuple[Box, Tensor], ...]:
        """This rank's rectangles, and views of `block` with their values; no padding."""
        return tuple(
            (Box(tile.offsets, tile.sizes), rectangle(self.block, tile.at, tile.sizes))
            for tile in self.lying.tiles(self.part_of(rank))
        )

    def inside(self, rank: int, box: Box) -> Tensor:
        """A view of this rank's values in a rectangle, which lies in one of its own."""
        for own, values in self.pieces(rank):
            at = tuple(a - b for a, b in zip(box.offsets, own.offsets, strict=True))
            limits = zip(at, box.sizes, own.sizes, strict=True)
            if all(start >= 0 and start + size <= limit for start, size, limit in limits):
                return rectangle(values, at, box.sizes)
        assert box.numel == 0, (self.name, box)
        return self.block.new_empty(box.sizes)


def records_of(state: State) -> tuple[Record, ...]:
    """Every tensor of a state but `extra`; parameters and optimizer state in bucket order.

    Args:
        state: alive, in flat buckets (see `state.adopt`).
    """
    home = state.home
    grid = grids_of(home.mesh)
    return (
        *_parameters(state, grid),
        *_optimizer(state, grid),
        *(_whole(f"{BUFFERS}/{n}", v, grid) for n, v in state.buffers.items()),
        _whole("seed", state.seed, grid),
        _whole("step", state.step, grid),
        *(_whole(f"{SCALE}/{n}", v, grid) for n, v in state.loss_scale._asdict().items()),
    )


def values_of(state: State) -> dict[str, Any]:
    """What the optimizer state holds besides tensors, by name."""
    named = _named_leaves(state.opt_flats, resting_keys(groups_of(state.home)))
    return {name: leaf for name, leaf in named if not isinstance(leaf, (Tensor, dict))}


def with_values(state: State, values: Mapping[str, Any]) -> State:
    """The same tensors beside other values.

    Args:
        state: at rest.
        values: by name; those that are not named stay.
    """
    if not values:
        return state
    keys = resting_keys(groups_of(state.home))
    named = list(_named_leaves(state.opt_flats, keys))
    spec = optree.tree_structure(
        state.opt_flats, is_leaf=lambda value: is_over(value, keys), namespace=NAMESPACE
    )
    leaves = [values.get(name, leaf) for name, leaf in named]
    return replace(state, opt_flats=optree.tree_unflatten(spec, leaves))


def _parameters(state: State, grid: Callable[[tuple[str, ...]], Grid]) -> Iterator[Record]:
    for bucket in state.home.buckets:
        has_master = bucket.has_master and bucket.opt is not None
        if has_master and bucket.opt is not None:
            master = state.masters[bucket.name]
            yield from _of_layout(PARAMS, bucket.opt, grid, master)
        flat = state.flats[bucket.name]
        yield from _of_layout(PARAMS, bucket.params, grid, flat, derived=has_master)


def _of_layout(
    at: str,
    layout: Layout,
    grid: Callable[[tuple[str, ...]], Grid],
    flat: Tensor,
    *,
    derived: bool = False,
) -> Iterator[Record]:
    for entry in layout.entries:
        lying = lying_of(grid, layout, entry)
        yield Record(f"{at}/{entry.path}", lying, entry.view(flat), entry.path, derived)


def _optimizer(state: State, grid: Callable[[tuple[str, ...]], Grid]) -> Iterator[Record]:
    groups = groups_of(state.home)
    for name, leaf in _named_leaves(state.opt_flats, resting_keys(groups)):
        if isinstance(leaf, Tensor):
            yield _whole(name, leaf, grid)
        elif isinstance(leaf, dict):
            yield from _over_parameters(name, leaf, groups, grid)


def _over_parameters(
    at: str, values: Flats, groups: tuple[Group, ...], grid: Callable[[tuple[str, ...]], Grid]
) -> Iterator[Record]:
    """A dict over parameters, path by path; see [Note: optimizer state at rest]."""
    for group in groups:
        value = values.get(group.key)
        if value is not None and value.shape == (group.layout.length,):
            yield from _of_layout(at, group.layout, grid, value)
            continue
        for path in group.paths:
            if value is not None or path in values:
                yield _whole(f"{at}/{path}", values[path] if value is None else value, grid, path)


def _whole(
    name: str, value: Tensor, grid: Callable[[tuple[str, ...]], Grid], of: str = ""
) -> Record:
    shape = tuple(value.shape)
    path = of or name.partition("/")[2] or name
    return Record(name, Lying(grid(()), Entry(path, shape, 0, shape, 0)), value, of)


def _named_leaves(tree: Any, keys: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Leaves of an optimizer state by name; dicts over parameters are leaves."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(
        tree, is_leaf=lambda value: is_over(value, keys), namespace=NAMESPACE
    )
    for accessor, leaf in zip(accessors, leaves, strict=True):
        yield "/".join([OPT, *map(_step, accessor)]), leaf


def _step(entry: optree.PyTreeEntry) -> str:
    if isinstance(entry, optree.NamedTupleEntry):
        return entry.field
    # One step, whatever the user's dict is keyed by.
    return str(entry.entry).replace("%", "%25").replace("/", "%2F")
