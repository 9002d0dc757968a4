"""A hash of the global values of a state, the same on any plan.

[Note: fingerprint]
Every element gives 64 bits: a mix of its bits, its index in the global tensor, and a key of the
tensor's name, shape and dtype; the fingerprint is their sum modulo 2^64, to which each tensor and
each value adds a hash of its own. Sums have no order, so each rank adds what it holds, replicas
once, whatever the cut. The mix is the finaliser of MurmurHash3: a change of any bit, a swap of two
elements or of two tensors goes unnoticed with a chance of about 2^-64. It is no protection against
somebody who wants two states to be equal. What is rounded from a master, and `extra`, is left out.

References: Appleby, MurmurHash3 (fmix64), 2011; Bellare and Micciancio, "A New Paradigm for
Collision-Free Hashing: Incrementality at Reduced Cost", EUROCRYPT 1997 (sums of hashes).
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.sharding.checkpoint.placing import cut
from shardwise.sharding.checkpoint.records import Box, Record, records_of, values_of
from shardwise.sharding.errors import StateError
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.state import State, adopt

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15
_MIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_LOW_31 = (1 << 31) - 1
_MANY = 1 << 30
"""Holders of a part that is hashed in the smallest pieces that `cut` makes."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(state: Any) -> str:
    """Sixteen hexadecimal digits that are equal for equal states; see [Note: fingerprint].

    In a real job all ranks call it: they exchange one number each. Costs about 10 ns for each
    element that a rank holds, and 64 MiB.

    Args:
        state: of one rank, or lifted.

    Raises:
        StateError: one rank's part of a state whose other ranks are not here.

    >>> # assert sw.fingerprint(state) == sw.fingerprint(other.init(sw.from_state(state)))
    """
    if isinstance(state, Lifted):
        total = sum(_sum_of(one) for one in state.ranks)
    else:
        total = sum(_gathered(state, _sum_of(state)))
    return f"{total & _MASK:016x}"


def _gathered(state: State, mine: int) -> list[int]:
    size = state.home.mesh.size
    if size == 1:
        return [mine]
    if not dist.is_initialized() or dist.get_world_size() != size:
        raise StateError(
            "A fingerprint needs the parts of all ranks.",
            where="fingerprint(state)",
            facts=f"this is the part of rank {state.home.rank} of {size}",
            why="It is a sum over all elements of the global tensors.",
            fix="pass the lifted state of a simulation, or call it on every rank of the job",
            rank=state.home.rank,
            size=size,
        )
    told: list[Any] = [None] * size
    dist.all_gather_object(told, mine)
    return told


def _sum_of(given: State) -> int:
    """What one rank adds: of each part that several ranks hold, one of them adds all."""
    state = adopt(given)
    rank = state.home.rank
    total = 0
    for record in records_of(state):
        if record.derived:
            continue
        about = f"{record.name} {record.shape} {record.dtype}"
        key = _hash(about)
        holders = record.lying.grid.holders[record.part_of(rank)]
        if holders[key % len(holders)] == rank:
            total += _sum_of_block(record, rank, key)
        total += key * (rank == 0)
    if rank == 0:
        total += sum(_hash(f"{n} = {value!r}") for n, value in values_of(state).items())
    return total & _MASK


def _sum_of_block(record: Record, rank: int, key: int) -> int:
    total = 0
    for box in record.first_boxes(record.part_of(rank)):
        for piece in cut(box, record.dtype, _MANY):
            total += _sum_of_elements(record.inside(rank, piece), piece, record.shape, key)
    return total


def _sum_of_elements(values: Tensor, box: Box, shape: tuple[int, ...], key: int) -> int:
    values = values.detach().contiguous()
    if values.is_complex():
        values = torch.view_as_real(values)
        box = Box((*box.offsets, 0), (*box.sizes, 2))
        shape = (*shape, 2)
    bits = values.reshape(-1).view(_BITS[values.dtype.itemsize])
    bits = bits.to(torch.int64, copy=True)  # it is overwritten
    mixed = _index(box, shape, values.device).mul_(_signed(_SPREAD)).add_(_signed(key))
    mixed.bitwise_xor_(bits.mul_(_signed(_SPREAD ^ key | 1)))
    for factor in _MIX:
        _fold(mixed, bits).mul_(_signed(factor))
    return int(_fold(mixed, bits).sum())


def _fold(value: Tensor, scratch: Tensor) -> Tensor:
    """`x ^= x >> 33`, where the mask makes the shift a logical one."""
    torch.bitwise_right_shift(value, 33, out=scratch)
    return value.bitwise_xor_(scratch.bitwise_and_(_LOW_31))


def _index(box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Row-major positions, in the global tensor, of the elements of a rectangle."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for start, size, whole in zip(*box, shape, strict=True):
        rows = torch.arange(start, start + size, device=device)
        index = index.unsqueeze(-1) * whole + rows
    return index.reshape(-1).contiguous()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _signed(value: int) -> int:
    """The same 64 bits as torch writes them."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
