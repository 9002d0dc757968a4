"""The state of a training program: flat local buckets, seen from outside as named DTensors.

[Note: donation]
A step updates the buckets in place and returns a new handle on the same memory; the handle that was
passed in is dead, and every access through it raises `DonatedStateError` with the step and the
place that consumed it. Leaves taken out before are views of live memory and change with the next
step.

[Note: leaves that are no DTensor]
A DTensor cuts whole dimensions. Where tensor axes cut parts of a fused one, such as q, k and v side
by side, or cut unevenly what data axes cut again, a leaf is the plain local block of this rank with
its padding: `to_global(state.params)` joins the blocks of all ranks, a function that is mapped over
the state works on blocks, and what it writes to padding is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.sharding.errors import DonatedStateError
from shardwise.sharding.layout import Layout
from shardwise.sharding.leaves import (
    Flats,
    Home,
    Leaves,
    fill_layout,
    master_layouts,
    param_layouts,
)
from shardwise.sharding.opt_state import by_group, by_path
from shardwise.sharding.pytree import NAMESPACE, register, tree_leaves, tree_map
from shardwise.sharding.scaling import LossScaleState
from shardwise.sharding.tiers import Tier


@dataclass
class Life:
    """Whether a handle may still be used, who ended it, and where it was moved, if it was."""

    consumed_by: str = ""
    away: Tier | None = None


class Loose(NamedTuple):
    """The leaves of a state that was built one by one, by path."""

    params: Mapping[str, Any]
    master: Mapping[str, Any]
    opt: Any
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class State:
    """Everything a program carries from step to step; a node of optree (namespace `shardwise`).

    Read `params["path"]`, `master["path"]`, `opt`, `buffers`, `step`, `loss_scale` and `extra`. A
    state built by `optree.tree_map` holds what the function returned; `step` takes it in once.

    >>> # state.params["layers.0.weight"] is a DTensor; sw.to_global(state.params) the whole dict
    """

    home: Home
    flats: Flats
    masters: Flats
    opt_flats: Any
    buffer_values: dict[str, Tensor]
    seed: Tensor
    count: Tensor
    scaling: LossScaleState
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
                consumed_by=self.life.consumed_by,
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
        layouts = master_layouts(self.home)
        return Leaves(self.home, "opt", layouts, lambda: self._alive().masters)

    @property
    def opt(self) -> Any:
        """Optimizer state; dicts over parameters have DTensor leaves by path."""
        self._alive()
        if self.loose is not None:
            return self.loose.opt
        return by_path(self.opt_flats, self.home, lambda values: self._alive() and values)

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
        """What the loss of the next step is multiplied by; 1 without a loss scale."""
        return self._alive().scaling.scale

    @property
    def loss_scale(self) -> LossScaleState:
        """The loss scale with its counters, those of skipped steps included."""
        return self._alive().scaling

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

        clone = self.home.memories.clone

        def copied(tree: Any) -> Any:
            return tree_map(lambda leaf: clone(leaf) if isinstance(leaf, Tensor) else leaf, tree)

        return replace(
            self,
            flats=copied(self.flats),
            masters=copied(self.masters),
            opt_flats=copied(self.opt_flats),
            buffer_values=copied(self.buffer_values),
            life=Life(away=self.life.away),
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

    def flat(layout: Layout, leaves: Mapping[str, Any], tier: Tier) -> Tensor:
        target = home.memories.zeros(tier, layout.length, layout.dtype)
        fill_layout(target, layout, leaves, home)
        return target

    for bucket in home.buckets:
        flats[bucket.name] = flat(bucket.params, loose.params, bucket.rests.params)
        if bucket.has_master and bucket.opt:
            masters[bucket.name] = flat(bucket.opt, loose.master, bucket.rests.masters)
    return replace(
        state,
        flats=flats,
        masters=masters,
        opt_flats=by_group(loose.opt, home),
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
        state.loss_scale,
        state.extra,
    )
    return children, state.home, None


def _unflatten(home: Home, children: tuple[Any, ...]) -> State:
    seed, count, scaling, extra = children[4:]
    return State(home, {}, {}, None, {}, seed, count, scaling, extra, loose=Loose(*children[:4]))


register(State, _flatten, _unflatten, namespace=NAMESPACE)
