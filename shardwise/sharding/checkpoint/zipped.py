"""The bytes around the elements of a chunk, so that it is what `torch.save` makes of one tensor.

[Note: an entry]
`torch.load` reads a zip archive: `data.pkl` rebuilds the tensor, `data/0` is its storage, and the
central directory at the end says where each member begins. All of that but the CRC-32 of the
elements follows from shape and dtype, so an entry has a known length and is written in one pass:
what precedes the elements, the elements, and what follows them with their sum. An entry that begins
at a multiple of `ALIGN` has its elements at one too. Entries stay below 4 GiB: no zip64.

References:
    .ZIP File Format Specification 6.3, sections 4.3.7 to 4.3.16.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardwise.sharding.compat import rebuild_parts

ALIGN = 64
"""Bytes; of the elements in the file, as `torch.save` aligns them for `mmap`."""

_ROOT = "archive"
_DATA = f"{_ROOT}/data/0"
_LOCAL, _DESCRIPTOR, _CENTRAL, _END = b"PK\3\4", b"PK\7\x08", b"PK\1\2", b"PK\5\6"
_FLAGS = 0x0808  # the sum follows in a descriptor; names are UTF-8
_VERSION = 20  # the first that has descriptors


def before(sizes: Sequence[int], dtype: torch.dtype) -> bytes:
    """What precedes the elements of a tensor in its entry; a multiple of `ALIGN` bytes.

    >>> len(before((2, 3), torch.float32)) % ALIGN
    0
    """
    return _frame(tuple(sizes), dtype).head


def after(sizes: Sequence[int], dtype: torch.dtype, crc: int) -> bytes:
    """What follows the elements; as long for any sum.

    Args:
        sizes: of the tensor.
        dtype: of its elements.
        crc: CRC-32 of the elements.

    >>> len(after((2, 3), torch.float32, 0)) == len(after((2, 3), torch.float32, 12345))
    True
    """
    frame = _frame(tuple(sizes), dtype)
    nbytes = frame.nbytes
    descriptor = struct.pack("<4sIII", _DESCRIPTOR, crc, nbytes, nbytes)
    directory = frame.directory + _central(_DATA, crc, nbytes, frame.data_at)
    start = len(frame.head) + nbytes + len(descriptor)
    end = struct.pack("<4sHHHHIIH", _END, 0, 0, frame.count, frame.count, len(directory), start, 0)
    return descriptor + directory + end


class _Frame(NamedTuple):
    """All of an entry that does not depend on the sum."""

    head: bytes
    directory: bytes  # of the members before the elements
    data_at: int  # where the member of the elements begins
    count: int
    nbytes: int


@functools.lru_cache(maxsize=4096)
def _frame(sizes: tuple[int, ...], dtype: torch.dtype) -> _Frame:
    nbytes = _nbytes(sizes, dtype)
    members, directory = _small_members(sizes, dtype)
    head = members + _data_header(len(members), nbytes)
    return _Frame(head, directory, len(members), 1 + len(_texts(sizes, dtype)), nbytes)


def _nbytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    nbytes = torch.Size(sizes).numel() * dtype.itemsize
    assert nbytes < 1 << 31, (sizes, dtype)
    return nbytes


def _texts(sizes: Sequence[int], dtype: torch.dtype) -> dict[str, bytes]:
    return {
        "data.pkl": _pickled(tuple(sizes), dtype),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }


def _small_members(sizes: Sequence[int], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """All members but the elements, and their part of the central directory."""
    members, directory = b"", b""
    for member, content in _texts(sizes, dtype).items():
        name, crc, nbytes = f"{_ROOT}/{member}", zlib.crc32(content), len(content)
        directory += _central(name, crc, nbytes, len(members))
        members += _local(name, crc, nbytes, flags=_FLAGS & ~8) + content
    return members, directory


def _data_header(at: int, nbytes: int) -> bytes:
    """The header of the elements, long enough for them to be aligned."""
    fill = -(at + len(_local(_DATA, 0, nbytes))) % ALIGN
    if 0 < fill < 4:  # an extra field has a header of four bytes
        fill += ALIGN
    extra = struct.pack("<2sH", b"FB", fill - 4) + b"Z" * (fill - 4) if fill else b""
    return _local(_DATA, 0, nbytes, extra=extra)


def _local(name: str, crc: int, nbytes: int, *, flags: int = _FLAGS, extra: bytes = b"") -> bytes:
    head = struct.pack(
        "<4sHHHHHIIIHH",
        *(_LOCAL, _VERSION, flags, 0, 0, 0, crc, nbytes, nbytes, len(name), len(extra)),
    )
    return head + name.encode() + extra


def _central(name: str, crc: int, nbytes: int, at: int) -> bytes:
    flags = _FLAGS if name == _DATA else _FLAGS & ~8
    head = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(_CENTRAL, _VERSION, _VERSION, flags, 0, 0, 0, crc, nbytes, nbytes, len(name)),
        *(0, 0, 0, 0, 0, at),
    )
    return head + name.encode()


class _Storage:
    """Stands for the storage of the tensor while it is pickled."""


class _Rebuilt:
    """Pickles as a contiguous tensor over `_Storage`."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        self._sizes = sizes
        self._dtype = dtype

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, _ = rebuild_parts(self._dtype)
        strides = _strides(self._sizes)
        named = (self._dtype,) if _needs_dtype(self._dtype) else ()
        hooks: OrderedDict[str, Any] = OrderedDict()
        return rebuild, (_Storage(), 0, self._sizes, strides, False, hooks, *named)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, numel: int, kind: Any) -> None:
        super().__init__(file, protocol=2)
        self._id = ("storage", kind, "0", "cpu", numel)

    def persistent_id(self, obj: Any) -> Any:
        return self._id if isinstance(obj, _Storage) else None


def _pickled(sizes: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """What `torch.save` pickles for a contiguous tensor."""
    _, kind = rebuild_parts(dtype)
    numel = torch.Size(sizes).numel() * (dtype.itemsize if _needs_dtype(dtype) else 1)
    file = io.BytesIO()
    _Pickler(file, numel, kind).dump(_Rebuilt(sizes, dtype))
    return file.getvalue()


def _needs_dtype(dtype: torch.dtype) -> bool:
    """Whether the storage is of bytes, so that the tensor has to say its dtype."""
    return rebuild_parts(dtype)[1] is torch.UntypedStorage


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
