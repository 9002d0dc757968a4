"""Buffers: bound for a pass, read back after it, and averaged over the batch axes if written.

Float buffers (running statistics) become their mean over the ranks, integer buffers (counters)
their maximum; both travel as float64 in one packed gather per axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.movement import Mover, finish
from shardwise.transforms.lowering import Lowering

Sites = dict[str, tuple[dict[str, Any], str]]


def find_buffers(module: nn.Module) -> Sites:
    """Where each buffer is held: `_buffers` table and key, by path; shared ones once."""
    found: Sites = {}
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for key, value in child._buffers.items():
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                found[f"{prefix}.{key}" if prefix else key] = (child._buffers, key)
    return found


def bind_buffers(sites: Sites, values: dict[str, Tensor], written: tuple[str, ...]) -> None:
    """Give the template the buffers of a state; copies of those that a pass writes."""
    for name, (table, key) in sites.items():
        table[key] = values[name].clone() if name in written else values[name]


def read_buffers(sites: Sites) -> dict[str, Tensor]:
    """The template's buffers after a pass."""
    return {name: table[key] for name, (table, key) in sites.items()}


def average_buffers(
    mover: Mover, lowering: Lowering, buffers: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The written buffers, made equal on all ranks."""
    names = lowering.written_buffers
    if not lowering.buffer_items:
        return buffers
    values = torch.cat([buffers[name].detach().reshape(-1).double() for name in names])
    floats = torch.cat(
        [torch.full((buffers[name].numel(),), buffers[name].is_floating_point()) for name in names]
    ).to(values.device)
    for item in lowering.buffer_items:
        size = mover.mesh[item.axis]
        stack = values.new_empty(size * values.numel())
        finish(mover.all_gather(stack, values, item))
        rows = stack.view(size, -1)
        values = torch.where(floats, rows.mean(0), rows.amax(0))
    result = dict(buffers)
    parts = values.split([buffers[name].numel() for name in names])
    for name, part in zip(names, parts, strict=True):
        old = buffers[name]
        result[name] = part.view(old.shape).to(old.dtype)
    return result
