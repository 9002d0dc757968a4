"""Whole tensors from the blocks that tensor axes cut, for what must see them whole.

Ranks along the axes of the frames hold blocks of one shape, padded, in buffers of one layout. These
are gathered, the outermost axis first as everywhere, and the rectangles that each block holds are
copied to their places; of copies the first one counts. Back it goes without communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.sharding.collectives import Collective
from shardwise.sharding.compat import copy_all
from shardwise.sharding.frames import tiles_of
from shardwise.sharding.layout import Entry, Layout, make_layout
from shardwise.sharding.lying import local_runs, rectangle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Mover, finish, gather


@dataclass(frozen=True)
class Assembly:
    """From blocks to whole tensors.

    Args:
        blocks: layout of the blocks, which no data axis cuts.
        whole: of the whole tensors.
        axes: of their frames, in the order of the mesh.
        sizes: of the axes.
    """

    blocks: Layout
    whole: Layout
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def stack_bytes(self) -> int:
        """Of the blocks of all ranks."""
        return self.blocks.nbytes * math.prod(self.sizes)

    def cast(self, dtype: torch.dtype) -> Assembly:
        """The same blocks in another dtype."""
        return Assembly(self.blocks.cast(dtype), self.whole.cast(dtype), self.axes, self.sizes)


def make_assembly(blocks: Layout, mesh: Mesh) -> Assembly | None:
    """The assembly of a layout; None if tensor axes cut nothing in it.

    Args:
        blocks: that no data axis cuts; all of its tensors have frames over the same axes, or none.
        mesh: sizes of the axes.

    >>> from shardwise.sharding.frames import make_frame
    >>> from shardwise.sharding.spec import Spec
    >>> frame = make_frame(Spec.parse("mlp/tp embed"), (8, 2), Mesh(tp=2), {})
    >>> blocks = make_layout([("w", (4, 2), 0)], (), Mesh(tp=2), torch.float32, {"w": frame})
    >>> made = make_assembly(blocks, Mesh(tp=2))
    >>> made.whole.entries[0].shape, made.stack_bytes
    ((8, 2), 256)
    """
    frames = [entry.frame for entry in blocks.entries if entry.frame is not None]
    if not frames:
        return None
    axes = frames[0].axes
    assert len(frames) == len(blocks.entries)
    assert all(frame.axes == axes for frame in frames), "buckets hold frames over the same axes"
    tensors = [(entry.path, entry.whole, 0) for entry in blocks.entries]
    whole = make_layout(tensors, (), mesh, blocks.dtype)
    return Assembly(blocks, whole, axes, tuple(mesh[axis] for axis in axes))


def assembly_items(made: Assembly, unit: str, reason: str) -> tuple[Collective, ...]:
    """The collectives of an assembly, outermost axis first."""
    items: list[Collective] = []
    nbytes, dtype = made.blocks.nbytes, made.blocks.dtype
    for axis, size in zip(made.axes, made.sizes, strict=True):
        items.append(Collective("all_gather", axis, (size - 1) * nbytes, unit, reason, dtype))
        nbytes *= size
    return tuple(items)


def run_assembly(mover: Mover, made: Assembly, flat: Tensor, items: Sequence[Collective]) -> Tensor:
    """The buffer of whole tensors.

    Args:
        mover: the choke point.
        made: in the dtype of the buffer.
        flat: this rank's blocks.
        items: what `assembly_items` predicted.
    """
    stack = flat.new_empty((*reversed(made.sizes), made.blocks.length))
    finish(gather(mover, flat, stack.view(-1), items))
    out = flat.new_zeros(made.whole.length)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for block, whole in zip(made.blocks.entries, made.whole.entries, strict=True):
        assert block.frame is not None
        known: set[tuple[int, ...]] = set()
        for number, place in enumerate(itertools.product(*map(range, made.sizes))):
            for tile in block.frame.tiles(number):
                if tile.offsets not in known:
                    known.add(tile.offsets)
                    there = block.view(stack[tuple(reversed(place))])
                    sources.append(rectangle(there, tile.at, tile.sizes))
                    targets.append(rectangle(whole.view(out), tile.offsets, tile.sizes))
    copy_all(targets, sources)
    return out


def own_tiles(
    entry: Entry,
    layout: Layout,
    whole: Tensor,
    flat: Tensor,
    *,
    mesh: Mesh,
    place: Mapping[str, int],
) -> list[tuple[Tensor, Tensor]]:
    """Views (of a whole tensor, of a rank's buffer) that hold the same elements.

    Args:
        entry: of the tensor in the layout of the buffer.
        layout: of the buffer; data axes may cut it too.
        whole: the whole tensor.
        flat: the buffer.
        mesh: sizes of the axes.
        place: coordinates of the rank.
    """
    block = entry.view(flat)
    return [
        (rectangle(whole, tile.offsets, tile.sizes), rectangle(block, tile.at, tile.sizes))
        for tile in tiles_of(local_runs(entry, layout, mesh, place))
    ]
