"""Hypothesis strategies for patterns, meshes and specs; they shrink to one plain dimension."""

from __future__ import annotations

from hypothesis import strategies as st

from shardwise.sharding.axes import Axes
from shardwise.sharding.grammar import Atom, Node, Product, Sum
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import MEMORIES, Spec

NAMES = ("a", "b", "embed", "kv", "hd_1", "_x", "heads")
MESH_AXES = ("dp", "fsdp", "tp")

atoms = st.builds(Atom, st.sampled_from(NAMES) | st.integers(1, 12).map(str))


def _composite(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    parts = st.lists(children, min_size=2, max_size=3).map(tuple)
    return st.builds(Product, parts) | st.builds(Sum, parts)


nodes: st.SearchStrategy[Node] = st.recursive(atoms, _composite, max_leaves=6)
axes = st.builds(Axes, st.lists(nodes, max_size=3).map(tuple))


def meshes(*, min_size: int = 1) -> st.SearchStrategy[Mesh]:
    """Meshes over all of `MESH_AXES`, in any order."""

    def build(order: list[str], sizes: list[int]) -> Mesh:
        return Mesh(**dict(zip(order, sizes, strict=True)))

    sizes = st.lists(st.integers(min_size, 3), min_size=3, max_size=3)
    return st.builds(build, st.permutations(MESH_AXES), sizes)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any spec: mesh axes on whole dimensions, on parts of dimensions, or pending."""
    named = draw(axes)
    positions = [position for position, _ in named.nodes()]
    shards: dict[tuple[int, ...], tuple[str, ...]] = {}
    partial = []
    for axis in draw(st.permutations(MESH_AXES)):
        where = draw(st.sampled_from(["nowhere", "pending", *positions]))
        if where == "pending":
            partial.append(axis)
        elif where != "nowhere":
            shards[where] = (*shards.get(where, ()), axis)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
    memory = draw(st.sampled_from(MEMORIES))
    return Spec(named, tuple(shards.items()), tuple(partial), dtype, memory)


@st.composite
def whole_specs(draw: st.DrawFn) -> Spec:
    """Specs of one to three named dimensions, cut as wholes."""
    ndim = draw(st.integers(1, 3))
    spec = Spec(Axes.anonymous(ndim))
    where = {axis: draw(st.integers(-1, ndim)) for axis in draw(st.permutations(MESH_AXES))}
    for dim in range(ndim):
        spec = spec.shard(dim, tuple(axis for axis, place in where.items() if place == dim))
    return spec.with_(partial=tuple(axis for axis, place in where.items() if place == ndim))
