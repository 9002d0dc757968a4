"""The store of a program: allocates on every tier, and brings tensors from there and back.

[Note: what is copied]
Where the device is the CPU, host memory is the device's own: nothing is copied to step what rests
there, or to gather it. With an accelerator copies run on a stream of their own, from and to pinned
memory. What is on disk is read and written around the page cache; see `engine`, and `direct` for
GPUs that read by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwise.offload.direct import DirectReads, direct_reads
from shardwise.offload.engine import Compute, Engine, Piece, Reading
from shardwise.offload.files import Folder, Region
from shardwise.sharding.tiers import DEVICE, Memories, Tier

_HOST = torch.device("cpu")


class Fetch(Protocol):
    """A tensor on its way to the device."""

    def take(self) -> Tensor:
        """Wait for it; only once."""
        ...

    def drop(self) -> None:
        """End it without a result."""
        ...


class Store(Memories):
    """Tiers of one program on one rank.

    Args:
        device: of the program.
        rank: names files, for messages.
        debug: sum up what is written to disk, and check it when it is read.
    """

    def __init__(self, device: torch.device, *, rank: int = 0, debug: bool = False) -> None:
        super().__init__(device)
        self._rank = rank
        self._debug = debug
        self._folders: dict[str, Folder] = {}
        self._engine: Engine | None = None
        self._direct: DirectReads | None = None
        self._looked = False

    @property
    def direct(self) -> DirectReads | None:
        """What reads files past host memory, if anything can; see [Note: GPUDirect]."""
        if not self._looked and not self._debug:  # debug sums up what comes through the engine
            self._looked, self._direct = True, direct_reads(self.device)
        return self._direct

    @property
    def _pins(self) -> bool:
        return self.device.type != "cpu"

    def folder(self, path: str | Path) -> Folder:
        """The files of this program in a folder."""
        key = str(path)
        if key not in self._folders:
            self._folders[key] = Folder(key, rank=self._rank)
        return self._folders[key]

    @property
    def engine(self) -> Engine:
        """What reads and writes files; its threads start with its first use."""
        if self._engine is None:
            self._engine = Engine(self.region, pin=self._pins, debug=self._debug)
        return self._engine

    def empty(self, tier: Tier, length: int, dtype: torch.dtype) -> Tensor:
        """See `Memories.empty`.

        Raises:
            OffloadError: the disk is full, or the folder cannot be used.
        """
        if tier == DEVICE:
            return torch.empty(length, dtype=dtype, device=self.device)
        if tier.memory == "disk":
            return self.folder(tier.path).empty(length, dtype)
        return torch.empty(length, dtype=dtype, pin_memory=self._pins)

    def clone(self, tensor: Tensor) -> Tensor:
        """See `Memories.clone`."""
        region = self.region(tensor)
        if region is not None:
            return region.folder.empty(tensor.numel(), tensor.dtype).copy_(tensor)
        if self._pins and tensor.device == _HOST and tensor.ndim:
            return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return tensor.clone()

    def beside(self, tensor: Tensor) -> Tensor | None:
        """See `Memories.beside`."""
        for folder in self._folders.values():
            if folder.holds(tensor):
                return folder.empty(tensor.numel(), tensor.dtype).view(tensor.shape)
        return None

    def region(self, tensor: Tensor) -> Region | None:
        """Where a tensor is on disk; None: it is not."""
        found = (folder.region(tensor) for folder in self._folders.values())
        return next((region for region in found if region is not None), None)

    def fetch(self, flat: Tensor) -> Fetch:
        """Begin to bring a resting tensor to the device.

        Args:
            flat: on any tier.
        """
        region = self.region(flat)
        if region is not None and self.direct is not None:
            return self.direct.fetch(region, flat)
        if region is not None:
            return _FromDisk(self.engine.fetch(flat), self.device)
        if not self._pins or flat.device == self.device:
            return _Here(flat)
        return _FromHost(flat, self.device)

    def forget(self, tensor: Tensor) -> None:
        """Say that a tensor was changed past the engine; see `Engine.forget`."""
        if self._engine is not None:
            self._engine.forget(tensor)

    def stream(self, pieces: Sequence[Piece], compute: Compute) -> None:
        """Step tensors in chunks; see `Engine.stream`."""
        self.engine.stream(pieces, compute)


class _Here:
    """Nothing to do."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def take(self) -> Tensor:
        return self._flat

    def drop(self) -> None:
        pass


class _FromHost:
    """A copy on a stream beside the one that computes."""

    def __init__(self, flat: Tensor, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._stream = module.Stream(device)
        self._current = module.current_stream
        with module.stream(self._stream):
            self._target = torch.empty(flat.shape, dtype=flat.dtype, device=device)
            self._target.copy_(flat, non_blocking=True)

    def take(self) -> Tensor:
        current = self._current()
        current.wait_stream(self._stream)
        self._target.record_stream(current)
        return self._target

    def drop(self) -> None:
        self.take()


class _FromDisk:
    """A read by the engine, then a copy where the device has memory of its own."""

    def __init__(self, reading: Reading, device: torch.device) -> None:
        self._reading = reading
        self._device = device

    def take(self) -> Tensor:
        return self._reading.take().to(self._device)

    def drop(self) -> None:
        self._reading.drop()
