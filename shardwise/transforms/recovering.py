"""Where a run goes on from: the newest of its checkpoints on disk and its copies in memory.

Rank 0 looks at the disk and every rank at the stores of its node; all tell all what they see, and
so decide alike. A copy in memory is taken if it is whole and not older than what is on disk; if it
turns out to be damaged, the disk is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.sharding.checkpoint.latest import Latest, latest
from shardwise.sharding.checkpoint.records import Record, records_of
from shardwise.sharding.checkpoint.stores import Copy, Spread, newest_whole
from shardwise.sharding.errors import CheckpointError
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.state import State
from shardwise.sharding.tiers import NOWHERE
from shardwise.transforms.casts import cast_buffers
from shardwise.transforms.filling import blank_state
from shardwise.transforms.peers import PeerCopies
from shardwise.transforms.program import Program, on_each
from shardwise.transforms.rank_program import RankProgram
from shardwise.transforms.restoring import FromCheckpoint, from_checkpoint

_CALL = "resume_or_init"

Peers = Mapping[int, PeerCopies]
"""By rank: of this process, or of all simulated ones; empty if the run keeps none."""


class Origins(NamedTuple):
    """What a run can go on from.

    Args:
        disk: the newest checkpoint on disk.
        memory: the newest save that is whole in the stores of all nodes.
        skipped: what was passed over, and why.
    """

    disk: Latest
    memory: Spread | None
    skipped: tuple[str, ...]

    @property
    def memory_wins(self) -> bool:
        """Whether the copies in memory are the newest."""
        return self.memory is not None and self.memory.step >= self.disk.step

    def without_memory(self, why: str) -> Origins:
        """The same if the copies in memory cannot be used."""
        assert self.memory is not None
        return self._replace(memory=None, skipped=(*self.skipped, _skipped(self.memory.step, why)))


class _Seen(NamedTuple):
    """What one rank sees; only rank 0 looks at the disk."""

    disk: Latest | None
    copies: list[Copy]
    passed: list[str]


def look(program: Program, folder: Path, peers: Peers) -> Origins:
    """What there is to go on from; all ranks take part and get the same answer.

    Args:
        program: that is to go on.
        folder: of the run.
        peers: that keep copies.
    """

    def run(rank: RankProgram) -> Origins:
        mine = rank.mover.rank
        copies, passed = peers[mine].found() if peers else ([], [])
        seen = _Seen(latest(folder) if mine == 0 else None, copies, passed)
        told: list[_Seen] = rank.mover.transport.gather_objects(seen)
        disk = told[0].disk
        assert disk is not None
        memory, lacking = newest_whole([one.copies for one in told])
        skipped = [*disk.skipped, *sorted({text for one in told for text in one.passed})]
        skipped += [_skipped(step, why) for step, why in lacking.items() if step > disk.step]
        return Origins(disk, memory, tuple(skipped))

    origins = on_each(program, _CALL, run)
    return origins.ranks[0] if isinstance(origins, Lifted) else origins


def recover(
    program: Program, origins: Origins, peers: Peers, *, at: str, seed: int | None, **fits: Any
) -> tuple[State | None, Origins]:
    """The state of the newest of them; all ranks take part.

    Args:
        program: that goes on.
        origins: from `look`.
        peers: that keep copies.
        at: where the user calls for it.
        seed: see `Program.init`.
        fits: arguments of `from_checkpoint`.

    Returns:
        The state, None if there is nothing, and what it came from.

    Raises:
        CheckpointError: it does not fit, or what is on disk is damaged; on every rank.
    """
    if origins.memory is not None and origins.memory_wins:
        try:
            state = _from_memory(program, origins.memory, peers, at=at, seed=seed, fits=fits)
            return state, origins
        except CheckpointError as error:
            if origins.disk.path is None:
                raise
            origins = origins.without_memory(error.what)
    if origins.disk.path is None:
        return None, origins
    source: FromCheckpoint = from_checkpoint(origins.disk.path, **fits)
    return program.init(source, seed=seed), origins


def _from_memory(
    program: Program,
    spread: Spread,
    peers: Peers,
    *,
    at: str,
    seed: int | None,
    fits: Mapping[str, Any],
) -> State:
    def gather(rank: RankProgram) -> str:
        own = peers[rank.mover.rank]
        return str(own.gather(spread, _layouts(rank), rank.background.transport(at)))

    try:
        places = on_each(program, _CALL, gather)
        return program.init(from_checkpoint(places, **fits), seed=seed)
    finally:
        for own in peers.values():
            own.release()


def _layouts(rank: RankProgram) -> Sequence[Record]:
    """The records of a state that takes no memory."""
    lowering = rank.lowering
    buffers = cast_buffers(dict(lowering.module.named_buffers()), lowering.plan.precision.buffers)
    return records_of(blank_state(lowering, rank.home, buffers, NOWHERE))


def _skipped(step: int, why: str) -> str:
    return f"peer copies of step {step}: {why}"
