"""A checkpoint on disk as plain files, without a job: safetensors, or what `torch.load` reads.

[Note: a state dict without its memory]
`torch.save` writes storages one after the other from where they are. Tensors here are views of a
temporary file, mapped into memory, so what they hold is the kernel's to drop; the price is that
bytes are written twice.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.disk import disk_error, flush_folder
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.checkpoint.manifest import Manifest, Stored
from shardwise.sharding.checkpoint.read import Job, Reader
from shardwise.sharding.checkpoint.records import Box
from shardwise.sharding.checkpoint.streams import parameters_and_buffers, pieces
from shardwise.sharding.errors import CheckpointError
from shardwise.sharding.plan import Plan
from shardwise.sharding.tree import Where, select
from shardwise.transforms.export_files import Files, Item

FILE_BYTES = 5_000_000_000
"""Of one safetensors file at most, unless one tensor is larger."""

_ALIGN = 64  # of each tensor in the temporary file


class Written(NamedTuple):
    """What was written: the number of tensors, and the bytes of their elements."""

    tensors: int
    nbytes: int


def to_safetensors(
    source: Path,
    target: Path,
    *,
    where: Where | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = FILE_BYTES,
) -> Written:
    """Write a directory as transformers reads it, tied weights once; holds one tensor.

    Args:
        source: a complete checkpoint.
        target: a directory; it must not exist.
        where: selects paths of parameters and buffers; None: all.
        dtype: of floating-point tensors; None: as they are stored.
        max_file_bytes: of one file; several have an index.

    Raises:
        CheckpointError: the checkpoint is damaged, the target exists or cannot be written.
        PatternError: a pattern matches no path.
    """
    chosen = _choose(read_manifest(source), where, dtype)
    files = Files(target, max_file_bytes, None, overwrite=False)
    try:
        files.begin([item for item, _ in chosen])
        with Reader(source) as reader:
            for item, stored in chosen:
                values = torch.empty(item.shape, dtype=item.dtype)
                whole = Box((0,) * len(item.shape), item.shape)
                reader.fill([Job(stored, whole, values)])
                files.append(item, values)
        files.complete(None)
    except BaseException:
        files.discard()
        raise
    return _written(chosen)


def to_torch(
    source: Path, target: Path, *, where: Where | None = None, dtype: torch.dtype | None = None
) -> Written:
    """Write a state dict for `torch.load`, tied weights under all of their names.

    Needs twice its space while it runs; see [Note: a state dict without its memory].

    Args:
        source: a complete checkpoint.
        target: a file; it must not exist.
        where: selects paths of parameters and buffers; None: all.
        dtype: of floating-point tensors; None: as they are stored.

    Raises:
        CheckpointError: the checkpoint is damaged, the target exists or cannot be written.
        PatternError: a pattern matches no path.
    """
    manifest = read_manifest(source)
    chosen = _choose(manifest, where, dtype)
    if target.exists():
        raise _exists(target)
    nbytes = sum(item.nbytes for item, _ in chosen)
    with _folder_beside(target) as folder:
        values = _mapped(source, folder / "elements", chosen)
        for alias, path in _aliases(manifest).items():
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


def _choose(
    manifest: Manifest, where: Where | None, dtype: torch.dtype | None
) -> list[tuple[Item, Stored]]:
    """Parameters and buffers by the module's own names."""
    known = parameters_and_buffers(manifest.tensors)
    paths = known if where is None else select(where, list(known))
    chosen: list[tuple[Item, Stored]] = []
    for path in paths:
        stored = known[path]
        casts = dtype is not None and stored.dtype.is_floating_point
        chosen.append(
            (Item(path, dtype if casts and dtype else stored.dtype, stored.shape), stored)
        )
    return chosen


def _aliases(manifest: Manifest) -> Mapping[str, str]:
    """Other names of tied parameters."""
    if not manifest.plan:
        return {}
    infos = Plan.from_json(manifest.plan).infos
    return {alias: info.path for info in infos for alias in info.aliases}


def _mapped(source: Path, path: Path, chosen: Sequence[tuple[Item, Stored]]) -> dict[str, Tensor]:
    """Tensors over a new file with all elements."""
    starts: list[int] = []
    at = 0
    try:
        with Reader(source) as reader, path.open("xb") as file:
            for item, stored in chosen:
                starts.append(at)
                for piece in pieces(reader, stored, item.dtype):
                    raw: Any = piece.reshape(-1).view(torch.uint8).numpy()
                    at += file.write(memoryview(raw))
                at += file.write(bytes(-at % _ALIGN))
            file.write(bytes(_ALIGN))  # a file of no bytes cannot be mapped
        with path.open("r+b") as file:
            elements = mmap.mmap(file.fileno(), 0)
    except OSError as error:
        raise disk_error(error, path, "write", at) from error
    return {
        item.name: _view(elements, start, item)
        for start, (item, _) in zip(starts, chosen, strict=True)
    }


def _view(elements: mmap.mmap, start: int, item: Item) -> Tensor:
    if not item.nbytes:
        return torch.empty(item.shape, dtype=item.dtype)
    count = torch.Size(item.shape).numel()
    flat = torch.frombuffer(elements, dtype=item.dtype, count=count, offset=start)
    return flat.reshape(item.shape)


@contextmanager
def _folder_beside(target: Path) -> Generator[Path]:
    """A hidden directory beside a file to be, and gone afterwards."""
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
