"""How types meet: the call that a rule sees, joins, and the rules of pointwise operations.

A rule is given one call along one axis, after it has run, and returns the type of its output (one
type for all outputs, or one for each), or raises `TypeMismatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.transforms.activation_types import (
    Constant,
    Free,
    Invariant,
    Partial,
    Replicated,
    Sharded,
    Type,
    TypeMismatch,
    Types,
)

Operand = tuple[Tensor, Type]


@dataclass(frozen=True)
class Call:
    """One operation along one axis.

    Args:
        types: the table.
        axis: the mesh axis.
        op: name of the operation without overload, and without `_` if it writes its input.
        given: its arguments by name.
        outputs: the tensors that it returned.
    """

    types: Types
    axis: str
    op: str
    given: Mapping[str, Any]
    outputs: Sequence[Tensor] = field(default=())

    def of(self, name: str) -> Type:
        """The type of the argument `name`."""
        return self.types.of(self.given[name], self.axis)

    def operand(self, name: str) -> Operand:
        """The argument `name` with its type."""
        return self.given[name], self.of(name)

    def operands(self, names: Iterable[str] | None = None) -> list[Operand]:
        """The tensors among the arguments (in lists too) with their types."""
        return [(tensor, kind) for _, tensor, kind in self.named(names)]

    def named(self, names: Iterable[str] | None = None) -> list[tuple[str, Tensor, Type]]:
        """The same with the names of the arguments."""
        found: list[tuple[str, Tensor, Type]] = []
        for name in self.given if names is None else names:
            value = self.given.get(name)
            several: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
            for one in several:
                if isinstance(one, Tensor):
                    found += [(name, one, self.types.of(one, self.axis))]
        return found

    def use(self, operands: Iterable[Operand], role: str) -> None:
        """Note how the free ones among the operands are used."""
        for tensor, _ in operands:
            self.types.use(tensor, self.axis, role)

    def mismatch(self, reason: str, **numbers: object) -> TypeMismatch:
        """The error of this call."""
        shapes = [(name, kind, tuple(one.shape)) for name, one, kind in self.named()]
        return TypeMismatch(reason, op=self.op, axis=self.axis, operands=shapes, **numbers)


Rule = Callable[[Call], Type | Sequence[Type]]


def join_equal(call: Call, operands: Sequence[Operand]) -> Type:
    """The type of what is computed of operands that are equal on all ranks.

    Raises:
        TypeMismatch: an invariant meets a replicated one, or one is not equal on all ranks.
    """
    kinds = [kind for _, kind in operands]
    if any(isinstance(kind, Sharded | Partial) for kind in kinds):
        raise call.mismatch(f"{call.op} has no rule for inputs that differ between ranks")
    if any(isinstance(kind, Replicated) for kind in kinds):
        if any(isinstance(kind, Invariant) for kind in kinds):
            raise call.mismatch(
                "an invariant value (its gradient is whole on each rank) meets a replicated one "
                "(its gradient is a part of a sum)"
            )
        call.use(operands, "replicated")
        return Replicated()
    if any(isinstance(kind, Invariant) for kind in kinds):
        call.use(operands, "invariant")
        return Invariant()
    return Free(tuple(path for kind in kinds if isinstance(kind, Free) for path in kind.uses))


def beside_sharded(call: Call, operands: Iterable[Operand]) -> None:
    """Use operands that are equal on all ranks together with a block.

    Raises:
        TypeMismatch: the gradient of one would be a part of a sum, but it is invariant; or one is
            a partial sum.
    """
    operands = list(operands)
    for _, kind in operands:
        if isinstance(kind, Invariant):
            raise call.mismatch(
                "an invariant value (its gradient is whole on each rank) meets a block, which "
                "gives it only a part of its gradient"
            )
        if isinstance(kind, Partial):
            raise call.mismatch("a partial sum meets a block; it has to be summed first")
    call.use(operands, "replicated")


def whole(call: Call) -> Type:
    """The rule of what has no rule: all inputs equal on all ranks.

    Raises:
        TypeMismatch: they are not.
    """
    return join_equal(call, call.operands())


def same(call: Call, first: Sharded, second: Sharded, dims: tuple[int, int]) -> None:
    """Ask that two blocks, of aligned dimensions `dims`, are cut alike.

    Raises:
        TypeMismatch: they are not.
    """
    if dims[0] != dims[1]:
        raise call.mismatch(
            f"one input is sharded on dim {dims[0]} and another on dim {dims[1]} of the result",
            dims=dims,
        )
    if (first.segments, first.rows) != (second.segments, second.rows):
        raise call.mismatch(
            f"one input is {first} ({sum(first.segments)} rows a rank) and another is {second} "
            f"({sum(second.segments)} rows a rank)",
            segments=(first.segments, second.segments),
        )


def broadcast(call: Call, operands: Sequence[Operand], shape: Sequence[int]) -> Type:
    """The type of a result of local shape `shape` that is computed element by element.

    Raises:
        TypeMismatch: an operand is a partial sum, or the operands are not cut alike.
    """
    cut = [(one, kind) for one, kind in operands if isinstance(kind, Sharded)]
    if not cut:
        return join_equal(call, operands)
    if any(isinstance(kind, Partial) for _, kind in operands):
        raise call.mismatch("a partial sum meets a block; it has to be summed first")
    first, kind = min(cut, key=lambda one: one[1].copies)
    dim = kind.dim + len(shape) - first.dim()
    for other, other_kind in cut:
        same(call, kind, other_kind, (dim, other_kind.dim + len(shape) - other.dim()))
    if sum(kind.segments) != shape[dim]:
        raise call.mismatch(
            f"a block of {sum(kind.segments)} rows is broadcast to {shape[dim]}",
            rows=(sum(kind.segments), shape[dim]),
        )
    rest = [(one, other) for one, other in operands if not isinstance(other, Sharded)]
    for one, other in rest:
        at = dim - len(shape) + one.dim()
        if at >= 0 and one.shape[at] != 1 and not isinstance(other, Constant):
            raise call.mismatch(
                f"dim {at} of size {one.shape[at]} of a value that is the same on all ranks meets "
                "a dimension of which each rank has a block of its own",
                dim=at,
                size=one.shape[at],
            )
    beside_sharded(call, rest)
    return replace(kind, dim=dim)


def pointwise(call: Call) -> Type:
    """The rule of operations on each element; partial sums only where they are linear."""
    operands = call.operands()
    if any(isinstance(kind, Partial) for _, kind in operands):
        return _linear(call)
    if operands and all(isinstance(kind, Constant) for _, kind in operands):
        return Constant()
    return broadcast(call, operands, call.outputs[0].shape)


def _linear(call: Call) -> Type:
    if call.op in ("add", "sub"):
        both = [call.given["self"], call.given["other"]]
        if all(
            isinstance(one, Tensor) and isinstance(call.types.of(one, call.axis), Partial)
            for one in both
        ):
            return Partial()
        raise call.mismatch("what is added to a partial sum would be added once for each rank")
    if call.op in ("neg", "positive", "clone", "alias", "detach", "lift_fresh", "lift"):
        return Partial()
    if call.op == "_to_copy":
        if call.outputs[0].is_floating_point():
            return Partial()
        raise call.mismatch(f"a partial sum cannot be rounded to {call.outputs[0].dtype}")
    if call.op in ("mul", "div") and call.given.get("rounding_mode") is None:
        if call.op == "mul" and not _is_partial(call, call.given["self"]):
            factor = call.given["self"]
        else:
            factor = call.given["other"]
        fits = not isinstance(factor, Tensor) or call.types.of(factor, call.axis) in (
            Free(()),
            Constant(),
        )
        if fits and (call.op == "mul" or _is_partial(call, call.given["self"])):
            return Partial()
    raise call.mismatch(f"{call.op} of a partial sum is not the sum of {call.op} over the ranks")


def _is_partial(call: Call, value: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(call.types.of(value, call.axis), Partial)


def _copy(call: Call) -> Type:
    """What is written over matters only if it is a block, or carries a (zero) gradient."""
    target, kind = call.operand("self")
    source = call.of("src")
    if isinstance(source, Partial) and (isinstance(kind, Partial) or not target.requires_grad):
        return source
    if isinstance(kind, Sharded) or target.requires_grad:
        return broadcast(call, call.operands(["self", "src"]), target.shape)
    if isinstance(source, Constant):
        return source
    return broadcast(call, call.operands(["src"]), target.shape)


def _fill(call: Call) -> Type:
    target, kind = call.operand("self")
    values = call.operands(["value"])
    if isinstance(kind, Sharded) or target.requires_grad:
        return broadcast(call, [(target, kind), *values], target.shape)
    return join_equal(call, values) if values else Constant()


def _detach(call: Call) -> Type:
    kind = call.of("self")
    return kind if isinstance(kind, Sharded | Partial | Constant) else Free(())


def _dropout(call: Call) -> Sequence[Type]:
    kind = pointwise(call)
    return [kind] * len(call.outputs)


RULES: dict[str, Rule] = {
    "copy": _copy,
    "fill": _fill,
    "zero": _fill,
    "detach": _detach,
    "native_dropout": _dropout,
    **dict.fromkeys(
        (
            *("_to_copy", "clone", "alias", "lift_fresh", "lift", "where", "masked_fill"),
            *("bernoulli", "nan_to_num", "clamp", "gelu", "silu", "isfinite", "isin", "positive"),
            *("normal", "uniform", "exponential"),
        ),
        pointwise,
    ),
}


def is_pointwise(func: Any) -> bool:
    """Whether torch says that an operation works element by element."""
    return torch.Tag.pointwise in func.tags
