"""From disk to any plan: a checkpoint as a source of `program.init`.

[Note: how a state is restored]
Rank 0 reads the manifest and tells it to the others, so that all go by one answer. Names, shapes
and dtypes of the program's state are matched with it before anything is allocated, alike on every
rank. Then each rank makes a blank state and reads the blocks that it holds into their places; what
replicas hold they each read. Beside the state a rank holds a few MiB. Nothing is written into any
state that exists, and a failure on one rank is raised on all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.extra import EXTRA, targets_of, tree_of, unpack_extra
from shardwise.sharding.checkpoint.folders import resolve
from shardwise.sharding.checkpoint.latest import manifest_text
from shardwise.sharding.checkpoint.manifest import MANIFEST, Manifest
from shardwise.sharding.checkpoint.matching import Known, Matched, match_state
from shardwise.sharding.checkpoint.read import Job, Reader
from shardwise.sharding.checkpoint.records import (
    BUFFERS,
    PARAMS,
    Box,
    records_of,
    values_of,
    with_values,
)
from shardwise.sharding.errors import CheckpointError, summarise
from shardwise.sharding.leaves import Home
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.movement import Mover, Transport
from shardwise.sharding.plan import Plan
from shardwise.sharding.state import State
from shardwise.sharding.tiers import NOWHERE
from shardwise.transforms.carry import kept_of_scaling
from shardwise.transforms.casts import cast_buffers
from shardwise.transforms.filling import blank_state, fill, read_bytes
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.make_home import home_without_job
from shardwise.transforms.on_states import raise_alike


@dataclass(frozen=True)
class Restoring:
    """What a program takes from a checkpoint, known before anything is read.

    Args:
        step: that was saved.
        tensors: how many are read.
        nbytes: of them all.
        read_bytes: of those, what one rank reads.
        fresh: names that start fresh: only the program trains their parameters.
        left: saved names that are left behind: only the saved program trained their parameters.
        kept: names that the checkpoint lacks, as `partial` allows; they keep the program's values.
        ignored: saved names that the program lacks, as `partial` allows.
    """

    step: int
    tensors: int
    nbytes: int
    read_bytes: int
    fresh: tuple[str, ...]
    left: tuple[str, ...]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"step {self.step}: {self.tensors} tensors, {self.nbytes:,} bytes, "
            f"of which this rank reads {self.read_bytes:,}"
        ]
        for what, names in (
            ("start fresh: only the program trains their parameters", self.fresh),
            ("are left behind: only the saved program trained their parameters", self.left),
            ("are missing and keep the program's own values", self.kept),
            ("are not in the program and are ignored", self.ignored),
        ):
            if names:
                lines.append(f"{len(names)} {what}:")
                lines += [f"  {line}" for line in summarise(names)]
        return "\n".join(lines)


@dataclass(frozen=True)
class FromCheckpoint:
    """Take a state from disk; see `from_checkpoint`."""

    path: str | os.PathLike[str]
    partial: tuple[str, ...] = ()
    cast: bool = False

    def into(self, lowered: Lowering, *, rank: int = 0) -> Restoring:
        """What `init` will take into a program; only the manifest is read. Not collective.

        Args:
            lowered: of the program that is to take the state.
            rank: whose bytes are told.

        Raises:
            CheckpointError: there is no checkpoint, or it does not fit.
        """
        directory = directory_of(self.path)
        manifest = Manifest.from_json(manifest_text(directory), str(directory / MANIFEST))
        return _match(self, manifest, lowered, home_without_job(lowered, rank)).report


def from_checkpoint(path: Any, *, partial: Sequence[str] | str = (), cast: bool = False) -> Any:
    """A source for `program.init`: what `program.save` has written, under whatever plan.

    The whole state must fit: see [Note: what fits] for what two plans may differ in.

    Args:
        path: of the checkpoint; lifted if simulated ranks see it at different places.
        partial: patterns of what may be on one side only: paths as in a plan, such as
            `"layers.3"`, with all that belongs to them, or names, such as `"opt/**"`. What is
            missing there keeps the program's own initial values; `"extra"` leaves `extra` alone.
        cast: let dtypes change with loss, such as float32 to bfloat16.

    >>> # print(sw.from_checkpoint(path).into(lowered))
    >>> # state = lowered.bind().init(sw.from_checkpoint(path))
    """
    patterns = (partial,) if isinstance(partial, str) else tuple(partial)
    if isinstance(path, Lifted):
        return path.map(lambda one: FromCheckpoint(one, patterns, cast))
    return FromCheckpoint(path, patterns, cast)


def restore_state(
    source: FromCheckpoint,
    lowering: Lowering,
    home: Home,
    mover: Mover,
    *,
    buffers: Mapping[str, Tensor],
    device: torch.device,
    initial: Callable[[int], State],
    seed: int | None,
) -> State:
    """The state of a checkpoint as one of this program; all ranks take part.

    Args:
        source: from `from_checkpoint`.
        lowering: of this program.
        home: of this program.
        mover: the choke point.
        buffers: of this program, as they rest.
        device: where tensors live.
        initial: makes a state from a seed, for what the checkpoint lacks.
        seed: for `initial`; None: the saved one.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it does not fit.
        PatternError: a pattern of `partial` matches nothing.
    """
    transport = mover.transport
    manifest = _told_manifest(source, transport, mover.rank, device)
    directory = directory_of(source.path)
    failure: Exception | None = None
    match: _Match | None = None
    try:
        match = _match(source, manifest, lowering, home)
        if match.needs_init and seed is None:
            seed = _saved_seed(manifest, directory)
    except Exception as error:
        failure = error
    raise_alike(transport, failure, "restore", None)
    assert match is not None
    if match.needs_init:
        state = initial(seed or 0)
    else:
        is_filled = not (match.matched.fresh or match.matched.kept)
        state = blank_state(lowering, home, buffers, home.memories, is_filled=is_filled)
    faults: tuple[str, ...] = ()
    try:
        state = with_values(state, match.matched.values)
        faults = fill(records_of(state), match.matched, directory, home.rank)
        if EXTRA not in source.partial:
            state = state.with_extra(_extra(manifest, directory, home, device))
    except Exception as error:
        failure = error
    _check_copies(raise_alike(transport, failure, "restore", faults))
    if match.report.kept or match.report.ignored:
        _warn(match.report, home.rank)
    return replace(state, home=home)


def directory_of(path: str | os.PathLike[str]) -> Path:
    """Where the files of a checkpoint are.

    Args:
        path: that it was saved under.
    """
    return resolve(Path(os.path.abspath(path)))


@dataclass(frozen=True)
class _Match:
    """What fills a state, and what is told of it."""

    matched: Matched
    report: Restoring

    @property
    def needs_init(self) -> bool:
        """Whether parameters or buffers have to be made."""
        return any(name.startswith((f"{PARAMS}/", f"{BUFFERS}/")) for name in self.matched.kept)


def _match(source: FromCheckpoint, manifest: Manifest, lowering: Lowering, home: Home) -> _Match:
    plan = lowering.plan
    saved = Plan.from_json(manifest.plan) if manifest.plan else None
    named = dict(lowering.module.named_buffers())
    form = blank_state(lowering, home, cast_buffers(named, plan.precision.buffers), NOWHERE)
    records = records_of(form)
    matched = match_state(
        records,
        values_of(form),
        manifest,
        program=replace(_known(plan), transient=home.transient),
        saved=Known(None) if saved is None else _known(saved),
        partial=source.partial,
        cast=source.cast,
        scale=kept_of_scaling(saved.loss_scale, plan, half=saved.uses_half) if saved else None,
        where=os.fspath(source.path),
    )
    report = Restoring(
        step=manifest.step,
        tensors=len(matched.sources),
        nbytes=sum(stored.nbytes for stored in matched.sources.values()),
        read_bytes=read_bytes(records, matched, home.rank),
        fresh=matched.fresh,
        left=matched.left,
        kept=matched.kept,
        ignored=matched.ignored,
    )
    return _Match(matched, report)


def _known(plan: Plan) -> Known:
    aliases = {alias: info.path for info in plan.infos for alias in info.aliases}
    frozen = frozenset(info.path for info in plan.infos if info.path not in plan.opt)
    return Known(frozenset(plan.opt), aliases, frozen)


def _extra(manifest: Manifest, directory: Path, home: Home, device: torch.device) -> Any:
    tree = tree_of(manifest.extra, home.rank)
    dtypes = {stored.name: stored.dtype for stored in manifest.tensors}
    targets = targets_of(tree, home, dtypes, device)
    with Reader(directory) as reader:
        reader.fill(
            Job(manifest.by_name[one.name], box, values)
            for one in targets
            for box, values in one.pieces(home.rank)
        )
    return unpack_extra(tree, {one.name: one.block for one in targets}, home, device)


def _saved_seed(manifest: Manifest, directory: Path) -> int:
    value = torch.zeros((), dtype=torch.int64)
    if "seed" in manifest.by_name:
        with Reader(directory) as reader:
            reader.fill([Job(manifest.by_name["seed"], Box((), ()), value)])
    return int(value)


def _told_manifest(
    source: FromCheckpoint, transport: Transport, rank: int, device: torch.device
) -> Manifest:
    """The manifest that rank 0 sees."""
    failure: Exception | None = None
    text = b""
    if rank == 0:
        try:
            text = manifest_text(directory_of(source.path)).encode()
        except Exception as error:
            failure = error
    raise_alike(transport, failure, "restore", None)
    size = torch.tensor([len(text)], device=device)
    transport.broadcast(size)
    raw = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if rank == 0:
        raw.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    transport.broadcast(raw)
    try:
        where = str(directory_of(source.path) / MANIFEST)
        return Manifest.from_json(raw.cpu().numpy().tobytes().decode(), where)
    finally:
        del raw


def _check_copies(told: Sequence[tuple[str, ...]]) -> None:
    """Refuse tied tensors and shared numbers whose stored copies differ, on whatever rank."""
    copies = tuple(dict.fromkeys(line for lines in told for line in lines))
    if copies:
        raise CheckpointError(
            f"{len(copies)} tensors are stored in copies that differ; nothing was loaded.",
            where="program.restore(path)",
            facts=summarise(copies),
            why="The program has one tensor for them, and taking either would drop the other.",
            fix="name the copy to be left out in partial=, or restore into a program that keeps "
            "them apart",
            count=len(copies),
        )


def _warn(report: Restoring, rank: int) -> None:
    if rank == 0:
        warnings.warn(f"A checkpoint was restored in part.\n{report}", stacklevel=2)
