"""Reads from a drive straight into the memory of a GPU, through kvikio where it is installed.

[Note: GPUDirect]
With its storage driver a GPU takes pages from a drive without a copy in host memory. kvikio is the
door to it; where it would copy through host memory itself ("compat mode") it is not used, since the
engine does that too. The drive knows nothing of streams: a block of memory that the allocator hands
out may still be read by kernels that were queued before. So targets come from a stream of their
own, whose blocks are given out again only after all streams that used them have come to an end.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.offload.files import Folder, Region
from shardwise.sharding.errors import OffloadError
from shardwise.sharding.host_pages import PAGE_BYTES, padded


class Room(Protocol):
    """Where targets of reads come from."""

    def take(self, nbytes: int) -> Tensor:
        """Bytes that nothing queued before will touch."""
        ...

    def hand_over(self, tensor: Tensor) -> None:
        """The current stream will use them from here."""
        ...


class StreamRoom:
    """Targets on a GPU; see [Note: GPUDirect].

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def take(self, nbytes: int) -> Tensor:
        """See `Room.take`."""
        with self._module.stream(self._stream):
            target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._stream.synchronize()
        return target

    def hand_over(self, tensor: Tensor) -> None:
        """See `Room.hand_over`."""
        tensor.record_stream(self._module.current_stream(self._device))


class DirectReads:
    """Reads of whole tensors.

    Args:
        kvikio: the module.
        room: gives targets.
    """

    def __init__(self, kvikio: Any, room: Room) -> None:
        self._kvikio = kvikio
        self._room = room
        self._files: dict[Folder, Any] = {}

    def fetch(self, region: Region, like: Tensor) -> DirectReading:
        """Begin to read a tensor.

        Args:
            region: where it is.
            like: has its shape and dtype.
        """
        skipped = region.offset % PAGE_BYTES
        nbytes = padded(skipped + region.nbytes)
        buffer = self._room.take(nbytes)
        file = self._file(region.folder)
        future = file.pread(buffer, size=nbytes, file_offset=region.offset - skipped)
        values = buffer[skipped : skipped + region.nbytes].view(like.dtype).view(like.shape)
        return DirectReading(values, region, nbytes, future.get, self._room)

    def _file(self, folder: Folder) -> Any:
        if folder not in self._files:
            # The file has no name, but this process has it open.
            path = f"/proc/self/fd/{folder.descriptor}"
            self._files[folder] = self._kvikio.CuFile(path, "r")
        return self._files[folder]


class DirectReading:
    """A tensor on its way from a drive to a GPU."""

    def __init__(
        self, values: Tensor, region: Region, nbytes: int, get: Callable[[], int], room: Room
    ) -> None:
        self._values = values
        self._region = region
        self._nbytes = nbytes
        self._get = get
        self._room = room

    def take(self) -> Tensor:
        """The values, once they are there; only once.

        Raises:
            OffloadError: the file cannot be read.
        """
        try:
            moved = self._get()
        except RuntimeError as error:  # all that kvikio raises
            raise self._failed(str(error)) from error
        if moved < self._nbytes:
            raise self._failed(f"{moved:,} bytes came")
        self._room.hand_over(self._values)
        return self._values

    def drop(self) -> None:
        """Wait, for nothing: memory must not be freed under a read."""
        try:
            self._get()
        except RuntimeError:
            return

    def _failed(self, cause: str) -> OffloadError:
        path = str(self._region.folder.path)
        return OffloadError(
            f"Could not read {self._nbytes:,} bytes of a file in {path!r} to a GPU.",
            facts=[f"at byte {self._region.offset:,} of the file: {cause}"],
            why="Parameters on disk are read by the GPU where kvikio is installed.",
            fix="check the drive; without kvikio, reads go through host memory",
            path=path,
            offset=self._region.offset,
            nbytes=self._nbytes,
        )


def direct_reads(device: torch.device) -> DirectReads | None:
    """What reads to a device past host memory; None: nothing can.

    >>> direct_reads(torch.device("cpu"))
    """
    if device.type != "cuda" or importlib.util.find_spec("kvikio") is None:
        return None
    try:
        kvikio = importlib.import_module("kvikio")
        copies = kvikio.defaults.is_compat_mode_preferred()
    except (ImportError, AttributeError, RuntimeError):  # no driver, or another version
        return None
    return None if copies else DirectReads(kvikio, StreamRoom(device))
