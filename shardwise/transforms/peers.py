"""Copies of a state in the memory of two nodes, and the way back from them after a restart.

[Note: costs of peer copies]
A generation takes twice the bytes of a rank's file in its store, and there are two generations
while a new one is written: four times in all, beside the copy of [Note: host copies]. A rank sends
its file once, in pieces, over the group of [Note: beside training], and there are two exchanges:
of checksums before, and of how it ended after.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.sharding.checkpoint.disk import disk_error
from shardwise.sharding.checkpoint.gathering import lay_out, memory_of, move, slices
from shardwise.sharding.checkpoint.manifest import MANIFEST, Manifest
from shardwise.sharding.checkpoint.placing import file_of
from shardwise.sharding.checkpoint.records import Record
from shardwise.sharding.checkpoint.stores import (
    Copy,
    Spread,
    Store,
    copies_in,
    run_name,
    shift_between,
)
from shardwise.sharding.checkpoint.writing import Saving, manifest_of, write_file
from shardwise.sharding.errors import CheckpointError
from shardwise.sharding.movement import Transport

PIECE_BYTES = 8 << 20
"""Of what is sent at once."""


class _Written(NamedTuple):
    """What a rank tells when it has written its own file, or could not."""

    node: str
    step: int
    digest: str
    fault: str
    sums: tuple[tuple[int, ...], ...]
    extra: Any


class PeerCopies:
    """What one rank keeps in the memory of its node: its own part of a state, and a peer's.

    Args:
        root: directory of the node's stores.
        folder: of the run on disk, which names it.
        rank: this rank.
        ranks: of the job.
    """

    def __init__(self, root: Path, folder: Path, rank: int, ranks: int) -> None:
        self.root = root
        self.run = run_name(str(folder))
        self.rank = rank
        self._ranks = ranks
        self._store = Store(root, self.run, rank)
        self._node = f"{socket.gethostname()} {os.path.abspath(root)}"

    def found(self) -> tuple[list[Copy], list[str]]:
        """What the stores of this node hold, and what was passed over; local."""
        return copies_in(self.root, self.run)

    def keep(self, saving: Saving, transport: Transport) -> None:
        """Write a generation, here and at a peer; when all have it, the older ones go.

        Args:
            saving: of this rank.
            transport: for tensors on the host.

        Raises:
            CheckpointError: some rank could not; on every rank, and older generations stay.
        """
        sums, fault = self._write_own(saving)
        told: list[_Written] = transport.gather_objects(
            _Written(self._node, saving.step, saving.digest, _text(fault), sums, saving.extra)
        )
        _check_told(fault, told)
        fault = None
        manifest = manifest_of(saving, [one.sums for one in told], [one.extra for one in told])
        fault = self._exchange(manifest, shift_between([one.node for one in told]), transport)
        if fault is None:
            fault = self._complete(saving.step, manifest)
        check_all(fault, transport.gather_objects(_text(fault)), saving.step, str(self.root))
        self._store.keep_only(saving.step)
        self._remove_strange([rank for rank, one in enumerate(told) if one.node == self._node])

    def _write_own(self, saving: Saving) -> tuple[tuple[tuple[int, ...], ...], Exception | None]:
        if saving.fault is not None:
            return (), saving.fault
        try:
            beside = self._store.begin(saving.step)
            own = beside / file_of(self.rank)
            return write_file(own, saving.chunks, torch.device("cpu")), None
        except OSError as error:
            return (), disk_error(error, self._store.path, "create", 0)
        except Exception as error:
            return (), error

    def _exchange(self, manifest: Manifest, shift: int, transport: Transport) -> Exception | None:
        """Send the own file to the peer that keeps it, and receive the one that is kept here.

        A rank that cannot write goes on receiving, so that its peers do not wait for it.
        """
        if not shift:
            return None
        to, source = (self.rank + shift) % self._ranks, (self.rank - shift) % self._ranks
        beside = self._store.beside(manifest.step)
        fault: Exception | None = None
        sizes = [manifest.files.get(file_of(rank), 0) for rank in range(self._ranks)]
        for start in range(0, max(sizes), PIECE_BYTES):
            sent, received = (
                min(max(sizes[rank] - start, 0), PIECE_BYTES) for rank in (self.rank, source)
            )
            mine, out = (torch.empty(n, dtype=torch.uint8) for n in (sent, received))
            try:
                _read_into(mine, beside / file_of(self.rank), start)
            except OSError as error:
                fault = fault or disk_error(error, beside, "read", sent, start)
            pending = transport.all_to_all(
                out, mine, _only(source, received, self._ranks), _only(to, sent, self._ranks)
            )
            if pending is not None:
                pending.wait()
            try:
                if fault is None and received:
                    with (beside / file_of(source)).open("ab") as file:
                        file.write(memory_of(out))
            except OSError as error:
                fault = disk_error(error, beside, "write", received, start)
        return fault

    def _complete(self, step: int, manifest: Manifest) -> Exception | None:
        own = self._store.beside(step) / file_of(self.rank)
        try:
            if own.name not in manifest.files:  # this rank writes nothing
                own.unlink()
            self._store.complete(step, manifest.to_json())
        except OSError as error:
            return disk_error(error, self._store.path, "rename", 0)
        return None

    def _remove_strange(self, ranks: Sequence[int]) -> None:
        """Stores that ranks of an earlier job have left; any rank of the node removes them."""
        own = {self._store.path.with_name(f"rank-{rank}") for rank in ranks}
        for path in self._store.path.parent.glob("rank-*"):
            if path not in own:
                shutil.rmtree(path, ignore_errors=True)

    # -- the way back -------------------------------------------------------------------------

    def gather(self, spread: Spread, records: Sequence[Record], transport: Transport) -> Path:
        """Make this rank's view of a spread save; all ranks take part.

        Args:
            spread: the save.
            records: of the state that is to be filled.
            transport: for tensors on the host.

        Returns:
            A directory that reads like a checkpoint; see `release`.

        Raises:
            CheckpointError: some rank could not; on every rank.
        """
        place = self._store.path / ".view"
        seen = min(min(holders) for holders in spread.holders.values())
        own = None
        if self.rank == seen:
            path = next(h[seen] for h in spread.holders.values() if seen in h)
            own = (Path(path) / MANIFEST).read_text()
        text: str = transport.gather_objects(own)[seen]
        manifest = Manifest.from_json(text, f"{MANIFEST} of rank {seen}'s store")
        fault: Exception | None = None
        try:
            lay_out(place, spread, text, self.rank, manifest.files)
        except OSError as error:
            fault = disk_error(error, place, "create", 0)
        check_all(fault, transport.gather_objects(_text(fault)), spread.step, str(self.root))
        rounds = slices(spread, manifest, records, self._ranks)
        fault = move(place, rounds, rank=self.rank, ranks=self._ranks, transport=transport)
        check_all(fault, transport.gather_objects(_text(fault)), spread.step, str(self.root))
        return place

    def release(self) -> None:
        """Remove the view."""
        shutil.rmtree(self._store.path / ".view", ignore_errors=True)


def _only(peer: int, nbytes: int, ranks: int) -> list[int]:
    return [nbytes if rank == peer else 0 for rank in range(ranks)]


def _read_into(data: torch.Tensor, path: Path, start: int) -> None:
    if data.numel():
        with path.open("rb") as file:
            file.seek(start)
            file.readinto(memory_of(data))


def _text(fault: Exception | None) -> str:
    if fault is None:
        return ""
    return str(fault) if isinstance(fault, CheckpointError) else f"{type(fault).__name__}: {fault}"


def _check_told(fault: Exception | None, told: Sequence[_Written]) -> None:
    check_all(fault, [one.fault for one in told], told[0].step, told[0].node)
    other = next((r for r, one in enumerate(told) if one[1:3] != told[0][1:3]), None)
    if other is not None:
        raise CheckpointError(
            "Ranks do not copy the same state.",
            where=f"rank {other} against rank 0",
            facts=[f"rank {r}: step {one.step}, layout {one.digest}" for r, one in enumerate(told)],
            why="Copies of all ranks make one checkpoint.",
            fix="call after_step with the state of the same step on every rank",
            rank=other,
        )


def check_all(fault: Exception | None, told: Sequence[str], step: int, where: str) -> None:
    """Raise on every rank if one of them could not do its part.

    Args:
        fault: what this rank could not do.
        told: the same of all ranks in words, in rank order.
        step: of the state.
        where: the stores.

    Raises:
        CheckpointError: some rank could not.
    """
    failed = [rank for rank, text in enumerate(told) if text]
    if not failed:
        return
    if fault is not None:
        raise fault
    raise CheckpointError(
        f"Rank {failed[0]} of {len(told)} has no peer copy of step {step}, so no rank has.",
        where=where,
        facts=told[failed[0]].splitlines(),
        why="Copies of all ranks make one checkpoint. Earlier copies and the disk are unchanged.",
        fix="give the memory file system room for four times a rank's part of a state, or leave "
        "out peer_dir=",
        rank=failed[0],
        step=step,
    )
