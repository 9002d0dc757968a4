"""Buffers: bound for a pass, read back after it, and averaged over the batch axes if written.

Float buffers (running statistics) become their mean over the ranks that had a batch, integer
buffers (counters) their maximum. Floats travel as float64 and integers as the bits of int64, in one
packed gather per axis. What is equal on all ranks stays as it is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.errors import UnitError
from shardwise.sharding.movement import Mover, finish
from shardwise.transforms.lowering import Lowering

Site = tuple[dict[str, Any], str]
Sites = dict[str, tuple[Site, ...]]
"""Where each buffer is held: `_buffers` tables and keys, by its first path."""


def find_buffers(module: nn.Module) -> Sites:
    """All places that hold a buffer; one that several modules hold is one buffer."""
    found: dict[int, tuple[str, list[Site]]] = {}
    for prefix, child in module.named_modules():
        for key, value in child._buffers.items():
            if value is not None:
                path = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(value), (path, []))[1].append((child._buffers, key))
    return {path: tuple(sites) for path, sites in found.values()}


def bind_buffers(sites: Sites, values: Mapping[str, Tensor], written: Container[str]) -> None:
    """Give the template the buffers of a state; copies of those that a pass writes."""
    for name, holders in sites.items():
        value = values[name].clone() if name in written else values[name]
        for table, key in holders:
            table[key] = value


def read_buffers(sites: Sites) -> dict[str, Tensor]:
    """The template's buffers after a pass, without the graph that some were computed in.

    Raises:
        UnitError: one of several modules that share a buffer has put another in its place.
    """
    found = {}
    for name, holders in sites.items():
        value, *others = (table[key] for table, key in holders)
        if any(other is not value for other in others):
            raise _no_longer_shared(name, len(holders))
        found[name] = value.detach() if value.requires_grad else value
    return found


def check_shapes(buffers: Mapping[str, Tensor], lowering: Lowering) -> None:
    """Refuse written buffers whose sizes are not those that their reduction was lowered for.

    Raises:
        UnitError: a forward pass has resized a buffer.
    """
    if not lowering.buffer_items:
        return
    lowered = dict(lowering.module.named_buffers())
    for name in lowering.written_buffers:
        if buffers[name].shape != lowered[name].shape:
            raise _resized(name, tuple(lowered[name].shape), tuple(buffers[name].shape))


def average_buffers(
    mover: Mover, lowering: Lowering, buffers: dict[str, Tensor], *, ran: bool = True
) -> dict[str, Tensor]:
    """The written buffers, made equal on all ranks.

    Args:
        mover: the choke point.
        lowering: says which buffers are written.
        buffers: of this rank, after its passes.
        ran: whether this rank has run a pass on a batch of its own; floats of a rank that has not
            are as they were before the step, and do not count in the mean.
    """
    names = lowering.written_buffers
    if not lowering.buffer_items:
        return buffers
    flat = [_as_numbers(buffers[name].detach()) for name in names]
    device = flat[0].device
    weight = torch.full((1,), float(ran), dtype=torch.float64, device=device)
    values = torch.cat([weight, *(_as_bits(part) for part in flat)])
    floats = torch.cat([torch.full((part.numel(),), part.is_floating_point()) for part in flat])
    floats = floats.to(device)
    for item in lowering.buffer_items:
        size = mover.mesh[item.axis]
        stack = values.new_empty(size * values.numel())
        finish(mover.all_gather(stack, values, item))
        weights, rows = stack.view(size, -1).split([1, values.numel() - 1], dim=1)
        means = _mean_of_rows(rows, weights)
        largest = rows.view(torch.int64).amax(0).view(torch.float64)
        values = torch.cat([weights.sum(0), torch.where(floats, means, largest)])
    result = dict(buffers)
    parts = values[1:].split([part.numel() for part in flat])
    for name, part, old in zip(names, parts, flat, strict=True):
        whole = (part if old.is_floating_point() else part.view(torch.int64)).to(old.dtype)
        if buffers[name].is_complex():
            whole = torch.view_as_complex(whole.view(-1, 2))
        result[name] = whole.view(buffers[name].shape)
    return result


def _mean_of_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """The mean over the ranks of an axis that have run; `weights` `[ranks, 1]` tell how many did.

    Rows that do not count are filled with one that does, so that what is equal on all others stays
    as it is, bit for bit.
    """
    first = rows[weights.argmax()]
    rows = torch.where(weights > 0, rows, first)
    plain = rows.mean(0)
    weighted = (rows * (weights / weights.sum())).sum(0)
    means = torch.where((weights == weights[0]).all(), plain, weighted)
    return torch.where((rows != rows[0]).any(0), means, rows[0])


def _as_numbers(buffer: Tensor) -> Tensor:
    """Flat real numbers; two for each complex one."""
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).reshape(-1)


def _as_bits(numbers: Tensor) -> Tensor:
    """A vector that travels as float64; integers as bits, for values above 2 ** 53 would round."""
    if numbers.is_floating_point():
        return numbers.double()
    return numbers.to(torch.int64).view(torch.float64)


def _no_longer_shared(name: str, holders: int) -> UnitError:
    return UnitError(
        f"Buffer {name!r} is held by {holders} modules, and one of them has replaced it.",
        where=f"buffer {name}, in the forward pass",
        why="A buffer that modules share is one tensor of the state.",
        fix="write it in place (buffer.copy_(value)), or give each module a buffer of its own",
        buffer=name,
        holders=holders,
    )


def _resized(name: str, lowered: tuple[int, ...], now: tuple[int, ...]) -> UnitError:
    return UnitError(
        f"The forward pass has resized buffer {name!r}.",
        where=f"buffer {name}",
        facts=f"It has shape {now}; the module was lowered with {lowered}.",
        why="Written buffers are averaged over the ranks in one reduction of a known size.",
        fix="make it as large as it will be when the module is built, or keep it as an attribute "
        "that is no buffer",
        buffer=name,
    )
