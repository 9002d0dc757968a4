"""Saves that go on while training does: a copy, a thread, and one at a time.

[Note: saves in the background]
`save_async` keeps training waiting for a copy in host memory of what this rank writes, and for the
save before it if that has not ended: no two are ever in flight. Later steps change live memory and
not the copy. Writing, the vote and the rename are those of `save`, in a thread, over a group that
the first call makes for all that follow: see [Note: beside training]. What fails there is raised,
on all ranks, by the first of `wait`, the next save or restore and the end of a `Checkpointer`.
In a simulation, where one rank runs at a time, the save is finished when `save_async` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shardwise.sharding.beside import Beside
from shardwise.sharding.checkpoint.host_copy import HostCopy
from shardwise.sharding.movement import Transport
from shardwise.sharding.simulation import Simulated
from shardwise.sharding.transport import make_beside
from shardwise.transforms.rank_program import RankProgram
from shardwise.transforms.saving import Saving

Work = Callable[[Saving, Transport], None]
"""What is done with a copy, in the thread, with exchanges that belong to the thread."""


class Background:
    """What one rank writes beside training, at most one save at a time.

    Args:
        rank: whose states are written.
    """

    def __init__(self, rank: RankProgram) -> None:
        self._mover = rank.mover
        self._copy = HostCopy(rank.device)
        self._transport: Transport | None = None
        self._last: Beside | None = None

    @property
    def copy_bytes(self) -> int:
        """Host memory that is held for copies."""
        return self._copy.nbytes

    def settle(self) -> None:
        """Wait for the save in flight, if any.

        Raises:
            CheckpointError: it has failed and nobody has been told so; every rank raises.
        """
        last, self._last = self._last, None
        if last is not None:
            last.settle()

    def start(self, saving: Saving, work: Work, what: str) -> Beside | None:
        """Copy what is to be written, and do the rest in a thread.

        Args:
            saving: with views of live memory.
            work: what to do with it.
            what: name of the call, for errors.

        Returns:
            The thread; None in a simulation, where the work has been done.
        """
        transport = self._mover.transport
        if isinstance(transport, Simulated):
            work(saving, transport)
            return None
        self.settle()
        if self._transport is None:
            self._transport = make_beside(transport)
        aside = self._transport
        copy = replace(saving, chunks=self._copy.take(saving.chunks))
        place = self._mover.rank, self._mover.mesh.size
        self._last = Beside(lambda: work(copy, aside), what, place)
        self._last.start()
        return self._last


@dataclass(frozen=True)
class Writing:
    """A save that goes on in the background.

    Args:
        path: of the checkpoint, once it is complete.
        stall_seconds: how long training has waited for it, and for the save before it.
    """

    path: str
    stall_seconds: float
    _thread: Beside | None = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether this rank has ended it, well or not; ranks may differ for a moment."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete on all ranks.

        Raises:
            CheckpointError: it failed; every rank raises.
            RankError: this rank has lost its peers.
        """
        if self._thread is not None:
            self._thread.result()


def since(start: float) -> float:
    """Seconds since a reading of `time.perf_counter`."""
    return time.perf_counter() - start
