"""Files of other systems as sources of `program.init`: weights, and optimizer state if any.

[Note: how files are imported]
Every rank reads the headers, matches names, shapes and dtypes with the program, and reads the
blocks that it holds into their places, as from a checkpoint of its own; nothing is larger than a
few MiB beside the state. What such files do not have keeps the values of `init`: the seed, buffers
that modules do not save, and, if there are only weights, the optimizer's state.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.deepspeed_files import read_deepspeed
from shardwise.sharding.checkpoint.foreign import Foreign
from shardwise.sharding.checkpoint.matching import Known, Matched, match_state
from shardwise.sharding.checkpoint.records import BUFFERS, OPT, PARAMS, SCALE, records_of
from shardwise.sharding.checkpoint.safetensors_format import read_tensors
from shardwise.sharding.checkpoint.state_dicts import read_dcp, read_torch_save
from shardwise.sharding.checkpoint.translating import Rename, Translated, translate
from shardwise.sharding.errors import CheckpointError, summarise
from shardwise.sharding.leaves import Home
from shardwise.sharding.movement import Mover
from shardwise.sharding.state import State
from shardwise.sharding.tiers import NOWHERE
from shardwise.transforms.filling import blank_state, fill
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.on_states import raise_alike


@dataclass(frozen=True)
class FromFiles:
    """Take values from files of another system; see `from_safetensors` and its neighbours.

    Args:
        path: of the file or directory.
        read: what reads its headers.
        rename: name in the files to path of the program.
        partial: patterns of what may be on one side only.
        cast: whether dtypes may change with loss.
    """

    path: Path
    read: Callable[[Path], Foreign]
    rename: Rename = None
    partial: tuple[str, ...] = ()
    cast: bool = False

    def weights(self) -> FromFiles:
        """Without what the files have besides parameters and buffers."""
        read = self.read
        return replace(self, read=lambda path: read(path).only_weights())


def from_safetensors(
    path: str | os.PathLike[str],
    *,
    rename: Rename = None,
    partial: Sequence[str] | str = (),
    cast: bool = False,
) -> FromFiles:
    """A source for `program.init`: parameters and buffers of a Hugging Face directory or one file.

    Every rank reads only what it holds. All must fit, or nothing is loaded and one error on all
    ranks lists what does not. If all names lack one first segment that the program's have, such as
    `model.`, or all have one too much, that is taken as meant, with a warning. A tied parameter
    takes one copy, or several that are equal.

    Args:
        path: of a file, or of a directory with an index or one file.
        rename: name in the files to path of the program, for those that differ.
        partial: patterns of paths that may be on one side only; what is missing there keeps the
            values of `init`.
        cast: let dtypes change with loss, such as float32 to bfloat16.

    >>> # state = program.init(sw.from_safetensors("Llama-3.2-1B"))
    """
    return _source(path, read_safetensors, rename, partial, cast=cast)


def from_deepspeed(
    path: str | os.PathLike[str],
    *,
    tag: str | None = None,
    optimizer: bool = True,
    rename: Rename = None,
    partial: Sequence[str] | str = (),
    cast: bool = False,
) -> FromFiles:
    """A source for `program.init`: a training run that DeepSpeed has saved under ZeRO-1, 2 or 3.

    Float32 masters, Adam's moments, counts of steps, frozen parameters, buffers and the loss scale
    of float16 go to a program on any plan. See [Note: names of moments] for what fits. DeepSpeed is
    not needed, and nothing in the files is run.

    Args:
        path: that `save_checkpoint` was called with.
        tag: of the checkpoint; None: the latest.
        optimizer: False takes weights only; the optimizer starts fresh, at step 0.
        rename: see `from_safetensors`.
        partial: see `from_safetensors`; `"opt/**"` allows another kind of optimizer.
        cast: see `from_safetensors`.

    >>> # state = program.init(sw.from_deepspeed("run", tag="global_step500"))
    """
    source = _source(path, lambda one: read_deepspeed(one, tag), rename, partial, cast=cast)
    return source if optimizer else source.weights()


def from_dcp(
    path: str | os.PathLike[str],
    *,
    order: Sequence[str] = (),
    optimizer: bool = True,
    rename: Rename = None,
    partial: Sequence[str] | str = (),
    cast: bool = False,
) -> FromFiles:
    """A source for `program.init`: a state dict that torch.distributed.checkpoint has saved.

    Such as FSDP2 writes: `{"model": ..., "optim": ...}` from `get_state_dict`, or weights alone.
    What shardwise has saved is restored with `program.restore`.

    Args:
        path: of the directory.
        order: paths of the optimizer's parameters by number, if the files have only numbers.
        optimizer: see `from_deepspeed`.
        rename: see `from_safetensors`.
        partial: see `from_safetensors`.
        cast: see `from_safetensors`.

    >>> # state = program.init(sw.from_dcp("run/step-500"))
    """
    names = tuple(order)
    source = _source(path, lambda one: read_dcp(one, names), rename, partial, cast=cast)
    return source if optimizer else source.weights()


def from_torch_save(
    path: str | os.PathLike[str],
    *,
    order: Sequence[str] = (),
    optimizer: bool = True,
    rename: Rename = None,
    partial: Sequence[str] | str = (),
    cast: bool = False,
) -> FromFiles:
    """A source for `program.init`: a file of torch.save with weights, and an optimizer's state.

    A dict of tensors, or `{"model": ..., "optim": ...}`. Only tensors, numbers, strings and
    containers are read; a file that needs anything else is refused, with its name.

    Args:
        path: of the file.
        order: paths of the optimizer's parameters by number, if the file has only numbers.
        optimizer: see `from_deepspeed`.
        rename: see `from_safetensors`.
        partial: see `from_safetensors`.
        cast: see `from_safetensors`.

    >>> # state = program.init(sw.from_torch_save("model.pt"))
    """
    names = tuple(order)
    source = _source(path, lambda one: read_torch_save(one, names), rename, partial, cast=cast)
    return source if optimizer else source.weights()


def _source(
    path: str | os.PathLike[str],
    read: Callable[[Path], Foreign],
    rename: Rename,
    partial: Sequence[str] | str,
    *,
    cast: bool,
) -> FromFiles:
    patterns = (partial,) if isinstance(partial, str) else tuple(partial)
    return FromFiles(Path(os.path.abspath(path)), read, rename, patterns, cast)


def read_safetensors(path: Path) -> Foreign:
    """What a file or a directory of safetensors holds; no element is read.

    Args:
        path: of either.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    stored = read_tensors(path)
    root = path if path.is_dir() else path.parent
    return Foreign(str(path), root, {one.name: one for one in stored})


