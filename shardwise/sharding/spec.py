"""A spec says where a tensor lives: mesh axes per dimension, pending sums, dtype, memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import SpecError, nearest
from shardwise.sharding.grammar import (
    Fault,
    Node,
    Position,
    Reader,
    Sum,
    read_axis,
    read_dims,
    render,
)
from shardwise.sharding.mesh import Mesh

MEMORIES = ("device", "pinned_host", "disk")
"""Kinds of memory a tensor can rest in."""

DTYPES = frozenset(
    str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if type(value) is torch.dtype
)
"""Names of the dtypes torch has."""

Shards = tuple[tuple[Position, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, repr=False)
class Spec:
    """Where a tensor lives. Text form: `embed/fsdp (heads/tp hd) +dp :bfloat16 @pinned_host`.

    Args:
        axes: names of the dimensions.
        shards: pairs of a position in `axes` and the mesh axes that cut it, major to minor. The
            position `(i,)` is dimension i as a whole, `(i, j)` part j of a composite dimension.
        partial: mesh axes over which the values still have to be summed.
        dtype: name of a torch dtype.
        memory: `device`, `pinned_host` or `disk`.

    Raises:
        SpecError: unknown dtype or memory, a position that is not in `axes`, or a mesh axis that
            is used twice.

    >>> spec = Spec.parse("embed/fsdp (heads/tp hd) @pinned_host")
    >>> spec.dim_axes(0), spec.dim_axes(1), spec.mesh_axes, spec.memory
    (('fsdp',), (), ('fsdp', 'tp'), 'pinned_host')
    >>> spec.shard(0, ("dp", "fsdp"))
    Spec('embed/(dp fsdp) (heads/tp hd) @pinned_host')
    """

    axes: Axes
    shards: Shards = ()
    partial: tuple[str, ...] = ()
    dtype: str = "float32"
    memory: str = "device"

    def __post_init__(self) -> None:
        # One tensor, one value: order and empty entries carry no meaning here.
        kept = sorted((tuple(at), _names(axes)) for at, axes in self.shards if axes)
        object.__setattr__(self, "shards", tuple(kept))
        object.__setattr__(self, "partial", tuple(sorted(_names(self.partial))))
        _check_word("dtype", self.dtype, DTYPES)
        _check_word("memory", self.memory, MEMORIES)
        _check_positions(self)
        _check_used_once(self)

    @staticmethod
    def parse(text: str) -> Spec:
        """Read the text form; the inverse of `str`.

        Raises:
            SpecError: the text does not follow the grammar, or no tensor can have that spec.

        >>> str(Spec.parse("embed  mlp/(tp)+dp,fsdp:bfloat16"))
        'embed mlp/tp +dp,fsdp :bfloat16'
        """
        return _parse(text)

    def __str__(self) -> str:
        words = [render(node, dict(self.shards), (dim,)) for dim, node in enumerate(self.axes.dims)]
        if self.partial:
            words.append("+" + ",".join(self.partial))
        if self.dtype != "float32":
            words.append(f":{self.dtype}")
        if self.memory != "device":
            words.append(f"@{self.memory}")
        return " ".join(words)

    def __repr__(self) -> str:
        return f"Spec({str(self)!r})"

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Every mesh axis that cuts something, once, in the order of the dimensions."""
        return tuple(dict.fromkeys(axis for _, axes in self.shards for axis in axes))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """Mesh axes that cut dimension `dim` as a whole, major to minor."""
        return dict(self.shards).get((dim,), ())

    def shard(self, dim: int, axes: tuple[str, ...]) -> Spec:
        """The same spec with dimension `dim` as a whole cut by `axes`; empty: not cut.

        Marks inside a composite dimension stay.
        """
        others = tuple(entry for entry in self.shards if entry[0] != (dim,))
        return replace(self, shards=(*others, ((dim,), axes)))

    def replicate(self) -> Spec:
        """The same spec with nothing cut and nothing pending.

        >>> Spec.parse("embed/fsdp +dp :bfloat16").replicate()
        Spec('embed :bfloat16')
        """
        return replace(self, shards=(), partial=())

    def with_(
        self,
        *,
        dtype: str | None = None,
        memory: str | None = None,
        partial: tuple[str, ...] | None = None,
    ) -> Spec:
        """The same spec with another dtype, memory or pending sum."""
        return replace(
            self,
            dtype=self.dtype if dtype is None else dtype,
            memory=self.memory if memory is None else memory,
            partial=self.partial if partial is None else partial,
        )


