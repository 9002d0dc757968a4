"""How the activations of a step cross boundaries: what a trace has chosen, run in its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardwise.sharding.compat import dispatch_modes
from shardwise.sharding.movement import Mover
from shardwise.transforms import faults
from shardwise.transforms.crossing_run import CrossingRun, Recent
from shardwise.transforms.crossings import Cross, Crossing, check_even
from shardwise.transforms.tensor_calls import RunCalls
from shardwise.transforms.tensor_layers import Boundary, Run, cut_lookup

_SIZED = frozenset({"slice", "scatter", "take", "gather", "collect"})
"""Kinds of crossings for which it matters how many rows there are on all ranks."""


class StepCrosser:
    """Runs crossings on one rank; see [Note: crossings].

    Args:
        mover: the choke point.
        phase: gives the phase that the engine is in.
        meet: takes the turn of a crossing, by its name, and again in a recomputation.
    """

    def __init__(
        self, mover: Mover, *, phase: Callable[[], str], meet: Callable[[str, bool], None]
    ) -> None:
        self.chosen: Mapping[str, Crossing] = {}
        self.ways: frozenset[str] = frozenset()
        self.recent = Recent()
        self.calls = RunCalls(
            mover.mesh,
            mover.coords,
            numbers=self._cross,
            enter=lambda name, tensor, axis: self.cross(
                Boundary(name, "call", (axis,)), "in0", tensor
            ),
            cross=self.cross,
            length_of=lambda stack: self._sequences.get(stack, 0),
        )
        self._mover = mover
        self._phase = phase
        self._meet = meet
        self._sequences: dict[str, int] = {}
        self._runs: dict[str, CrossingRun] = {}
        self._found: dict[tuple[str, str], tuple[tuple[str, Crossing, bool], ...]] = {}

    def take(self, chosen: Mapping[str, Crossing]) -> None:
        """Repeat what a trace has chosen, by the name of each crossing."""
        self.chosen = chosen
        self._found = {}
        places = (name.rpartition(" ")[0] for name in chosen)
        self.ways = frozenset(place.rstrip("0123456789") for place in places)

    def cross(self, boundary: Boundary, place: str, tensor: Tensor) -> Tensor:
        """Bring an activation to the types that it needs on the other side of a boundary."""
        key = boundary.label, place
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = tuple(self._find(boundary, place))
        if found and self._phase() != "idle":
            for name, crossing, fresh in found:
                tensor = self._cross(name, crossing, tensor, fresh=fresh)
        return tensor

    def _find(self, boundary: Boundary, place: str) -> Iterator[tuple[str, Crossing, bool]]:
        """What crosses at a place, worked out once."""
        for axis in boundary.axes:
            name = boundary.crossing(place, axis)
            if name in self.chosen:
                fresh = boundary.is_fresh and place.startswith("out")
                yield name, self.chosen[name], fresh

    def look_up(self, boundary: Boundary, module: nn.Embedding, run: Run, tokens: Tensor) -> Tensor:
        """See `cut_lookup`."""
        (axis,) = boundary.axes
        mesh = self._mover.mesh
        place = mesh.index(mesh.parts(axis), self._mover.coords)
        return cut_lookup(module, run, tokens, place=place, rows=boundary.rows)

    def _cross(
        self, name: str, crossing: Crossing, tensor: Tensor, *, fresh: bool = False
    ) -> Tensor:
        """Cross; a `fresh` tensor is read by nobody else."""
        known = self.recent.find(crossing, tensor)
        if known is not None:
            return known
        rows = self._rows(name, crossing, tensor) if crossing.kind in _SIZED else 0
        run = self._runs.get(name)
        if run is None or not run.serves(crossing, tensor, rows):
            run = self._runs[name] = CrossingRun(crossing, name, tensor, self._mover, rows=rows)
        needs_grad = torch.is_grad_enabled() and tensor.requires_grad
        if crossing.kind == "copy" and not needs_grad:
            return tensor
        if run.items.forward is not None:
            self._meet(name, self._phase() == "backward")
        if crossing.kind == "numbers":
            return run.forward(tensor)
        if needs_grad and crossing.kind != "reduce":
            result = Cross.apply(tensor, run.forward, lambda grad: self._back(name, run, grad))
        elif fresh and crossing.kind == "reduce" and not dispatch_modes():
            result = run.in_place(tensor)  # unless a mode keeps it for a recomputation
        else:  # a sum is a copy for autograd
            result = run.forward(tensor)
        self.recent.add(crossing, tensor, result)
        return result

    def _rows(self, name: str, crossing: Crossing, tensor: Tensor) -> int:
        """Of a sequence that a stack cuts; what is cut otherwise has to divide."""
        if crossing.stack:
            if crossing.kind == "slice":
                self._sequences[crossing.stack] = tensor.shape[crossing.dim]
            return self._sequences.get(crossing.stack, 0)
        if crossing.kind in ("slice", "scatter", "take"):
            check_even(name, crossing, tensor, self._mover.mesh[crossing.axis])
        return 0

    def _back(self, name: str, run: CrossingRun, grad: Tensor) -> Tensor:
        if self._phase() != "backward":
            raise faults.inner_backward(name)
        if run.items.backward is not None:
            self._meet(name, False)
        return run.backward(grad)
