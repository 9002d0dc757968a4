"""Placements against DTensor's own arithmetic, for every rank, without a process group."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.sharding.axes import Axes
from shardwise.sharding.compat import device_mesh_without_backend
from shardwise.sharding.errors import MeshError, SpecError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.placements import as_dtensor, from_placements, placements
from shardwise.sharding.spec import Spec, local_range, local_shape
from tests.sharding.strategies import meshes, whole_specs

pytestmark = pytest.mark.abstract


def owned(spec: Spec, shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[slice, ...]:
    coords = mesh.coords(rank)
    return tuple(slice(*local_range(spec, shape, mesh, coords, dim)) for dim in range(len(shape)))


def torch_block(
    full: torch.Tensor, layout: tuple[Placement, ...], mesh: Mesh, rank: int
) -> torch.Tensor:
    """What torch's own splitting gives to a rank: one placement after the other, in mesh order."""
    block = full
    for axis, placement in zip(mesh.names, layout, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            parts, _ = placement._split_tensor(block, mesh[axis], with_padding=False)
            block = parts[mesh.coords(rank)[axis]]
    return block


@st.composite
def cases(draw: st.DrawFn) -> tuple[Spec, Mesh, tuple[int, ...]]:
    """A spec, a mesh and a shape for which placements exist; uneven where one axis cuts."""
    spec, mesh = draw(whole_specs()), draw(meshes())
    shape = []
    for dim in range(spec.axes.ndim):
        cutting = [axis for axis in spec.dim_axes(dim) if mesh[axis] > 1]
        unit = mesh.product(tuple(cutting)) if len(cutting) > 1 else 1
        shape.append(unit * draw(st.integers(0, 2)) if unit > 1 else draw(st.integers(0, 7)))
    return spec, mesh, tuple(shape)


@given(cases())
def test_every_rank_holds_what_dtensor_says(
    case: tuple[Spec, Mesh, tuple[int, ...]],
) -> None:
    spec, mesh, shape = case
    layout = placements(spec, mesh, shape)
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for rank in range(mesh.size):
        device_mesh = device_mesh_without_backend(mesh, rank, "cpu")
        sizes, offset = compute_local_shape_and_global_offset(shape, device_mesh, layout)
        block = full[owned(spec, shape, mesh, rank)]
        assert tuple(block.shape) == tuple(sizes)
        assert torch.equal(block, torch_block(full, layout, mesh, rank))
        if block.numel():
            starts = tuple(cut.start for cut in owned(spec, shape, mesh, rank))
            assert tuple(int(i) for i in offset) == starts
        padded = local_shape(spec, shape, mesh)
        assert all(size <= most for size, most in zip(sizes, padded, strict=True))


@given(whole_specs(), meshes(min_size=2))
def test_inverse(spec: Spec, mesh: Mesh) -> None:
    shape = (mesh.size,) * spec.axes.ndim
    layout = placements(spec, mesh, shape)
    assert from_placements(layout, mesh, spec.axes) == spec


@given(whole_specs(), meshes())
def test_inverse_up_to_axes_of_size_one(spec: Spec, mesh: Mesh) -> None:
    shape = (mesh.size,) * spec.axes.ndim
    layout = placements(spec, mesh, shape)
    again = from_placements(layout, mesh, spec.axes)
    assert placements(again, mesh, shape) == layout
    for rank in range(mesh.size):
        assert owned(again, shape, mesh, rank) == owned(spec, shape, mesh, rank)


def test_both_orders_of_two_axes() -> None:
    mesh, shape = Mesh(fsdp=2, tp=3), (12, 4)
    forward, backward = Spec.parse("a/(fsdp tp) b"), Spec.parse("a/(tp fsdp) b")
    assert placements(forward, mesh, shape) == (Shard(0), Shard(0))
    assert placements(backward, mesh, shape) == (_StridedShard(0, split_factor=3), Shard(0))
    starts = [owned(backward, shape, mesh, rank)[0].start for rank in range(6)]
    assert starts == [0, 4, 8, 2, 6, 10]


@pytest.mark.parametrize("order", list(itertools.permutations(("dp", "fsdp", "tp"))))
def test_blocks_in_index_order_are_the_tensor(order: tuple[str, ...]) -> None:
    mesh = Mesh(dp=2, fsdp=3, tp=2)
    spec = Spec(Axes.parse("a b")).shard(0, order)
    full = torch.arange(48).reshape(24, 2)
    layout = placements(spec, mesh, full.shape)
    by_index = sorted(range(mesh.size), key=lambda rank: mesh.index(order, mesh.coords(rank)))
    blocks = [torch_block(full, layout, mesh, rank) for rank in by_index]
    assert torch.equal(torch.cat(blocks), full)


@given(cases())
def test_dtensor_by_constructor(case: tuple[Spec, Mesh, tuple[int, ...]]) -> None:
    spec, mesh, shape = case
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    rank = mesh.size - 1
    local = full[owned(spec, shape, mesh, rank)]
    device_mesh = device_mesh_without_backend(mesh, rank, "cpu")
    made = as_dtensor(local, spec, mesh, shape, device_mesh)
    assert isinstance(made, DTensor)
    assert made.shape == full.shape
    assert made.stride() == full.stride()
    assert made.placements == placements(spec, mesh, shape)
    assert made.dtype == torch.float32
    assert not made.requires_grad
    assert made.to_local().data_ptr() == local.data_ptr()


def test_dtensor_of_a_scalar_and_on_an_empty_mesh() -> None:
    value = torch.tensor(3.0)
    for mesh in (Mesh(), Mesh(fsdp=2)):
        device_mesh = device_mesh_without_backend(mesh, 0, "cpu")
        made = as_dtensor(value, Spec.parse(""), mesh, (), device_mesh)
        assert made.shape == ()
        assert made.placements == (Replicate(),) * len(mesh.names)


def test_the_local_tensor_is_checked() -> None:
    mesh = Mesh(fsdp=4)
    spec = Spec.parse("a/fsdp b")
    device_mesh = device_mesh_without_backend(mesh, 2, "cpu")
    with pytest.raises(SpecError) as caught:
        as_dtensor(torch.zeros(2, 3), spec, mesh, (5, 3), device_mesh)
    assert "has shape (2, 3); this rank owns (1, 3)" in str(caught.value)
    assert "rank at {'fsdp': 2}" in str(caught.value)
    with pytest.raises(SpecError, match=r"is torch\.float64"):
        as_dtensor(torch.zeros(1, 3, dtype=torch.float64), spec, mesh, (5, 3), device_mesh)
    other = device_mesh_without_backend(Mesh(dp=4), 2, "cpu")
    with pytest.raises(SpecError, match=r"the DeviceMesh is not Mesh\(fsdp=4\)"):
        as_dtensor(torch.zeros(1, 3), spec, mesh, (5, 3), other)


@given(st.integers(0, 40))
def test_uneven_over_several_axes_is_refused(size: int) -> None:
    mesh, spec = Mesh(fsdp=2, tp=3), Spec.parse("embed/(fsdp tp)")
    assume(size % 6)
    with pytest.raises(SpecError) as caught:
        placements(spec, mesh, (size,))
    text = str(caught.value)
    assert f"2 * 3 == 6; {size} % 6 == {size % 6}" in text
    assert f"pad it by {6 - size % 6} rows" in text


def test_uneven_is_refused_because_torch_cuts_chunks_of_chunks() -> None:
    mesh, spec = Mesh(fsdp=2, tp=2), Spec.parse("embed/(fsdp tp)")
    full = torch.arange(5)
    theirs = [torch_block(full, (Shard(0), Shard(0)), mesh, rank).numel() for rank in range(4)]
    ours = [full[owned(spec, (5,), mesh, rank)].numel() for rank in range(4)]
    assert theirs == [2, 1, 1, 1]
    assert ours == [2, 2, 1, 0]


def test_parts_of_a_dimension_are_refused_unless_their_axis_is_off() -> None:
    spec = Spec.parse("(heads/tp hd) embed")
    with pytest.raises(SpecError) as caught:
        placements(spec, Mesh(tp=2), (8, 4))
    assert "tp cuts 'heads', a part of dim 0" in str(caught.value)
    assert placements(spec, Mesh(tp=1), (8, 4)) == (Replicate(),)


def test_unknown_axes_and_wrong_shapes() -> None:
    with pytest.raises(MeshError, match="did you mean 'fsdp'"):
        placements(Spec.parse("a/fdsp"), Mesh(fsdp=2), (4,))
    with pytest.raises(SpecError, match="has 1 dimensions; the tensor has 2"):
        placements(Spec.parse("a"), Mesh(fsdp=2), (4, 4))


def test_from_placements_reads_what_users_have() -> None:
    mesh, axes = Mesh(dp=2, fsdp=2, tp=2), Axes.parse("a b")
    layout = [Partial(), Shard(-1), Replicate()]
    assert str(from_placements(layout, mesh, axes)) == "a b/fsdp +dp"
    made = from_placements(layout, mesh, axes, dtype="bfloat16", memory="disk")
    assert str(made) == "a b/fsdp +dp :bfloat16 @disk"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([Shard(0)], "1 placements do not fit Mesh(fsdp=2, tp=2)"),
        ([Partial("max"), Replicate()], "on mesh axis 'fsdp'"),
        ([_StridedShard(0, split_factor=3), Shard(0)], "split_factor=3 is no product"),
        ([Shard(0), _StridedShard(0, split_factor=2)], "split_factor=2 is no product"),
        ([Shard(2), Replicate()], "position (2,)"),
    ],
)
def test_placements_no_spec_has(layout: list[Placement], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_placements(layout, Mesh(fsdp=2, tp=2), Axes.parse("a b"))
    assert message in str(caught.value)
    assert "Fix:" in str(caught.value)
