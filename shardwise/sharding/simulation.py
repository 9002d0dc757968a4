"""All ranks of a mesh in one process: one thread a rank, one rank running at a time.

[Note: the baton]
Each rank is a thread that runs real, plain-tensor code. Exactly one thread holds the baton; it runs
until it needs its peers (a collective), leaves its contribution and hands the baton to the next
rank that can go on. The last peer to arrive performs the collective for all of them, in rank order.
So a simulated job is deterministic, every rank may take its own branch or hold data of its own
size, and what would hang a real job - ranks that wait for different things, or one that ended early
- is seen at once, because then nobody can take the baton. The default random generator travels with
the baton: each rank has its own stream.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.sharding.errors import SimulationError
from shardwise.sharding.mesh import Mesh


@dataclass
class _Wait:
    """What a rank waits for: `key` must be the same for all of `peers`."""

    key: tuple[Any, ...]
    peers: tuple[int, ...]
    payload: Any
    result: Any = None
    done: bool = False


@dataclass
class _Rank:
    """One simulated rank while `World.run` is on its way."""

    wait: _Wait | None = None
    rng: Tensor | None = None
    finished: bool = False
    value: Any = None
    turn: threading.Event = field(default_factory=threading.Event)


class _Stopped(BaseException):
    """Unwinds a simulated rank after another one has failed."""


class World:
    """The ranks of one simulated mesh; see [Note: the baton]."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._ranks: list[_Rank] = []
        self._failed: BaseException | None = None
        self._over = threading.Event()
        self._rng: list[Tensor | None] = [None] * mesh.size

    def run(self, main: Callable[[int], Any]) -> list[Any]:
        """Call `main(rank)` for every rank and return the results in rank order.

        Raises:
            SimulationError: ranks wait for each other for ever.
            BaseException: whatever the first rank to fail raised.
        """
        if any(not rank.finished for rank in self._ranks):
            raise SimulationError(
                "A simulated program was called while another call on the same ranks is running.",
                where="a program used inside loss_fn, or by two threads",
                why="All ranks take part in a call; inside one they are busy.",
                fix="call the other program before, and pass its result in the batch",
            )
        self._ranks = [_Rank(rng=rng) for rng in self._rng]
        self._failed = None
        self._over.clear()
        outside = torch.get_rng_state()
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._thread, rank, main), daemon=True
            )
            for rank in range(self.mesh.size)
        ]
        for thread in threads:
            thread.start()
        self._resume(0)
        self._over.wait()
        for thread in threads:
            thread.join()
        torch.set_rng_state(outside)
        self._rng = [rank.rng for rank in self._ranks]
        values = [rank.value for rank in self._ranks]
        failed, self._failed = self._failed, None
        self._ranks = []
        try:
            if failed is not None:
                raise failed
            return values
        finally:
            del failed  # its traceback holds this frame

    def exchange(
        self,
        rank: int,
        peers: tuple[int, ...],
        key: tuple[Any, ...],
        payload: Any,
        combine: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Meet `peers`; the last to arrive calls `combine(payloads)`, one result for each."""
        wait = _Wait(key, peers, payload)
        self._ranks[rank].wait = wait
        waits = [self._ranks[peer].wait for peer in peers]
        met = [w for w in waits if w is not None and w.key == key and not w.done]
        if len(met) == len(peers):
            for one, result in zip(met, combine([w.payload for w in met]), strict=True):
                one.result, one.done = result, True
        else:
            self._yield_from(rank)
        self._ranks[rank].wait = None
        return wait.result

    def _thread(self, rank: int, main: Callable[[int], Any]) -> None:
        me = self._ranks[rank]
        me.turn.wait()
        try:
            if self._failed is None:
                self._load_rng(me)
                me.value = main(rank)
        except _Stopped:
            pass
        except BaseException as error:
            self._failed = self._failed or error
        me.finished = True
        me.rng = torch.get_rng_state()
        self._pass_on(rank)

    def _yield_from(self, rank: int) -> None:
        me = self._ranks[rank]
        me.rng = torch.get_rng_state()
        me.turn.clear()
        self._pass_on(rank)
        me.turn.wait()
        if self._failed is not None:
            raise _Stopped
        self._load_rng(me)

    def _pass_on(self, rank: int) -> None:
        """Hand the baton to the next rank that can go on."""
        size = self.mesh.size
        order = [(rank + 1 + i) % size for i in range(size)]
        alive = [r for r in order if not self._ranks[r].finished]
        if not alive:
            self._over.set()
            return
        for other in alive:
            wait = self._ranks[other].wait
            if self._failed is not None or wait is None or wait.done:
                self._resume(other)
                return
        self._failed = self._deadlock()
        self._resume(alive[0])

    def _resume(self, rank: int) -> None:
        self._ranks[rank].turn.set()

    @staticmethod
    def _load_rng(me: _Rank) -> None:
        if me.rng is not None:
            torch.set_rng_state(me.rng)

    def _deadlock(self) -> SimulationError:
        facts = []
        for index, rank in enumerate(self._ranks):
            state = "has ended" if rank.finished else f"waits in {_describe(rank.wait)}"
            facts.append(f"rank {index} {state}")
        return SimulationError(
            "The simulated ranks wait for each other for ever; a real job would hang here.",
            facts=facts,
            why="Every rank of an axis must run the same collectives in the same order.",
            fix="look for Python branches that differ by rank around the calls named above",
        )


def _describe(wait: _Wait | None) -> str:
    return " ".join(str(part) for part in wait.key) if wait is not None else "nothing"


class _Message(NamedTuple):
    """What one rank puts into an all-to-all and wants from it."""

    out: Tensor
    mine: Tensor
    received: tuple[int, ...]
    sent: tuple[int, ...]


class Simulated:
    """The transport of one simulated rank.

    Args:
        world: all simulated ranks.
        rank: this one.
        mesh: whose axes are named; that of the world may have them in one piece.
    """

    def __init__(self, world: World, rank: int, mesh: Mesh | None = None) -> None:
        self.world = world
        self.rank = rank
        self.mesh = mesh or world.mesh

    def all_gather(self, out: Tensor, mine: Tensor, axis: str) -> None:
        """See `Transport.all_gather`."""

        def combine(pairs: list[tuple[Tensor, Tensor]]) -> list[None]:
            whole = torch.cat([part.reshape(-1) for _, part in pairs])
            for target, _ in pairs:
                target.view(-1).copy_(whole)
            return [None] * len(pairs)

        self._meet("all_gather", axis, mine, (out, mine), combine)

    def reduce_scatter(self, out: Tensor, whole: Tensor, axis: str) -> None:
        """See `Transport.reduce_scatter`."""

        def combine(pairs: list[tuple[Tensor, Tensor]]) -> list[None]:
            wholes = [source.view(len(pairs), -1) for _, source in pairs]
            for index, (target, _) in enumerate(pairs):
                total = wholes[0][index].clone()
                for other in wholes[1:]:
                    total += other[index]
                target.view(-1).copy_(total)
            return [None] * len(pairs)

        self._meet("reduce_scatter", axis, whole, (out, whole), combine)

    def all_reduce(self, whole: Tensor, axis: str) -> None:
        """See `Transport.all_reduce`."""

        def combine(wholes: list[Tensor]) -> list[None]:
            total = wholes[0].clone()
            for other in wholes[1:]:
                total += other
            for target in wholes:
                target.copy_(total)
            return [None] * len(wholes)

        self._meet("all_reduce", axis, whole, whole, combine)

    def all_to_all(
        self, out: Tensor, mine: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """See `Transport.all_to_all`."""

        def combine(given: list[_Message]) -> list[None]:
            parts = [one.mine.split(list(one.sent)) for one in given]
            for rank, one in enumerate(given):
                arrived = [part[rank] for part in parts]
                if [part.numel() for part in arrived] != list(one.received):
                    raise SimulationError(
                        f"Rank {rank} expects other elements than its peers send.",
                        facts=[f"sent {[p.numel() for p in arrived]}", f"expected {one.received}"],
                        why="Both sides of an all-to-all follow from one plan.",
                        fix="pass the same state and plan on every rank",
                        rank=rank,
                    )
                torch.cat(arrived, out=one.out)
            return [None] * len(given)

        message = _Message(out, mine, tuple(received), tuple(sent))
        key = ("all_to_all", mine.dtype)
        with torch.no_grad():
            self.world.exchange(self.rank, self._everyone, key, message, combine)

    def broadcast(self, whole: Tensor) -> None:
        """See `Transport.broadcast`."""

        def combine(wholes: list[Tensor]) -> list[None]:
            for target in wholes[1:]:
                target.copy_(wholes[0])
            return [None] * len(wholes)

        key = ("broadcast", tuple(whole.shape), whole.dtype)
        self.world.exchange(self.rank, self._everyone, key, whole, combine)

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Transport.gather_objects`."""
        return self.world.exchange(
            self.rank, self._everyone, ("gather_objects",), value, lambda all_: [all_] * len(all_)
        )

    @property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world.mesh.size))

    def _meet(
        self,
        kind: str,
        axis: str,
        tensor: Tensor,
        payload: Any,
        combine: Callable[[list[Any]], list[None]],
    ) -> None:
        peers = self.mesh.peers(axis, self.rank)
        key = (kind, axis, tensor.numel(), tensor.dtype)
        with torch.no_grad():
            self.world.exchange(self.rank, peers, key, payload, combine)


