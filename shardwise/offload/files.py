"""Tensors over files that have no name, in one folder on one rank.

[Note: files without a name]
All tensors of a folder lie in one file. It is removed from the folder as soon as it is open, so
nothing is left behind by an exit, an exception or a kill; the file system frees it with its last
user. Each tensor has a region of it, whose blocks are reserved when it is made: a disk that fills
later cannot harm it. A region is mapped, so a tensor on disk is an ordinary tensor, whose pages the
kernel writes back and drops when it needs room; only the step goes past the page cache, on a second
descriptor. Both see the same values, as long as they are not used at the same moment.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import shutil
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import OffloadError
from shardwise.sharding.host_pages import padded

_PROTECTION, _SHARED = 1 | 2, 1  # PROT_READ | PROT_WRITE, MAP_SHARED
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*


@dataclass(frozen=True, slots=True)
class Region:
    """Where the bytes of a tensor are in a file.

    Args:
        folder: of the file.
        offset: of the first byte.
        nbytes: of the tensor.
        end: where the pages end that belong to the tensor's allocation.
        number: of the allocation; never used again.
    """

    folder: Folder
    offset: int
    nbytes: int
    end: int
    number: int


@dataclass(slots=True)
class _Extent:
    """A part of the file; `address` is where it is mapped."""

    offset: int
    nbytes: int
    address: int
    number: int


class Folder:
    """Allocates tensors in a folder.

    Args:
        path: an existing folder on a local drive.
        rank: for messages.

    Raises:
        OffloadError: the folder is missing or cannot be written to.
    """

    def __init__(self, path: str | Path, *, rank: int = 0) -> None:
        self.path = Path(path)
        self._rank = rank
        self.check(0)
        self.descriptor, self.direct_descriptor = self._open()
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._size = 0
        self._free: list[tuple[int, int]] = []
        self._extents: dict[int, _Extent] = {}  # by address
        self._addresses: list[int] = []
        self._dead: deque[int] = deque()
        self._made = 0
        self.peak_bytes = 0
        self._finalizer = weakref.finalize(self, _close, (self.descriptor, self.direct_descriptor))

    def check(self, nbytes: int) -> None:
        """Refuse a folder that cannot take so many bytes.

        Raises:
            OffloadError: it is missing, no folder, not writable, or too full.
        """
        if not self.path.is_dir():
            raise self._unusable("is no folder" if self.path.exists() else "does not exist")
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise self._unusable("cannot be written to")
        free = shutil.disk_usage(self.path).free
        if nbytes > free:
            raise self._full(nbytes, free)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the file behind tensors that are alive."""
        self._reclaim()
        return sum(extent.nbytes for extent in self._extents.values())

    def empty(self, length: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of any values; its bytes are reserved on disk.

        Raises:
            OffloadError: the disk is full.
        """
        nbytes = length * dtype.itemsize
        if not nbytes:
            return torch.empty(length, dtype=dtype)
        self._reclaim()
        size = padded(nbytes)
        offset = self._take(size)
        address = self._libc.mmap(
            None, ctypes.c_size_t(size), _PROTECTION, _SHARED, self.descriptor,
            ctypes.c_longlong(offset),
        )  # fmt: skip
        if address in (None, ctypes.c_void_p(-1).value):
            self._free.append((offset, size))
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(self.path))
        self._reclaim()  # the address may be that of a tensor that has just died
        self._made += 1
        self._extents[address] = _Extent(offset, size, address, self._made)
        bisect.insort(self._addresses, address)
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        memory = (ctypes.c_char * size).from_address(address)
        # A tensor may still be read while the interpreter ends.
        weakref.finalize(memory, self._end, address, size).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=length)

    def region(self, tensor: Tensor) -> Region | None:
        """Where a tensor, or a contiguous part of one, is in the file; None: it is not of here."""
        extent = self._extent(tensor)
        if extent is None or not tensor.is_contiguous():
            return None
        delta = tensor.data_ptr() - extent.address
        offset, nbytes = extent.offset + delta, tensor.numel() * tensor.element_size()
        return Region(self, offset, nbytes, extent.offset + extent.nbytes, extent.number)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of this folder, or any view of one."""
        return self._extent(tensor) is not None

    def _extent(self, tensor: Tensor) -> _Extent | None:
        if tensor.device.type != "cpu" or not self._addresses:
            return None
        place = bisect.bisect_right(self._addresses, tensor.data_ptr()) - 1
        if place < 0:
            return None
        extent = self._extents[self._addresses[place]]
        return extent if tensor.data_ptr() < extent.address + extent.nbytes else None

    def _open(self) -> tuple[int, int]:
        """The file for mappings, and for requests past the page cache where that is possible."""
        try:
            made, name = tempfile.mkstemp(prefix=f".shardwise-{self._rank}-", dir=self.path)
        except OSError as error:
            raise self._unusable(f"cannot be written to ({error.strerror})") from error
        try:
            direct = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
        except OSError:  # such as on a file system in memory
            direct = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.unlink(name)
        return made, direct

    def _take(self, size: int) -> int:
        """Reserve blocks: where a tensor has died, or at the end."""
        for index, (offset, length) in enumerate(self._free):
            if length >= size:
                self._reserve(offset, size)
                rest = [(offset + size, length - size)] if length > size else []
                self._free[index : index + 1] = rest
                return offset
        offset = self._size
        self._reserve(offset, size)
        self._size += size
        return offset

    def _reserve(self, offset: int, size: int) -> None:
        try:
            os.posix_fallocate(self.descriptor, offset, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                self._punch(offset, size)
                raise self._full(size, shutil.disk_usage(self.path).free, error) from error
            raise

    def _punch(self, offset: int, size: int) -> None:
        """Give blocks back; a file system that cannot do that keeps them for the next tensor."""
        self._libc.fallocate(
            self.descriptor,
            _KEEP_SIZE | _PUNCH_HOLE,
            ctypes.c_longlong(offset),
            ctypes.c_longlong(size),
        )

    def _end(self, address: int, size: int) -> None:
        # Called by the garbage collector at any moment: only what needs no lock.
        self._libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        self._dead.append(address)

    def _reclaim(self) -> None:
        """Take back the regions of tensors that have died."""
        while self._dead:
            address = self._dead.popleft()
            extent = self._extents.pop(address)
            del self._addresses[bisect.bisect_left(self._addresses, address)]
            self._punch(extent.offset, extent.nbytes)
            self._free.append((extent.offset, extent.nbytes))
            self._free = _joined(self._free)

    def _unusable(self, fault: str) -> OffloadError:
        return OffloadError(
            f"The folder {str(self.path)!r} {fault}.",
            where=f"disk({str(self.path)!r}) on rank {self._rank}",
            why="Every rank keeps its files in that folder on its own machine.",
            fix="make the folder on every machine, or name another one",
            path=str(self.path),
            rank=self._rank,
        )

    def _full(self, needed: int, free: int, error: OSError | None = None) -> OffloadError:
        return OffloadError(
            f"The disk of {str(self.path)!r} has no room for {needed:,} bytes.",
            where=f"disk({str(self.path)!r}) on rank {self._rank}",
            facts=[f"needed {needed:,} bytes, free {free:,} bytes, in use {self.in_use_bytes:,}"],
            why="The bytes of a tensor are reserved before it is written to.",
            fix="free some space, offload a smaller fraction, or shard over more ranks",
            path=str(self.path),
            needed=needed,
            free=free,
            errno=error.errno if error else errno.ENOSPC,
        )


def _joined(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one."""
    joined: list[tuple[int, int]] = []
    for offset, size in sorted(free):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
