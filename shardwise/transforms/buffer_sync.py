"""Buffers: bound for a pass, read back after it, and averaged over the batch axes if written.

Float buffers (running statistics) become their mean over the ranks, integer buffers (counters)
their maximum; both travel as float64 in one packed gather per axis. What is equal on all ranks
stays as it is, bit for bit.
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
    flat = [_as_numbers(buffers[name].detach()) for name in names]
    values = torch.cat([part.double() for part in flat])
    floats = torch.cat([torch.full((part.numel(),), part.is_floating_point()) for part in flat])
    floats = floats.to(values.device)
    for item in lowering.buffer_items:
        size = mover.mesh[item.axis]
        stack = values.new_empty(size * values.numel())
        finish(mover.all_gather(stack, values, item))
        rows = stack.view(size, -1)
        differs = (rows != rows[0]).any(0)
        values = torch.where(floats & differs, rows.mean(0), rows.amax(0))
    result = dict(buffers)
    parts = values.split([part.numel() for part in flat])
    for name, part, old in zip(names, parts, flat, strict=True):
        whole = part.to(old.dtype)
        if buffers[name].is_complex():
            whole = torch.view_as_complex(whole.view(-1, 2))
        result[name] = whole.view(buffers[name].shape)
    return result


def _as_numbers(buffer: Tensor) -> Tensor:
    """Flat real numbers; two for each complex one."""
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).reshape(-1)
