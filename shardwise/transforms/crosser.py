"""How the activations of a step cross boundaries: what a trace has chosen, run in its turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardwise.sharding.movement import Mover
from shardwise.transforms import faults
from shardwise.transforms.crossing_run import CrossingRun, Recent
from shardwise.transforms.crossings import Cross, Crossing, check_even
from shardwise.transforms.tensor_calls import RunCalls
from shardwise.transforms.tensor_layers import Boundary, Run, cut_lookup


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

    def cross(self, boundary: Boundary, place: str, tensor: Tensor) -> Tensor:
        """Bring an activation to the types that it needs on the other side of a boundary."""
        for axis in boundary.axes:
            name = boundary.crossing(place, axis)
            crossing = self.chosen.get(name)
            if crossing is not None and self._phase() != "idle":
                tensor = self._cross(name, crossing, tensor)
        return tensor

    def look_up(self, boundary: Boundary, module: nn.Embedding, run: Run, tokens: Tensor) -> Tensor:
        """See `cut_lookup`."""
        (axis,) = boundary.axes
        mesh = self._mover.mesh
        place = mesh.index(mesh.parts(axis), self._mover.coords)
        return cut_lookup(module, run, tokens, place=place, rows=boundary.rows)

    def _cross(self, name: str, crossing: Crossing, tensor: Tensor) -> Tensor:
        known = self.recent.find(crossing, tensor)
        if known is not None:
            return known
        if crossing.kind == "slice" and crossing.stack:
            self._sequences[crossing.stack] = tensor.shape[crossing.dim]
        if crossing.kind in ("slice", "scatter", "take") and not crossing.stack:
            check_even(name, crossing, tensor, self._mover.mesh[crossing.axis])
        rows = self._sequences.get(crossing.stack, 0) if crossing.stack else 0
        run = CrossingRun(crossing, name, tensor, self._mover, rows=rows)
        needs_grad = torch.is_grad_enabled() and tensor.requires_grad
        if crossing.kind == "numbers":
            self._meet(name, self._phase() == "backward")
            return run.forward(tensor)
        if crossing.kind == "copy" and not needs_grad:
            return tensor

        def forward(value: Tensor) -> Tensor:
            self._meet(name, self._phase() == "backward")
            return run.forward(value)

        def backward(grad: Tensor) -> Tensor:
            if self._phase() != "backward":
                raise faults.inner_backward(name)
            self._meet(name, False)
            return run.backward(grad)

        result = Cross.apply(tensor, forward, backward) if needs_grad else forward(tensor)
        self.recent.add(crossing, tensor, result)
        return result
