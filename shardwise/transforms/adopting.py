"""Checkpoints of other systems as shardwise ones, without a job.

[Note: a template]
Files of others do not say how a program names its optimizer state, which of their tensors are
buffers, or what a fresh seed is. A checkpoint of step 0 of the program does: it is the template,
that every tensor which the files have is put into. They must have all parameters, and all of the
optimizer state or none; buffers, seed and rates that they lack keep the program's own start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.sharding.checkpoint.foreign import Foreign
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.checkpoint.manifest import Manifest
from shardwise.sharding.checkpoint.matching import Known, Matched, match_state
from shardwise.sharding.checkpoint.placing import digest, own_chunks, place
from shardwise.sharding.checkpoint.read import Job, Reader
from shardwise.sharding.checkpoint.records import BUFFERS, OPT, PARAMS, Record
from shardwise.sharding.checkpoint.translating import translate
from shardwise.sharding.checkpoint.writing import Saving, Session, write_checkpoint
from shardwise.sharding.errors import CheckpointError, summarise
from shardwise.sharding.layout import Entry
from shardwise.sharding.lying import Grid, Lying
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan
from shardwise.transforms.converting import Weights, aliases_in, folder_beside, mapped
from shardwise.transforms.export_files import Item
from shardwise.transforms.filling import fill


def foreign_weights(foreign: Foreign) -> Weights:
    """Only the weights of another system's checkpoint.

    Args:
        foreign: what it holds.
    """
    return Weights(foreign.root, foreign.weights, {})


class Adopted(NamedTuple):
    """What was written.

    Args:
        tensors: how many.
        nbytes: of their elements.
        from_template: names of parameters, buffers and optimizer state that the files lack.
    """

    tensors: int
    nbytes: int
    from_template: tuple[str, ...]


def to_checkpoint(foreign: Foreign, target: Path, template: Path) -> Adopted:
    """Write what another system has saved as a checkpoint; see [Note: a template].

    Needs twice its space while it runs, and little memory.

    Args:
        foreign: what it holds.
        target: absolute; a directory that must not exist.
        template: a checkpoint of step 0 of the program that shall restore it.

    Raises:
        CheckpointError: the files do not fit the template, are damaged, or cannot be written.
    """
    manifest = read_manifest(template)
    if manifest.step or not manifest.plan:
        raise _no_template(template, manifest)
    plan = Plan.from_json(manifest.plan)
    aliases = aliases_in(plan)
    buffers = [one.name for one in manifest.tensors if one.name.startswith(f"{BUFFERS}/")]
    with folder_beside(target) as folder:
        records = _records(folder / "elements", manifest)
        translated = translate(
            foreign,
            records,
            aliases=aliases,
            transient={name.partition("/")[2] for name in buffers},
        )
        matched = match_state(
            translated.records,
            {},
            translated.manifest,
            program=Known(frozenset(plan.opt), aliases),
            saved=Known(translated.trained or None),
            where=foreign.where,
        )
        _fill(records, matched, foreign, manifest, template)
        named = {record.name: record for record in records}
        for name, number in translated.numbers.items():
            named[name].block.fill_(number)
        step = int(named["step"].block.item())
        _write(records, manifest, step, target)
    kinds = (f"{PARAMS}/", f"{BUFFERS}/", f"{OPT}/")
    lacking = (r.name for r in records if r.name.startswith(kinds))
    known = {*matched.sources, *translated.numbers}
    return Adopted(
        len(records),
        sum(record.block.nbytes for record in records),
        tuple(name for name in lacking if name not in known),
    )


def _records(path: Path, manifest: Manifest) -> tuple[Record, ...]:
    """The tensors of a template, whole and on one rank, over a new file."""
    items = [Item(one.name, one.dtype, one.shape) for one in manifest.tensors]
    values = mapped(path, items)
    grid = Grid(Mesh(ranks=1), ())
    return tuple(
        Record(
            one.name,
            Lying(grid, Entry(one.of or one.name, one.shape, 0, one.shape, 0)),
            values[one.name],
            one.of,
        )
        for one in manifest.tensors
    )


def _fill(
    records: Sequence[Record],
    matched: Matched,
    foreign: Foreign,
    manifest: Manifest,
    template: Path,
) -> None:
    rest = [
        Job(manifest.by_name[record.name], box, values)
        for record in records
        if record.name not in matched.sources
        for box, values in record.pieces(0)
    ]
    with Reader(template) as reader:
        reader.fill(rest)
    faults = fill(records, matched, foreign.root, 0)
    if faults:
        raise CheckpointError(
            f"{len(faults)} tied tensors are stored in copies that differ.",
            where=foreign.where,
            facts=summarise(faults),
            why="The program has one tensor for them, and nobody knows which copy is meant.",
            fix="store them once, or make the copies equal",
            faults=tuple(faults),
        )


def _write(records: Sequence[Record], manifest: Manifest, step: int, target: Path) -> None:
    tensors = place(records, 1)
    saving = Saving(
        step=step,
        plan=manifest.plan,
        tensors=tensors,
        digest=digest(tensors),
        chunks=tuple(own_chunks(tensors, records, 0)),
        values=manifest.values,
        extra=None,
        device=records[0].block.device,
    )
    write_checkpoint(saving, target, rank=0, gather=lambda value: [value], session=Session())


def _no_template(template: Path, manifest: Manifest) -> CheckpointError:
    return CheckpointError(
        "The template is not the start of a program.",
        where=str(template),
        facts=f"it is of step {manifest.step}" if manifest.plan else "it has no plan",
        why="What the files lack is taken from it, so it must not be of a run of its own.",
        fix="save program.init(0) and pass that",
        path=str(template),
        step=manifest.step,
    )
