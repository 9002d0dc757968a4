"""Norms and sums of gradients under tensor axes: padding and copies count once, on any plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise.optim import Norm
from shardwise.sharding.frames import tiles_of
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.lying import local_runs, rectangle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Mover
from shardwise.sharding.simulation import Simulated
from shardwise.transforms.norms import run_norms
from shardwise.transforms.tensor_sums import run_sums
from tests.transforms.carried import square
from tests.transforms.named_trees import Drawn, kinds, plans, tree

pytestmark = pytest.mark.simulated

ORDS = (1.0, 2.0, math.inf)


def block_of(entry: Entry, layout: Layout, mesh: Mesh, rank: int, whole: Tensor) -> Tensor:
    """What a rank holds of a whole tensor, padded with zeros."""
    block = whole.new_zeros(entry.block)
    for tile in tiles_of(local_runs(entry, layout, mesh, mesh.coords(rank))):
        values = rectangle(whole, tile.offsets, tile.sizes)
        rectangle(block, tile.at, tile.sizes).copy_(values)
    return block


def flats_of(
    layouts: Mapping[str, Layout], mesh: Mesh, rank: int, whole: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        found[name] = torch.zeros(layout.length, dtype=torch.float64)
        for entry in layout.entries:
            block = block_of(entry, layout, mesh, rank, whole[entry.path])
            entry.view(found[name]).copy_(block)
    return found


def random_like(lowered: sw.Lowered, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        info.path: torch.randn(info.shape, dtype=torch.float64, generator=generator)
        for info in lowered.plan.infos
    }


def lowered_with_norms(names: tuple[str, ...], drawn: Drawn) -> sw.Lowered:
    module = tree(names, torch.float64)
    clips = [sw.optim.clip_by_global_norm(1.0, ord) for ord in ORDS]
    clips.append(sw.optim.clip_by_group_norm({"layers.0": 1.0, "last": 1.0}))
    return sw.lower(drawn.plan(module), square, sw.optim.chain(*clips, sw.optim.sgd(0.1)))


@settings(max_examples=25)
@given(kinds, plans(half=False), st.integers(0, 99))
def test_norms_are_those_of_the_whole_gradient(
    names: tuple[str, ...], drawn: Drawn, seed: int
) -> None:
    lowered = lowered_with_norms(names, drawn)
    mesh, whole = lowered.plan.mesh, random_like(lowered, seed)
    layouts = {b.name: b.opt for b in lowered.all_buckets if b.opt}
    with sw.simulate(mesh) as world:

        def run(rank: int) -> dict[Norm, Tensor]:
            mover = Mover(mesh, rank, Simulated(world, rank))
            mover.begin(lowered.norm_items)
            found = run_norms(mover, lowered.norms, flats_of(layouts, mesh, rank, whole))
            mover.end()
            return found

        ranks: list[Any] = list(world.run(run))
    assert len(ranks[0]) == len(ORDS) + 2
    for norm, value in ranks[0].items():
        parts = [whole[path].reshape(-1) for path in norm.select(list(whole))]
        want = torch.linalg.vector_norm(torch.cat(parts), norm.ord)
        torch.testing.assert_close(value, want, rtol=1e-12, atol=0.0)
        assert all(torch.equal(one[norm], value) for one in ranks)


@settings(max_examples=25)
@given(kinds, plans(half=False), st.integers(0, 99))
def test_copied_rows_are_summed_and_no_others(
    names: tuple[str, ...], drawn: Drawn, seed: int
) -> None:
    """An element's gradient is the sum over the ranks of its frame that hold it, and is in bits
    the same on all of them.
    """
    lowered = lowered_with_norms(names, drawn)
    mesh, buckets = lowered.plan.mesh, lowered.all_buckets
    layouts = {b.name: b.sums for b in buckets if b.sums}
    given_ = [random_like(lowered, seed + 100 * rank) for rank in range(mesh.size)]
    with sw.simulate(mesh) as world:

        def run(rank: int) -> dict[str, Tensor]:
            mover = Mover(mesh, rank, Simulated(world, rank))
            landed = flats_of(layouts, mesh, rank, given_[rank])
            mover.begin([one.item for one in lowered.tensor_sums])
            run_sums(mover, lowered.tensor_sums, landed)
            mover.end()
            return landed

        ranks: list[Any] = list(world.run(run))
    for layout in layouts.items():
        for entry in layout[1].entries:
            check_entry(entry, *layout, mesh=mesh, given=given_, landed=ranks)


def check_entry(
    entry: Entry,
    bucket: str,
    layout: Layout,
    *,
    mesh: Mesh,
    given: list[dict[str, Tensor]],
    landed: list[dict[str, Tensor]],
) -> None:
    axes = () if entry.frame is None else entry.frame.axes
    ones = torch.ones(entry.whole, dtype=torch.float64)
    held = [block_of(entry, layout, mesh, rank, ones) for rank in range(mesh.size)]
    for rank in range(mesh.size):
        total = torch.zeros(entry.whole, dtype=torch.float64)
        for peer in range(mesh.size):
            ours, theirs = mesh.coords(rank), mesh.coords(peer)
            if all(ours[axis] == theirs[axis] for axis in mesh if axis not in axes):
                mask = spread(entry, layout, mesh, peer)
                total += mask * given[peer][entry.path]
        want = block_of(entry, layout, mesh, rank, total)
        got = entry.view(landed[rank][bucket])
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert not got[held[rank] == 0].any()


def spread(entry: Entry, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """One where a rank holds an element of the whole tensor, else 0."""
    mask = torch.zeros(entry.whole, dtype=torch.float64)
    for tile in tiles_of(local_runs(entry, layout, mesh, mesh.coords(rank))):
        rectangle(mask, tile.offsets, tile.sizes).fill_(1)
    return mask