def import_state(
    source: FromFiles,
    lowering: Lowering,
    home: Home,
    mover: Mover,
    *,
    buffers: Mapping[str, Tensor],
    device: torch.device,
    initial: Callable[[], State],
) -> State:
    """A state with the values of files of another system; all ranks take part.

    Args:
        source: which files.
        lowering: of this program.
        home: of this program.
        mover: the choke point.
        buffers: of this program, as they rest; those that files need not have keep these values.
        device: where tensors live.
        initial: makes a state, where the files lack parameters or buffers that are needed.

    Raises:
        CheckpointError: files are missing, damaged, or do not fit; on every rank.
    """
    error: Exception | None = None
    found: _Found | None = None
    about = ""
    try:
        found = _find(source, lowering, home, buffers)
        about = found.about
    except Exception as one:
        error = one
    told = raise_alike(mover.transport, error, "init", about)
    assert found is not None
    if any(one != told[0] for one in told):
        raise _other_files(source, told)
    absent = [name for name in buffers if f"{BUFFERS}/{name}" not in found.matched.sources]
    needs_init = found.lacks_weights or any(buffers[name].is_meta for name in absent)
    state = initial() if needs_init else blank_state(lowering, home, buffers, home.memories)
    try:
        _fill(state, found, home, {} if needs_init else {name: buffers[name] for name in absent})
    except Exception as one:
        error = one
    raise_alike(mover.transport, error, "init", None)
    if found.told and home.rank == 0:
        warnings.warn(found.told, stacklevel=2)
    step = int(found.translated.numbers.get("step", 0))
    return replace(state, count=torch.tensor(step, dtype=torch.int64))


