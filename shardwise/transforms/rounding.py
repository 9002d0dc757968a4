"""Stochastic rounding in the update: what the optimizer has computed becomes 16 bits at random.

[Note: stochastic rounding]
A value between two numbers of 16 bits becomes the upper one with a probability in proportion to its
distance from the lower one, so that steps too small for the dtype are made on average. Where the
optimizer state rests in 16 bits too, it is widened for the update and rounded by the same rule. The
noise of an element depends on seed, step, what is rounded (the parameter, or which part of its
state), path, and the element's index in the whole tensor: no mesh or level can change it, and a run
that is resumed continues it. A block is rounded in pieces, each with a few arrays of counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.bits import global_index, stochastic_round
from shardwise.sharding.buckets import Bucket, Group
from shardwise.sharding.frames import Runs
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.leaves import Flats
from shardwise.sharding.lying import local_runs
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.opt_state import is_over, split
from shardwise.sharding.pytree import tree_unflatten
from shardwise.sharding.rng import key
from shardwise.transforms.stepping import Stepping

_PIECE_ELEMENTS = 1 << 18
"""Elements that are rounded at a time."""

_PIECE_BYTES_PER_ELEMENT = 32
"""Counters, random bits and noise of 8 bytes each, and two copies of the values."""


@dataclass(frozen=True)
class Rounding:
    """Where the noise of one update on one rank comes from.

    Args:
        seed: of the run.
        step: number of the update.
        mesh: sizes of the axes.
        coords: of this rank.
    """

    seed: int
    step: int
    mesh: Mesh
    coords: Mapping[str, int]

    def flat(
        self,
        values: Tensor,
        layout: Layout,
        dtype: torch.dtype,
        what: str,
        *,
        span: tuple[int, int] | None = None,
    ) -> Tensor:
        """A flat buffer, or a part of it, in 16 bits.

        Args:
            values: in a wider dtype.
            layout: says which elements of which tensors the whole buffer has.
            dtype: to round to.
            what: is rounded; other things have other noise.
            span: which elements of the buffer `values` are; default: all.
        """
        out = torch.zeros(values.numel(), dtype=dtype, device=values.device)
        begin, end = span or (0, layout.length)
        for entry in layout.entries:
            noise = key(self.seed, self.step, "round", what, entry.path)
            lowest, highest = max(begin - entry.offset, 0), min(end - entry.offset, entry.numel)
            for first, last in _pieces(lowest, highest):
                index = self._index(entry, layout, (first, last), values.device)
                part = slice(entry.offset + first - begin, entry.offset + last - begin)
                out[part] = stochastic_round(values[part].float(), dtype, noise, index)
        return out

    def _index(
        self, entry: Entry, layout: Layout, span: tuple[int, int], device: torch.device
    ) -> Tensor:
        """Where some elements of a block are in the whole tensor."""
        if entry.frame is not None:
            runs = local_runs(entry, layout, self.mesh, self.coords)
            return _framed_index(entry, runs, span, device)
        first = self.mesh.index(layout.axes, self.coords) if layout.axes else 0
        rows = first * entry.block[entry.dim] if layout.axes else 0
        return global_index(entry.shape, entry.block, entry.dim, rows, span=span, device=device)

    def whole(self, value: Tensor, dtype: torch.dtype, path: str, what: str) -> Tensor:
        """A tensor that is whole on every rank, in 16 bits."""
        noise = key(self.seed, self.step, "round", what, path)
        index = torch.arange(value.numel(), device=value.device).view(value.shape)
        return stochastic_round(value.float(), dtype, noise, index)


def _framed_index(
    entry: Entry, runs: Sequence[Runs], span: tuple[int, int], device: torch.device
) -> Tensor:
    """Indices in the whole tensor of elements of a block with gaps; padding has that of row 0."""
    flat = torch.arange(*span, device=device)
    index = torch.zeros_like(flat)
    for dim, whole in enumerate(entry.whole):
        rows = torch.zeros(entry.block[dim], dtype=torch.int64, device=device)
        for run in runs[dim]:
            rows[run.at : run.at + run.count] = torch.arange(run.start, run.stop, device=device)
        inner = math.prod(entry.block[dim + 1 :])
        here = torch.div(flat, inner, rounding_mode="floor").remainder_(entry.block[dim])
        index.mul_(whole).add_(rows[here])
    return index


def piece_bytes(layout: Layout) -> int:
    """Beside its result, what rounding a flat buffer takes at its peak."""
    largest = max((entry.numel for entry in layout.entries), default=0)
    return min(largest, _PIECE_ELEMENTS) * _PIECE_BYTES_PER_ELEMENT


def rounded_params(rounding: Rounding, bucket: Bucket, values: Tensor) -> Tensor:
    """Updated parameters of a bucket, in their own dtype, still in the `opt` layout."""
    assert bucket.opt is not None
    return rounding.flat(values, bucket.opt, bucket.params.dtype, "params")


def widened(stepping: Stepping, opt: Any) -> Any:
    """The optimizer state as the update computes with it; itself if nothing rests in 16 bits."""
    if not any(map(_is_narrow, stepping.groups)):
        return opt
    leaves, spec = split(opt, stepping.keys)
    narrow = dict(_narrow_keys(stepping))

    def wide(leaf: Any) -> Any:
        if not is_over(leaf, stepping.keys):
            return leaf
        return {
            name: value.to(narrow[name].working(value.dtype)) if name in narrow else value
            for name, value in leaf.items()
        }

    return tree_unflatten(spec, [wide(leaf) for leaf in leaves])


def narrowed(stepping: Stepping, old: Any, new: Any, rounding: Rounding) -> Any:
    """The optimizer state at rest again: what `widened` has widened is rounded into its buffers.

    Args:
        stepping: the optimizer and its groups.
        old: at rest; written.
        new: what the update has made of the widened one.
        rounding: where the noise comes from.
    """
    if new is old or not any(map(_is_narrow, stepping.groups)):
        return new
    befores, spec = split(old, stepping.keys)
    narrow = dict(_narrow_keys(stepping))
    done: list[Any] = []
    for number, (before, after) in enumerate(zip(befores, spec.flatten_up_to(new), strict=True)):
        if not is_over(before, stepping.keys):
            done.append(after)
            continue
        resting: Flats = dict(after)
        for name, group in narrow.items():
            if name in after and after[name].dtype != before[name].dtype:
                value = _rest(
                    rounding,
                    group,
                    name,
                    after[name],
                    dtype=before[name].dtype,
                    what=f"opt {number}",
                )
                resting[name] = before[name].copy_(value)
        done.append(resting)
    return tree_unflatten(spec, done)


def _rest(
    rounding: Rounding, group: Group, name: str, value: Tensor, *, dtype: torch.dtype, what: str
) -> Tensor:
    if name == group.key and value.shape == (group.layout.length,):
        return rounding.flat(value, group.layout, dtype, what)
    return rounding.whole(value, dtype, name, what)


def _is_narrow(group: Group) -> bool:
    return group.work != group.layout.dtype


def _narrow_keys(stepping: Stepping) -> Iterator[tuple[str, Group]]:
    """Keys of state that may rest in 16 bits, with their groups."""
    for group in filter(_is_narrow, stepping.groups):
        if group in stepping.streamed:  # widened chunk by chunk
            continue
        yield group.key, group
        if group.couples != "element":
            yield from ((path, group) for path in group.paths)


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, _PIECE_ELEMENTS):
        yield first, min(first + _PIECE_ELEMENTS, stop)


def widened_bytes(stepping: Stepping) -> int:
    """What `widened` takes beside the optimizer state at rest."""
    narrow = dict(_narrow_keys(stepping))
    if not narrow:
        return 0
    leaves, _ = split(stepping.form, stepping.keys)
    dicts = [leaf for leaf in leaves if is_over(leaf, stepping.keys)]
    return sum(
        math.prod(value.shape) * narrow[name].work.itemsize
        for values in dicts
        for name, value in values.items()
        if name in narrow and value.dtype == narrow[name].layout.dtype
    )
