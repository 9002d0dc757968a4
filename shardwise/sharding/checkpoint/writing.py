"""One save: every rank writes its file, all vote, rank 0 completes it, all learn how it ended.

[Note: two exchanges a save]
Ranks tell each other how writing went, with their checksums, and then hear from rank 0 whether the
checkpoint is complete; no rank returns before. The first save of a session has one exchange more,
of the token of [Note: names beside a checkpoint]. All of it goes through a function `gather`, which
gives every rank the values of all: of a process group, of simulated ranks, or of one rank alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.disk import DiskFile, disk_error, write_durably
from shardwise.sharding.checkpoint.extra import merge_extra
from shardwise.sharding.checkpoint.folders import (
    METADATA,
    Draft,
    Target,
    check_free,
    clear_leftovers,
    complete,
)
from shardwise.sharding.checkpoint.manifest import MANIFEST, Chunk, Manifest, Stored
from shardwise.sharding.checkpoint.placing import file_of, file_sizes, with_sums
from shardwise.sharding.checkpoint.torch_metadata import dcp_metadata
from shardwise.sharding.checkpoint.zipped import after, before
from shardwise.sharding.errors import CheckpointError

Gather = Callable[[Any], list[Any]]
"""Gives every rank the values of all ranks, in rank order."""


@dataclass(frozen=True)
class Saving:
    """What one rank saves; all but `chunks` and `extra` is the same on all ranks.

    Args:
        step: optimizer steps taken.
        plan: JSON text.
        tensors: all of the checkpoint, without sums; see `placing.place`.
        digest: of `tensors` and `values`.
        chunks: what this rank writes, in the order of its file.
        values: of the manifest.
        extra: this rank's JSON; see `extra.pack_extra`.
        device: of the tensors.
        fault: why this rank has nothing to write; told to all.
    """

    step: int
    plan: str
    tensors: tuple[Stored, ...]
    digest: str
    chunks: tuple[tuple[Chunk, Tensor], ...]
    values: Mapping[str, Any]
    extra: Any
    device: torch.device
    fault: Exception | None = None


class Session:
    """What the saves of one program have in common."""

    def __init__(self) -> None:
        self._token = ""
        self._count = 0

    def target(self, path: Path, gather: Gather) -> Target:
        """Where the next save writes; the first one has an exchange."""
        if not self._token:
            self._token = gather(secrets.token_hex(4))[0]
        self._count += 1
        return Target(path, f"{self._token}.{self._count}")


class Vote(NamedTuple):
    """What a rank tells when it has written, or could not."""

    path: str
    step: int
    digest: str
    overwrite: bool
    fault: CheckpointError | None
    sums: tuple[tuple[int, ...], ...]
    extra: Any


def write_checkpoint(
    saving: Saving,
    path: Path,
    *,
    rank: int,
    gather: Gather,
    session: Session,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint; complete on return. All ranks call it, or none returns.

    Args:
        saving: of this rank.
        path: absolute; a directory that this makes.
        rank: this rank.
        gather: see [Note: two exchanges a save].
        session: of this rank; the same number of saves on all ranks.
        overwrite: whether a checkpoint of that name may be replaced.

    Raises:
        CheckpointError: some rank could not write, or rank 0 not complete it; on every rank, and
            nothing is left of the save.
    """
    target = session.target(path, gather)
    draft, sums, fault = _written(saving, target, rank, overwrite=overwrite)
    told = saving.step, saving.digest, overwrite, _tellable(fault), sums, saving.extra
    try:
        votes: list[Vote] = gather(Vote(str(path), *told))
    except BaseException:
        # Another rank may still be writing, or know that all have voted.
        if draft is not None:
            draft.leave(rank)
        raise
    problem = fault or _problem(votes)
    if problem is None and rank == 0:
        try:
            _complete(saving, target, votes, overwrite=overwrite)
        except Exception as error:
            problem = error
    if draft is not None and problem is not None:
        draft.discard()
    try:
        outcome: CheckpointError | None = gather(_tellable(problem))[0]
    finally:
        if draft is not None:
            draft.release()
    if problem is not None:
        raise problem
    if outcome is not None:
        raise _told(0, outcome, path, len(votes))


def _written(
    saving: Saving, target: Target, rank: int, *, overwrite: bool
) -> tuple[Draft | None, tuple[tuple[int, ...], ...], Exception | None]:
    """Write this rank's file; what went wrong is told to all, so it is returned."""
    if saving.fault is not None:
        return None, (), saving.fault
    draft: Draft | None = None
    try:
        if rank == 0:
            check_free(target.path, overwrite=overwrite)
            clear_leftovers(target)
        draft = Draft(target)
        return draft, write_file(draft.path / file_of(rank), saving.chunks, saving.device), None
    except Exception as error:
        return draft, (), error
    except BaseException:
        if draft is not None:
            draft.leave(rank)
        raise


