"""A whole state from tier to tier between phases, such as training and generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.errors import StateError
from shardwise.sharding.leaves import Flats, Home
from shardwise.sharding.movement import Transport
from shardwise.sharding.opt_state import is_over, split
from shardwise.sharding.pytree import tree_unflatten
from shardwise.sharding.state import Life, State, adopt
from shardwise.sharding.tiers import DEVICE, Memories, Tier
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.on_states import raise_alike


def move_state(
    given: State,
    home: Home,
    lowering: Lowering,
    transport: Transport,
    *,
    to: Tier | None,
    call: str,
) -> State:
    """The same values on another tier; the old handle dies once all ranks have them there.

    Args:
        given: consumed.
        home: of its program.
        lowering: of its program.
        transport: to the other ranks.
        to: everything goes there; None: where the plan says.
        call: who consumed it, for errors.

    Raises:
        StateError: it is dead, or of another program.
        OffloadError: a tier cannot hold it; some rank's error on every rank, and it stays usable.
    """
    failure: Exception | None = None
    new = None
    try:
        home.check(given.home, "state")
        new = _moved(adopt(given), lowering, home.memories, to)
    except Exception as error:
        failure = error
    raise_alike(transport, failure, "move", None)
    assert new is not None
    given.consume(call)
    return new


def _moved(state: State, lowering: Lowering, memories: Memories, to: Tier | None) -> State:
    away = state.life.away

    def moved(flat: Tensor, rests: Tier) -> Tensor:
        source, target = away or rests, to or rests
        if source == target:
            return flat
        return memories.empty(target, flat.numel(), flat.dtype).copy_(flat)

    buckets: Mapping[str, Bucket] = {bucket.name: bucket for bucket in lowering.all_buckets}
    stepping = lowering.stepping
    tiers = {group.key: group.rests.moments for group in stepping.groups}
    leaves, spec = split(state.opt_flats, stepping.keys)

    def moved_leaf(leaf: Any) -> Any:
        if not is_over(leaf, stepping.keys):
            return leaf
        found: Flats = {}
        for key, value in leaf.items():
            found[key] = moved(value, tiers.get(key, DEVICE)) if value.ndim == 1 else value
        return found

    return replace(
        state,
        flats={n: moved(flat, buckets[n].rests.params) for n, flat in state.flats.items()},
        masters={n: moved(flat, buckets[n].rests.masters) for n, flat in state.masters.items()},
        opt_flats=tree_unflatten(spec, [moved_leaf(leaf) for leaf in leaves]),
        life=Life(away=to),
    )


def check_in_place(state: State) -> State:
    """The state.

    Raises:
        StateError: it was moved away from where the plan of its program says.
    """
    away = state.life.away
    if away is not None:
        raise StateError(
            f"This state was moved to {away}, and no step can run on it there.",
            where="program.move(state, to)",
            facts=f"all of it is on {away}",
            why="A step finds every part of a state where the plan says that it rests.",
            fix="state = program.move(state) brings it back",
            away=str(away),
        )
    return state
