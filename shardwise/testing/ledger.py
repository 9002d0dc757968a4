"""Bytes as measured: what a state holds at rest, and the peak of a call by the allocator's events.

The profiler sees every allocation of the thread that it runs in, also those that the engine makes
in storages by hand, which a dispatch mode does not see. Ranks of a simulation share their
collectives' memory; measure a world of one, or real processes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import optree
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


class Usage(NamedTuple):
    """Bytes of one call on this thread, beyond what was there before.

    Args:
        peak: the most that was held at once.
        kept: what is still held when it returns.
    """

    peak: int
    kept: int


def measure(run: Callable[[], T]) -> tuple[T, Usage]:
    """Call and count CPU memory.

    Args:
        run: what to call.

    Returns:
        The result of the call, and its usage.

    >>> import torch
    >>> result, usage = measure(lambda: (torch.zeros(1000) + 1).sum())
    >>> 8_000 <= usage.peak < 9_000, usage.kept < 1_000
    (True, True)
    """
    # The profiler's library writes two lines to stderr otherwise; it reads this at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with warnings.catch_warnings():
        # The profiler warns that it starts anew when it is used again.
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = run()
    # Typed as private classes without the attributes that they have.
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    level = peak = 0
    for _, nbytes in changes:
        level += nbytes
        peak = max(peak, level)
    return result, Usage(peak, level)


def rest_bytes(state: Any) -> int:
    """Bytes that one rank's state holds: every storage behind its leaves, once.

    Args:
        state: a `State` of one rank; `lifted.ranks[i]` in a simulation.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> weight = torch.zeros(10)
    >>> rest_bytes(SimpleNamespace(params={"a": weight[:5], "b": weight[5:]}, master={}, opt=(),
    ...                            buffers={}))
    40
    """
    homes = (dict(state.params), dict(state.master), state.opt, state.buffers)
    storages: dict[int, int] = {}
    for leaf in optree.tree_leaves(homes, namespace="shardwise"):  # pyright: ignore[reportArgumentType]
        for tensor in _tensors(leaf):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(leaf: Any) -> list[Tensor]:
    """The local tensors behind a leaf; optree does not look into mappings of other types."""
    if isinstance(leaf, DTensor):
        return [leaf.to_local()]
    if isinstance(leaf, Tensor):
        return [leaf]
    return [tensor for value in leaf.values() for tensor in _tensors(value)]
