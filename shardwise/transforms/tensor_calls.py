"""What functions that users call find out of cut tensors: by types in a trace, by size in a step.

[Note: which dimension is cut]
A step has no types. A trace writes down, for every length of a dimension that it was asked about,
how it is cut, and refuses a model in which one length means both; so a step can tell by the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import PlanError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec
from shardwise.transforms.activation_types import (
    Free,
    Invariant,
    Partial,
    Sharded,
    Type,
    TypeMismatch,
    Types,
)
from shardwise.transforms.call_facts import CallFacts
from shardwise.transforms.crossings import Crossing, crossed
from shardwise.transforms.declared import LocalRegion
from shardwise.transforms.declared_run import Cross, DeclaredRun
from shardwise.transforms.declared_trace import DeclaredTrace, nested
from shardwise.transforms.dropout_cuts import CutAt, cuts_at, cuts_in, unseen_call
from shardwise.transforms.order import CROSS, Event
from shardwise.transforms.places import Places
from shardwise.transforms.random_cuts import Apart
from shardwise.transforms.tensor_context import Cut, DropoutCall, VocabShard


@dataclass(frozen=True, slots=True)
class CutLength:
    """How a dimension of a certain length is cut: over which axis, and into how many rows."""

    axis: str
    rows: int


Lengths = Mapping[int, CutLength | None]
"""By length of a dimension on a rank; None: it is whole."""


def shard_at(cut: CutLength, length: int, mesh: Mesh, coords: Mapping[str, int]) -> VocabShard:
    """The classes that the rank at `coords` has."""
    place = mesh.index(mesh.parts(cut.axis), coords)
    first = min(place * length, cut.rows)
    count = min(length, cut.rows - first)
    return VocabShard(cut.axis, mesh[cut.axis], place, cut.rows, first, count)


class TracedCalls:
    """The tensor context of a trace; see [Note: which dimension is cut].

    Args:
        mesh: sizes of axes.
        types: of the trace.
        events: of the trace; exchanges of numbers are added.
        around: calls of recomputed modules that are open.
        untyped: context in which operations are not typed.
        enter: brings an activation into what an axis cuts.
        declared: types the calls of `sw.constrain` and `sw.local`.
        places: of the trace.
        closed: gives the call of `sw.local` that runs, or "".
    """

    def __init__(
        self,
        mesh: Mesh,
        types: Types,
        events: list[Event],
        around: list[str],
        *,
        untyped: Callable[[], Any],
        enter: Callable[[str, Tensor, str], Tensor],
        declared: DeclaredTrace,
        places: Places,
        closed: Callable[[], str],
    ) -> None:
        self.lengths: dict[int, CutLength | None] = {}
        self.dropouts: dict[DropoutCall, tuple[CutAt, ...]] = {}
        self.room = 0
        self.declared = declared
        self.places = places
        self._closed = closed
        self._mesh = mesh
        self._types = types
        self._events = events
        self._around = around
        self._untyped = untyped
        self._enter = enter

    def shard_of(self, tensor: Tensor, dim: int) -> VocabShard | None:
        """By its type.

        Raises:
            PlanError: dimensions of the same length are cut in one place and whole in another.
        """
        self._refuse_inside("sw.cross_entropy")
        found, length = self._cut(tensor, dim), tensor.shape[dim]
        if self.lengths.setdefault(length, found) != found:
            raise PlanError(
                f"A dimension of length {length} is cut in one loss and whole in another.",
                where="sw.cross_entropy",
                facts=[str(found), str(self.lengths[length])],
                why="A step knows by its length which dimension is cut.",
                fix="logits='gathered' in tensor_parallel",
                length=length,
            )
        first = dict.fromkeys(self._mesh.names, 0)
        return None if found is None else shard_at(found, length, self._mesh, first)

    def _cut(self, tensor: Tensor, dim: int) -> CutLength | None:
        for axis in self._types.axes:
            kind = self._types.of(tensor, axis)
            if isinstance(kind, Sharded) and kind.dim == dim and len(kind.segments) == 1:
                return CutLength(axis, kind.rows or tensor.shape[dim] * self._mesh[axis])
        return None

    def cuts_of(self, tensor: Tensor, call: DropoutCall) -> tuple[Cut, ...]:
        """By its type, which is noted for the step.

        Raises:
            PlanError: two axes cut one dimension, or types are not known here.
        """
        self._refuse_inside("sw.dropout")
        found = self.dropouts[call] = cuts_in(self._types, tensor, call)
        coords = dict.fromkeys(self._mesh.names, 0)
        return cuts_at(
            found, tensor, call, mesh=self._mesh, coords=coords, length_of=lambda stack: 0
        )

    def constrain(self, tensor: Tensor, spec: Spec) -> Tensor:
        """See `sw.constrain`."""
        return self.declared.constrain(tensor, spec)

    def local(self, region: LocalRegion, args: tuple[Any, ...]) -> Any:
        """See `sw.local`."""
        return self.declared.local(region, args)

    def facts(self, apart: Apart) -> CallFacts:
        """What a step has to know.

        Args:
            apart: random functions that draw apart.
        """
        return CallFacts(
            self._types.axes,
            apart,
            dict(self.dropouts),
            frozenset(self.declared.placed),
            dict(self.declared.even),
        )

    def _refuse_inside(self, call: str) -> None:
        if self._closed():
            raise nested(call, self._closed())

    def all_gather(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """The shape of the numbers of all ranks."""
        crossing = Crossing("numbers", axis)
        ranks = self._mesh[axis]
        place = f"{name} {axis}"
        moved = crossed(crossing, tensor.shape, tensor.dtype, rows=0, ranks=ranks, place=place)
        shape = tuple(tensor.shape)
        event = Event(CROSS, place, False, tuple(self._around), moved, shape)
        self._events.append(event)
        return tensor.new_empty((ranks, *shape))

    def all_reduce(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """A sum is that of the numbers of all ranks."""
        return self.all_gather(tensor, axis, name).sum(0)

    def enter(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """See `TensorContext.enter`."""
        return self._enter(name, tensor, axis)

    def by_row(
        self, run: Callable[..., Tensor], rows: Tensor, weights: Sequence[Tensor], *args: Any
    ) -> Tensor:
        """Untyped, with the type of the rows.

        Raises:
            PlanError: the rows or the weights are cut otherwise.
        """
        kinds = {axis: _type_of_rows(self._types, axis, rows, weights) for axis in self._types.axes}
        with self._untyped():
            result = run(rows, *weights, *args)
        self._types.set(result, kinds)
        return result

    def invariant(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """Untyped, with an invariant result."""
        with self._untyped():
            result = run(*args)
        self._types.set(result, {axis: Invariant() for axis in self._types.axes})
        return result


def _type_of_rows(types: Types, axis: str, rows: Tensor, weights: Sequence[Tensor]) -> Type:
    """What is made of each row: alike on all ranks, or cut as the rows are."""
    kind = types.of(rows, axis)
    known = [types.of(weight, axis) for weight in weights]
    shapes = [tuple(one.shape) for one in (rows, *weights)]
    is_cut = isinstance(kind, Sharded) and kind.dim == rows.ndim - 1
    if is_cut or isinstance(kind, Partial) or any(isinstance(one, _CUT) for one in known):
        raise TypeMismatch(
            "a loss needs each row and its weights whole, or the vocabulary cut in one piece",
            op="cross entropy",
            axis=axis,
            operands=list(zip(("rows", "weight", "bias"), (kind, *known), shapes, strict=False)),
        ).error("")
    if isinstance(kind, Free):
        uses = [path for one in known if isinstance(one, Free) for path in one.uses]
        return Free((*kind.uses, *uses))
    for weight in weights:
        types.use(weight, axis, "invariant" if isinstance(kind, Invariant) else "replicated")
    return kind


_CUT = (Sharded, Partial)


class RunCalls:
    """The tensor context of a step.

    Args:
        mesh: sizes of axes.
        coords: of this rank.
        numbers: runs an exchange of numbers in its turn.
        enter: brings an activation into what an axis cuts.
        cross: runs a crossing that was chosen.
        length_of: the length of the sequence in a stack of modules; 0 if it is not known.
    """

    def __init__(
        self,
        mesh: Mesh,
        coords: Mapping[str, int],
        *,
        numbers: Callable[[str, Crossing, Tensor], Tensor],
        enter: Callable[[str, Tensor, str], Tensor],
        cross: Cross,
        length_of: Callable[[str], int],
    ) -> None:
        self.lengths: Lengths = {}
        self.facts = CallFacts()
        self.places = Places()
        self.room = 0
        self._length_of = length_of
        self._declared = DeclaredRun(
            mesh, coords, places=self.places, cross=cross, length_of=length_of
        )
        self._mesh = mesh
        self._coords = coords
        self._numbers = numbers
        self._enter = enter

    def shard_of(self, tensor: Tensor, dim: int) -> VocabShard | None:
        """By the length of the dimension."""
        length = tensor.shape[dim]
        found = self.lengths.get(length)
        return None if found is None else shard_at(found, length, self._mesh, self._coords)

    def cuts_of(self, tensor: Tensor, call: DropoutCall) -> tuple[Cut, ...]:
        """As a trace has noted, or as for the other calls of that place if it has had fewer.

        Raises:
            RandomError: the trace has met no such call.
        """
        if not self.facts.axes:
            return ()
        found = self.facts.dropouts.get(call)
        if found is None:
            others = {f for one, f in self.facts.dropouts.items() if one[:2] == call[:2]}
            if len(others) != 1:
                raise unseen_call(call)
            (found,) = others
        return cuts_at(
            found, tensor, call, mesh=self._mesh, coords=self._coords, length_of=self._length_of
        )

    def constrain(self, tensor: Tensor, spec: Spec) -> Tensor:
        """See `sw.constrain`."""
        return self._declared.constrain(tensor, spec, self.facts)

    def local(self, region: LocalRegion, args: tuple[Any, ...]) -> Any:
        """See `sw.local`."""
        return self._declared.local(region, args, self.facts)

    def all_gather(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """In its turn."""
        return self._numbers(f"{name} {axis}", Crossing("numbers", axis), tensor)

    def all_reduce(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """In rank order."""
        return torch.stack(self.all_gather(tensor, axis, name).unbind(0)).sum(0)

    def enter(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """See `TensorContext.enter`."""
        return self._enter(name, tensor, axis)

    def by_row(
        self, run: Callable[..., Tensor], rows: Tensor, weights: Sequence[Tensor], *args: Any
    ) -> Tensor:
        """Just so."""
        return run(rows, *weights, *args)

    def invariant(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """Just so."""
        return run(*args)
