"""Writes one file in one pass, durably.

[Note: writing early]
Elements are copied into blocks, and one thread writes a block while the next is filled and summed;
so a save holds two blocks, whatever it writes. After each write the kernel is told that the block
is not needed: it begins to write it to disk at once, and the cache keeps what others use. The fsync
at the end then finds little to do. Measured for two files of 650 MB at once (ext4): 860 MB/s;
writes and one fsync 530, O_DIRECT with one to four writes in flight 410 to 510.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from shardwise.sharding.checkpoint.manifest import SUM_BYTES
from shardwise.sharding.errors import CheckpointError
from shardwise.sharding.host_pages import bytes_of, host_pages, padded

BLOCK_BYTES = 8 << 20
"""Of one write; two blocks are held."""


class DiskFile:
    """A new file that is appended to; durable when the `with` block that it is used in ends.

    Args:
        path: of the file; it must not exist.
        nbytes: about how long it will be, for blocks no larger than needed.
        device: where tensors come from; blocks are pinned for CUDA.

    Raises:
        CheckpointError: the system refuses; with path, bytes and cause.
    """

    def __init__(self, path: Path, nbytes: int, device: torch.device) -> None:
        self.path = path
        size = min(BLOCK_BYTES, padded(max(nbytes, 1)))
        self._blocks = _Blocks(size, device)
        self._written = 0
        self._fd = _open(path)

    @property
    def position(self) -> int:
        """Bytes that were appended."""
        return self._written + self._blocks.filled

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._blocks.close()
            os.close(self._fd)

    def append(self, data: bytes) -> None:
        """Write bytes after those before."""
        if data:
            self._append(torch.frombuffer(bytearray(data), dtype=torch.uint8), None)

    def append_tensor(self, values: Tensor) -> tuple[int, ...]:
        """Write elements in row-major order; returns their running sums, see `Chunk.sums`.

        Args:
            values: of any strides, on any device.
        """
        sums = _Sums()
        for piece in _flat_pieces(values):
            self._append(piece, sums)
        return sums.finish()

    def _append(self, flat: Tensor, sums: _Sums | None) -> None:
        at = 0
        while at < flat.numel():
            taken = self._blocks.fill(flat[at:])
            if sums is not None:
                sums.add(taken)
            at += len(taken)
            if self._blocks.is_full:
                self._blocks.submit(self._write, self._written)
                self._written += self._blocks.size

    def _finish(self) -> None:
        self._blocks.wait()
        length = self.position
        self._write(self._blocks.rest(), self._written)
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise disk_error(error, self.path, "flush", length) from error

    def _write(self, data: memoryview, offset: int) -> None:
        start = offset
        while data:
            try:
                done = os.pwrite(self._fd, data, offset)
            except OSError as error:
                raise disk_error(error, self.path, "write", len(data), offset) from error
            data, offset = data[done:], offset + done
        if hasattr(os, "posix_fadvise"):  # macOS has none
            with suppress(OSError):  # advice, which not all file systems take
                os.posix_fadvise(self._fd, start, offset - start, os.POSIX_FADV_DONTNEED)


class _Blocks:
    """Two blocks: one is filled while the other is written."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.filled = 0
        self._device = device
        self._blocks: list[tuple[Tensor, memoryview]] = []
        self._writes: list[Future[None] | None] = [None, None]
        self._current = 0
        self._thread: ThreadPoolExecutor | None = None

    @property
    def is_full(self) -> bool:
        """Whether the block has to be written."""
        return self.filled == self.size

    def fill(self, flat: Tensor) -> memoryview:
        """Copy as much as fits; returns the bytes that were taken."""
        if self._current == len(self._blocks):
            self._blocks.append(_block(self.size, self._device))
        if self.filled == 0:
            self._wait_for(self._current)
        block, view = self._blocks[self._current]
        count = min(self.size - self.filled, flat.numel())
        block[self.filled : self.filled + count].copy_(flat[:count])
        taken = view[self.filled : self.filled + count]
        self.filled += count
        return taken

    def submit(self, write: Callable[[memoryview, int], None], offset: int) -> None:
        """Write the block in the background, and go on with the other one."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        _, view = self._blocks[self._current]
        self._writes[self._current] = self._thread.submit(write, view, offset)
        self._current = 1 - self._current
        self.filled = 0

    def rest(self) -> memoryview:
        """What is in the block that was not submitted."""
        if not self.filled:
            return memoryview(b"")
        return self._blocks[self._current][1][: self.filled]

    def wait(self) -> None:
        """Wait for all writes; raises what they raised."""
        for index in range(len(self._writes)):
            self._wait_for(index)

    def close(self) -> None:
        """Wait for the thread, whatever came of its writes."""
        if self._thread is not None:
            self._thread.shutdown()
        self._blocks = []

    def _wait_for(self, index: int) -> None:
        write, self._writes[index] = self._writes[index], None
        if write is not None:
            write.result()


class _Sums:
    """Running CRC-32 at the end of every `SUM_BYTES` and at the end."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._crc = 0
        self._bytes = 0

    def add(self, data: memoryview) -> None:
        while data:
            count = SUM_BYTES - self._bytes % SUM_BYTES
            piece, data = data[:count], data[count:]
            self._crc = crc32(piece, self._crc)
            self._bytes += len(piece)
            if self._bytes % SUM_BYTES == 0:
                self._sums.append(self._crc)

    def finish(self) -> tuple[int, ...]:
        if self._bytes % SUM_BYTES or not self._bytes:
            self._sums.append(self._crc)
        return tuple(self._sums)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small new file through the cache and flush it.

    Raises:
        CheckpointError: the system refuses.
    """
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path, "write", len(data)) from error


def flush_folder(path: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        CheckpointError: the system refuses.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise disk_error(error, path, "flush", 0) from error


def disk_error(
    error: OSError, path: Path, doing: str, nbytes: int, offset: int = 0
) -> CheckpointError:
    """What the system refused, with path, bytes and cause.

    Args:
        error: of the system.
        path: of the file or directory.
        doing: verb.
        nbytes: that it was about.
        offset: in the file.
    """
    cause = errno.errorcode.get(error.errno or 0, "?")
    fix = _FIXES.get(error.errno or 0, "look at the file system; then save again")
    return CheckpointError(
        f"A checkpoint cannot be written: {doing} of {nbytes} bytes failed with {cause}.",
        where=str(path),
        facts=f"byte {offset} of the file; the system says: {error.strerror or error}",
        why="A checkpoint is complete with every byte on disk, or it is none. Nothing that was "
        "there before is changed, nor is the state.",
        fix=fix,
        path=str(path),
        nbytes=nbytes,
        offset=offset,
        errno=error.errno,
        cause=cause,
    )


_FIXES = {
    errno.ENOSPC: "free space, or save elsewhere; then save again",
    errno.EDQUOT: "free space in your quota, or save elsewhere; then save again",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or save elsewhere",
    errno.EROFS: "save to a file system that is not mounted read-only",
    errno.EACCES: "save to a directory that this user may write",
    errno.EPERM: "save to a directory that this user may write",
}


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise disk_error(error, path, "create", 0) from error


def _block(size: int, device: torch.device) -> tuple[Tensor, memoryview]:
    """Whole pages as a tensor and as a buffer."""
    block = host_pages(size, pin=device.type == "cuda")
    return block, bytes_of(block)


def _flat_pieces(values: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor in row-major order, copied in pieces of about a block if scattered."""
    values = values.detach()
    if values.is_contiguous():
        yield values.reshape(-1).view(torch.uint8)
        return
    row_bytes = max(1, values[:1].numel() * values.itemsize)
    for piece in values.split(max(1, BLOCK_BYTES // row_bytes)):
        yield piece.contiguous().view(-1).view(torch.uint8)
