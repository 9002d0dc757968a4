"""The safetensors format: a header in JSON, then the bytes of all tensors without gaps.

[Note: safetensors]
Eight bytes little-endian: the length of the header. The header is a JSON object: by name the dtype,
the shape and the first byte and end of a tensor, counted from the end of the header; the key
`__metadata__` holds text. It is padded with spaces so that elements begin at a multiple of eight.
Tensors are row-major and cover the rest of the file. Reading it runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.sharding.checkpoint.manifest import Chunk, Stored
from shardwise.sharding.errors import CheckpointError

INDEX = "model.safetensors.index.json"
"""Which file of a directory has which tensor."""

SINGLE = "model.safetensors"
"""The file of a directory that needs no index."""

_HEADER_BYTES = 100_000_000  # what the format's own library reads at most

_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def make_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """All bytes before the elements; those follow in the order given.

    Args:
        tensors: dtype and shape by name.

    Raises:
        CheckpointError: the format has no such dtype.

    >>> make_header({"w": (torch.float32, (2,))})[8:]
    b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   '
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _NAMES:
            raise CheckpointError(
                f"safetensors has no dtype for {name}.",
                where="export_safetensors",
                facts=f"{name} is {dtype}",
                why="The format knows real numbers, integers, bool and complex64.",
                fix="leave it out with where=, or choose another dtype=",
                name=name,
            )
        end = at + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(path: Path) -> tuple[Stored, ...]:
    """What a file or a directory holds, as rectangles of files; no element is read.

    Args:
        path: of a `.safetensors` file, or of a directory with one or with an index.

    Raises:
        CheckpointError: there is none, or it is not what the format says.
    """
    if not path.is_dir():
        return _of_file(path, path.name)
    if (path / INDEX).exists():
        return _of_index(path)
    files = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(
            "The directory has no safetensors that can be told apart.",
            where=str(path),
            facts=f"looked for {INDEX}, {SINGLE}, or one *.safetensors; found {found}",
            why="Without an index nobody knows which files make up the model.",
            fix="pass one file, or a directory that transformers has saved",
            path=str(path),
            files=len(files),
        )
    return _of_file(files[0], files[0].name)


def _of_index(path: Path) -> tuple[Stored, ...]:
    where = path / INDEX
    try:
        table: dict[str, str] = json.loads(where.read_text())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in table.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(where, f"the index cannot be read: {error!r}") from None
    have: dict[str, dict[str, Stored]] = {}
    for name in dict.fromkeys(file for _, file in pairs):
        if Path(name).name != name:
            raise _damaged(where, f"{name!r} is not the name of a file in the directory")
        have[name] = {stored.name: stored for stored in _of_file(path / name, name)}
    lost = [name for name, file in pairs if name not in have[file]]
    listed = {name for name, _ in pairs}
    more = [name for tensors in have.values() for name in tensors if name not in listed]
    if lost or more:
        odd = (lost or more)[0]
        what = "listed, but not in their files" if lost else "in the files, but not listed"
        raise _damaged(where, f"{len(lost or more)} tensors are {what}, such as {odd}")
    return tuple(have[file][name] for name, file in pairs)


def _of_file(path: Path, name: str) -> tuple[Stored, ...]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_BYTES):
                raise _damaged(path, f"{size:,} bytes cannot hold a header of {length:,}")
            text = file.read(length)
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error}") from error
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        found = [_stored(key, one, name, 8 + length) for key, one in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read: {error!r}") from None
    for stored in found:
        start = stored.chunks[0].start
        if start < 8 + length or start + stored.nbytes > size:
            end = start + stored.nbytes
            raise _damaged(path, f"{stored.name} would end at byte {end:,} of {size:,}")
    return tuple(found)


def _stored(name: str, one: Mapping[str, Any], file: str, first: int) -> Stored:
    dtype, shape = _DTYPES[one["dtype"]], tuple(map(int, one["shape"]))
    start, end = one["data_offsets"]
    if end - start != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"{name} of shape {shape} and {dtype} has {end - start} bytes")
    chunk = Chunk((0,) * len(shape), shape, file, (first + start, end - start), first + start, ())
    return Stored(name, shape, dtype, (chunk,))


def _damaged(path: Path, fault: str) -> CheckpointError:
    return CheckpointError(
        "A safetensors file is damaged.",
        where=str(path),
        facts=fault,
        why="A header that does not fit its file would load wrong values.",
        fix="copy or download it again",
        path=str(path),
    )