def write_file(
    path: Path, chunks: Sequence[tuple[Chunk, Tensor]], device: torch.device
) -> tuple[tuple[int, ...], ...]:
    """Write the chunks of one file, each as an entry of [Note: an entry]; returns their sums.

    Args:
        path: of the file; it must not exist.
        chunks: with their elements, in the order of the file.
        device: of the tensors.

    Raises:
        CheckpointError: the system refuses.
    """
    sums: list[tuple[int, ...]] = []
    nbytes = sum(chunks[-1][0].entry) if chunks else 0
    with DiskFile(path, nbytes, device) as file:
        for chunk, values in chunks:
            head = before(chunk.sizes, values.dtype)
            file.append(bytes(chunk.entry[0] - file.position) + head)
            sums.append(file.append_tensor(values))
            file.append(after(chunk.sizes, values.dtype, sums[-1][-1]))
    return tuple(sums)


def _complete(saving: Saving, target: Target, votes: Sequence[Vote], *, overwrite: bool) -> None:
    """Rank 0, when all have voted: the manifest, and the rename."""
    folder = target.temporary
    manifest = manifest_of(saving, [vote.sums for vote in votes], [vote.extra for vote in votes])
    for rank in range(len(votes)):
        _check_file(folder / file_of(rank), rank, manifest.files.get(file_of(rank), 0))
    write_durably(folder / METADATA, dcp_metadata(manifest.tensors))
    write_durably(folder / MANIFEST, manifest.to_json().encode())
    complete(target, overwrite=overwrite)


def manifest_of(
    saving: Saving, sums: Sequence[tuple[tuple[int, ...], ...]], extras: Sequence[Any]
) -> Manifest:
    """The manifest of a save that all ranks have written.

    Args:
        saving: of any rank.
        sums: of the chunks that each rank has written, in rank order.
        extras: the JSON of each rank's `extra`.

    Raises:
        CheckpointError: ranks refer to different tensors in `extra`.
    """
    tensors = with_sums(saving.tensors, sums)
    return Manifest(
        step=saving.step,
        plan=saving.plan,
        tensors=tensors,
        values=saving.values,
        extra=merge_extra(extras),
        files=file_sizes(tensors),
    )


def _check_file(path: Path, rank: int, nbytes: int) -> None:
    """Check that rank 0 sees what another rank has written; a file without a chunk is dropped."""
    try:
        size = path.stat().st_size
        if size == nbytes == 0:
            path.unlink()
    except OSError as error:
        size = -1
        if nbytes == 0:
            raise disk_error(error, path, "remove", 0) from error
    if size != nbytes:
        has = "no such file" if size < 0 else f"{size} bytes"
        raise CheckpointError(
            f"Rank 0 does not see the file that rank {rank} has written.",
            where=str(path),
            facts=f"rank {rank} wrote {nbytes} bytes; rank 0 sees {has}",
            why="All ranks write one directory, which must be on a file system that they share.",
            fix="save to a directory that every machine of the job mounts",
            rank=rank,
            nbytes=nbytes,
            sees=size,
        )


def _problem(votes: Sequence[Vote]) -> CheckpointError | None:
    """What the votes say against completing; the same on every rank that has no fault itself."""
    for rank, vote in enumerate(votes):
        if vote.fault is not None:
            return _told(rank, vote.fault, Path(vote.path), len(votes))
    first = votes[0]
    other = next((r for r, vote in enumerate(votes) if vote[:4] != first[:4]), None)
    if other is None:
        return None
    return CheckpointError(
        "Ranks do not save the same checkpoint.",
        where=f"rank {other} against rank 0",
        facts=[
            f"rank {rank}: {vote.path}, step {vote.step}, layout {vote.digest}, "
            f"overwrite={vote.overwrite}"
            for rank, vote in enumerate(votes)
        ],
        why="All ranks write parts of one checkpoint. Nothing is left of this one.",
        fix="pass the same path, the state of the same step and the same overwrite= on every rank",
        rank=other,
        steps=tuple(vote.step for vote in votes),
    )


def _tellable(error: Exception | None) -> CheckpointError | None:
    """A failure as other ranks can read it, whatever they can unpickle."""
    if error is None or type(error) is CheckpointError:
        return error
    return CheckpointError(f"{type(error).__name__}: {error}")


def _told(rank: int, error: CheckpointError, path: Path, ranks: int) -> CheckpointError:
    return CheckpointError(
        f"Rank {rank} of {ranks} failed to save, so no rank has.",
        where=str(path),
        facts=str(error).splitlines(),
        why="A checkpoint is complete with the parts of all ranks, or it is none. Earlier "
        "checkpoints and the state are unchanged.",
        fix="see the failure of that rank above; then save again",
        **{"path": str(path), **error.numbers, "rank": rank, "ranks": ranks},
    )
