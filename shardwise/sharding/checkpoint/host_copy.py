"""A copy in host memory of what this rank writes, so that training can go on while it is written.

[Note: host copies]
The copy is all that a save in the background keeps training waiting for. It holds the chunks that
this rank writes, and not those that its replicas write; its memory is made at the first save and
used again by all later ones. It is pinned where tensors are on CUDA. On CPU it asks for huge pages:
the first touch of 1 GiB in pages of 4 KiB costs 262,144 faults. What rests on disk is copied on
disk, next to where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.manifest import Chunk
from shardwise.sharding.compat import copy_all
from shardwise.sharding.host_pages import host_pages
from shardwise.sharding.large_pages import in_large_pages
from shardwise.sharding.tiers import Memories

_ALIGN = 64


class HostCopy:
    """Memory that takes one snapshot after another.

    Args:
        memories: where tensors come from.
    """

    def __init__(self, memories: Memories) -> None:
        self._memories = memories
        self._device = memories.device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._memory.nbytes

    def take(self, chunks: Sequence[tuple[Chunk, Tensor]]) -> tuple[tuple[Chunk, Tensor], ...]:
        """Copy the values as they are now; ends what an earlier call has returned.

        Args:
            chunks: with views of live memory.

        Returns:
            The same chunks, with contiguous values in host memory.
        """
        on_disk = [self._memories.beside(values) for _, values in chunks]
        ends = [0]
        for (_, values), beside in zip(chunks, on_disk, strict=True):
            nbytes = values.nbytes if beside is None else 0
            ends.append(ends[-1] + -(-nbytes // _ALIGN) * _ALIGN)
        if self._memory.nbytes < ends[-1]:
            self._memory = _host_memory(ends[-1], self._device)
        copies = [
            self._memory[start : start + values.nbytes].view(values.dtype).view(values.shape)
            if beside is None
            else beside
            for start, (_, values), beside in zip(ends, chunks, on_disk)
        ]
        if copies:
            with torch.no_grad():
                copy_all(copies, [values for _, values in chunks], self._device.type == "cuda")
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return tuple((chunk, copy) for (chunk, _), copy in zip(chunks, copies))


def _host_memory(nbytes: int, device: torch.device) -> Tensor:
    return in_large_pages(host_pages(nbytes, pin=device.type == "cuda"))
