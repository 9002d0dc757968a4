"""Parts of tensors that tensor axes cut: each element once, and moves between any two layouts."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.sharding.checkpoint.placing import own_chunks, place
from shardwise.sharding.checkpoint.records import Record
from shardwise.sharding.frames import Tile, make_frame, tiles_of
from shardwise.sharding.layout import Layout, make_layout
from shardwise.sharding.lying import Lying, grids_of, local_runs, lying_of, rectangle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.pieces import Held, Piece
from shardwise.sharding.relocate import Fill, _source_view, _target_view, plan_fill
from shardwise.sharding.spec import Spec

pytestmark = pytest.mark.abstract

SIZES = {"heads": 4, "kv": 2, "hd": 3, "mlp": 4}
SHAPES = {
    "((heads/tp + kv/tp + kv/tp) hd) embed": (24, 5),
    "((heads/(tp0 tp1) + kv/tp0 + kv/tp0) hd) embed": (24, 5),
    "(2 mlp/tp) embed": (8, 5),
    "vocab/tp embed": (33, 5),
    "embed (heads/tp hd)": (5, 12),
    "embed mlp": (5, 7),
}
MESHES = {
    "tp": Mesh(fsdp=2, tp=2),
    "tp0": Mesh(fsdp=1, tp=4).split_joined("tp", {"tp0": 2, "tp1": 2}),
}


@st.composite
def layouts(draw: st.DrawFn, pattern: str | None = None, shape: tuple[int, ...] | None = None):
    """A layout of one tensor on a mesh of four ranks."""
    fitting = [p for p, s in SHAPES.items() if shape in (None, s)]
    text = pattern or draw(st.sampled_from(fitting))
    mesh = MESHES["tp0" if "tp0" in text else "tp"]
    frame = make_frame(Spec.parse(text), SHAPES[text], mesh, SIZES)
    block = SHAPES[text] if frame is None else frame.block
    axes = draw(st.sampled_from([(), ("fsdp",)]))
    dim = draw(st.integers(0, 1))
    frames = {} if frame is None else {"w": frame}
    return mesh, make_layout([("w", block, dim)], axes, mesh, torch.float32, frames)


def _whole(layout: Layout) -> Tensor:
    shape = layout.entries[0].whole
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def _flats(mesh: Mesh, layout: Layout) -> list[Tensor]:
    entry = layout.entries[0]
    found = []
    for rank in range(mesh.size):
        flat = torch.zeros(layout.length)
        for tile in tiles_of(local_runs(entry, layout, mesh, mesh.coords(rank))):
            values = rectangle(_whole(layout), tile.offsets, tile.sizes)
            rectangle(entry.view(flat), tile.at, tile.sizes).copy_(values)
        found.append(flat)
    return found


def _lying(mesh: Mesh, layout: Layout) -> Lying:
    return lying_of(grids_of(mesh), layout, layout.entries[0])


@given(layouts())
def test_first_tiles_hold_each_element_once(made: tuple[Mesh, Layout]) -> None:
    lying = _lying(*made)
    count = torch.zeros(lying.shape)
    for part in range(len(lying.grid.holders)):
        for tile in lying.first_tiles(part):
            rectangle(count, tile.offsets, tile.sizes).add_(1)
    assert bool((count == 1).all())


@given(layouts())
def test_chunks_of_a_save_are_the_tensor(made: tuple[Mesh, Layout]) -> None:
    mesh, layout = made
    lying, entry = _lying(mesh, layout), layout.entries[0]
    flats = _flats(mesh, layout)
    records = [Record("params/w", lying, entry.view(flat), "w") for flat in flats]
    stored = place(records[:1], mesh.size)
    assert stored == place(records[1:2], mesh.size)
    assert stored[0].shape == entry.whole
    saved = torch.zeros(entry.whole)
    for rank, record in enumerate(records):
        for chunk, values in own_chunks(stored, [record], rank):
            rectangle(saved, chunk.offsets, chunk.sizes).copy_(values)
    assert torch.equal(saved, _whole(layout))


@given(st.data())
def test_any_layout_is_filled_from_any_other(data: st.DataObject) -> None:
    mesh, source = data.draw(layouts())
    other_mesh, target = data.draw(layouts(shape=source.entries[0].whole))
    entry, fresh = source.entries[0], target.entries[0]
    old, want = _flats(mesh, source), _flats(other_mesh, target)
    fills = []
    for rank in range(4):
        held = {"w": Held(_lying(mesh, source), entry.view(old[rank]))}
        grid = grids_of(other_mesh)(target.axes)
        fills.append(Fill("u", torch.zeros(target.length), target, grid, held))
    plans = [plan_fill(fill, rank) for rank, fill in enumerate(fills)]
    for round_ in zip(*plans, strict=True):
        sent: Mapping[tuple[int, int], list[tuple[Piece, Tensor]]] = collections.defaultdict(list)
        for rank, one in enumerate(round_):
            for piece in one.sends:
                sent[rank, piece.peer].append((piece, _source_view(one.fill, piece)))
        for rank, one in enumerate(round_):
            for piece in one.own:
                _target_view(one.fill, piece).copy_(_source_view(one.fill, piece))
            for piece in one.receives:
                _, values = sent[piece.peer, rank].pop(0)
                _target_view(one.fill, piece).copy_(values)
        assert not any(sent.values())
    for rank in range(4):
        assert torch.equal(fresh.view(fills[rank].target), fresh.view(want[rank]))


@given(layouts(), st.data())
def test_parts_that_touch_a_rectangle_are_found_without_a_look_at_all(
    made: tuple[Mesh, Layout], data: st.DataObject
) -> None:
    lying = _lying(*made)
    starts = [data.draw(st.integers(0, size - 1)) for size in lying.shape]
    sizes = [
        data.draw(st.integers(1, size - start))
        for start, size in zip(starts, lying.shape, strict=True)
    ]
    mask = torch.zeros(lying.shape)
    rectangle(mask, starts, sizes).fill_(1)
    touching = [
        part
        for part in range(len(lying.grid.holders))
        if any(rectangle(mask, tile.offsets, tile.sizes).any() for tile in lying.tiles(part))
    ]
    found = list(lying.parts_touching(Tile(tuple(starts), tuple(sizes), (0,) * len(starts))))
    assert found == touching
