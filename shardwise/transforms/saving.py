"""`program.save` on one rank: what a state says about itself, and the exchanges of a save."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.sharding.checkpoint.extra import pack_extra, pack_value
from shardwise.sharding.checkpoint.manifest import Stored
from shardwise.sharding.checkpoint.placing import digest, own_chunks, place
from shardwise.sharding.checkpoint.records import Record, records_of, values_of
from shardwise.sharding.checkpoint.writing import Saving, Session, write_checkpoint
from shardwise.sharding.compat import job_store
from shardwise.sharding.errors import CheckpointError, RankError
from shardwise.sharding.leaves import Home
from shardwise.sharding.lost import is_lost
from shardwise.sharding.movement import Mover, Transport
from shardwise.sharding.plan import Plan
from shardwise.sharding.state import State, adopt
from shardwise.sharding.transport import spans_processes

_ARRIVED = "shardwise/save/"
"""Keys of the job's store that say which save a rank has begun."""


class Saver:
    """The saves of one rank of a program.

    Args:
        plan: of the program.
        home: of the program.
        mover: the rank and its peers.
        device: of its tensors.
    """

    def __init__(self, plan: Plan, home: Home, mover: Mover, device: torch.device) -> None:
        self._plan = plan
        self._plan_text = ""
        self._home = home
        self._mover = mover
        self._device = device
        self._session = Session()
        self._count = 0
        self._placed: tuple[Any, tuple[Stored, ...], str] = ((), (), "")

    def save(self, path: str | os.PathLike[str], state: State, *, overwrite: bool, at: str) -> None:
        """Write a state; complete on return. See `Program.save`.

        Args:
            path: of the directory to be made.
            state: of this program; stays usable.
            overwrite: whether a checkpoint of that name may be replaced.
            at: where the user calls it.

        Raises:
            CheckpointError: on every rank, or this rank has lost its peers.
        """
        mover = self._mover
        self.arrive()
        write = self.to_disk(path, overwrite=overwrite, at=at, lose=mover.lose)
        write(self.prepare(state), mover.transport)

    def to_disk(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        at: str,
        lose: Callable[[RuntimeError], RankError],
    ) -> Callable[[Saving, Transport], None]:
        """What writes a state that was prepared, with the exchanges of whoever calls it.

        Args:
            path: of the directory to be made.
            overwrite: whether a checkpoint of that name may be replaced.
            at: where the user calls for it.
            lose: explains the loss of peers.
        """

        def write(saving: Saving, transport: Transport) -> None:
            try:
                write_checkpoint(
                    saving,
                    absolute(path),
                    rank=self._mover.rank,
                    gather=transport.gather_objects,
                    session=self._session,
                    overwrite=overwrite,
                )
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                raise self.alone(lose(error), str(path), at) from error

        return write

    def alone(self, lost: RankError, path: str, at: str) -> CheckpointError:
        """The error of a rank that others have not joined.

        Args:
            lost: what became of the exchange.
            path: of the checkpoint.
            at: where the user called for it.
        """
        return _alone(lost, self._absent(), path, at)

    def prepare(self, state: State) -> Saving:
        """What this rank saves; local, and what is wrong with it is in `fault`.

        Args:
            state: of this program; the tensors of the result are views of it.
        """
        self._plan_text = self._plan_text or self._plan.to_json()
        blank = Saving(0, self._plan_text, (), "", (), {}, None, self._device)
        try:
            self._home.check(state.home, "state")
            state = adopt(state)
            packed = pack_extra(state.extra, self._home)
            values = {name: pack_value(one, name) for name, one in values_of(state).items()}
            records = (*in_model_order(records_of(state), self._plan), *packed.records)
            tensors, layout = self._place(records)
            return replace(
                blank,
                step=int(state.step),
                tensors=tensors,
                digest=f"{layout}{_digest_of(values)}",
                chunks=tuple(own_chunks(tensors, records, self._mover.rank)),
                values=values,
                extra=packed.tree,
            )
        except Exception as error:
            return replace(blank, fault=error)

    def _place(self, records: Sequence[Record]) -> tuple[tuple[Stored, ...], str]:
        """Layouts are those of the last save, but for what the user has put into `extra`."""
        key = [(r.name, r.dtype, r.derived, r.lying.entry, r.lying.grid.axes) for r in records]
        if key != self._placed[0]:
            tensors = place(records, self._mover.mesh.size)
            self._placed = key, tensors, digest(tensors)
        return self._placed[1:]

    def arrive(self) -> None:
        """Note for other ranks that this one has begun a save."""
        self._count += 1
        store = self._store()
        if store is not None:
            store.set(f"{_ARRIVED}{self._mover.rank}", str(self._count))

    def _store(self) -> Any:
        """Of the job; simulated ranks have none, and their own way to see who is absent."""
        return job_store() if spans_processes(self._mover.transport) else None

    def _absent(self) -> list[int] | None:
        """Ranks that have not begun this save; None if nobody can tell."""
        store = self._store()
        if store is None:
            return None
        keys = [f"{_ARRIVED}{rank}" for rank in range(self._mover.mesh.size)]
        try:
            return [
                rank
                for rank, key in enumerate(keys)
                if not store.check([key]) or int(store.get(key)) < self._count
            ]
        except RuntimeError:  # the rank that holds the store has ended
            return None


def in_model_order(records: Sequence[Record], plan: Plan) -> list[Record]:
    """Records of parameters in the order of the module, within each part of a state.

    Args:
        records: as buckets have them.
        plan: that knows the module.
    """
    index = {info.path: number for number, info in enumerate(plan.infos)}
    sections: dict[str, list[Record]] = {}
    for record in records:
        sections.setdefault(record.name.removesuffix(record.of), []).append(record)
    return [
        record
        for section in sections.values()
        for record in sorted(section, key=lambda one: index.get(one.of, -1))
    ]


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path as every rank must see it: not resolved, as mounts may differ."""
    return Path(os.path.abspath(path))


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]


def _alone(lost: RankError, absent: list[int] | None, path: str, at: str) -> CheckpointError:
    facts = list(lost.facts)
    if absent:
        facts.insert(0, f"have not called it: rank {', '.join(map(str, absent))}")
    return CheckpointError(
        f"program.save was not joined by all ranks: {lost.what}",
        where=f"program.save({path!r}) at {at}",
        facts=facts,
        why="Every rank writes its part, so all ranks call save, at the same step. The path "
        "holds a whole checkpoint or none, and the state is unchanged.",
        fix="call save on every rank, not under `if rank == 0`; where ranks decide by themselves, "
        "decide together with program.agree(...)",
        path=path,
        absent=tuple(absent or ()),
        at=at,
    )
