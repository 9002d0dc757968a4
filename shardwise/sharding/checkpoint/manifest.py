"""What is in a checkpoint directory: every global tensor, and where each rectangle of it lies.

[Note: files of a checkpoint]
`shardwise.json` is this manifest; a directory that has it is complete, as it is written last.
`__<rank>_0.distcp` holds what one rank wrote, and `.metadata` lets torch's own DCP read the same
files; shardwise never opens `.metadata`, which is a pickle. Each chunk is one entry of a `.distcp`
file in torch.save's zip format; the bytes of its elements, row-major, begin at `start`. CRC-32 sums
are running ones over the elements, one at the end of each MiB, so that a slice is verified alone
and the last one is the sum of the whole.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwise.sharding.checkpoint.records import Box
from shardwise.sharding.errors import CheckpointError

MANIFEST = "shardwise.json"
VERSION = 1
"""Of the manifest; raised whenever an older reader would misread a newer checkpoint."""

SUM_BYTES = 1 << 20
"""Bytes of elements from one checksum to the next."""


@dataclass(frozen=True)
class Chunk:
    """One rectangle of a tensor in a file.

    Args:
        offsets: where the rectangle begins, by dimension.
        sizes: how large it is.
        file: name inside the directory.
        entry: first byte of the zip entry in the file, and its bytes.
        start: first byte of the elements in the file.
        sums: running CRC-32 at the end of every `SUM_BYTES` and at the end.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    entry: tuple[int, int]
    start: int
    sums: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The rectangle."""
        return Box(self.offsets, self.sizes)


@dataclass(frozen=True)
class Stored:
    """One global tensor; its chunks cover it without overlap."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    of: str = ""

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """A checkpoint, but for the bytes.

    Args:
        step: optimizer steps taken.
        plan: of the program that saved, as JSON text.
        tensors: parameters first, in the model's own order.
        values: what the optimizer state holds besides tensors.
        extra: the user's own values as JSON, with references to tensors; see `extra`.
        files: bytes by file.
    """

    step: int
    plan: str
    tensors: tuple[Stored, ...]
    values: Mapping[str, Any]
    extra: Any
    files: Mapping[str, int]

    @cached_property
    def by_name(self) -> Mapping[str, Stored]:
        """Tensors by name."""
        return {stored.name: stored for stored in self.tensors}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(stored.nbytes for stored in self.tensors)

    def to_json(self) -> str:
        """Text with its own checksum on the first line."""
        lines = ",\n  ".join(json.dumps(_tensor(stored)) for stored in self.tensors)
        body = (
            f'"version": {VERSION},\n"step": {self.step},\n"values": {json.dumps(self.values)},\n'
            f'"extra": {json.dumps(self.extra)},\n"files": {json.dumps(self.files)},\n'
            f'"plan": {json.dumps(self.plan)},\n"tensors": [\n  {lines}\n]'
        )
        return f'{{"crc32": {zlib.crc32(body.encode())},\n{body}}}\n'

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read strictly; runs nothing.

        Args:
            text: of the file.
            where: of the file, for errors.

        Raises:
            CheckpointError: damaged, of another version, or no manifest.
        """
        first, _, body = text.partition("\n")
        try:
            data = json.loads(text)
            crc = data["crc32"]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(where, f"it cannot be read: {error}") from None
        if first != f'{{"crc32": {crc},' or zlib.crc32(body[:-2].encode()) != crc:
            raise _damaged(where, f"its own checksum is not {crc}")
        if data["version"] != VERSION:
            raise _damaged(where, f"it is of version {data['version']}, this reads {VERSION}")
        return cls(
            step=data["step"],
            plan=data["plan"],
            tensors=tuple(map(_stored, data["tensors"])),
            values=data["values"],
            extra=data["extra"],
            files=data["files"],
        )


def _tensor(stored: Stored) -> dict[str, Any]:
    # Thousands of chunks: `dataclasses.asdict` copies every tuple of each, ten times as slowly.
    chunks = [vars(chunk) for chunk in stored.chunks]
    return vars(stored) | {"dtype": str(stored.dtype).removeprefix("torch."), "chunks": chunks}


def _stored(record: dict[str, Any]) -> Stored:
    chunks = tuple(
        Chunk(
            offsets=tuple(one["offsets"]),
            sizes=tuple(one["sizes"]),
            file=one["file"],
            entry=(one["entry"][0], one["entry"][1]),
            start=one["start"],
            sums=tuple(one["sums"]),
        )
        for one in record["chunks"]
    )
    dtype = getattr(torch, record["dtype"])
    return Stored(record["name"], tuple(record["shape"]), dtype, chunks, record["of"])


def _damaged(where: str, fault: str) -> CheckpointError:
    return CheckpointError(
        "A checkpoint's manifest is damaged.",
        where=where,
        facts=fault,
        why="The manifest says where every tensor lies, so a wrong one would load wrong values.",
        fix="restore another checkpoint, or copy this one again from where it was written",
    )
