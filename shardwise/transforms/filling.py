"""A blank state of a program, and what fills it from the files of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.loss_scale import init_loss_scale
from shardwise.sharding.checkpoint.manifest import Stored
from shardwise.sharding.checkpoint.matching import Matched
from shardwise.sharding.checkpoint.placing import cut
from shardwise.sharding.checkpoint.read import Job, Reader
from shardwise.sharding.checkpoint.records import Box, Record, records_of
from shardwise.sharding.compat import copy_all
from shardwise.sharding.large_pages import in_large_pages
from shardwise.sharding.layout import Layout
from shardwise.sharding.leaves import Flats, Home
from shardwise.sharding.opt_state import is_over, split
from shardwise.sharding.pytree import tree_map
from shardwise.sharding.state import State
from shardwise.sharding.tiers import DEVICE, Memories, Tier
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.stepping import init_opt

_MANY = 1 << 30
"""Holders of a part that is compared in the smallest pieces that `cut` makes."""


def blank_state(
    lowering: Lowering,
    home: Home,
    buffers: Mapping[str, Tensor],
    memories: Memories,
    *,
    is_filled: bool = False,
) -> State:
    """A state with the optimizer's first values and zeros for parameters and buffers.

    Args:
        lowering: of the program.
        home: of the program.
        buffers: for shapes and dtypes.
        memories: what allocates; `NOWHERE` for names and layouts only.
        is_filled: every record will be read, so on the CPU only padding is written.
    """
    buckets = lowering.all_buckets
    place = lowering.plan.mesh.coords(home.rank)
    device = memories.device
    only_padding = is_filled and device.type == "cpu"

    def blank(layout: Layout, tier: Tier) -> Tensor:
        flat = memories.empty(tier, layout.length, layout.dtype)
        flat = in_large_pages(flat) if tier == DEVICE else flat
        return flat if only_padding else flat.zero_()

    # First, as an optimizer's init sees parameters to be thrown away: later they would be a peak.
    if only_padding:
        opt = _unwritten(lowering, memories)
    else:
        opt = init_opt(lowering.stepping, place, memories)
    state = first_state(
        lowering,
        home,
        flats={bucket.name: blank(bucket.params, bucket.rests.params) for bucket in buckets},
        masters={b.name: blank(b.opt, b.rests.masters) for b in buckets if b.has_master and b.opt},
        opt=opt,
        buffers={
            name: torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
            for name, buffer in buffers.items()
        },
    )
    if only_padding:
        _zero_padding(state, lowering)
    return state


def _unwritten(lowering: Lowering, memories: Memories) -> Any:
    """Buffers for the optimizer's state, each on its tier."""
    stepping = lowering.stepping
    tiers = {group.key: group.rests.moments for group in stepping.groups}

    def made(leaf: Any, tier: Tier = DEVICE) -> Any:
        if is_over(leaf, stepping.keys):
            return {key: made(value, tiers.get(key, DEVICE)) for key, value in leaf.items()}
        if not isinstance(leaf, Tensor):
            return leaf
        if tier == DEVICE or leaf.ndim != 1:
            return in_large_pages(torch.empty_like(leaf, device=memories.device))
        return memories.empty(tier, leaf.numel(), leaf.dtype)

    return tree_map(made, stepping.form, is_leaf=lambda leaf: is_over(leaf, stepping.keys))


def _zero_padding(state: State, lowering: Lowering) -> None:
    """Write what no record will: the ends of uneven blocks, and the gaps between blocks."""
    stepping = lowering.stepping
    pairs = [(bucket.params, state.flats[bucket.name]) for bucket in lowering.all_buckets]
    pairs += [
        (b.opt, state.masters[b.name]) for b in lowering.all_buckets if b.has_master and b.opt
    ]
    leaves, _ = split(state.opt_flats, stepping.keys)
    for values in leaves:
        if is_over(values, stepping.keys):
            groups = (group for group in stepping.groups if group.key in values)
            pairs += [(group.layout, values[group.key]) for group in groups]
    for layout, flat in pairs:
        if flat.shape == (layout.length,):
            for start, stop in layout.gaps:
                flat[start:stop].zero_()
    for record in records_of(state):
        held = [values for _, values in record.pieces(state.home.rank)]
        if sum(values.numel() for values in held) == record.block.numel():
            continue
        if record.lying.entry.frame is not None or not held:
            record.block.zero_()  # what is no padding is read later
            continue
        dim = record.lying.entry.dim
        valid = held[0].shape[dim]
        record.block.narrow(dim, valid, record.block.shape[dim] - valid).zero_()


