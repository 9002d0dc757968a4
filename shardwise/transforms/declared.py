"""Layouts that user code declares for activations: what a spec says, and the crossings to it.

[Note: declared layouts]
A spec names every dimension of an activation and marks what tensor axes cut: `batch seq heads/tp
hd`. Without a mark the activation is whole along an axis, and `+tp` says that it is a summand. How
an activation gets there follows from the type it has:

    has           whole               cut                 whole, inside of sw.local
    invariant     -                   slice               copy
    replicated    -                   take                -
    cut alike     collect             -                   gather
    partial       reduce              scatter             reduce, copy

Inside of `sw.local` what is whole is used together with blocks, so that each rank makes a part of
its gradient. What a function returns whole has its gradient whole on each rank again (`first`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec
from shardwise.transforms.activation_types import (
    Constant,
    Partial,
    Replicated,
    Sharded,
    Type,
    TypeMismatch,
)
from shardwise.transforms.crossings import Crossing


@dataclass(frozen=True, slots=True)
class Declared:
    """What a spec says about one axis.

    Args:
        dim: the dimension that is cut; None: none is.
        plain: whether its blocks are one piece of it.
        partial: whether the value is a summand.
    """

    dim: int | None = None
    plain: bool = True
    partial: bool = False

    def __str__(self) -> str:
        if self.partial:
            return "a partial sum"
        return "whole" if self.dim is None else f"cut on dim {self.dim}"


@dataclass(frozen=True, eq=False)
class LocalRegion:
    """A function on blocks, from `sw.local`.

    Args:
        run: the function.
        in_specs: of its arguments; None for one that is no tensor, or is left as it is.
        out_specs: of what it returns.
        returns_one: whether that is one tensor, and no tuple.
        random: how its random operations draw: `alike`, `apart`, or None: it has none.
    """

    run: Callable[..., Any]
    in_specs: tuple[Spec | None, ...]
    out_specs: tuple[Spec, ...]
    returns_one: bool
    random: str | None

    @property
    def specs(self) -> tuple[Spec, ...]:
        """All of them."""
        return (*(spec for spec in self.in_specs if spec is not None), *self.out_specs)

    def cut_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Axes along which some argument or result is marked."""
        return tuple(
            axis
            for axis in axes
            if any(axis in (*spec.mesh_axes, *spec.partial) for spec in self.specs)
        )

    def results(self, returned: Any, where: str) -> list[Tensor]:
        """The tensors that the function has returned.

        Raises:
            PlanError: they are others than declared.
        """
        several: Any = [returned] if self.returns_one else returned
        fits = isinstance(several, list | tuple) and len(several) == len(self.out_specs)
        if not fits or not all(isinstance(one, Tensor) for one in several):
            raise PlanError(
                "The function of sw.local returns something else than out_specs says.",
                where=where,
                facts=f"out_specs has {len(self.out_specs)}; it returned {_told(returned)}.",
                why="The layout of every result is declared; nothing else tells it.",
                fix="out_specs='...' for one tensor, or a tuple of specs for a tuple of tensors",
                count=len(self.out_specs),
            )
        for spec, one in zip(self.out_specs, several, strict=True):
            check_dims("sw.local(fn, out_specs=)", where, spec, one)
        return list(several)

    def tensors(self, args: tuple[Any, ...], where: str) -> dict[int, Tensor]:
        """The arguments with a spec, by their place.

        Raises:
            PlanError: there are more or fewer arguments than specs, or one is no tensor.
        """
        odd = [
            at
            for at, spec in enumerate(self.in_specs[: len(args)])
            if spec is not None and not isinstance(args[at], Tensor)
        ]
        if len(args) != len(self.in_specs) or odd:
            told = f"argument {odd[0]} is {_told(args[odd[0]])}" if odd else ""
            raise PlanError(
                "The function of sw.local was called with other arguments than in_specs says.",
                where=where,
                facts=told or f"in_specs has {len(self.in_specs)}, the call {len(args)} arguments",
                why="Each argument is brought to a layout that is declared, or None leaves it.",
                fix="a spec for every tensor, and None for what is none",
                count=len(self.in_specs),
                given=len(args),
            )
        found = {at: args[at] for at, spec in enumerate(self.in_specs) if spec is not None}
        for at, one in found.items():
            spec = self.in_specs[at]
            assert spec is not None
            check_dims("sw.local(fn, in_specs=)", where, spec, one)
        return found


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def declared(spec: Spec, axis: str) -> Declared:
    """What a spec says about an axis.

    >>> declared(Spec.parse("batch seq (heads/tp hd)"), "tp")
    Declared(dim=2, plain=True, partial=False)
    >>> declared(Spec.parse("batch ((heads/tp + kv/tp) hd)"), "tp").plain
    False
    """
    if axis in spec.partial:
        return Declared(partial=True)
    marks = [at for at, axes in spec.shards if axis in axes]
    if not marks:
        return Declared()
    first = all(child == 0 for child in marks[0][1:])
    return Declared(marks[0][0], plain=len(marks) == 1 and first)


def marked(spec: Spec, axes: Sequence[str]) -> tuple[str, ...]:
    """Tensor axes in the order in which a spec cuts with them, then all others."""
    return tuple(dict.fromkeys([*(a for a in spec.mesh_axes if a in axes), *axes]))


