"""Host buffers that begin at a page, of one size, taken and given back."""

from __future__ import annotations

import threading

from torch import Tensor

from shardwise.sharding.host_pages import host_pages, padded


class Pool:
    """A fixed number of buffers; whoever wants one more waits until one is given back.

    Args:
        count: how many buffers.
        buffer_bytes: of each.
        pin: for copies to an accelerator.
    """

    def __init__(self, count: int, buffer_bytes: int, *, pin: bool = False) -> None:
        self.count = count
        self.buffer_bytes = padded(buffer_bytes)
        self._free = [host_pages(self.buffer_bytes, pin=pin) for _ in range(count)]
        self._given_back = threading.Condition()
        self.high_water = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.count * self.buffer_bytes

    @property
    def num_free(self) -> int:
        """Buffers that nobody has."""
        return len(self._free)

    def take(self) -> Tensor:
        """A buffer of any content."""
        with self._given_back:
            self._given_back.wait_for(lambda: self._free)
            buffer = self._free.pop()
            self.high_water = max(self.high_water, self.count - len(self._free))
            return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Let others have it."""
        with self._given_back:
            self._free.append(buffer)
            self._given_back.notify()
