"""Saves that go on while training does: a copy, a thread, and one at a time.

[Note: saves in the background]
`save_async` keeps training waiting for a copy in host memory of what this rank writes, and for the
save before it if that has not ended: no two are ever in flight. Later steps change live memory and
not the copy. Writing, the votes and the rename are those of `save`, in a thread, over a group that
the first call makes for all that follow: see [Note: beside training]. What fails there is raised,
on all ranks, by the first of `wait`, the next save or restore and the end of a `Checkpointer`.
In a simulation, where one rank runs at a time, the save is finished when `save_async` returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwise.sharding.beside import Beside
from shardwise.sharding.checkpoint.host_copy import HostCopy
from shardwise.sharding.checkpoint.writing import Saving
from shardwise.sharding.errors import RankError
from shardwise.sharding.lost import is_lost, lost_peers
from shardwise.sharding.movement import Mover, Transport
from shardwise.sharding.simulation import Simulated
from shardwise.sharding.state import State
from shardwise.sharding.tiers import Memories
from shardwise.sharding.transport import make_beside
from shardwise.transforms.saving import Saver

Work = Callable[[Saving, Transport], None]
"""What is done with a state that is saved, with exchanges that may be those of another thread."""


class Background:
    """What one rank writes beside training, at most one save at a time.

    Args:
        saver: of the rank.
        mover: the rank and its peers.
        memories: of its tensors.
    """

    def __init__(self, saver: Saver, mover: Mover, memories: Memories) -> None:
        self._saver = saver
        self._mover = mover
        self._copy = HostCopy(memories)
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

    def save(
        self, path: str | os.PathLike[str], state: State, *, overwrite: bool, at: str
    ) -> Beside | None:
        """See `Program.save_async`; None in a simulation, where the save has ended."""
        step = int(state.step)
        write = self._saver.to_disk(path, overwrite=overwrite, at=at, lose=self.lose(step))
        return self.start(state, [write], at)

    def start(self, state: State, works: Sequence[Work], at: str) -> Beside | None:
        """Copy what this rank writes of a state, and do the rest in a thread.

        Args:
            state: that is saved; stays usable.
            works: what to do with it, one after another; see `run_all`.
            at: where the user calls for it.

        Returns:
            The thread; None in a simulation, where the work has been done.
        """
        self.settle()
        self._saver.arrive()
        transport = self.transport(at)
        saving = self._saver.prepare(state)
        if isinstance(transport, Simulated):
            run_all(works, saving, transport)
            return None
        copy = replace(saving, chunks=self._copy.take(saving.chunks), device=torch.device("cpu"))
        lose = self.lose(saving.step)

        def work() -> None:
            try:
                run_all(works, copy, transport)
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                raise lose(error) from error

        self._last = Beside(work, f"save_async {saving.step}")
        self._last.start()
        return self._last

    def run(self, state: State, works: Sequence[Work], at: str) -> None:
        """Do the same at once and without a copy.

        Args:
            state: that is saved; stays usable.
            works: what to do with it.
            at: where the user calls for it.
        """
        self.settle()
        self._saver.arrive()
        run_all(works, self._saver.prepare(state), self.transport(at))

    def transport(self, at: str) -> Transport:
        """Exchanges that do not belong to training; a collective, the first time."""
        if self._transport is None:
            try:
                self._transport = make_beside(self._mover.transport)
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                raise self._saver.alone(self._mover.lose(error), "the first save", at) from error
        return self._transport

    def lose(self, step: int) -> Callable[[RuntimeError], RankError]:
        """What explains the loss of peers in the thread."""
        rank, ranks = self._mover.rank, self._mover.mesh.size

        def explained(error: RuntimeError) -> RankError:
            return lost_peers(
                str(error),
                rank=rank,
                peers=[other for other in range(ranks) if other != rank],
                call=f"save_async {step}",
                place="in the background",
                expected="all ranks tell how they have written",
            )

        return explained


def run_all(works: Sequence[Work], saving: Saving, transport: Transport) -> None:
    """Do one after another; one that fails on all ranks does not keep the others from being done.

    A rank that has lost its peers does nothing more with them.

    Args:
        works: what to do.
        saving: with what.
        transport: exchanges.

    Raises:
        Exception: that of the first that failed.
    """
    failures: list[Exception] = []
    for work in works:
        try:
            work(saving, transport)
        except Exception as error:
            if isinstance(error, RuntimeError) and is_lost(error):
                raise
            failures.append(error)
    try:
        if failures:
            raise failures[0]
    finally:
        del failures  # their tracebacks hold this frame


@dataclass(frozen=True)
class Writing:
    """A save that goes on in the background.

    Args:
        path: of the checkpoint, once it is complete.
        stall_seconds: how long training has waited for it, and for the save before it.
        copy_bytes: host memory that this rank holds for copies: the elements that it writes, at
            multiples of 64 bytes; none in a simulation.
    """

    path: str
    stall_seconds: float
    copy_bytes: int
    _thread: Beside | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Whether this rank has ended it, well or not; ranks may differ for a moment."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete on all ranks.

        Raises:
            CheckpointError: it failed, or not all ranks have called `save_async`; every rank
                that has called it raises.
        """
        if self._thread is not None:
            self._thread.result()
