"""Calls on a state alone: its ranks are simulated ones, those of the job that made it, or one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from shardwise.sharding.errors import ShardwiseError, StateError
from shardwise.sharding.leaves import Home
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.movement import Mover, Transport
from shardwise.sharding.simulation import Simulated, World
from shardwise.sharding.state import State
from shardwise.sharding.transport import Alone, spans_processes
from shardwise.transforms.desync import watched
from shardwise.transforms.settle import Failure, raise_together

T = TypeVar("T")


def on_state(state: Any, call: str, run: Callable[[State, Mover], T]) -> list[T]:
    """Run on this rank of a state, or on all ranks of a lifted one; results by rank.

    Args:
        state: of one rank, or lifted.
        call: what the user has called, for errors.
        run: the call on one rank; its collectives go through the mover.

    Raises:
        StateError: it is one rank's part of a state whose other ranks are not here.
        RankError: this rank has lost its peers.
    """
    if not isinstance(state, Lifted):
        return [_one(state, call, run, _transport(state.home, call))]
    world = World(state.ranks[0].home.mesh)
    return world.run(lambda rank: _one(state.ranks[rank], call, run, Simulated(world, rank)))


def raise_alike(transport: Transport, error: Exception | None, doing: str, about: T) -> list[T]:
    """Raise on every rank what the first rank to fail has found, in the same words.

    Args:
        transport: of all ranks; they exchange objects once.
        error: of this rank.
        doing: what was going on.
        about: told to the others.

    Returns:
        What each rank tells.
    """
    mine = error if isinstance(error, ShardwiseError) else None
    other = Failure(error if mine is None else None)
    told: list[tuple[ShardwiseError | None, str, T]] = transport.gather_objects(
        (mine, str(other), about)
    )
    raise_together([text for _, text, _ in told], other, doing)
    first = next((one for one, _, _ in told if one is not None), None)
    if first is not None:
        raise copy.copy(first)
    return [one for _, _, one in told]


def _one(state: State, call: str, run: Callable[[State, Mover], T], transport: Transport) -> T:
    mover = Mover(state.home.mesh, state.home.rank, transport)
    return watched(mover, call, int(state.count), lambda: run(state, mover))


def _transport(home: Home, call: str) -> Transport:
    size = home.mesh.size
    if home.origin is not None and spans_processes(home.origin.transport):
        return home.origin.transport
    if size == 1:
        return Alone()
    raise StateError(
        f"{call} needs the parts of all ranks.",
        where=f"{call}(state, ...)",
        facts=f"this is the part of rank {home.rank} of {size}",
        why="A state is in parts on all ranks of its mesh.",
        fix="pass the lifted state of a simulation, or call it on every rank of the job",
        rank=home.rank,
        size=size,
    )
