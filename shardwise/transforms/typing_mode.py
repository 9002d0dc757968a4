"""The dispatch mode that gives every activation of a forward pass its type."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.sharding.compat import TorchDispatchMode
from shardwise.sharding.functional import bound
from shardwise.transforms import (
    type_rules,
    type_rules_indices,
    type_rules_products,
    type_rules_reductions,
    type_rules_views,
)
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
from shardwise.transforms.places import function_name
from shardwise.transforms.type_rules import Call, Rule, is_pointwise, pointwise, whole

RULES: Mapping[str, Rule] = {
    **type_rules.RULES,
    **type_rules_views.RULES,
    **type_rules_products.RULES,
    **type_rules_reductions.RULES,
    **type_rules_indices.RULES,
}
Drawn = Sequence[tuple[str, dict[str, Type], str | None]]
"""Random operations: name, types of the result, and the module."""

Seen = Callable[[str, Drawn], None]
"""Is told the name of a function and what it drew."""

_BINARY_FORMS = ("max", "min")
_WHOLE_FUNCTIONS: Mapping[Any, str] = {
    torch.nn.functional.linear: "linear",
    torch.matmul: "matmul",
    torch.Tensor.matmul: "matmul",
    torch.Tensor.__matmul__: "matmul",
    torch.nn.functional.scaled_dot_product_attention: "scaled_dot_product_attention",
}


_MISSING = object()


@dataclass(slots=True)
class Guess:
    """What happened while rules were asked and nothing was refused.

    Args:
        knows_all: whether they could type all operations.
        draws: whether some operation drew random numbers.
    """

    knows_all: bool = True
    draws: bool = False


class TypingMode(TorchDispatchMode):
    """Types the outputs of every operation while it is entered; enter it above a fake mode.

    Args:
        types: the table, which has the types of the inputs and parameters.
        where: says in which module the forward pass is, for errors and random operations; None:
            in none.
        seen: is told every function that was called, and what of `types.random` it drew.

    Raises:
        PlanError: from the operation whose inputs do not go together.
    """

    def __init__(
        self,
        types: Types,
        *,
        where: Callable[[], str | None] = lambda: "",
        seen: Seen = lambda name, drawn: None,
    ) -> None:
        super().__init__()
        self.guess: Guess | None = None
        self._types = types
        self._where = where
        self._seen = seen
        self._functions = _Functions(self)
        self._inside = False

    def __enter__(self) -> TypingMode:
        """Watch operations, and the functions that are typed as a whole."""
        super().__enter__()
        self._functions.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop watching."""
        self._functions.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and type what it returns and writes."""
        kwargs = kwargs or {}
        # `prim` operations ask for a device or layout; an error raised in them ends the process.
        if self._inside or func.namespace == "prim":
            if self.guess is not None:
                self.guess.draws |= torch.Tag.nondeterministic_seeded in func.tags
            return func(*args, **kwargs)
        schema = func._schema
        given = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
        given |= dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
        written = [
            tensor
            for one in schema.arguments
            if one.alias_info and one.alias_info.is_write
            for tensor in _tensors(given[one.name])
        ]
        op: str = func._opname
        op = op[:-1] if schema.is_mutable and op.endswith("_") else op
        rule = RULES.get(op, pointwise if is_pointwise(func) else whole)
        if op in _BINARY_FORMS and "other" in given:
            rule = pointwise
        if any(one.is_out for one in schema.arguments):
            read = {one.name: given[one.name] for one in schema.arguments if not one.is_out}
        else:
            read = given
        random = torch.Tag.nondeterministic_seeded in func.tags
        return self._typed(rule, op, read, lambda: func(*args, **kwargs), written, random=random)

    @contextmanager
    def untyped(self) -> Generator[None]:
        """Let operations pass whose results get their types otherwise."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def guessing(self) -> Generator[Guess]:
        """Type what rules can type, refuse nothing, and note no use of a parameter."""
        around, used = self.guess, copy.deepcopy(self._types.used)
        self.guess = found = Guess()
        try:
            yield found
        finally:
            self.guess = around
            self._types.used.update(used)

    def whole_function(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a function of several operations and type its result by one rule."""
        if self._inside:
            return func(*args, **kwargs)
        args, kwargs = tuple(map(bound, args)), {key: bound(one) for key, one in kwargs.items()}
        names, rule = type_rules_products.WHOLE[name]
        given = dict(zip(names, args, strict=False)) | kwargs
        random = bool(given.get("dropout_p") or (len(args) > len(names) and args[len(names)]))

        def run() -> Any:
            with self.untyped():
                return func(*args, **kwargs)

        return self._typed(rule, name, given, run, (), random=random)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a function, by one rule if there is one for all of it, and tell who wants to know."""
        before, name = len(self._types.random), _WHOLE_FUNCTIONS.get(func)
        if name is None:
            result = func(*args, **kwargs)
        else:
            result = self.whole_function(name, func, args, kwargs)
        self._seen(function_name(func), self._types.random[before:])
        return result

    def _typed(
        self,
        rule: Rule,
        op: str,
        given: Mapping[str, Any],
        run: Callable[[], Any],
        written: Sequence[Tensor],
        *,
        random: bool,
    ) -> Any:
        table, found = self._types, dict[str, Type]()
        result: Any = _MISSING
        try:
            calls = [Call(table, axis, op, given) for axis in table.axes]
            before = [[table.of(one, axis) for one in written] for axis in table.axes]
            result = self._run(calls, run)
            outputs = list(_tensors(result))
            for call, old in zip(calls, before, strict=True):
                seen = Call(table, call.axis, op, given, outputs or written)
                kinds = rule(seen)
                several = kinds if isinstance(kinds, Sequence) else [kinds] * len(seen.outputs)
                if random:
                    several = [Free(()) if one == Constant() else one for one in several]
                found |= {call.axis: several[0]} if several else {}
                if random:
                    _check_drawable(seen, several)
                for one, kind in zip(written, old, strict=True):
                    _write(seen, one, kind, _kind_of(one, seen.outputs, several))
                for one, kind in zip(outputs, several, strict=True):
                    self._types.set(one, call.axis, kind)
        except TypeMismatch as mismatch:
            if self.guess is None:
                raise mismatch.error(self._where()) from mismatch
            self.guess.knows_all = False
            self.guess.draws |= random
            return run() if result is _MISSING else result
        if random and self.guess is not None:
            self.guess.draws = True
        elif random:
            table.random.append((op, found, self._where()))
        return result

    def _run(self, calls: Sequence[Call], run: Callable[[], Any]) -> Any:
        """Run it; if local shapes do not fit, say so in terms of the types."""
        try:
            return run()
        except (RuntimeError, IndexError) as error:
            for call in calls:
                if any(isinstance(kind, Sharded | Partial) for _, kind in call.operands()):
                    first = (str(error).splitlines() or [""])[0]
                    raise call.mismatch(f"local shapes do not fit together ({first})") from error
            raise


class _Functions(TorchFunctionMode):
    """Sees functions before they are made of views that hide which dimension is which.

    A product of [batch, heads, seq, dim] goes through a view that merges batch and heads; with one
    head on each rank that view does not show whether heads went with the batch or the sequence.
    """

    def __init__(self, mode: TypingMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Hand a function to the mode as a whole."""
        return self._mode.call(func, args, kwargs or {})


def _check_drawable(call: Call, kinds: Sequence[Type]) -> None:
    """Refuse a draw for a block that a step cannot put apart."""
    cut = [kind for kind in kinds if isinstance(kind, Sharded)]
    if cut and call.given.get("generator") is not None:
        raise call.mismatch(
            f"{call.op} draws for a block from a generator of its own, which all ranks have in the "
            "same state"
        )
    if any(kind.mixed for kind in cut):
        raise call.mismatch(
            f"{call.op} draws for a block of which ranks share some segments and not others; it "
            "has to be split before"
        )


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for one in result:
            yield from _tensors(one)


def _kind_of(written: Tensor, outputs: Sequence[Tensor], kinds: Sequence[Type]) -> Type:
    for one, kind in zip(outputs, kinds, strict=True):
        if one is written:
            return kind
    return kinds[0]


def _write(call: Call, target: Tensor, old: Type, kind: Type) -> None:
    """Give a written tensor its new type, and tell what shares its storage."""
    table, axis = call.types, call.axis
    table.set(target, axis, kind)
    if kind == old and not isinstance(kind, Constant):
        return
    for alias in table.aliases(target):
        if _place(alias) == _place(target):
            table.set(alias, axis, kind)
        else:
            table.set(alias, axis, _mixed(call, table.raw(alias, axis), kind))
    if isinstance(kind, Sharded | Partial):
        table.rewrite(target)


def _mixed(call: Call, old: Type, new: Type) -> Type:
    """The type of a tensor a part of which is overwritten."""
    kinds = [Free(()) if isinstance(kind, Constant) else kind for kind in (old, new)]
    if any(isinstance(kind, Sharded | Partial) for kind in kinds) or (
        Invariant() in kinds and Replicated() in kinds
    ):
        raise call.mismatch(f"a value that is {new} is written into a part of one that is {old}")
    frees = [kind for kind in kinds if isinstance(kind, Free)]
    for role, kind in (("invariant", Invariant()), ("replicated", Replicated())):
        if kind in kinds:
            for path in (path for free in frees for path in free.uses):
                call.types.used[call.axis].setdefault(path, set()).add(role)
            return kind
    return Free(tuple(path for free in frees for path in free.uses))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
