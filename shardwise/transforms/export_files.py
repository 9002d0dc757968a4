"""The files of an export on rank 0: cut by size, written in one pass, completed by a rename."""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.disk import DiskFile, disk_error, flush_folder, write_durably
from shardwise.sharding.checkpoint.safetensors_format import INDEX, SINGLE, make_header
from shardwise.sharding.errors import CheckpointError


class Item(NamedTuple):
    """One tensor of an export: its name in the files, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Files:
    """What rank 0 writes: `begin`, then `append` in the order given, then `complete`.

    Args:
        path: of the directory.
        max_file_bytes: of elements in one file, but for a tensor that is larger.
        config: what `config.json` is made of; None: there is none.
        overwrite: whether what is at `path` may be replaced.
    """

    def __init__(self, path: Path, max_file_bytes: int, config: Any, *, overwrite: bool) -> None:
        self.config = config
        self._path = path
        host = socket.gethostname()
        self._drafts = f".{path.name}.exporting-{host}-"
        self._draft = path.with_name(f"{self._drafts}{os.getpid()}")
        self._max = max_file_bytes
        self._overwrite = overwrite
        self._groups: list[list[Item]] = []
        self._file: DiskFile | None = None
        self._at = (0, 0)

    def begin(self, items: Sequence[Item]) -> None:
        """Check that the directory may be made, and make the one beside it.

        Raises:
            CheckpointError: it may not.
        """
        json_of(self.config, None)
        make_header({item.name: (item.dtype, item.shape) for item in items})
        self._groups = _groups(items, self._max)
        try:
            if not self._overwrite and self._path.exists():
                raise _exists(self._path)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for left in self._path.parent.glob(f"{glob.escape(self._drafts)}*"):
                if left == self._draft or not _lives(left):
                    shutil.rmtree(left, ignore_errors=True)
            self._draft.mkdir()
        except OSError as error:
            raise disk_error(error, self._draft, "create", 0) from error

    def append(self, item: Item, values: Tensor) -> None:
        """Write the next tensor.

        Args:
            item: the next one of what was begun with.
            values: of its dtype and shape.
        """
        number, at = self._at
        group = self._groups[number]
        assert group[at] is item
        if self._file is None:
            header = make_header({one.name: (one.dtype, one.shape) for one in group})
            nbytes = len(header) + sum(one.nbytes for one in group)
            self._file = DiskFile(self._draft / self._name(number), nbytes, values.device)
            self._file.append(header)
        self._file.append_tensor(values)
        self._at = (number, at + 1)
        if at + 1 == len(group):
            done, self._file = self._file, None
            done.__exit__(None)
            self._at = (number + 1, 0)

    def complete(self, config: bytes | None) -> None:
        """Write index and configuration, and give the directory its name.

        Args:
            config: of `config.json`.

        Raises:
            CheckpointError: the system refuses.
        """
        if not self._groups:
            write_durably(self._draft / SINGLE, make_header({}))
        if len(self._groups) > 1:
            total = sum(item.nbytes for group in self._groups for item in group)
            table = {
                item.name: self._name(number)
                for number, group in enumerate(self._groups)
                for item in group
            }
            index = {"metadata": {"total_size": total}, "weight_map": table}
            write_durably(self._draft / INDEX, (json.dumps(index, indent=2) + "\n").encode())
        if config is not None:
            write_durably(self._draft / "config.json", config)
        flush_folder(self._draft)
        aside = self._path.with_name(f".{self._path.name}.replaced-{os.getpid()}")
        try:
            if self._path.exists():
                if not self._overwrite:
                    raise _exists(self._path)
                self._path.rename(aside)
            self._draft.rename(self._path)
        except OSError as error:
            raise disk_error(error, self._path, "rename", 0) from error
        flush_folder(self._path.parent)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written."""
        left, self._file = self._file, None
        if left is not None:
            left.__exit__(OSError)
        shutil.rmtree(self._draft, ignore_errors=True)

    def _name(self, number: int) -> str:
        count = len(self._groups)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _groups(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Tensors by file, in order."""
    groups: list[list[Item]] = []
    filled = 0
    for item in items:
        if not groups or filled + item.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.nbytes
    return groups


def _lives(draft: Path) -> bool:
    """Whether the process of this machine that writes there may still run."""
    try:
        os.kill(int(draft.name.rpartition("-")[2]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def json_of(config: Any, dtype: torch.dtype | None) -> bytes | None:
    r"""The bytes of `config.json`.

    Args:
        config: with `to_json_string` or `to_dict`, as transformers has them, or a mapping.
        dtype: of the files, which the configuration then names; None: as it is.

    Raises:
        CheckpointError: it is neither.

    >>> json_of({"hidden_size": 8}, torch.bfloat16)
    b'{\n  "hidden_size": 8,\n  "dtype": "bfloat16"\n}\n'
    """
    if config is None:
        return None
    if hasattr(config, "to_json_string"):
        data = json.loads(config.to_json_string())
    elif isinstance(config, Mapping):
        data = dict(config)
    else:
        raise CheckpointError(
            "config= cannot be written as JSON.",
            where="export_safetensors(config=...)",
            facts=f"it is of {type(config)}",
            why="config.json is made by to_json_string(), or from a mapping.",
            fix="pass model.config of transformers, or a dict",
        )
    if dtype is not None:
        data.pop("torch_dtype", None)
        data["dtype"] = str(dtype).removeprefix("torch.")
    return (json.dumps(data, indent=2) + "\n").encode()


def _exists(path: Path) -> CheckpointError:
    return CheckpointError(
        "There is something where the export would be.",
        where=str(path),
        facts="it exists",
        why="An export replaces a directory only if it is told to.",
        fix="export to another directory, or export_safetensors(..., overwrite=True)",
        path=str(path),
    )
