"""`sw.constrain` and `sw.local` in a trace: chooses the crossings to what user code declares."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.sharding.errors import PlanError, summarise
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec
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
from shardwise.transforms.crossing_trace import CrossingTrace
from shardwise.transforms.crossings import Crossing
from shardwise.transforms.declared import (
    Declared,
    LocalRegion,
    check_axes,
    check_dims,
    crossings_to,
    declared,
    marked,
    type_of_output,
)
from shardwise.transforms.declared_run import call_name, steps
from shardwise.transforms.places import Places
from shardwise.transforms.tensor_layers import Boundary
from shardwise.transforms.type_rules import Call, join_equal
from shardwise.transforms.typing_mode import TypingMode


class DeclaredTrace:
    """Types the calls of user code in a trace.

    Args:
        mesh: sizes of axes.
        types: of the trace.
        mode: that gives them.
        crossings: of the trace.
        places: of the trace.
        parameters: fake parameters by path.
    """

    def __init__(
        self,
        mesh: Mesh,
        types: Types,
        mode: TypingMode,
        crossings: CrossingTrace,
        *,
        places: Places,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self.placed: set[str] = set()
        self.even: dict[str, tuple[tuple[str, str], ...]] = {}
        self._mesh = mesh
        self._types = types
        self._mode = mode
        self._crossings = crossings
        self._places = places
        self._parameters = parameters

    def constrain(self, tensor: Tensor, spec: Spec) -> Tensor:
        """See `sw.constrain`.

        Raises:
            PlanError: the tensor cannot be brought there.
        """
        name = self._name("constrain")
        check_axes("sw.constrain", name, [spec], self._types.axes, self._mesh)
        check_dims("sw.constrain(x, spec)", name, spec, tensor)
        return self._bring(name, "in0", tensor, spec, cut=None)

    def local(self, region: LocalRegion, args: tuple[Any, ...]) -> Any:
        """See `sw.local`.

        Raises:
            PlanError: what is declared cannot be, or the function does what it does not say.
        """
        name = self._name("local")
        check_axes("sw.local", name, region.specs, self._types.axes, self._mesh)
        cut = region.cut_axes(self._types.axes)
        given = list(args)
        tensors = region.tensors(args, name)
        for at, tensor in tensors.items():
            spec = region.in_specs[at]
            assert spec is not None
            given[at] = self._bring(name, f"in{at}", tensor, spec, cut=cut)
        tensors = region.tensors(tuple(given), name)
        self._note_even(name, tensors)
        results = self._run(region, name, given)
        for one, spec in zip(results, region.out_specs, strict=True):
            for axis in self._types.axes:
                if axis in cut:
                    said = declared(spec, axis)
                    kind = type_of_output(said, axis, one, self._kinds(region, tensors, axis), spec)
                else:
                    kind = self._joined(tensors, axis)
                self._types.set(one, axis, kind)
        left = [self._leave(name, at, one, cut) for at, one in enumerate(results)]
        return left[0] if region.returns_one else tuple(left)

    def _name(self, what: str) -> str:
        if self._crossings.closed:
            raise nested(f"sw.{what}", self._crossings.closed)
        if self._places.path is not None:
            self.placed.add(self._places.path)
        return call_name(self._places, what)

    def _bring(
        self, name: str, place: str, tensor: Tensor, spec: Spec, *, cut: Sequence[str] | None
    ) -> Tensor:
        """One activation along all axes, by at most two crossings each.

        Args:
            name: of the call.
            place: of the activation in it.
            tensor: the activation.
            spec: where it is to be.
            cut: axes along which a local function has blocks; None: this is no local function.
        """
        call = "sw.constrain" if cut is None else "sw.local"
        for axis in marked(spec, self._types.axes):
            inside = cut is not None and axis in cut
            kind: Type | None = None
            try:
                kind = self._types.of(tensor, axis)
                chosen = self._choose(declared(spec, axis), tensor, axis, kind, inside=inside)
            except TypeMismatch as mismatch:
                mismatch.op, mismatch.axis = call, axis
                mismatch.operands = () if kind is None else (("x", kind, tuple(tensor.shape)),)
                raise mismatch.error(self._places.path) from mismatch
            boundary = Boundary(name, "call", (axis,))
            for step, crossing in itertools.zip_longest(steps(place), chosen):
                tensor = self._crossings.make(boundary, step, tensor, axis, crossing)
        return tensor

    def _choose(
        self, want: Declared, tensor: Tensor, axis: str, kind: Type, *, inside: bool
    ) -> tuple[Crossing, ...]:
        used = inside and want.dim is None and not want.partial and isinstance(kind, Free)
        if used and any(tensor is one for one in self._parameters.values()):
            # Its gradient is summed with those of all whole parameters, after backward.
            self._types.use(tensor, axis, "replicated")
            return ()
        return crossings_to(want, axis, tensor, kind, ranks=self._mesh[axis], inside=inside)

    def _note_even(self, name: str, tensors: Mapping[int, Tensor]) -> None:
        """Blocks with padding are refused, and those that may have some in another batch noted."""
        stacks: list[tuple[str, str]] = []
        for at, tensor in tensors.items():
            for axis in self._types.axes:
                kind = self._types.of(tensor, axis)
                if isinstance(kind, Sharded) and kind.rows is not None:
                    raise _padded(name, at, axis, kind, self._mesh[axis])
                if isinstance(kind, Sharded) and kind.stack:
                    stacks.append((axis, kind.stack))
        if stacks:
            self.even[name] = tuple(dict.fromkeys(stacks))

    def _run(self, region: LocalRegion, name: str, given: Sequence[Any]) -> list[Tensor]:
        """Run the function, and check that it reads, draws and returns only what it says."""
        # An alias has a node of its own, at which a walk back through the function ends.
        own = list(given)
        ends: set[Any] = set()
        as_they_are = {at: one for at, one in enumerate(given) if self._is_block(region, one)}
        for at, tensor in (as_they_are | region.tensors(tuple(given), name)).items():
            own[at] = tensor.view_as(tensor)
            ends.add(own[at].grad_fn)
        with self._mode.guessing() as guess:
            self._crossings.closed = name
            try:
                results = region.results(region.run(*own), name)
            finally:
                self._crossings.closed = ""
        if guess.draws and region.random is None:
            raise _draws(name)
        read = leaves_behind(results, ends)
        paths = [path for path, one in self._parameters.items() if id(one) in read]
        if paths:
            raise _reads(name, paths)
        if guess.knows_all:
            self._compare(region, name, results)
        return [self._own(one) for one in results]

    def _is_block(self, region: LocalRegion, value: Any) -> bool:
        """Whether an argument may stay as it is: each rank's gradient is that of its own block.

        So it can be what no spec tells, such as q, k and v side by side.
        """
        return isinstance(value, Tensor) and all(
            isinstance(self._types.of(value, axis), Sharded if axis in cut else Free | Invariant)
            for cut in [region.cut_axes(self._types.axes)]
            for axis in self._types.axes
        )

    def _compare(self, region: LocalRegion, name: str, results: Sequence[Tensor]) -> None:
        """Where rules can tell what a result is, it has to be what was declared."""
        for axis in region.cut_axes(self._types.axes):
            for at, (one, spec) in enumerate(zip(results, region.out_specs, strict=True)):
                said, kind = declared(spec, axis), self._types.raw(one, axis)
                summand = isinstance(kind, Partial)
                cut_at = kind.dim if isinstance(kind, Sharded) else None
                elsewhere = cut_at is not None and not said.partial and said.dim != cut_at
                equal = isinstance(kind, Replicated | Invariant)
                if (summand != said.partial and (summand or equal)) or elsewhere:
                    raise _other_result(name, at, axis, kind, said)

    def _own(self, result: Tensor) -> Tensor:
        """A result that is an argument or a parameter gets its type as a tensor of its own."""
        with self._mode.untyped():
            return result.view_as(result)

    def _kinds(
        self, region: LocalRegion, tensors: Mapping[int, Tensor], axis: str
    ) -> list[tuple[Spec, Type]]:
        found: list[tuple[Spec, Type]] = []
        for at, tensor in tensors.items():
            spec = region.in_specs[at]
            if spec is not None:
                found.append((spec, self._types.of(tensor, axis)))
        return found

    def _joined(self, tensors: Mapping[int, Tensor], axis: str) -> Type:
        """Along an axis that nothing marks, results are what all arguments together are."""
        named = {f"argument {at}": one for at, one in tensors.items()}
        call = Call(self._types, axis, "sw.local", named)
        try:
            return join_equal(call, call.operands())
        except TypeMismatch as mismatch:
            raise mismatch.error(self._places.path) from mismatch

    def _leave(self, name: str, at: int, result: Tensor, cut: Sequence[str]) -> Tensor:
        """What is whole has a whole gradient again, along axes with blocks inside."""
        for axis in cut:
            kind = self._types.of(result, axis) if result.requires_grad else Constant()
            first = Crossing("first", axis) if isinstance(kind, Replicated) else None
            boundary = Boundary(name, "call", (axis,))
            result = self._crossings.make(boundary, steps(f"out{at}")[0], result, axis, first)
        return result


def leaves_behind(results: Sequence[Tensor], ends: Collection[Any]) -> set[int]:
    """Which tensors without history results depend on otherwise than through nodes `ends`.

    >>> import torch
    >>> x, w = (torch.ones(1, requires_grad=True) for _ in range(2))
    >>> inside = x.view_as(x)
    >>> leaves_behind([inside * w], {inside.grad_fn}) == {id(w)}
    True
    """
    found: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = [one.grad_fn for one in results]
    while stack:
        node = stack.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        stack += [parent for parent, _ in node.next_functions]
    return found


def nested(call: str, region: str) -> PlanError:
    """The error for what asks for types inside of a function that has none."""
    return PlanError(
        f"{call} is called inside of a function of sw.local.",
        where=region,
        why="Such a function computes on this rank's blocks, and no type of what is in it is "
        "known.",
        fix="call it on the arguments or results of the function",
        region=region,
    )


def _padded(name: str, at: int, axis: str, kind: Sharded, ranks: int) -> PlanError:
    return PlanError(
        f"Argument {at} of sw.local has blocks with padding.",
        where=name,
        facts=f"it is {kind}; {kind.rows} % {ranks} == {(kind.rows or 0) % ranks} along {axis!r}.",
        why="The function would compute with padding as if it were values.",
        fix=f"a size that divides by {ranks}, or the dimension whole in in_specs",
        argument=at,
        rows=kind.rows,
        ranks=ranks,
    )


def _other_result(name: str, at: int, axis: str, kind: Type, said: Declared) -> PlanError:
    fix = f"mark it with +{axis}" if isinstance(kind, Partial) else "declare it as it is"
    return PlanError(
        f"Result {at} of the function of sw.local is another one than declared.",
        where=name,
        facts=f"along {axis!r} it is {kind}, and out_specs says that it is {said}.",
        why="What comes after it would take a part for the whole, or the whole for a part.",
        fix=f"{fix} in out_specs; sw.constrain brings it to another layout",
        result=at,
        axis=axis,
    )


def _draws(name: str) -> PlanError:
    return PlanError(
        "The function of sw.local draws random numbers, and does not say how.",
        where=name,
        why="Ranks of a tensor axis draw alike unless they are told to: the same dropout for "
        "different blocks.",
        fix="random='apart' for what is drawn for blocks, random='alike' for what all ranks have",
        region=name,
    )


def _reads(name: str, paths: Sequence[str]) -> PlanError:
    return PlanError(
        f"The function of sw.local depends on {len(paths)} parameters otherwise than by its "
        "arguments.",
        where=name,
        facts=summarise(paths),
        why="Each rank makes a part of a gradient inside, and only arguments say how parts go "
        "together.",
        fix="pass the parameter, or the activation that depends on it, as an argument with a spec",
        path=paths[0],
        count=len(paths),
    )