@dataclass(frozen=True)
class _Found:
    """What fills a state, and what is told of it."""

    foreign: Foreign
    translated: Translated
    matched: Matched

    @property
    def lacks_weights(self) -> bool:
        return any(name.startswith((f"{PARAMS}/", f"{BUFFERS}/")) for name in self.matched.kept)

    @property
    def about(self) -> str:
        """What must be equal on all ranks."""
        names = [(name, one.shape, one.dtype) for name, one in self.matched.sources.items()]
        numbers = sorted(self.translated.numbers.items())
        return hashlib.sha256(repr((names, numbers)).encode()).hexdigest()[:16]

    @property
    def told(self) -> str:
        """What was taken as meant, or left out."""
        lines: list[str] = []
        prefix = self.translated.prefix
        if prefix:
            doing = "was added to" if prefix[0] == "+" else "was left out of"
            lines.append(f"{prefix[1:]!r} {doing} all names of {self.foreign.where}")
        for what, names in (
            ("keep the values of init", self.matched.kept),
            ("are not in the program and are ignored", self.matched.ignored),
        ):
            if names:
                lines += [f"{len(names)} {what}:", *(f"  {line}" for line in summarise(names))]
        return "\n".join(lines)


def _find(
    source: FromFiles, lowering: Lowering, home: Home, buffers: Mapping[str, Tensor]
) -> _Found:
    foreign = source.read(source.path)
    form = blank_state(lowering, home, buffers, NOWHERE)
    translated = translate(
        foreign,
        records_of(form),
        aliases=home.aliases,
        transient=home.transient,
        rename=source.rename,
    )
    matched = match_state(
        translated.records,
        {},
        translated.manifest,
        program=Known(frozenset(lowering.plan.opt), home.aliases),
        saved=Known(translated.trained if translated.trained else None),
        partial=source.partial,
        cast=source.cast,
        where=foreign.where,
    )
    return _Found(foreign, translated, matched)


def _fill(state: State, found: _Found, home: Home, kept: Mapping[str, Tensor]) -> None:
    for name, value in kept.items():
        state.buffer_values[name].copy_(value)
    records = records_of(state)
    faults = fill(records, found.matched, found.foreign.root, home.rank)
    if faults:
        raise CheckpointError(
            f"{len(faults)} tied tensors are stored in copies that differ; nothing was loaded.",
            where=found.foreign.where,
            facts=summarise(faults),
            why="The program has one tensor for them, and taking either would drop the other.",
            fix="name the copy to be left out in partial=, or untie them in the model",
            count=len(faults),
        )
    taken = {
        r.of for r in records if r.name.startswith(f"{OPT}/") and r.name in found.matched.sources
    }
    for record in records:
        number = found.translated.numbers.get(record.name)
        counted = found.translated.counted.get(record.name)
        # Steps count for moments that were taken; fresh ones begin at none.
        fresh = bool(counted) and taken.isdisjoint(counted or ())
        scaled = home.loss_scale is not None or not record.name.startswith(f"{SCALE}/")
        if number is not None and scaled and not fresh and record.name != "step":
            record.block.fill_(number)


def _other_files(source: FromFiles, told: Sequence[str]) -> CheckpointError:
    other = next(rank for rank, one in enumerate(told) if one != told[0])
    return CheckpointError(
        "Ranks see different files.",
        where=str(source.path),
        facts=f"rank {other} finds other tensors than rank 0",
        why="Each rank reads its own part of the same files.",
        fix="pass a path on a file system that all ranks share, or copy the files to all nodes",
        rank=other,
    )
