"""There and back: any layout to any other and home again changes no bit, and owners hold chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise.sharding.buckets import route
from shardwise.sharding.layout import Layout, make_layout
from shardwise.sharding.movement import Mover
from shardwise.sharding.redistribute import route_items, run_route
from shardwise.sharding.simulation import Simulated
from shardwise.testing.strategies import axes_of, meshes

pytestmark = pytest.mark.simulated

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """Tensors, and two ways to cut them: axes, and for each tensor the dimension."""

    mesh: sw.Mesh
    shapes: tuple[Shape, ...]
    axes: tuple[tuple[str, ...], tuple[str, ...]]
    dims: tuple[tuple[int, ...], tuple[int, ...]]

    def layout(self, which: int) -> Layout:
        dims = zip(self.shapes, self.dims[which], strict=True)
        tensors = [(f"t{i}", shape, dim) for i, (shape, dim) in enumerate(dims)]
        real = tuple(axis for axis in self.axes[which] if self.mesh[axis] > 1)
        return make_layout(tensors, real, self.mesh, torch.float32)


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    mesh = draw(meshes(max_ranks=6))
    chosen = [draw(axes_of(mesh)) or () for _ in range(2)]
    axes = [(names,) if isinstance(names, str) else names for names in chosen]
    even = any(sum(mesh[axis] > 1 for axis in names) > 1 for names in axes)
    # Chunks of chunks are refused, so several axes cut evenly; one axis cuts anything.
    scale = mesh.size if even else 1
    sizes = st.lists(st.integers(1, 5).map(lambda n: n * scale), min_size=1, max_size=3)
    shapes = tuple(tuple(draw(sizes)) for _ in range(draw(st.integers(1, 3))))
    dims = [tuple(draw(st.integers(0, len(s) - 1)) for s in shapes) for _ in axes]
    return Draw(mesh, shapes, (axes[0], axes[1]), (dims[0], dims[1]))


def wholes(shapes: tuple[Shape, ...]) -> list[Tensor]:
    counts = [math.prod(shape) for shape in shapes]
    flat = torch.arange(1.0, sum(counts) + 1)
    return [p.view(shape) for p, shape in zip(flat.split(counts), shapes, strict=True)]


def owned(drawn: Draw, which: int, rank: int) -> list[Tensor]:
    """The oracle: torch.chunk along one axis after the other, major to minor."""
    coords = drawn.mesh.coords(rank)
    blocks = []
    for whole, dim in zip(wholes(drawn.shapes), drawn.dims[which], strict=True):
        block = whole
        for axis in drawn.axes[which]:
            parts = block.chunk(drawn.mesh[axis], dim)
            empty = block.narrow(dim, 0, 0)
            block = parts[coords[axis]] if coords[axis] < len(parts) else empty
        blocks.append(block)
    return blocks


def filled(drawn: Draw, which: int, rank: int) -> Tensor:
    """A flat buffer with this rank's blocks; padding is zero."""
    layout = drawn.layout(which)
    flat = torch.zeros(layout.length)
    for entry, block in zip(layout.entries, owned(drawn, which, rank), strict=True):
        view = entry.view(flat)
        if layout.axes:
            view = view.narrow(entry.dim, 0, block.shape[entry.dim])
        view.copy_(block)
    return flat


@given(draws())
def test_there_and_back(drawn: Draw) -> None:
    mesh = drawn.mesh
    a, b = drawn.layout(0), drawn.layout(1)
    there, back = route(a, b, mesh), route(b, a, mesh)
    with sw.simulate(mesh) as world:

        def main(rank: int) -> tuple[Tensor, Tensor]:
            mover = Mover(mesh, rank, Simulated(world, rank))
            source = filled(drawn, 0, rank)
            items = [route_items(way, "", "test") for way in (there, back)]
            mover.begin([*items[0], *items[1]])
            arrived = run_route(mover, there, source, items[0])
            returned = run_route(mover, back, arrived, items[1])
            mover.end()
            return arrived.clone(), returned

        results = world.run(main)
    for rank, (arrived, returned) in enumerate(results):
        assert torch.equal(arrived, filled(drawn, 1, rank))
        assert torch.equal(returned, filled(drawn, 0, rank))


@given(draws())
def test_a_finer_layout_is_reached_without_moving_a_byte(drawn: Draw) -> None:
    a, b = drawn.layout(0), drawn.layout(1)
    way = route(a, b, drawn.mesh)
    if b.refines(a):
        assert route_items(way, "", "test") == ()
    else:
        assert sum(item.nbytes for item in route_items(way, "", "test")) > 0
