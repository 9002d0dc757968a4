"""Ranks along a tensor axis compute one loss of one batch: whether they have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import BatchError
from shardwise.sharding.plan import Plan
from shardwise.sharding.pytree import tree_leaves
from shardwise.transforms.micro import structure_of

_NO_BATCH = "no batch"
_PLAIN = (bool, int, float, str, bytes)


def digest_of(micros: Sequence[Any]) -> str:
    """Structure, shapes and a checksum of every dense tensor; it waits for the device.

    Args:
        micros: micro-batches of one rank.

    >>> digest_of([torch.ones(2)]) == digest_of([torch.ones(2)]) != digest_of([torch.zeros(2)])
    True
    >>> digest_of([])
    'no batch'
    """
    if not micros:
        return _NO_BATCH
    shapes: list[str] = []
    summed = hashlib.blake2b(digest_size=6)
    for micro in micros:
        summed.update(structure_of(micro).encode())
        for leaf in tree_leaves(micro):
            if isinstance(leaf, Tensor) and not _has_bytes(leaf):
                shapes.append(str(leaf.layout))
            elif isinstance(leaf, Tensor):
                shapes.append("x".join(map(str, leaf.shape)) or "scalar")
                summed.update(_bytes_of(leaf))
            elif isinstance(leaf, _PLAIN):
                summed.update(repr(leaf).encode())
    return f"{', '.join(shapes)}, checksum {summed.hexdigest()}"


def _has_bytes(tensor: Tensor) -> bool:
    """Not so of sparse, nested and quantized ones, whose parts are not compared."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes()


def check_shared(digests: Sequence[str | None], plan: Plan) -> None:
    """Check that ranks which differ only along tensor axes have the same batch.

    Args:
        digests: of all ranks; None where a rank has failed.
        plan: says which axes those are.

    Raises:
        BatchError: they do not; on every rank.
    """
    axes = [axis for axis in plan.tensor.axes.values() if plan.mesh[axis.name] > 1]
    parts = {part for axis in axes for part in axis.parts}
    first: dict[tuple[int, ...], int] = {}
    for rank, digest in enumerate(digests):
        coords = plan.mesh.coords(rank)
        place = tuple(at for axis, at in coords.items() if axis not in parts)
        lead = first.setdefault(place, rank)
        if None not in (digest, digests[lead]) and digest != digests[lead]:
            peers = [r for r in range(plan.mesh.size) if _same_data(plan, r, lead, parts)]
            raise _differ(digests, peers, [axis.name for axis in axes])


def _same_data(plan: Plan, one: int, other: int, parts: set[str]) -> bool:
    here, there = plan.mesh.coords(one), plan.mesh.coords(other)
    return all(here[axis] == there[axis] for axis in here if axis not in parts)


def _differ(digests: Sequence[str | None], peers: Sequence[int], axes: list[str]) -> BatchError:
    named = " and ".join(repr(axis) for axis in axes)
    odd = [rank for rank in peers if digests[rank] != digests[peers[0]]]
    shown = ", ".join(map(str, odd))
    return BatchError(
        f"Ranks along {named} have different batches: {shown} not that of rank {peers[0]}.",
        where="program.step(state, batch)",
        facts=[f"rank {rank}: {digests[rank]}" for rank in peers],
        why=f"Along {named} ranks compute parts of one loss of one batch; with different ones "
        "every number would be wrong.",
        fix=f"load by the place along {_data(axes)}, the same for all ranks along {named}; or "
        "program.shard_batch(global_batch) with the same global batch on every rank",
        rank=odd[0],
        ranks=tuple(odd),
        axes=tuple(axes),
    )


def _data(axes: Sequence[str]) -> str:
    return f"the axes other than {' and '.join(axes)}"