_CURRENT: contextvars.ContextVar[World | None] = contextvars.ContextVar("simulation", default=None)


@contextmanager
def simulate(mesh: Mesh) -> Generator[World]:
    """Run all ranks of `mesh` in this process; `bind` inside the block uses them.

    Values that differ by rank come back as `Lifted`; read them with `to_global`. Costs the work of
    all ranks, one after the other, plus a thread switch per collective.

    Raises:
        SimulationError: a process group exists (its collectives would mix with these), or blocks
            are nested.

    >>> with simulate(Mesh(fsdp=2)) as world:
    ...     world.run(lambda rank: rank * 10)
    [0, 10]
    """
    if dist.is_available() and dist.is_initialized():
        raise SimulationError(
            f"simulate({mesh!r}) inside a job of {dist.get_world_size()} ranks.",
            why="Simulated ranks live in one process; a process group is already set up here.",
            fix="drop simulate(...) in a real job, or run this script without a launcher",
            world=dist.get_world_size(),
        )
    if _CURRENT.get() is not None:
        raise SimulationError(
            f"simulate({mesh!r}) inside another simulate block.",
            why="One simulated job runs at a time.",
            fix="close the outer block first",
        )
    world = World(mesh)
    token = _CURRENT.set(world)
    try:
        yield world
    finally:
        _CURRENT.reset(token)


def current_world() -> World | None:
    """The simulation of the block around this call, if there is one."""
    return _CURRENT.get()
