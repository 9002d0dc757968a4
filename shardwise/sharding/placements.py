"""Between specs and DTensor: placements, their inverse, and DTensors made without dispatch.

[Note: order of mesh axes]
A spec lists the mesh axes of a dimension major to minor; DTensor applies placements in mesh order.
Where the two differ, the placement of a mesh axis is `_StridedShard(dim, split_factor=f)`: f is the
number of blocks that axes more major in the spec, but later in the mesh, have cut already. Each
rank then holds one contiguous block, the one at `mesh.index(axes, coords)`. With uneven sizes this
breaks: torch cuts chunks of chunks, a spec cuts one chunk per rank; for 5 rows over 2 * 2 ranks
torch gives 2, 1, 1, 1 rows and a spec 2, 2, 1, 0. Such a spec has no placements.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwise.sharding.axes import Axes
from shardwise.sharding.compat import DTensorSpec, StridedShard, TensorMeta
from shardwise.sharding.errors import SpecError
from shardwise.sharding.grammar import Sum
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec, check_ndim, local_range


def placements(spec: Spec, mesh: Mesh, shape: Sequence[int]) -> tuple[Placement, ...]:
    """The torch placements of a spec, one per mesh axis, in mesh order.

    Raises:
        SpecError: parts of a composite dimension are cut, or several mesh axes cut a dimension
            that does not divide by their product.
        MeshError: the spec names an axis the mesh does not have.

    >>> mesh = Mesh(fsdp=2, tp=2)
    >>> placements(Spec.parse("embed/(fsdp tp) mlp"), mesh, (8, 4))
    (Shard(dim=0), Shard(dim=0))
    >>> placements(Spec.parse("embed/(tp fsdp) mlp"), mesh, (8, 4))
    (_StridedShard(dim=0, sf=2), Shard(dim=0))
    """
    check_ndim(spec, shape)
    mesh.check(*spec.mesh_axes, *spec.partial)
    _check_whole(spec, mesh)
    for dim, size in enumerate(shape):
        _check_even(spec, mesh, dim, size)
    return tuple(_placement(spec, mesh, axis) for axis in mesh.names)


@functools.lru_cache(maxsize=4096)
def on_whole_dims(spec: Spec, mesh: Mesh, shape: tuple[int, ...]) -> Spec | None:
    """The same layout by marks on whole dimensions; None if it has no placements.

    The first part of a product is major, so cutting it cuts the dimension: `(heads/tp hd)`.

    Args:
        spec: any.
        mesh: sizes of the axes.
        shape: of the tensor.

    >>> mesh = Mesh(fsdp=2, tp=2)
    >>> on_whole_dims(Spec.parse("(heads/tp hd)/fsdp embed"), mesh, (16, 4))
    Spec('(heads hd)/(tp fsdp) embed')
    >>> on_whole_dims(Spec.parse("(2 mlp/tp) embed"), mesh, (16, 4))
    """
    found: dict[int, tuple[str, ...]] = {}
    # Deeper marks first: a mark on the whole cuts what they leave.
    for at, axes in sorted(spec.shards, key=lambda mark: -len(mark[0])):
        if mesh.product(axes) == 1:
            continue
        above = (spec.axes.node(at[:depth]) for depth in range(1, len(at)))
        if any(at[1:]) or any(isinstance(node, Sum) for node in above):
            return None
        found[at[0]] = (*found.get(at[0], ()), *axes)
    for dim, axes in found.items():
        real = [axis for axis in axes if mesh[axis] > 1]
        if len(real) > 1 and shape[dim] % mesh.product(axes):
            return None  # see [Note: order of mesh axes]
    return replace(spec, shards=tuple(((dim,), axes) for dim, axes in found.items()))


def from_placements(
    placements: Sequence[Placement],
    mesh: Mesh,
    axes: Axes,
    *,
    dtype: str = "float32",
    memory: str = "device",
) -> Spec:
    """The spec that has these placements; the inverse of `placements`.

    A mesh axis of size 1 leaves no trace of its order, so it comes back in mesh order.

    Raises:
        SpecError: not one placement per mesh axis, or a placement no spec has.

    >>> mesh = Mesh(fsdp=2, tp=2)
    >>> from_placements([Partial(), Shard(1)], mesh, Axes.parse("embed mlp"))
    Spec('embed mlp/tp +fsdp')
    """
    if len(placements) != len(mesh.names):
        raise SpecError(
            f"{len(placements)} placements do not fit {mesh!r}.",
            facts=f"placements {tuple(placements)}; the mesh has {len(mesh.names)} axes.",
            why="DTensor has one placement per mesh axis.",
            fix="give one placement for every axis, Replicate() where nothing is cut",
        )
    cuts: dict[int, list[str]] = {}
    partial: list[str] = []
    # From the last mesh axis: a split factor counts blocks cut by axes that come later.
    for axis, placement in reversed(list(zip(mesh.names, placements, strict=True))):
        dim = _dim(placement, axes.ndim)
        if dim is not None:
            order = cuts.setdefault(dim, [])
            order.insert(_place(placement, axis, order, mesh), axis)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            partial.append(axis)
        elif not isinstance(placement, Replicate):
            raise _no_spec(placement, axis, why="A spec knows cuts, copies and pending sums.")
    shards = tuple(((dim,), tuple(order)) for dim, order in cuts.items())
    return Spec(axes, shards, tuple(partial), dtype, memory)


def as_dtensor(
    local: torch.Tensor, spec: Spec, mesh: Mesh, shape: Sequence[int], device_mesh: DeviceMesh
) -> DTensor:
    """A DTensor that shares storage with `local`, by constructor: no dispatch, no communication.

    Args:
        local: what this rank truly owns, without padding rows.
        spec: how the global tensor is laid out.
        mesh: the mesh of the spec.
        shape: shape of the global tensor; its strides are those of a contiguous tensor.
        device_mesh: the same mesh as torch knows it.

    Raises:
        SpecError: `local` or `device_mesh` is not what the spec says, or it has no placements.
    """
    shape = tuple(shape)
    _check_device_mesh(device_mesh, mesh)
    layout = placements(spec, mesh, shape)
    _check_local(local, spec, mesh, shape, device_mesh)
    meta = TensorMeta(torch.Size(shape), _contiguous_stride(shape), local.dtype)
    dtensor_spec = DTensorSpec(device_mesh, layout, tensor_meta=meta)
    return DTensor(local, dtensor_spec, requires_grad=False)


def _placement(spec: Spec, mesh: Mesh, axis: str) -> Placement:
    if axis in spec.partial:
        return Partial()
    for dim in range(spec.axes.ndim):
        order = spec.dim_axes(dim)
        if axis in order:
            return _shard(dim, axis, order, mesh)
    return Replicate()


def _shard(dim: int, axis: str, order: tuple[str, ...], mesh: Mesh) -> Placement:
    """See [Note: order of mesh axes]."""
    later = mesh.names[mesh.names.index(axis) :]
    factor = mesh.product(tuple(a for a in order[: order.index(axis)] if a in later))
    return Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)


def _dim(placement: Placement, ndim: int) -> int | None:
    """The dimension a placement cuts, counted from the front."""
    # A strided shard is no subclass of Shard.
    if not isinstance(placement, (Shard, StridedShard)):
        return None
    return placement.dim + ndim if placement.dim < 0 else placement.dim


def _place(placement: Placement, axis: str, order: list[str], mesh: Mesh) -> int:
    """Where `axis` goes among the later mesh axes that cut the same dimension."""
    factor = placement.split_factor if isinstance(placement, StridedShard) else 1
    before = itertools.accumulate((mesh[a] for a in order), lambda a, b: a * b, initial=1)
    for index, blocks in enumerate(before):
        if blocks == factor:
            return index
    raise _no_spec(
        placement,
        axis,
        why=f"split_factor={factor} is no product of the axes {order or 'none'} of {mesh!r} "
        "that cut the same dimension.",
    )


def _no_spec(placement: Placement, axis: str, *, why: str) -> SpecError:
    return SpecError(
        f"no spec has the placement {placement!r} on mesh axis {axis!r}.",
        why=why,
        fix="redistribute the DTensor to Shard, Replicate or Partial('sum') first",
        axis=axis,
    )


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    # torch counts an empty dimension as one row.
    sizes = (max(size, 1) for size in reversed(shape[1:]))
    steps = list(itertools.accumulate(sizes, lambda a, b: a * b, initial=1))
    return tuple(reversed(steps)) if shape else ()


def _check_whole(spec: Spec, mesh: Mesh) -> None:
    for at, axes in spec.shards:
        if len(at) > 1 and mesh.product(axes) > 1:
            raise SpecError(
                f"'{spec}' has no placements: {', '.join(axes)} cuts "
                f"{spec.axes.node_text(at)!r}, a part of dim {at[0]}.",
                facts=f"{mesh!r}.",
                why="DTensor cuts whole dimensions.",
                fix=f"mark the whole dimension: {spec.axes.dim_name(at[0])}/{axes[0]}",
                dim=at[0],
            )


def _check_even(spec: Spec, mesh: Mesh, dim: int, size: int) -> None:
    """See [Note: order of mesh axes]."""
    axes = [axis for axis in spec.dim_axes(dim) if mesh[axis] > 1]
    count = mesh.product(tuple(axes))
    if len(axes) > 1 and size % count:
        raise SpecError(
            f"'{spec}' has no placements: {' and '.join(axes)} cut dim {dim} unevenly.",
            facts=[
                f"dim {dim} {spec.axes.dim_name(dim)!r} has size {size}; "
                f"{' * '.join(str(mesh[axis]) for axis in axes)} == {count}; "
                f"{size} % {count} == {size % count}.",
                f"{mesh!r}.",
            ],
            why="Over several axes torch cuts chunks of chunks, a spec one chunk per rank.",
            fix=f"cut it over {axes[0]!r} alone, or pad it by {-size % count} rows",
            dim=dim,
            size=size,
            count=count,
        )


def _check_device_mesh(device_mesh: DeviceMesh, mesh: Mesh) -> None:
    names, sizes = device_mesh.mesh_dim_names or (), tuple(device_mesh.shape)
    if (tuple(names), sizes) != (mesh.names, mesh.sizes):
        raise SpecError(
            f"the DeviceMesh is not {mesh!r}.",
            facts=f"it has axes {tuple(names)} of sizes {sizes}.",
            why="A DTensor lives on the mesh of its spec.",
            fix="build the DeviceMesh with the names and sizes of the mesh",
        )


def _check_local(
    local: torch.Tensor,
    spec: Spec,
    mesh: Mesh,
    shape: tuple[int, ...],
    device_mesh: DeviceMesh,
) -> None:
    if str(local.dtype) != f"torch.{spec.dtype}":
        raise SpecError(
            f"the local tensor of '{spec}' is {local.dtype}.",
            why=f"The spec says {spec.dtype}.",
            fix="cast the tensor, or use spec.with_(dtype=...)",
        )
    coordinate = device_mesh.get_coordinate()
    # Simulated ranks share one tensor: coordinates and sizes are then symbols, one per rank.
    if coordinate is None or not all(type(i) is int for i in coordinate):
        return
    coords = dict(zip(mesh.names, coordinate, strict=True))
    ranges = [local_range(spec, shape, mesh, coords, dim) for dim in range(len(shape))]
    owned = tuple(stop - start for start, stop in ranges)
    if tuple(local.shape) != owned:
        raise SpecError(
            f"the local tensor of '{spec}' has shape {tuple(local.shape)}; this rank owns {owned}.",
            facts=f"global shape {shape}; rank at {coords} of {mesh!r}.",
            why="A DTensor holds what its rank owns, without padding rows.",
            fix="narrow the block to its true rows",
            shape=tuple(local.shape),
            owned=owned,
        )
