"""The collectives of a step and their payload, as torch's profiler sees them reach gloo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "long": 8, "long int": 8, "int": 4}


def observed(step: Callable[[], Any]) -> tuple[int, int]:
    """Collectives and payload bytes of one step on this rank.

    Payload is what a rank must send by the best algorithm: `n (N - 1) / N` of a whole of n bytes
    for a gather, a scatter or an all-to-all, and twice that for an all-reduce. A reduce-scatter
    counts as the all-reduce that gloo makes of it.

    Args:
        step: runs one training step.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        step()
    events = [event for event in profile.events() or () if event.name.startswith("gloo:")]
    return len(events), round(sum(map(_payload, events)))


def _payload(event: Any) -> float:
    ranks = dist.get_world_size()
    items = zip(event.input_shapes, event.input_dtypes, strict=True)
    nbytes = sum(math.prod(shape) * _ITEM_BYTES[kind] for shape, kind in items)
    kind = event.name.removeprefix("gloo:")
    if kind == "all_gather":
        return nbytes * (ranks - 1)
    share = nbytes * (ranks - 1) / ranks
    return 2 * share if kind == "all_reduce" else share
