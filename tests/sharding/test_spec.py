"""Spec: the text round trip, what no tensor can have, and blocks against torch.chunk."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import MeshError, SpecError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec, local_range, local_shape
from tests.sharding.strategies import meshes, specs

pytestmark = pytest.mark.abstract


@given(specs())
def test_text_round_trip(spec: Spec) -> None:
    again = Spec.parse(str(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert str(again) == str(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "embed/fsdp (heads/tp hd) @pinned_host",
        "embed/(dp fsdp)",
        "(heads hd)/fsdp embed",
        "embed mlp +dp,fsdp",
        "embed/fsdp +dp :bfloat16 @disk",
        "((heads/tp + kv/tp + kv/tp) hd)/fsdp embed",
        "",
        "+dp :float64",
    ],
)
def test_canonical_texts(text: str) -> None:
    assert str(Spec.parse(text)) == text


def test_order_and_empty_entries_carry_no_meaning() -> None:
    axes = Axes.parse("embed mlp")
    a = Spec(axes, (((1,), ("tp",)), ((0,), ("fsdp",))), ("dp", "cp"))
    b = Spec(axes, (((0,), ("fsdp",)), ((1,), ("tp",))), ("cp", "dp"))
    assert a == b
    assert str(a) == "embed/fsdp mlp/tp +cp,dp"
    assert Spec(axes, (((0,), ()),)) == Spec(axes)
    assert Spec(axes, (((0,), ("dp", "fsdp")),)) != Spec(axes, (((0,), ("fsdp", "dp")),))


def test_editing_a_spec() -> None:
    spec = Spec.parse("(heads/tp hd) embed/fsdp +dp :bfloat16 @disk")
    assert spec.mesh_axes == ("tp", "fsdp")
    assert spec.dim_axes(0) == ()
    assert spec.dim_axes(1) == ("fsdp",)
    assert str(spec.shard(1, ())) == "(heads/tp hd) embed +dp :bfloat16 @disk"
    assert str(spec.shard(1, ()).shard(0, ("fsdp",))) == (
        "(heads/tp hd)/fsdp embed +dp :bfloat16 @disk"
    )
    assert str(spec.replicate()) == "(heads hd) embed :bfloat16 @disk"
    assert str(spec.with_(dtype="float32", memory="device", partial=())) == (
        "(heads/tp hd) embed/fsdp"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embed/fsdp mlp/fsdp", "mesh axis 'fsdp' is used twice in 'embed/fsdp mlp/fsdp'"),
        ("embed/(tp tp)", "mesh axis 'tp' is used twice"),
        ("embed/fsdp +fsdp", "mesh axis 'fsdp' is used twice"),
        ("embed +dp,dp", "mesh axis 'dp' is used twice"),
        ("(heads/tp hd/tp)", "mesh axis 'tp' is used twice"),
        ("(heads/tp + kv)/tp", "mesh axis 'tp' is used twice"),
        ("embed :floaty32", "did you mean 'float32'?"),
        ("embed :float", "dtype 'float' is unknown"),
        ("embed @pined_host", "did you mean 'pinned_host'?"),
    ],
)
def test_specs_no_tensor_can_have(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Spec.parse(text)
    assert message in str(caught.value)
    assert "Fix:" in str(caught.value)


def test_terms_of_a_sum_may_share_a_mesh_axis() -> None:
    spec = Spec.parse("((heads/tp + kv/tp + kv/tp) hd) embed/fsdp")
    assert spec.mesh_axes == ("tp", "fsdp")


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("embed/", 6, "expected the name of a mesh axis, found the end"),
        ("embed/(dp 2)", 10, "expected the name of a mesh axis, found '2'"),
        ("(a/tp)/dp", 6, "expected one mark"),
        ("embed @disk :float16", 12, "(in this order)"),
        ("embed +", 7, "expected the name of a mesh axis, found the end"),
        ("embed :", 7, "expected a dtype, found the end"),
    ],
)
def test_a_fault_is_shown_with_a_caret(text: str, column: int, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        Spec.parse(text)
    assert str(caught.value).splitlines()[2] == "  " + " " * column + "^"
    assert expected in str(caught.value)


def test_positions_and_tuples_are_checked() -> None:
    axes = Axes.parse("embed mlp")
    with pytest.raises(SpecError, match=r"position \(2,\) of 'embed mlp'"):
        Spec(axes, (((2,), ("fsdp",)),))
    with pytest.raises(SpecError, match=r"position \(0, 1\)"):
        Spec(axes, (((0, 1), ("fsdp",)),))
    with pytest.raises(SpecError, match="leave a scalar replicated"):
        Spec(Axes.parse(""), (((0,), ("fsdp",)),))
    with pytest.raises(SpecError) as caught:
        Spec(axes).shard(0, "fsdp")  # type: ignore[arg-type]
    assert "Fix: ('fsdp',)" in str(caught.value)


@given(meshes(), st.integers(0, 40), st.data())
def test_blocks_follow_torch_chunk(mesh: Mesh, size: int, data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(mesh.names)))[: data.draw(st.integers(0, 3))]
    spec = Spec(Axes.parse("embed")).shard(0, order)
    count = mesh.product(order)
    chunks = torch.arange(size).chunk(count)
    (padded,) = local_shape(spec, (size,), mesh)
    assert padded == chunks[0].numel()
    for coords in map(mesh.coords, range(mesh.size)):
        index = 0
        for axis in order:
            index = index * mesh[axis] + coords[axis]
        start, stop = local_range(spec, (size,), mesh, coords, 0)
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert list(range(start, stop)) == expected
        assert 0 <= stop - start <= padded


def test_scalars_and_other_dims_stay_whole() -> None:
    mesh = Mesh(fsdp=4)
    assert local_shape(Spec.parse(""), (), mesh) == ()
    assert local_shape(Spec.parse("embed/fsdp mlp"), (2, 6), mesh) == (1, 6)
    assert local_range(Spec.parse("embed/fsdp mlp"), (2, 6), mesh, {"fsdp": 3}, 1) == (0, 6)
    assert local_range(Spec.parse("embed/fsdp mlp"), (2, 6), mesh, {"fsdp": 3}, 0) == (2, 2)


def test_marks_inside_a_dimension_divide_it() -> None:
    mesh = Mesh(fsdp=3, tp=2)
    fused = "((heads/tp + kv/tp + kv/tp) hd)/fsdp embed"
    assert local_shape(Spec.parse(fused), (32, 5), mesh) == (6, 5)
    assert local_shape(Spec.parse("(2 mlp/tp) embed"), (32, 5), mesh) == (16, 5)
    with pytest.raises(SpecError, match="7 % 2 == 1"):
        local_shape(Spec.parse("(heads/tp hd)"), (7,), mesh)
    with pytest.raises(SpecError, match="cut by 2, 1"):
        local_shape(Spec.parse("(heads/tp + kv)"), (8,), mesh)
    with pytest.raises(SpecError, match="are not one range"):
        local_range(Spec.parse("(2 mlp/tp)"), (8,), mesh, {"fsdp": 0, "tp": 1}, 0)


def test_wrong_shapes_and_unknown_axes() -> None:
    mesh = Mesh(fsdp=2)
    with pytest.raises(SpecError, match="has 1 dimensions; the tensor has 2"):
        local_shape(Spec.parse("embed"), (2, 2), mesh)
    with pytest.raises(MeshError, match="did you mean 'fsdp'"):
        local_shape(Spec.parse("embed/fsd"), (2,), mesh)


@given(meshes(), st.integers(0, 30), st.integers(0, 30), st.data())
def test_blocks_of_all_ranks_tile_the_tensor(
    mesh: Mesh, rows: int, cols: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(mesh.names))
    cut = data.draw(st.integers(0, 3))
    spec = Spec(Axes.parse("a b")).shard(0, tuple(order[:cut])).shard(1, tuple(order[cut:]))
    assume(rows * cols)
    seen = torch.zeros(rows, cols, dtype=torch.int)
    for coords in map(mesh.coords, range(mesh.size)):
        (a, b), (c, d) = (local_range(spec, (rows, cols), mesh, coords, dim) for dim in (0, 1))
        seen[a:b, c:d] += 1
    assert bool((seen == 1).all())
    assert list(itertools.chain(spec.mesh_axes)) == list(order)
