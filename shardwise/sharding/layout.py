"""How the tensors of a bucket lie in one flat buffer, and how a finer buffer maps to a coarser one.

[Note: flat layouts]
A `Layout` puts the local blocks of several tensors one after the other in a flat buffer. Blocks are
padded to the same shape on every rank and offsets are multiples of 32 elements (64 bytes and more
for every dtype of two bytes and more), so no shape depends on the rank and a cast moves no offset.
`Layout.axes` are the mesh axes that cut every tensor (each along its own `dim`), major to minor; no
axes means whole tensors. A layout whose axes extend those of another *refines* it. One buffer of
the coarser layout equals the fine buffers of all ranks along the extra axes. Gathering goes from
the outermost axis of the mesh to the innermost, scattering the other way, whatever the order of the
axes in the layout: the outermost (slowest) axis then carries the fewest bytes both ways. Gathered
fine buffers are stacked as `[innermost, ..., outermost, length]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shardwise.sharding.frames import Frame
from shardwise.sharding.mesh import Mesh

_ALIGN_ELEMENTS = 32
_NO_FRAMES: Mapping[str, Frame] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a flat buffer; `block` is its padded local shape, cut along `dim`.

    Of a parameter that tensor axes cut, `shape` is that of the block in its `frame`.
    """

    path: str
    shape: tuple[int, ...]
    dim: int
    block: tuple[int, ...]
    offset: int
    frame: Frame | None = None

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return self.shape if self.frame is None else self.frame.shape

    @property
    def numel(self) -> int:
        """Elements of the padded local block."""
        return math.prod(self.block)

    def view(self, flat: Tensor) -> Tensor:
        """The padded local block as a view of a flat buffer."""
        return flat[self.offset : self.offset + self.numel].view(self.block)


