"""Two checkpoints compared, in pieces of bounded size.

What is held at any time is one piece of one tensor, `PIECE_BYTES`, and the reader's own buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.extra import unpack_value
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.checkpoint.manifest import Manifest, Stored
from shardwise.sharding.checkpoint.placing import cut
from shardwise.sharding.checkpoint.read import Job, Reader
from shardwise.sharding.checkpoint.records import Box

PIECE_BYTES = 16 << 20
"""Of a tensor at a time, unless one row of it is longer."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """How one name differs between two checkpoints.

    Args:
        name: of the tensor or value.
        what: in words; empty: it does not.
        differ: how many elements have other bits.
        largest: the largest absolute difference; NaN where only one side is NaN.
    """

    name: str
    what: str
    differ: int = 0
    largest: float = 0.0


def boxes(stored: Stored) -> Iterator[Box]:
    """The pieces of a tensor in row-major order; of an empty one, none."""
    if stored.nbytes:
        whole = Box((0,) * len(stored.shape), stored.shape)
        yield from cut(whole, stored.dtype, -(-stored.nbytes // PIECE_BYTES))


def _read(reader: Reader, stored: Stored, box: Box) -> Tensor:
    target = torch.empty(box.sizes, dtype=stored.dtype)
    reader.fill([Job(stored, box, target)])
    return target


def differences(one: Path, other: Path) -> Iterator[Difference]:
    """Compare two checkpoints name by name; every name is yielded, also those that are equal.

    Names, shapes, dtypes and the bits of all elements are compared, values that are no tensors, and
    `extra`. Plans are not: a checkpoint means the same under any.

    Args:
        one: a complete checkpoint.
        other: another one.

    Raises:
        CheckpointError: one of them is none, or a file is damaged.
    """
    a, b = read_manifest(one), read_manifest(other)
    with Reader(one) as left, Reader(other) as right:
        for name in dict.fromkeys([*a.by_name, *b.by_name]):
            first, second = a.by_name.get(name), b.by_name.get(name)
            if first is None or second is None:
                yield Difference(name, _only("first" if second is None else "second"))
            else:
                yield _compare(left, first, right, second)
    yield from _values(a, b)


def _values(a: Manifest, b: Manifest) -> Iterator[Difference]:
    ours = {name: unpack_value(tree) for name, tree in a.values.items()}
    theirs = {name: unpack_value(tree) for name, tree in b.values.items()}
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            yield Difference(name, _only("first" if name in ours else "second"))
        else:
            # Text tells -0.0 from 0.0 and 1 from 1.0, and NaN is like itself.
            x, y = repr(ours[name]), repr(theirs[name])
            yield Difference(name, "" if x == y else f"{x} and {y}")
    if a.extra is not None or b.extra is not None:
        same = repr(a.extra) == repr(b.extra)
        yield Difference("extra", "" if same else "the values beside the tensors differ")


def _only(which: str) -> str:
    return f"only in the {which}"


def _compare(left: Reader, one: Stored, right: Reader, other: Stored) -> Difference:
    if one.shape != other.shape:
        return Difference(one.name, f"shapes {one.shape} and {other.shape}")
    words = (
        "" if one.dtype == other.dtype else f"dtypes {short(one.dtype)} and {short(other.dtype)}"
    )
    wide = torch.complex128 if one.dtype.is_complex or other.dtype.is_complex else torch.float64
    total, differ, largest = torch.Size(one.shape).numel(), 0, 0.0
    for box in boxes(one):
        x = _read(left, one, box)
        y = _read(right, other, box)
        mask = _unequal(x, y, wide)
        count = int(mask.sum())
        if count:
            # The magnitude of inf - inf is NaN; the two are equal and so not in the mask.
            gap = (x[mask].to(wide) - y[mask].to(wide)).abs().max().item()
            largest = gap if math.isnan(gap) or gap > largest else largest
            differ += count
    if differ:
        words = "; ".join(filter(None, [words, f"{differ:,} of {total:,} elements"]))
    return Difference(one.name, words, differ, largest)


def _unequal(x: Tensor, y: Tensor, wide: torch.dtype) -> Tensor:
    """Where bits differ; of different dtypes, where values do."""
    if x.dtype != y.dtype:
        return x.to(wide) != y.to(wide)
    if x.is_complex():
        return _unequal(torch.view_as_real(x), torch.view_as_real(y), wide).any(-1)
    bits = _BITS[x.dtype.itemsize]
    return x.view(bits) != y.view(bits)


def short(dtype: torch.dtype) -> str:
    """A dtype without its module.

    >>> short(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def parameters_and_buffers(tensors: Sequence[Stored]) -> dict[str, Stored]:
    """What a module has, by its own names.

    Args:
        tensors: of a checkpoint.
    """
    kept = ("params/", "buffers/")
    return {one.name.partition("/")[2]: one for one in tensors if one.name.startswith(kept)}
