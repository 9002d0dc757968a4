"""What autograd saves for backward, kept on a tier from forward to backward.

[Note: saved values on a tier]
Around a module's forward, hooks take what autograd saves: its memory is copied to the tier, once
for all views of it, and given back as soon as nobody else needs it. In backward the first value
that a module call asks for begins to fetch all of that call, and those of the calls before it, as
far ahead as the plan says. The graph owns everything: a forward without gradients copies nothing,
and what an exception or a graph that is thrown away leaves behind is freed with it.

Small tensors stay, as they cost more to move than they take. On the CPU a value is copied to the
tier before the next operation runs, and back by a thread; with an accelerator both copies run on a
stream beside the one that computes.

Autograd counts the writes of a tensor, and refuses one that was written after it had been saved;
behind hooks it cannot. So a value keeps the counter, on an alias without memory, and tells how
often it was written. Writes past the counter (`.data`) go unseen, as without hooks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.compat import StorageWeakRef
from shardwise.sharding.tiers import Memories, Tier

MIN_BYTES = 1 << 14
"""What is smaller stays: the calls that move it cost more than its bytes are worth."""

_ALIGNMENT = 512
"""A value lies as before to any alignment that allocators have, so that kernels give equal bits."""

_WHOLE = 4
"""A view of at least one in so many bytes of a storage has all of it copied: others may follow."""


class Lane:
    """Copies beside what computes: a thread on the CPU, else a stream.

    Args:
        device: of the program.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._stream: Any = None
        if device.type != "cpu":
            self._stream = torch.get_device_module(device).Stream(device)

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy to the tier; the source may be freed afterwards."""
        if self._stream is None:
            target.copy_(source)
            return
        module = torch.get_device_module(self._device)
        self._stream.wait_stream(module.current_stream(self._device))
        with module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def fetch(self, source: Tensor) -> Callable[[], Tensor]:
        """Begin to copy back; what is returned waits for it."""
        if self._stream is None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "shardwise-acts")
            future: Future[Tensor] = self._thread.submit(source.clone)
            return future.result
        module = torch.get_device_module(self._device)
        with module.stream(self._stream):
            target = source.to(self._device, non_blocking=True)

        def take() -> Tensor:
            current = module.current_stream(self._device)
            current.wait_stream(self._stream)
            target.record_stream(current)
            return target

        return take


class _Copy:
    """The bytes of one storage, or of a part of one, on a tier."""

    def __init__(self, lane: Lane, source: Tensor, target: Tensor, storage: Any) -> None:
        self._lane = lane
        self._kept = target
        # Keeps the number of the storage from being used again while it stands for this one.
        self._storage = StorageWeakRef(storage)
        self._coming: Callable[[], Tensor] | None = None
        self._here: Tensor | None = None
        self.num_users = 0
        self._num_taken = 0
        lane.send(source, target)

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._here is None and self._coming is None:
            self._coming = self._lane.fetch(self._kept)

    def take(self) -> Tensor:
        """The bytes on the device; held until all that were saved of it have been asked for."""
        self.fetch()
        if self._here is None:
            assert self._coming is not None
            self._here, self._coming = self._coming(), None
        here = self._here
        self._num_taken += 1
        if self._num_taken % self.num_users == 0:
            self._here = None
        return here


class Saved:
    """One value that was saved: how it lies in the bytes that were copied."""

    __slots__ = ("_copy", "_counter", "_form", "_group", "_version")

    def __init__(self, group: Group, copy: _Copy, tensor: Tensor, start: int) -> None:
        offset = tensor.storage_offset() - start // tensor.element_size()
        self._group = group
        self._copy = copy
        self._form = (tensor.dtype, tensor.size(), tensor.stride(), offset)
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)
        self._version = tensor._version

    @property
    def times_written(self) -> int:
        """How often the tensor was written since it was saved."""
        return self._counter._version - self._version

    def take(self) -> Tensor:
        """The value, on the device."""
        self._group.reach()
        dtype, size, stride, offset = self._form
        here = self._copy.take()
        empty = torch.empty(0, dtype=dtype, device=here.device)
        return empty.set_(here.untyped_storage(), offset, size, stride)


class Group:
    """What one call of a module has saved.

    Args:
        keeper: of the program.
        tier: where to.
        prefetch: how many calls before this one are fetched with it.
    """

    def __init__(self, keeper: Keeper, tier: Tier, prefetch: int) -> None:
        self._keeper = keeper
        self._tier = tier
        self._prefetch = prefetch
        self._copies: dict[tuple[int, int, int, int], _Copy] = {}
        self._reached = False
        self.number = keeper.join(self)

    def save(self, tensor: Tensor) -> Saved | None:
        """Put a value on the tier; None: it stays where it is.

        Raises:
            OffloadError: the tier is full.
        """
        if type(tensor) is not Tensor or tensor.device != self._keeper.device or _is_odd(tensor):
            return None
        tensor, storage = tensor.detach(), tensor.untyped_storage()
        start, nbytes = span(tensor)
        if nbytes < MIN_BYTES:
            return None
        start, nbytes = start - start % _ALIGNMENT, nbytes + start % _ALIGNMENT
        if storage.nbytes() <= _WHOLE * nbytes:
            start, nbytes = 0, storage.nbytes()
        key = (storage._cdata, start, nbytes, tensor._version)
        copy = self._copies.get(key)
        if copy is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat.set_(storage, start, (nbytes,), (1,))
            target = self._keeper.memories.empty(self._tier, nbytes, torch.uint8)
            copy = self._copies[key] = _Copy(self._keeper.lane, flat, target, storage)
        copy.num_users += 1
        return Saved(self, copy, tensor, start)

    def fetch(self) -> None:
        """Begin to bring everything back."""
        for copy in self._copies.values():
            copy.fetch()

    def reach(self) -> None:
        """Backward has come here: fetch this call, and those before it within reach."""
        if not self._reached:
            self._reached = True
            self.fetch()
            for group in self._keeper.before(self, self._prefetch):
                group.fetch()


class Keeper:
    """Puts saved values of one program on tiers.

    Args:
        memories: allocates there.
    """

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self.device = memories.device
        self._lane: Lane | None = None
        self._groups: deque[weakref.ref[Group]] = deque()
        self._joined = 0

    @property
    def lane(self) -> Lane:
        """What copies; made with its first use."""
        if self._lane is None:
            self._lane = Lane(self.device)
        return self._lane

    @property
    def num_alive(self) -> int:
        """Calls of modules whose values some graph still holds."""
        return sum(group() is not None for group in self._groups)

    def join(self, group: Group) -> int:
        """Enter a call in the order of forward."""
        while self._groups and self._groups[-1]() is None:
            self._groups.pop()
        self._groups.append(weakref.ref(group))
        self._joined += 1
        return self._joined

    def before(self, group: Group, count: int) -> list[Group]:
        """The calls that came before one, the last first."""
        alive = [one for one in (ref() for ref in reversed(self._groups)) if one is not None]
        return [one for one in alive if one.number < group.number][:count]


def _is_odd(tensor: Tensor) -> bool:
    """Whether size and stride over some bytes are not all there is to it."""
    return tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg()


def span(tensor: Tensor) -> tuple[int, int]:
    """Where the elements of a view begin in its storage, and how many bytes they span.

    >>> span(torch.zeros(4, 6)[1:3, 2:4])
    (32, 32)
    """
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride()))
    width = tensor.element_size()
    return int(tensor.storage_offset()) * width, (int(reach) + 1) * width
