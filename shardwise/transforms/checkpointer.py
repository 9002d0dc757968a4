"""`Checkpointer`: when to save, what to keep, where to go on from, and when to stop.

[Note: a run and its checkpoints]
A run is a directory of checkpoints, `step-00000120` and so on. `resume_or_init` goes on from the
newest complete one, whatever plan and number of ranks wrote it, or makes a fresh state. Rank 0
looks and all follow its answer, since file systems may show each rank another picture. Older ones
go after a newer one is complete on disk, so a run that has a complete checkpoint always has one.

[Note: agreeing to stop]
Schedulers send SIGTERM before they end a job, and not every rank gets it in the same step. So at
each step (or every `agree_every` steps) ranks tell whether they were asked, in one packed reduction
of 8 bytes; if any was, all save and all see `stopping`. Repeated signals ask for nothing more.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.sharding.checkpoint.folders import remove
from shardwise.sharding.checkpoint.keeping import (
    complete_steps,
    name_of,
    superseded,
)
from shardwise.sharding.checkpoint.writing import Saving
from shardwise.sharding.errors import CheckpointError, ShardwiseError, strict_keywords
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.movement import Transport
from shardwise.sharding.scope import call_site
from shardwise.sharding.state import State
from shardwise.transforms.background import Background, Work
from shardwise.transforms.peers import PeerCopies
from shardwise.transforms.program import Program, on_each
from shardwise.transforms.rank_program import RankProgram
from shardwise.transforms.recovering import look, recover
from shardwise.transforms.stopping import StopRequest


class Checkpointer:
    """Saves a run every few steps, goes on from its newest checkpoint, and stops when asked to.

    Use it as a context manager around the training loop::

        with sw.Checkpointer(program, "runs/one", every=100) as checkpointer:
            state = checkpointer.resume_or_init(0)
            while checkpointer.step < 10_000 and not checkpointer.stopping:
                state, metrics = program.step(state, batch(checkpointer.step))
                checkpointer.after_step(state)

    What else a run needs to go on, such as the place in the data or the state of a generator, goes
    into the state: `checkpointer.after_step(state.with_extra({"cursor": cursor}))`; after a resume
    it is in `checkpointer.extra`.

    Args:
        program: whose states are saved; all methods are collective.
        folder: of the run, on a file system that all ranks share.
        every: steps from one checkpoint to the next.
        keep: how many of the newest stay.
        keep_every: checkpoints whose step is a multiple of it stay as well.
        async_: save as `save_async` does, or have training wait as `save` does.
        stop_on: signals that ask to save and stop, while the context is open in the main thread.
        agree_every: ranks agree to stop at multiples of it. Each costs one packed reduction of
            8 bytes a rank.
        peer_dir: a directory in a memory file system, such as `/dev/shm/run`, in which each node
            keeps copies, so that a restart need not read the disk; see [Note: peer copies].
        peer_every: steps from one such copy to the next; default `every`.

    Raises:
        CheckpointError: numbers of steps that are none.

    >>> Checkpointer(None, "runs/one", every=0)
    Traceback (most recent call last):
    shardwise.sharding.errors.CheckpointError: Checkpointer(every=0) is not a number of steps.
      It says how often something is done or how much of it is kept.
      Fix: every=1 or more
    """

    @strict_keywords
    def __init__(
        self,
        program: Program,
        folder: str | os.PathLike[str],
        *,
        every: int,
        keep: int = 3,
        keep_every: int | None = None,
        async_: bool = True,
        stop_on: Sequence[signal.Signals] = (signal.SIGTERM,),
        agree_every: int = 1,
        peer_dir: str | os.PathLike[str] | Lifted | None = None,
        peer_every: int | None = None,
    ) -> None:
        numbers = {"every": every, "keep": keep, "agree_every": agree_every}
        numbers |= {"keep_every": keep_every, "peer_every": peer_every}
        for name, value in numbers.items():
            _check(name, value)
        self._program = program
        self.folder = Path(os.path.abspath(folder))
        self._every = every
        self._keep = keep
        self._keep_every = keep_every
        self._async = async_
        self._agree_every = agree_every
        self._request = StopRequest(stop_on)
        self._is_first = False
        self._backgrounds = list[Background]()
        self._peers: dict[int, PeerCopies] = {}
        on_each(program, "Checkpointer", self._take, peer_dir)
        self._peer_every = peer_every or every
        self._saved = self._copied = -1
        self._left: list[str] = []
        self.step = 0
        """Steps that the state of the last call has taken."""
        self.stopping = False
        """Whether ranks have agreed to stop; the state is saved."""
        self.resumed_from: str | None = None
        """The checkpoint that the run went on from; None for a fresh state."""
        self.extra: Any = None
        """`extra` of the state that the run went on from; in a simulation that of rank 0."""
        self.skipped: tuple[str, ...] = ()
        """What was there and was passed over when the run went on, and why."""

    @strict_keywords
    def resume_or_init(
        self,
        source: Any = 0,
        *,
        seed: int | None = None,
        partial: Sequence[str] | str = (),
        cast: bool = False,
    ) -> State:
        """The state of the newest complete checkpoint, or `program.init(source)` if there is none.

        Args:
            source: for a fresh state: a seed, `from_module(model)` and so on.
            seed: beside another source, or for what dropout draws from after a resume.
            partial: see `from_checkpoint`.
            cast: likewise.

        Raises:
            CheckpointError: the newest checkpoint is damaged or does not fit; on every rank.
        """
        origins = look(self._program, self.folder, self._peers)
        state, origins = recover(
            *(self._program, origins, self._peers),
            at=call_site(),
            seed=seed,
            partial=partial,
            cast=cast,
        )
        if state is None:
            state = self._program.init(source, seed=seed)
        else:
            self.resumed_from = "peer copies" if origins.memory_wins else str(origins.disk.path)
            self._saved = max(self._saved, origins.disk.step)
            self.extra = _first(state).extra
        self.step = step_count(state)
        self.skipped = origins.skipped
        if self.skipped and self._is_first:
            warnings.warn(
                f"The run goes on from step {self.step} ({self.resumed_from or 'a fresh state'}); "
                f"passed over: {'; '.join(self.skipped)}.",
                RuntimeWarning,
                stacklevel=3,
            )
        return state

    def after_step(self, state: State) -> None:
        """Save if it is time to, and if the job was asked to stop; call it after every step.

        Args:
            state: of the step; stays usable.

        Raises:
            CheckpointError: this save, or the one before in the background, has failed; on every
                rank. The state is unharmed.
        """
        self.step = step_count(state)
        asked = self.step % self._agree_every == 0
        if asked and not self._program.agree(not self._request.noted):
            self._save(state, call_site(), wait=True)
            self.stopping = True
        elif self.step % self._every == 0:
            self._save(state, call_site(), wait=not self._async)
        elif self._peers and self.step % self._peer_every == 0:
            self._copy(state, call_site(), [])

    def save(self, state: State) -> None:
        """Save now, unless this step is saved; complete when `wait` returns.

        Args:
            state: stays usable.

        Raises:
            CheckpointError: as `after_step`.
        """
        self.step = step_count(state)
        self._save(state, call_site(), wait=not self._async)

    def wait(self) -> None:
        """Return when the last save is complete on all ranks.

        Raises:
            CheckpointError: it has failed; on every rank.
        """
        for background in self._backgrounds:
            background.settle()
        self._tell_left()

    def __enter__(self) -> Checkpointer:
        self._request.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._request.__exit__()
        if kind is None:
            self.wait()
            return
        # What ended the block is what the user has to see.
        with suppress(ShardwiseError):
            self.wait()

    def _take(self, rank: RankProgram, peer_dir: Any) -> None:
        """Know a rank of this process; all simulated ones are."""
        self._backgrounds.append(rank.background)
        self._is_first |= rank.mover.rank == 0
        if peer_dir is not None:
            number, ranks = rank.mover.rank, rank.mover.mesh.size
            self._peers[number] = PeerCopies(Path(peer_dir), self.folder, number, ranks)

    # -- saving -----------------------------------------------------------------------------

    def _save(self, state: State, at: str, *, wait: bool) -> None:
        """To disk, unless this step is there; and to peers on the way."""
        if self.step != self._saved:
            self._copy(state, at, [self._to_disk], wait=wait)
            self._saved = self.step
        elif wait:
            self.wait()

    def _copy(
        self,
        state: State,
        at: str,
        to: Sequence[Callable[[RankProgram, str], Work]],
        *,
        wait: bool = False,
    ) -> None:
        self._tell_left()
        with_peers = self._peers and (to or self.step != self._copied)

        def run(rank: RankProgram, state: State) -> None:
            works = [self._peers[rank.mover.rank].keep] if with_peers else []
            works += [make(rank, at) for make in to]
            if wait or not self._async:
                rank.background.run(state, works, at)
            else:
                rank.background.start(state, works, at)

        if with_peers or to:
            on_each(self._program, f"save {name_of(self.step)}", run, state)
            self._copied = self.step

    def _to_disk(self, rank: RankProgram, at: str) -> Work:
        step, path = self.step, self.folder / name_of(self.step)
        lose = rank.background.lose(step)
        write = rank.saver.to_disk(path, overwrite=True, at=at, lose=lose)

        def save(saving: Saving, transport: Transport) -> None:
            write(saving, transport)
            if rank.mover.rank == 0:
                self._remove_old(step)

        return save

    def _remove_old(self, newest: int) -> None:
        """Rank 0, when a checkpoint is complete; what fails is told later, by the main thread."""
        steps = [step for step in complete_steps(self.folder) if step <= newest]
        for step in superseded(steps, keep=self._keep, keep_every=self._keep_every):
            try:
                remove(self.folder / name_of(step))
            except ShardwiseError as error:
                self._left.append(" ".join(str(error).split()))

    def _tell_left(self) -> None:
        while self._left:
            warnings.warn(
                f"An old checkpoint stays: {self._left.pop()}", RuntimeWarning, stacklevel=4
            )


def step_count(state: State) -> int:
    """Steps that a state has taken; it may be lifted."""
    return int(_first(state).step)


def _first(state: Any) -> State:
    return state.ranks[0] if isinstance(state, Lifted) else state


def _check(name: str, value: int | None) -> None:
    if value is None or (isinstance(value, int) and value >= 1):
        return
    raise CheckpointError(
        f"Checkpointer({name}={value!r}) is not a number of steps.",
        why="It says how often something is done or how much of it is kept.",
        fix=f"{name}=1 or more",
        value=value,
    )
