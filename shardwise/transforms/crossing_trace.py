"""How activations cross boundaries, found by the types that a trace gives them.

[Note: how a crossing is chosen]
Going in: what is equal on all ranks and will have a gradient becomes replicated (`copy`), what is
cut along the sequence becomes whole (`gather`); what a layer itself has cut stays. Going out: a
partial sum becomes whole (`reduce`), or a part of the sequence inside a stack that cuts it
(`scatter`); logits over a cut vocabulary are collected if the plan or the loss wants them whole.
A stack cuts the first activation that comes in, and makes whole what it gives. A boundary crosses
alike whenever its module is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import PlanError
from shardwise.sharding.mesh import Mesh
from shardwise.transforms.activation_types import (
    Free,
    Invariant,
    Partial,
    Replicated,
    Sharded,
    Type,
    Types,
)
from shardwise.transforms.crossing_run import Recent
from shardwise.transforms.crossings import Cross, Crossing, crossed
from shardwise.transforms.order import CROSS, Event
from shardwise.transforms.tensor_layers import Boundary

_SEQUENCE_DIMS = 3
"""Activations between layers have at most a batch, a sequence and features."""


class CrossingTrace:
    """Chooses crossings on fake tensors, and writes down what they move.

    Args:
        mesh: sizes of axes.
        types: of all tensors of the trace.
        events: of the trace; crossings are added.
        around: calls of recomputed modules that are open.
        collects: whether logits are collected.
        sequences: axes that cut the sequence.

    Attributes:
        closed: the call of `sw.local` that runs, in which nothing crosses.
    """

    def __init__(
        self,
        mesh: Mesh,
        types: Types,
        events: list[Event],
        around: list[str],
        *,
        collects: bool,
        sequences: frozenset[str],
    ) -> None:
        self.chosen: dict[str, Crossing] = {}
        self.closed = ""
        self.recent = Recent()
        self._mesh = mesh
        self._types = types
        self._events = events
        self._around = around
        self._collects = collects
        self._sequences = sequences
        self._rows: dict[str, int] = {}
        self._nodes: list[tuple[Any, int]] = []
        self._passed: set[str] = set()

    def cross(self, boundary: Boundary, place: str, tensor: Tensor) -> Tensor:
        """The tensor on the other side, with its type.

        Raises:
            PlanError: the boundary crosses otherwise than in an earlier call.
        """
        if self.closed:
            raise _inside_local(boundary.path, self.closed)
        for axis in boundary.axes:
            crossing = self._choose(boundary, place, tensor, axis)
            tensor = self.make(boundary, place, tensor, axis, crossing)
        return tensor

    def make(
        self, boundary: Boundary, place: str, tensor: Tensor, axis: str, crossing: Crossing | None
    ) -> Tensor:
        """Make a crossing that was chosen; None: there is none.

        Raises:
            PlanError: the boundary crosses otherwise than in an earlier call.
        """
        name = boundary.crossing(place, axis)
        self._check_alike(boundary, name, crossing)
        return tensor if crossing is None else self._apply(name, tensor, crossing)

    def mark_reached(self, loss: Tensor) -> None:
        """Note which crossings backward comes to."""
        seen: set[Any] = set()
        stack = [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [parent for parent, _ in node.next_functions]
        for node, index in self._nodes:
            if node not in seen:
                self._events[index] = replace(self._events[index], grad=False)

    def _choose(self, boundary: Boundary, place: str, tensor: Tensor, axis: str) -> Crossing | None:
        kind = self._types.of(tensor, axis)
        if boundary.role == "begin":
            return self._begins(boundary, place, tensor, axis, kind)
        along = tensor.ndim - 2
        in_sequence = (
            isinstance(kind, Sharded)
            and axis in self._sequences
            and bool(boundary.stack)
            and kind.dim == along
            and tensor.ndim <= _SEQUENCE_DIMS
        )
        if boundary.role == "end":
            whole = place.startswith("out") and in_sequence
            return Crossing("collect", axis, along, stack=boundary.stack) if whole else None
        if place.startswith("in"):
            if in_sequence:
                return Crossing("gather", axis, along, stack=boundary.stack)
            grows = tensor.requires_grad and isinstance(kind, Free | Invariant)
            return Crossing("copy", axis) if grows else None
        if isinstance(kind, Partial):
            if boundary.stack and axis in self._sequences:
                return Crossing("scatter", axis, along, stack=boundary.stack)
            return Crossing("reduce", axis)
        last = tensor.ndim - 1
        if boundary.is_logits and self._collects and isinstance(kind, Sharded) and kind.dim == last:
            return Crossing("collect", axis, last, rows=boundary.rows)
        return None

    def _begins(
        self, boundary: Boundary, place: str, tensor: Tensor, axis: str, kind: Type
    ) -> Crossing | None:
        if place != "in0" or not isinstance(kind, Free | Invariant) or tensor.ndim < 2:
            return None
        return Crossing("slice", axis, tensor.ndim - 2, stack=boundary.stack)

    def _check_alike(self, boundary: Boundary, name: str, crossing: Crossing | None) -> None:
        before = self.chosen.get(name)
        if name in self._passed and before != crossing:
            raise PlanError(
                f"Module {boundary.path!r} is called with activations of different types.",
                where=name,
                facts=[f"first call: {before or 'as it is'}", f"now: {crossing or 'as it is'}"],
                why="What crosses at a module is fixed when a program is lowered.",
                fix="call it with activations of one kind, or use two modules",
                path=boundary.path,
            )
        self._passed.add(name)
        if crossing is not None:
            self.chosen[name] = crossing

    def _apply(self, name: str, tensor: Tensor, crossing: Crossing) -> Tensor:
        known = self.recent.find(crossing, tensor)
        if known is not None:
            return known
        axis, kind = crossing.axis, self._types.of(tensor, crossing.axis)
        if isinstance(kind, Free) and tensor.requires_grad:
            self._types.use(tensor, axis, "invariant")
        ranks, dim = self._mesh[axis], crossing.dim
        rows = tensor.shape[dim] if tensor.ndim else 1
        if crossing.kind == "slice" and crossing.stack:
            self._rows[crossing.stack] = rows
        if crossing.kind in ("gather", "collect"):
            rows = crossing.rows or self._rows.get(crossing.stack, rows * ranks)
        moved = crossed(crossing, tensor.shape, tensor.dtype, rows=rows, ranks=ranks, place=name)
        others = {one: self._types.of(tensor, one) for one in self._types.axes if one != axis}
        forward = _shape_only(crossing, rows, ranks, backward=False)
        needs_grad = torch.is_grad_enabled() and tensor.requires_grad
        result = (
            Cross.apply(tensor, forward, _shape_only(crossing, rows, ranks, backward=True))
            if needs_grad
            else forward(tensor)
        )
        self._types.set(result, {axis: _type_after(crossing, result, rows, ranks), **others})
        event = Event(CROSS, name, needs_grad, tuple(self._around), moved, tuple(tensor.shape))
        self._events.append(event)
        if needs_grad:
            self._nodes.append((result.grad_fn, len(self._events) - 1))
        self.recent.add(crossing, tensor, result)
        return result


def _inside_local(path: str, region: str) -> PlanError:
    return PlanError(
        f"Module {path!r}, which a tensor axis cuts, is called inside of a function of sw.local.",
        where=region,
        why="Such a function computes on this rank's blocks; what crosses between ranks does so "
        "at its arguments and results.",
        fix="call the module outside, or pass its parameters to the function as arguments",
        path=path,
        region=region,
    )


def _type_after(crossing: Crossing, result: Tensor, rows: int, ranks: int) -> Type:
    if crossing.kind in ("copy", "gather"):
        return Replicated()
    if crossing.kind in ("reduce", "collect", "first"):
        return Invariant()
    block = result.shape[crossing.dim]
    return Sharded(crossing.dim, (block,), rows if rows % ranks else None, stack=crossing.stack)


def _shape_only(
    crossing: Crossing, rows: int, ranks: int, *, backward: bool
) -> Callable[[Tensor], Tensor]:
    """The shapes of a crossing on fake tensors."""
    kind, dim = crossing.kind, crossing.dim
    grows = {
        "gather": not backward,
        "collect": not backward,
        "scatter": backward,
        "slice": backward,
        "take": backward,
    }

    def run(tensor: Tensor) -> Tensor:
        if kind not in grows:
            return tensor if kind == "copy" and not backward else tensor.clone()
        shape = list(tensor.shape)
        shape[dim] = rows if grows[kind] else -(-rows // ranks)
        return tensor.new_empty(shape)

    return run
