"""A checkpoint on disk as plain files, without a job: safetensors, or what `torch.load` reads.

[Note: tensors without memory]
`torch.save` and our own writer take elements from where they are. Tensors here are views of a
temporary file that is mapped into memory, so what they hold is the kernel's to drop; the price is
that bytes are written twice.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.differences import parameters_and_buffers
from shardwise.sharding.checkpoint.disk import disk_error, flush_folder
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.checkpoint.manifest import Stored
from shardwise.sharding.checkpoint.read import Job, Reader
from shardwise.sharding.checkpoint.records import Box
from shardwise.sharding.errors import CheckpointError
from shardwise.sharding.plan import Plan
from shardwise.sharding.tree import Where, select
from shardwise.transforms.export_files import Files, Item

FILE_BYTES = 5_000_000_000
"""Of one safetensors file at most, unless one tensor is larger."""

_ALIGN = 64  # of each tensor in the temporary file


@dataclass(frozen=True)
class Weights:
    """Parameters and buffers on disk by the module's own names.

    Args:
        root: directory that the files of chunks are named from.
        tensors: by name.
        aliases: other names of tied parameters, to the name that has the tensor.
    """

    root: Path
    tensors: Mapping[str, Stored]
    aliases: Mapping[str, str]


class Written(NamedTuple):
    """What was written: the number of tensors, and the bytes of their elements."""

    tensors: int
    nbytes: int


def weights_of(path: Path) -> Weights:
    """The weights of a shardwise checkpoint.

    Args:
        path: of a complete checkpoint.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    manifest = read_manifest(path)
    aliases = aliases_in(Plan.from_json(manifest.plan)) if manifest.plan else {}
    return Weights(path, parameters_and_buffers(manifest.tensors), aliases)


def aliases_in(plan: Plan) -> dict[str, str]:
    """Other names of tied parameters, to the one that holds them."""
    return {alias: info.path for info in plan.infos for alias in info.aliases}


def to_safetensors(
    source: Weights,
    target: Path,
    *,
    where: Where | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = FILE_BYTES,
) -> Written:
    """Write a directory as transformers reads it, tied weights once; holds one tensor.

    Args:
        source: what is written.
        target: a directory; it must not exist.
        where: selects paths of parameters and buffers; None: all.
        dtype: of floating-point tensors; None: as they are stored.
        max_file_bytes: of one file; several have an index.

    Raises:
        CheckpointError: the source is damaged, the target exists or cannot be written.
        PatternError: a pattern matches no path.
    """
    chosen = _choose(source, where, dtype)
    files = Files(target, max_file_bytes, None, overwrite=False)
    try:
        files.begin([item for item, _ in chosen])
        with Reader(source.root) as reader:
            for item, stored in chosen:
                values = torch.empty(item.shape, dtype=item.dtype)
                reader.fill([Job(stored, _whole(item.shape), values)])
                files.append(item, values)
        files.complete(None)
    except BaseException:
        files.discard()
        raise
    return _written(chosen)


def to_torch(
    source: Weights,
    target: Path,
    *,
    where: Where | None = None,
    dtype: torch.dtype | None = None,
) -> Written:
    """Write a state dict for `torch.load`, tied weights under all of their names.

    Needs twice its space while it runs; see [Note: tensors without memory].

    Args:
        source: what is written.
        target: a file; it must not exist.
        where: selects paths of parameters and buffers; None: all.
        dtype: of floating-point tensors; None: as they are stored.

    Raises:
        CheckpointError: the source is damaged, the target exists or cannot be written.
        PatternError: a pattern matches no path.
    """
    chosen = _choose(source, where, dtype)
    if target.exists():
        raise _exists(target)
    nbytes = sum(item.nbytes for item, _ in chosen)
    with folder_beside(target) as folder:
        values = mapped(folder / "elements", [item for item, _ in chosen])
        with Reader(source.root) as reader:
            for item, stored in chosen:
                reader.fill([Job(stored, _whole(item.shape), values[item.name])])
        for alias, path in source.aliases.items():
            if path in values:
                values[alias] = values[path]
        made = folder / target.name
        try:
            torch.save(values, made)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.rename(target)
        except OSError as error:
            raise disk_error(error, target, "write", nbytes) from error
        except RuntimeError as error:  # so says torch's own writer of a full disk
            raise _failed(target, nbytes, str(error).splitlines()[0]) from error
        flush_folder(target.parent)
    return _written(chosen)


def _written(chosen: Sequence[tuple[Item, Stored]]) -> Written:
    return Written(len(chosen), sum(item.nbytes for item, _ in chosen))


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def _choose(
    source: Weights, where: Where | None, dtype: torch.dtype | None
) -> list[tuple[Item, Stored]]:
    paths = source.tensors if where is None else select(where, list(source.tensors))
    chosen: list[tuple[Item, Stored]] = []
    for path in paths:
        stored = source.tensors[path]
        casts = dtype is not None and stored.dtype.is_floating_point
        made = dtype if casts and dtype else stored.dtype
        chosen.append((Item(path, made, stored.shape), stored))
    return chosen


def mapped(path: Path, items: Sequence[Item]) -> dict[str, Tensor]:
    """Tensors over a new file; see [Note: tensors without memory].

    Args:
        path: of the file; it must not exist.
        items: names, dtypes and shapes.

    Raises:
        CheckpointError: there is no space.
    """
    starts: list[int] = []
    end = 0
    for item in items:
        starts.append(end)
        end += -(-item.nbytes // _ALIGN) * _ALIGN
    end += _ALIGN  # a file of no bytes cannot be mapped
    try:
        with path.open("x+b") as file:
            # Without space a write to mapped memory would end the process.
            os.posix_fallocate(file.fileno(), 0, end)
            elements = mmap.mmap(file.fileno(), end)
    except OSError as error:
        raise disk_error(error, path, "write", end) from error
    return {
        item.name: _view(elements, start, item) for start, item in zip(starts, items, strict=True)
    }


def _view(elements: mmap.mmap, start: int, item: Item) -> Tensor:
    if not item.nbytes:
        return torch.empty(item.shape, dtype=item.dtype)
    count = torch.Size(item.shape).numel()
    flat = torch.frombuffer(elements, dtype=item.dtype, count=count, offset=start)
    return flat.reshape(item.shape)


@contextmanager
def folder_beside(target: Path) -> Generator[Path]:
    """A hidden directory beside what is to be, and gone afterwards.

    Args:
        target: what is to be.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.saving-", dir=target.parent))
    except OSError as error:
        raise disk_error(error, target, "create", 0) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _exists(target: Path) -> CheckpointError:
    return CheckpointError(
        "There is something where the state dict would be.",
        where=str(target),
        facts="it is a directory" if target.is_dir() else f"it has {target.stat().st_size} bytes",
        why="A conversion replaces nothing.",
        fix="choose another name, or remove it",
        path=str(target),
    )


def _failed(target: Path, nbytes: int, said: str) -> CheckpointError:
    return CheckpointError(
        "A state dict cannot be written.",
        where=str(target),
        facts=f"{nbytes} bytes; torch.save says: {said}",
        why="It is there with every byte on disk, or not at all.",
        fix="free space, or write elsewhere",
        path=str(target),
        nbytes=nbytes,
    )