def check_axes(
    call: str, where: str, specs: Iterable[Spec], axes: Sequence[str], mesh: Mesh
) -> None:
    """Refuse marks of axes that cut no layers; those of one rank mean nothing.

    Raises:
        PlanError: such a mark.
    """
    for spec in specs:
        for axis in (*spec.mesh_axes, *spec.partial):
            if axis in axes or (axis in mesh and mesh[axis] == 1):
                continue
            known = axis in mesh
            raise PlanError(
                f"{call} marks {axis!r} in '{spec}', "
                + ("which cuts no layers." if known else f"which is no axis of {mesh!r}."),
                where=where,
                facts=f"tensor axes of the plan: {', '.join(axes) or 'none'}",
                why="An activation is cut by tensor axes; data axes have cut the batch before the "
                "model sees it.",
                fix=f"leave {axis!r} out, or sw.tensor_parallel({axis!r}) in the plan"
                if known
                else nearest(axis, dict.fromkeys([*axes, *mesh.names])),
                axis=axis,
            )


def check_dims(call: str, where: str, spec: Spec, tensor: Tensor) -> None:
    """Refuse a tensor with another number of dimensions than its spec.

    Raises:
        PlanError: it has.
    """
    if tensor.ndim != spec.axes.ndim:
        raise PlanError(
            f"{call} names {spec.axes.ndim} dimensions, and the tensor has {tensor.ndim}.",
            where=where,
            facts=f"'{spec}' for shape {tuple(tensor.shape)}.",
            why="A spec names every dimension of a tensor.",
            fix="one name for each dimension, or parts of a composite one in parentheses: "
            "'batch seq (heads/tp hd)'",
            ndim=spec.axes.ndim,
            shape=tuple(tensor.shape),
        )


def crossings_to(
    want: Declared,
    axis: str,
    tensor: Tensor,
    kind: Type,
    *,
    ranks: int,
    inside: bool,
) -> tuple[Crossing, ...]:
    """What brings an activation to what was declared along one axis, in turn.

    Args:
        want: what was declared.
        axis: the tensor axis.
        tensor: the activation.
        kind: its type.
        ranks: along the axis.
        inside: whether it is used together with blocks; see [Note: declared layouts].

    Raises:
        TypeMismatch: nothing does.
    """
    if want.partial:
        if isinstance(kind, Partial):
            return ()
        raise _mismatch(f"a value that is {kind} cannot be declared a partial sum", axis)
    if isinstance(kind, Sharded):
        return _from_cut(want, axis, kind, inside=inside)
    if want.dim is None:
        if isinstance(kind, Partial):
            reduced = Crossing("reduce", axis)
            return (reduced, Crossing("copy", axis)) if inside else (reduced,)
        grows = tensor.requires_grad and not isinstance(kind, Replicated | Constant)
        return (Crossing("copy", axis),) if inside and grows else ()
    if not want.plain:
        raise _mismatch(
            f"dim {want.dim} would be cut in several pieces, and it is {kind}: only one piece can "
            "be taken of it",
            axis,
        )
    size = tensor.shape[want.dim]
    if size % ranks:
        raise _mismatch(
            f"dim {want.dim} of {size} rows cannot be cut over {ranks} ranks: {size} % {ranks} == "
            f"{size % ranks}",
            axis,
            size=size,
            ranks=ranks,
        )
    if isinstance(kind, Partial):
        return (Crossing("scatter", axis, want.dim),)
    return (Crossing("take" if isinstance(kind, Replicated) else "slice", axis, want.dim),)


def _from_cut(want: Declared, axis: str, kind: Sharded, *, inside: bool) -> tuple[Crossing, ...]:
    if want.dim == kind.dim and want.plain == (len(kind.segments) == 1):
        return ()
    if want.dim is not None:
        raise _mismatch(
            f"a value that is {kind} cannot become {want} in one step; declare it whole before",
            axis,
            dims=(kind.dim, want.dim),
        )
    if len(kind.segments) > 1 or kind.copies > 1:
        raise _mismatch(f"a value that is {kind} cannot be put together", axis)
    rows = 0 if kind.stack else kind.rows or 0
    name = "gather" if inside else "collect"
    return (Crossing(name, axis, kind.dim, rows=rows, stack=kind.stack),)


def _mismatch(reason: str, axis: str, **numbers: Any) -> TypeMismatch:
    return TypeMismatch(reason, axis=axis, **numbers)


def type_of_output(
    want: Declared, axis: str, output: Tensor, inputs: Sequence[tuple[Spec, Type]], spec: Spec
) -> Type:
    """The type along an axis of what a local function returns.

    A dimension of the same name and local length as one of an input is cut as that one is.

    Args:
        want: what was declared.
        axis: the tensor axis.
        output: what was returned.
        inputs: the specs of the arguments, and what they were.
        spec: of the output.
    """
    if want.partial:
        return Partial()
    if want.dim is None:
        return Replicated()
    name = spec.axes.dim_name(want.dim)
    for other, kind in inputs:
        if (
            isinstance(kind, Sharded)
            and other.axes.dim_name(kind.dim) == name
            and sum(kind.segments) == output.shape[want.dim]
        ):
            return Sharded(want.dim, kind.segments, kind.rows, kind.stack, kind.copies)
    return Sharded(want.dim, (output.shape[want.dim],))