@dataclass(frozen=True)
class Layout:
    """Blocks of several tensors in one flat buffer; see [Note: flat layouts]."""

    axes: tuple[str, ...]
    entries: tuple[Entry, ...]
    length: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer on one rank."""
        return self.length * self.dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of the buffer that hold no element of a whole tensor (alignment only)."""
        return self.nbytes - sum(e.numel for e in self.entries) * self.dtype.itemsize

    @cached_property
    def by_path(self) -> Mapping[str, Entry]:
        """Entries by parameter path."""
        return {entry.path: entry for entry in self.entries}

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Where the buffer holds no block: `(start, stop)` in elements."""
        ends = [entry.offset for entry in self.entries[1:]] + [self.length]
        spans = [(e.offset + e.numel, end) for e, end in zip(self.entries, ends, strict=True)]
        return tuple(span for span in spans if span[0] < span[1])

    @cached_property
    def cuts(self) -> tuple[list[int], list[int], list[int]]:
        """The buffer as pieces in a row: their sizes, and which are blocks and which are gaps."""
        sizes, places, gaps = list[int](), list[int](), list[int]()
        ends = [entry.offset for entry in self.entries[1:]] + [self.length]
        for entry, end in zip(self.entries, ends, strict=True):
            places.append(len(sizes))
            sizes.append(entry.numel)
            if entry.offset + entry.numel < end:
                gaps.append(len(sizes))
                sizes.append(end - entry.offset - entry.numel)
        return sizes, places, gaps

    def refines(self, coarse: Layout) -> bool:
        """Whether every block here is a part of the block of the same tensor there."""
        if self.axes[: len(coarse.axes)] != coarse.axes:
            return False
        pairs = zip(self.entries, coarse.entries, strict=True)
        return not coarse.axes or all(fine.dim == other.dim for fine, other in pairs)

    def cast(self, dtype: torch.dtype) -> Layout:
        """The same blocks at the same offsets in another dtype."""
        return replace(self, dtype=dtype)


def pack(
    blocks: Sequence[tuple[str, tuple[int, ...], int, tuple[int, ...]]],
    axes: tuple[str, ...],
    dtype: torch.dtype,
    frames: Mapping[str, Frame] = _NO_FRAMES,
) -> Layout:
    """Lay `(path, shape, dim, block)` out one after the other at aligned offsets."""
    step = _ALIGN_ELEMENTS
    entries: list[Entry] = []
    offset = 0
    for path, shape, dim, block in blocks:
        entries.append(Entry(path, shape, dim, block, offset, frames.get(path)))
        offset += -(-math.prod(block) // step) * step
    return Layout(axes, tuple(entries), offset, dtype)


def make_layout(
    tensors: Sequence[tuple[str, tuple[int, ...], int]],
    axes: tuple[str, ...],
    mesh: Mesh,
    dtype: torch.dtype,
    frames: Mapping[str, Frame] = _NO_FRAMES,
) -> Layout:
    """Layout of `(path, shape, dim)` tensors cut along `dim` over `axes`.

    Args:
        tensors: with the shapes that the axes cut.
        axes: of the mesh, major to minor.
        mesh: sizes of the axes.
        dtype: of the buffer.
        frames: by path, of tensors whose shapes are those of blocks.
    """
    parts = mesh.product(axes)
    blocks = []
    for path, shape, dim in tensors:
        block = list(shape)
        if parts > 1:
            block[dim] = -(-shape[dim] // parts)
        blocks.append((path, shape, dim, tuple(block)))
    return pack(blocks, axes, dtype, frames)


def frames_of(entries: Iterable[Entry]) -> dict[str, Frame]:
    """The frames of tensors that have one, by path."""
    return {entry.path: entry.frame for entry in entries if entry.frame is not None}


class Regroup:
    """The map between a coarse layout and a finer one; pure index arithmetic.

    Args:
        coarse: the layout whose blocks are cut.
        fine: a layout that refines it.
        mesh: sizes of the axes.
    """

    def __init__(self, coarse: Layout, fine: Layout, mesh: Mesh) -> None:
        assert fine.refines(coarse), (coarse.axes, fine.axes)
        self.coarse = coarse
        self.fine = fine
        self.axes = fine.axes[len(coarse.axes) :]
        self.sizes = tuple(mesh[axis] for axis in self.axes)
        self.parts = math.prod(self.sizes)
        self.outer_first = tuple(axis for axis in mesh if axis in self.axes)
        self.stack = (*(mesh[axis] for axis in reversed(self.outer_first)), fine.length)
        self._to_stack = tuple(self.axes.index(axis) for axis in reversed(self.outer_first))

    @cached_property
    def _cuts(self) -> tuple[tuple[tuple[int, int, int, int], int, int], ...]:
        """Per entry `(pre, rows, chunk, post)`, whole chunks, and rows of the one after them."""
        cuts = []
        for whole, part in zip(self.coarse.entries, self.fine.entries, strict=True):
            dim = part.dim
            rows, chunk = (whole.block[dim], part.block[dim]) if whole.block else (1, 1)
            pre = math.prod(whole.block[:dim])
            post = math.prod(whole.block[dim + 1 :])
            full, rest = divmod(rows, chunk) if chunk else (self.parts, 0)
            cuts.append(((pre, rows, chunk, post), full, rest))
        return tuple(cuts)

    def coarse_pieces(self, index: int, block: Tensor) -> list[Tensor]:
        """Views of one coarse block in the shapes that `fine_pieces` has for the same entry."""
        (pre, rows, chunk, post), full, rest = self._cuts[index]
        if rest == 0 and full == self.parts and pre == 1:
            cut = block.reshape(*self.sizes, chunk * post)
            ranks = len(self.sizes)
            return [cut if ranks == 1 else cut.permute(*self._to_stack, ranks)]
        grid = block.reshape(pre, rows, post)
        if rest == 0 and full == self.parts:
            cut = grid.unflatten(1, (*self.sizes, chunk))
            return [cut.permute(*(place + 1 for place in self._to_stack), 0, -2, -1)]
        pieces = []
        if full:
            head = grid.narrow(1, 0, full * chunk).unflatten(1, (full, chunk))
            pieces.append(head.transpose(0, 1))
        if rest:
            pieces.append(grid.narrow(1, full * chunk, rest))
        return pieces

    def fine_pieces(self, index: int, stack: Tensor) -> list[Tensor]:
        """Views of the stacked fine buffers that hold the elements of one coarse block."""
        (pre, _, chunk, post), full, rest = self._cuts[index]
        entry = self.fine.entries[index]
        here = stack.narrow(-1, entry.offset, entry.numel)
        if rest == 0 and full == self.parts:
            return [here if pre == 1 else here.unflatten(-1, (pre, chunk, post))]
        grid = here.unflatten(-1, (pre, chunk, post))
        pieces = [grid[:full]] if full else []
        if rest:
            pieces.append(grid[full].narrow(1, 0, rest))
        return pieces

    def padding_pieces(self, stack: Tensor) -> list[Tensor]:
        """Views of the stacked fine buffers that hold no element of any coarse block."""
        pieces = []
        ends = [entry.offset for entry in self.fine.entries[1:]] + [self.fine.length]
        for entry, cut, end in zip(self.fine.entries, self._cuts, ends, strict=True):
            (pre, _, chunk, post), full, rest = cut
            here = stack.narrow(-1, entry.offset, entry.numel)
            if rest:
                grid = here[full].unflatten(-1, (pre, chunk, post))
                pieces.append(grid.narrow(1, rest, chunk - rest))
            if full + bool(rest) < self.parts:
                pieces.append(here[full + bool(rest) :])
            gap = end - entry.offset - entry.numel
            if gap:
                pieces.append(stack.narrow(-1, entry.offset + entry.numel, gap))
        return [piece for piece in pieces if piece.numel()]

    def own_pieces(
        self, index: int, block: Tensor, flat: Tensor, place: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Views (of a coarse block, of this rank's fine buffer) that hold the same elements.

        Args:
            index: which entry.
            block: the coarse block of that entry.
            flat: the fine buffer of the rank.
            place: linear position of the rank along the extra axes, major to minor.
        """
        (pre, rows, chunk, post), _, _ = self._cuts[index]
        start = min(place * chunk, rows)
        count = min(chunk, rows - start)
        if count == 0:
            return []
        mine = self.fine.entries[index].view(flat).reshape(pre, chunk, post)
        return [(block.reshape(pre, rows, post).narrow(1, start, count), mine.narrow(1, 0, count))]