def local_shape(spec: Spec, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Shape of the block every rank holds, padded so that it is the same on all ranks.

    Marks inside a composite dimension divide it; whole-dimension marks cut what is left into
    `ceil(size / n)` rows.

    Raises:
        SpecError: the shape does not fit, or a mark inside a composite dimension does not divide.

    >>> local_shape(Spec.parse("embed/fsdp mlp/tp"), (10, 6), Mesh(fsdp=4, tp=2))
    (3, 3)
    """
    check_ndim(spec, shape)
    return tuple(
        -(-_inner_size(spec, dim, size, mesh) // mesh.product(spec.dim_axes(dim)))
        for dim, size in enumerate(shape)
    )


def local_range(
    spec: Spec, shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int], dim: int
) -> tuple[int, int]:
    """First row and end of what the rank at `coords` truly owns of `dim`; may be empty.

    The rule of `torch.chunk` over the product of the axes, the first one major.

    Raises:
        SpecError: the shape does not fit, or parts of a composite dimension are cut, so that the
            rows are not one range.

    >>> spec, mesh = Spec.parse("embed/fsdp"), Mesh(fsdp=4)
    >>> [local_range(spec, (5,), mesh, {"fsdp": i}, 0) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    check_ndim(spec, shape)
    cut = [(at, axes) for at, axes in spec.shards if at[0] == dim and len(at) > 1]
    if any(mesh.product(axes) > 1 for _, axes in cut):
        raise SpecError(
            f"local_range(..., dim={dim}): the rows of '{spec.axes.dim_name(dim)}' in '{spec}' "
            "are not one range.",
            facts=f"mesh axes {', '.join(axis for _, axes in cut for axis in axes)} cut parts "
            f"of dim {dim}.",
            why="A mark inside a composite dimension takes rows with gaps.",
            fix="mark the dimension as a whole",
            dim=dim,
        )
    axes = spec.dim_axes(dim)
    rows = -(-shape[dim] // mesh.product(axes))
    start = min(mesh.index(axes, coords) * rows, shape[dim])
    return start, min(start + rows, shape[dim])


def _inner_size(spec: Spec, dim: int, size: int, mesh: Mesh) -> int:
    """Rows of a dimension after the marks on its parts."""
    factor = _factor(spec, spec.axes.dims[dim], (dim,), mesh)
    if size % factor:
        raise SpecError(
            f"'{spec}' cannot cut the parts of dim {dim} '{spec.axes.dim_name(dim)}' evenly.",
            facts=f"dim {dim} has size {size}; {size} % {factor} == {size % factor}. {mesh!r}.",
            why="Marks inside a composite dimension divide it.",
            fix="choose axis sizes whose product divides it",
            dim=dim,
            size=size,
            factor=factor,
        )
    return size // factor


def _factor(spec: Spec, node: Node, at: Position, mesh: Mesh) -> int:
    """By what the marks below a node divide its size; the node's own mark not counted."""
    marks = dict(spec.shards)
    below = [
        _factor(spec, child, (*at, i), mesh) * mesh.product(marks.get((*at, i), ()))
        for i, child in enumerate(node.children)
    ]
    if not isinstance(node, Sum):
        return math.prod(below)
    if len(set(below)) > 1:
        raise SpecError(
            f"'{spec}' cuts the terms of a sum by different factors.",
            facts=f"the terms of {render(node, marks, at)} are cut by "
            f"{', '.join(map(str, below))}.",
            why="The size of a block then depends on the size of every term.",
            fix="mark every term alike",
        )
    return below[0]


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Spec:
    reader = Reader(text, Fault("Spec.parse", SpecError))
    dims, marks = read_dims(reader)
    partial: list[str] = []
    if reader.accept("+"):
        partial.append(read_axis(reader))
        while reader.accept(","):
            partial.append(read_axis(reader))
    dtype = reader.word("a dtype") if reader.accept(":") else "float32"
    memory = reader.word("a memory") if reader.accept("@") else "device"
    if reader.token:
        raise reader.expected(
            "a dimension, '+axis', ':dtype', '@memory' (in this order) or the end"
        )
    return Spec(Axes(dims), tuple(marks.items()), tuple(partial), dtype, memory)


def _names(axes: Sequence[str]) -> tuple[str, ...]:
    # A bare string is a sequence of its letters: the typical slip is ("fsdp") for ("fsdp",).
    if isinstance(axes, str):
        raise SpecError(
            f"mesh axes {axes!r} are a text, not a tuple.",
            why="A dimension is cut by a tuple of mesh axes, major to minor.",
            fix=f"({axes!r},)",
        )
    return tuple(axes)


def _check_word(what: str, word: str, known: Sequence[str] | frozenset[str]) -> None:
    if word not in known:
        raise SpecError(
            f"{what} {word!r} is unknown.",
            why=f"A spec names its {what} by a word of torch or of shardwise.",
            fix=nearest(word, sorted(known)),
        )


def _check_positions(spec: Spec) -> None:
    for at, axes in spec.shards:
        if not at or spec.axes.node(at) is None:
            raise SpecError(
                f"Spec cannot shard position {at} of '{spec.axes}'.",
                facts=f"mesh axes {', '.join(axes)}; the axes have {spec.axes.ndim} dimensions.",
                why="A position is a dimension, then a child of it, and so on.",
                fix=f"use a dimension from 0 to {spec.axes.ndim - 1}"
                if spec.axes.ndim
                else "leave a scalar replicated",
                position=at,
            )


def _check_used_once(spec: Spec) -> None:
    """A mesh axis cuts a tensor once; terms of one sum share no element, so they may share it."""
    uses = [(axis, at) for at, axes in spec.shards for axis in axes]
    summed = [(axis, None) for axis in spec.partial]
    for (axis, at), (other, there) in itertools.combinations([*uses, *summed], 2):
        if axis != other:
            continue
        if at is not None and there is not None and spec.axes.alternatives(at, there):
            continue
        raise SpecError(
            f"mesh axis {axis!r} is used twice in '{spec}'.",
            why="A mesh axis cuts one dimension of a tensor, or carries its partial sums.",
            fix=f"take {axis!r} away from one of them",
            axis=axis,
        )


def check_ndim(spec: Spec, shape: Sequence[int]) -> None:
    """Raise `SpecError` for a shape with another number of dimensions."""
    if len(shape) != spec.axes.ndim:
        raise SpecError(
            f"'{spec}' has {spec.axes.ndim} dimensions; the tensor has {len(shape)}.",
            facts=f"shape {tuple(shape)}.",
            why="A spec names every dimension of a tensor.",
            fix="use the axes of that tensor",
            ndim=spec.axes.ndim,
            shape=tuple(shape),
        )
