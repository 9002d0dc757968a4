"""Files of torch.save: what is in them, and at which bytes the elements of tensors lie.

[Note: reading torch.save]
Only torch's own `weights_only` unpickler reads these files, under a mode in which tensors have no
memory, so that nothing runs and no element is read. What it would refuse stays refused, but for a
few classes that hold numbers only: those are stood in for by `Inert`, which has attributes and
nothing else. Elements lie uncompressed in the zip; torch tells where.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.manifest import Chunk, Stored
from shardwise.sharding.compat import FakeTensorMode, offset_in_file
from shardwise.sharding.errors import CheckpointError


class Inert:
    """Stands in for a class of which only attributes are read."""


class Window(io.RawIOBase):
    """A part of a file as a file of its own.

    Args:
        file: open for reading, with nobody else moving in it.
        start: first byte.
        nbytes: how many.
    """

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._nbytes = nbytes
        self._at = 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; see `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; see `io.RawIOBase.readinto`."""
        self._file.seek(self._start + self._at)
        count = max(0, min(len(buffer), self._nbytes - self._at))
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def load_without_elements(
    path: Path,
    *,
    stand_ins: Mapping[str, Any] | None = None,
    window: tuple[int, int] | None = None,
) -> Any:
    """What a file of torch.save holds; its tensors have shapes and places, and no memory.

    Args:
        path: of the file.
        stand_ins: what takes the place of a class, by its full name; see the note above.
        window: first byte and bytes of the part that is such a file; None: all of it.

    Raises:
        CheckpointError: no file of torch.save, or one that would run code.
    """
    known: list[Any] = [(value, name) for name, value in (stand_ins or {}).items()]
    try:
        with path.open("rb") as file:
            part: Any = Window(file, *window) if window else file
            if not zipfile.is_zipfile(part):
                raise _no_zip(path)
            part.seek(0)
            with torch.serialization.safe_globals(known), FakeTensorMode():
                return torch.load(part, weights_only=True, map_location="cpu")
    except CheckpointError:
        raise
    except Exception as error:
        raise _refused(path, error) from None


def place_of(tensor: Tensor, name: str, path: Path, root: Path, *, start: int = 0) -> Stored:
    """Where the elements of a tensor from `load_without_elements` lie.

    Args:
        tensor: without memory.
        name: that it gets.
        path: of the file.
        root: directory that files are named from.
        start: of the window that was loaded.

    Raises:
        CheckpointError: its elements do not lie in a row.
    """
    if not tensor.is_contiguous():
        raise CheckpointError(
            f"{name} was saved as a view whose elements do not lie in a row.",
            where=str(path),
            facts=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            why="Ranks read only the rows that they hold, straight from the file.",
            fix="save it again after .contiguous()",
            name=name,
        )
    shape = tuple(tensor.shape)
    first = start + offset_in_file(tensor) + int(tensor.storage_offset()) * tensor.dtype.itemsize
    nbytes = tensor.numel() * tensor.dtype.itemsize
    file = str(path.relative_to(root))
    chunk = Chunk((0,) * len(shape), shape, file, (first, nbytes), first, ())
    return Stored(name, shape, tensor.dtype, (chunk,))


def number_in(stored: Stored, root: Path) -> int:
    """The value of a stored tensor of one element, such as a count of steps."""
    chunk = stored.chunks[0]
    with (root / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        raw = bytearray(file.read(stored.dtype.itemsize))
    return int(torch.frombuffer(raw, dtype=stored.dtype).item())


def _no_zip(path: Path) -> CheckpointError:
    return CheckpointError(
        "The file is not in torch.save's zip format.",
        where=str(path),
        facts=f"{path.stat().st_size:,} bytes",
        why="Torch has written zip files since 1.6; the format before that is one pickle, whose "
        "elements have no place of their own.",
        fix="load it with torch.load(..., weights_only=True) and save it again",
        path=str(path),
    )


def _refused(path: Path, error: Exception) -> CheckpointError:
    found = re.search(r"(?:Unsupported global: )?GLOBAL ([\w.]+)", str(error))
    name = found.group(1) if found else ""
    told = f"it needs {name}" if name else str(error).partition("\n")[0][:200]
    return CheckpointError(
        "A file of torch.save cannot be read without running code."
        if name
        else "A file of torch.save cannot be read.",
        where=str(path),
        facts=told,
        why="Only tensors, numbers, strings and containers of them are read, so that a file from "
        "elsewhere can do no harm.",
        fix="save a dict of tensors and numbers only, in the program that wrote this file",
        path=str(path),
        global_name=name,
    )
