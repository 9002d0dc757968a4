"""What functions that users call find out of cut tensors: by types in a trace, by size in a step.

[Note: which dimension is cut]
A step has no types. A trace writes down, for every length of a dimension that it was asked about,
how it is cut, and refuses a model in which one length means both; so a step can tell by the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import PlanError
from shardwise.sharding.mesh import Mesh
from shardwise.transforms.activation_types import Invariant, Sharded, Types
from shardwise.transforms.crossings import Crossing, crossed
from shardwise.transforms.order import CROSS, Event
from shardwise.transforms.tensor_context import Cut, VocabShard


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
    ) -> None:
        self.lengths: dict[int, CutLength | None] = {}
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

    def cuts_of(self, tensor: Tensor) -> tuple[Cut, ...]:
        """Nothing is cut.

        Raises:
            PlanError: it is.
        """
        for axis in self._types.axes:
            kind = self._types.of(tensor, axis)
            if isinstance(kind, Sharded):
                raise PlanError(
                    f"sw.dropout is called on an activation that {axis!r} cuts.",
                    facts=f"it is {kind}, {tuple(tensor.shape)} on each rank.",
                    why="Its masks depend on the place of an element in the whole activation.",
                    fix="torch's dropout there, or sw.dropout on what is whole",
                    axis=axis,
                )
        return ()

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

    def invariant(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """Untyped, with an invariant result."""
        with self._untyped():
            result = run(*args)
        self._types.set(result, {axis: Invariant() for axis in self._types.axes})
        return result


class RunCalls:
    """The tensor context of a step.

    Args:
        mesh: sizes of axes.
        coords: of this rank.
        numbers: runs an exchange of numbers in its turn.
        enter: brings an activation into what an axis cuts.
    """

    def __init__(
        self,
        mesh: Mesh,
        coords: Mapping[str, int],
        *,
        numbers: Callable[[str, Crossing, Tensor], Tensor],
        enter: Callable[[str, Tensor, str], Tensor],
    ) -> None:
        self.lengths: Lengths = {}
        self._mesh = mesh
        self._coords = coords
        self._numbers = numbers
        self._enter = enter

    def shard_of(self, tensor: Tensor, dim: int) -> VocabShard | None:
        """By the length of the dimension."""
        length = tensor.shape[dim]
        found = self.lengths.get(length)
        return None if found is None else shard_at(found, length, self._mesh, self._coords)

    def cuts_of(self, tensor: Tensor) -> tuple[Cut, ...]:
        """A trace has refused others."""
        return ()

    def all_gather(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """In its turn."""
        return self._numbers(f"{name} {axis}", Crossing("numbers", axis), tensor)

    def all_reduce(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """In rank order."""
        return torch.stack(self.all_gather(tensor, axis, name).unbind(0)).sum(0)

    def enter(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        """See `TensorContext.enter`."""
        return self._enter(name, tensor, axis)

    def invariant(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """Just so."""
        return run(*args)