def first_state(
    lowering: Lowering,
    home: Home,
    *,
    flats: Flats,
    masters: Flats,
    opt: Any,
    buffers: dict[str, Tensor],
    seed: int = 0,
) -> State:
    """A state before its first step.

    Args:
        lowering: of the program.
        home: of the program.
        flats: parameters, by bucket.
        masters: their master copies, by bucket.
        opt: the optimizer's first state, at rest.
        buffers: by path.
        seed: what dropout draws from.
    """
    plan = lowering.plan
    return State(
        home=home,
        flats=flats,
        masters=masters,
        opt_flats=opt,
        buffer_values=buffers,
        seed=torch.tensor(seed, dtype=torch.int64),
        count=torch.zeros((), dtype=torch.int64),
        scaling=init_loss_scale(plan.loss_scale, half=plan.uses_half),
        extra_value=None,
    )


def read_bytes(records: Sequence[Record], matched: Matched, rank: int) -> int:
    """Bytes of elements that one rank reads to fill its state.

    Args:
        records: of a state of that rank.
        matched: what fills it.
        rank: which rank.
    """
    jobs = itertools.chain(_jobs(records, matched, rank), _number_jobs(_shared(records), matched))
    return sum(job.box.numel * job.stored.dtype.itemsize for job in jobs)


def fill(
    records: Sequence[Record], matched: Matched, directory: Path, rank: int
) -> tuple[str, ...]:
    """Read this rank's blocks in place.

    Args:
        records: of a blank state.
        matched: what fills it; see `matching.match_state`.
        directory: of the files.
        rank: this rank.

    Returns:
        What cannot be decided: copies of one tensor that differ, in words.

    Raises:
        CheckpointError: files are missing, short or damaged.
    """
    with Reader(directory) as reader:
        reader.fill(_jobs(records, matched, rank))
        faults = [*_fill_shared(reader, _shared(records), matched)]
        faults += _unequal_twins(reader, records, matched, rank)
    pairs = list(_roundings(records))
    if pairs:
        copy_all([copy.block for copy, _ in pairs], [true.block for _, true in pairs])
    return tuple(faults)


def _jobs(records: Sequence[Record], matched: Matched, rank: int) -> Iterable[Job]:
    """What is read straight into the blocks of a state."""
    rounded = {id(copy) for copy, _ in _roundings(records)}
    several = {id(record) for members in _shared(records) for record in members}
    for record in records:
        stored = matched.sources.get(record.name)
        if stored is None or id(record) in rounded or id(record) in several:
            continue
        for box, values in record.pieces(rank):
            yield Job(stored, box, values)


def _roundings(records: Sequence[Record]) -> Iterable[tuple[Record, Record]]:
    """Copies of masters that lie as the masters do: they need no bytes of their own."""
    true = {record.name: record for record in records if not record.derived}
    for record in records:
        master = true.get(record.name)
        if record.derived and master is not None:
            here, there = record.lying, master.lying
            same = here.grid.axes == there.grid.axes and here.entry.block == there.entry.block
            same = same and here.entry.frame == there.entry.frame
            if same and here.entry.dim == there.entry.dim:
                yield record, master


def _shared(records: Sequence[Record]) -> list[list[Record]]:
    """Records of several parameters that are one number in memory."""
    found: dict[int, list[Record]] = {}
    for record in records:
        found.setdefault(id(record.block), []).append(record)
    return [members for members in found.values() if len(members) > 1]


def _number_jobs(shared: Sequence[Sequence[Record]], matched: Matched) -> Iterable[Job]:
    for members in shared:
        for record in members:
            stored = matched.sources.get(record.name)
            if stored is not None:
                target = torch.empty(record.shape, dtype=record.dtype)
                yield Job(stored, Box((0,) * len(record.shape), record.shape), target)


def _fill_shared(
    reader: Reader, shared: Sequence[Sequence[Record]], matched: Matched
) -> Iterable[str]:
    """Read one number for several parameters, which must all have the same one."""
    for members in shared:
        jobs = list(_number_jobs([members], matched))
        reader.fill(jobs)
        if not jobs:
            continue
        first = jobs[0].target
        if all(torch.equal(job.target, first) for job in jobs):
            members[0].block.copy_(first)
        else:
            told = sorted({str(job.target.tolist()) for job in jobs})
            yield f"{jobs[0].stored.name} and {len(jobs) - 1} more: one number of {told}"


def _unequal_twins(
    reader: Reader, records: Sequence[Record], matched: Matched, rank: int
) -> Iterable[str]:
    """Compare second copies of tied tensors with the ones that were taken, piece by piece."""
    true = {record.name: record for record in records if not record.derived}
    for name, twin in matched.twins:
        record = true[name]
        if name in matched.sources and not _equal(reader, record, twin, rank):
            yield f"{twin.name} differs from {matched.sources[name].name}"


def _equal(reader: Reader, record: Record, twin: Stored, rank: int) -> bool:
    boxes = record.boxes(record.part_of(rank))
    for piece in (one for box in boxes for one in cut(box, record.dtype, _MANY)):
        other = torch.empty(piece.sizes, dtype=record.dtype, device=record.block.device)
        reader.fill([Job(twin, piece, other)])
        mine = record.inside(rank, piece)
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (mine, other)]
        if not torch.equal(*bits):
            return False
    return True
