"""The engine of one rank: walks the schedule, enters and leaves units when their turn has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.pytree import tree_leaves
from shardwise.transforms import faults
from shardwise.transforms.brackets import Close, Enter, Join, Leave
from shardwise.transforms.order import Action, Schedule, Walk
from shardwise.transforms.outputs import replace_tensors
from shardwise.transforms.unit_runtime import Call, UnitRuntime, place


class Engine:
    """Walks the schedule of one rank's forward and backward pass.

    Args:
        units: runtimes of all units by name; the root is `""`.
        schedule: the order that was lowered.
    """

    def __init__(self, units: dict[str, UnitRuntime], schedule: Schedule) -> None:
        self.units = units
        self.schedule = schedule
        self.phase = "idle"
        self.used: set[str] = set()
        self._tokens: list[Tensor] = []
        self._calls: list[Call] = []
        self._walk = Walk((), 0, self._start)

    # -- one pass ---------------------------------------------------------------------------

    def begin(self, flats: dict[str, Tensor], phase: str) -> None:
        """Enter the root; `phase` is `train` or `eval`."""
        if self.phase != "idle":  # an interrupt (not an Exception) ended the pass before
            self.close()
        for unit in self.units.values():
            unit.load(flats)
        self.phase = phase
        self.used = set()
        self._tokens = []
        self._walk = Walk(self.schedule.forward, self.schedule.prefetch, self._start)
        self.enter("")

    def end_forward(self, total: Tensor) -> Tensor:
        """Drain the events this rank did not meet; return the loss joined with all tokens."""
        self._pass_until(len(self._walk.actions))
        if self.phase == "eval":
            self.close()
            return total
        self.phase = "backward"
        self._walk = Walk(self.schedule.backward, self.schedule.prefetch, self._start)
        return Join.apply(total, *self._tokens) if self._tokens else total

    def backward(self, loss: Tensor) -> dict[str, Tensor]:
        """Landed, unnormalised gradients by bucket name."""
        leaves = [(b, leaf) for unit in self.units.values() for b, leaf in unit.leaves()]
        wanted = [leaf for _, leaf in leaves]
        self._tokens = []
        grads: Any = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
        self._pass_until(len(self._walk.actions))
        for unit in self.units.values():
            unit.land()
        landed: dict[str, Tensor] = {}
        for (buffers, leaf), grad in zip(leaves, grads, strict=True):
            landed[buffers.bucket.name] = torch.zeros_like(leaf) if grad is None else grad
        self.close()
        return landed

    def close(self) -> None:
        """End the pass, whatever its state: unbind and free everything."""
        for unit in self.units.values():
            unit.reset()
        for call in self._calls:
            call.parameters = []  # they point to the graph, and the graph to the call
        self._calls = []
        self._tokens = []
        self.phase = "idle"

    # -- forward ----------------------------------------------------------------------------

    def enter(self, name: str, /, inputs: Any = None) -> Any:
        """Bind the unit's parameters; returns the inputs to use when they had to be replaced."""
        unit = self.units[name]
        if self.phase == "backward":
            self._enter_recompute(unit)
            return None
        if self.phase == "idle":
            raise faults.outside(unit.name)
        if unit.depth or unit.is_bound:
            unit.depth += 1
            return None
        index = self._turn("enter", unit)
        action = None
        if index is not None:
            self._pass_until(index)
            action = self._walk.meet(index)
        unit.finish()
        unit.depth = 1
        return self._open(unit, action, inputs)

    def _open(self, unit: UnitRuntime, action: Action | None, inputs: Any) -> Any:
        call = Call(unit, unit.aliases())
        leaves = [leaf for _, leaf in unit.leaves()]
        expects_grad = action is None or action.event.grad
        # A unit that stays bound may be used with gradients after a first use without.
        if self.phase == "eval" or not (unit.stays or torch.is_grad_enabled()):
            if self.phase == "train" and action is not None:
                self._skip(action, unit)
            unit.bind(call)
            return None
        if leaves and not expects_grad:
            raise faults.needs_grad(unit.name)
        self._calls.append(call)
        if leaves:
            with torch.enable_grad():
                *outs, token = Enter.apply(call, self, *leaves)
            call.parameters = outs
            self._tokens.append(token)
            unit.bind(call)
            return None
        unit.bind(call)
        return self._guard_inputs(call, inputs)

    def _guard_inputs(self, call: Call, inputs: Any) -> Any:
        """Without trainable parameters only the inputs tell when backward is over."""
        if inputs is None or call.unit.stays:
            return None

        def guard(tensors: list[Tensor]) -> Sequence[Tensor]:
            wanted = [t for t in tensors if t.requires_grad]
            if not wanted:
                return tensors
            new = iter(Close.apply(call, *wanted))
            return [next(new) if t.requires_grad else t for t in tensors]

        return replace_tensors(inputs, call.unit.name, guard)

    def leave(self, name: str, /, output: Any, inputs: Any = None) -> Any:
        """Unbind, empty, and put `Leave` on what the unit returns."""
        unit = self.units[name]
        if self.phase in {"backward", "idle"}:
            return output
        unit.depth -= 1
        if unit.depth or unit.stays:
            return output
        index = self._turn("leave", unit)
        if index is not None:
            self._pass_until(index)
            self._walk.meet(index)
        call = unit.call
        assert call is not None
        before = {place(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        output = replace_tensors(output, name, lambda tensors: self._leave(call, tensors, before))
        unit.unbind()
        unit.empty()
        return output

    def _leave(self, call: Call, tensors: list[Tensor], before: set[int]) -> Sequence[Tensor]:
        pointers = call.unit.storage_pointers - {0}
        # By identity: what was one tensor stays one, so in-place use of it keeps its meaning.
        left = {id(t): t.clone() if place(t) in pointers else t for t in tensors}
        wanted = [key for key, t in left.items() if t.requires_grad]
        if wanted:
            places = [place(left[key]) for key in wanted]
            shared = [p != 0 and (p in before or places.count(p) > 1) for p in places]
            new = Leave.apply(call, self, shared, *(left[key] for key in wanted))
            left.update(zip(wanted, new, strict=True))
        return [left[id(t)] for t in tensors]

    def resolve(self, path: str, name: str, /) -> Tensor:
        """A value for a placeholder that is read: children of the root are entered by a read."""
        unit = self.units[name]
        if self.phase in ("train", "eval") and unit.stays and not unit.is_bound:
            self.enter(name)
            unit.depth = 0
        if unit.is_bound and unit.stays:
            return unit.bound(path)
        raise faults.read_outside(path, name, _PHASES[self.phase])

    # -- backward ---------------------------------------------------------------------------

    def on_leave_backward(self, call: Call) -> None:
        """Refill a unit that was emptied, and bind it for a recomputation inside."""
        unit = call.unit
        if self.phase != "backward":
            raise faults.inner_backward(unit.name)
        index = self._turn("leave", unit)
        if index is not None:
            self._pass_until(index)
            self._walk.meet(index)
        unit.finish()
        unit.bind(call)

    def on_enter_backward(self, call: Call, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Unbind, empty, reduce; the landed gradients in the order of the unit's leaves."""
        unit = call.unit
        if self.phase != "backward":
            raise faults.inner_backward(unit.name)
        index = self._turn("enter", unit)
        items: Sequence[Any] = ()
        if index is not None:
            self._pass_until(index)
            items = self._walk.meet(index).items
        unit.unbind()
        unit.empty()
        call.parameters = []
        self.used.update(p for p, g in zip(unit.trainable, grads, strict=False) if g is not None)
        grads = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
        landed = unit.reduce(grads, items)
        if unit.name in self.schedule.repeated:
            unit.land()  # autograd adds the gradients of several calls as soon as they are returned
        return landed

    def _enter_recompute(self, unit: UnitRuntime) -> None:
        if unit.is_bound:
            return
        raise faults.recomputed(unit.name)

    # -- the list ---------------------------------------------------------------------------

    def _start(self, action: Action) -> None:
        self.units[action.event.unit].start(action.items)

    def _turn(self, kind: str, unit: UnitRuntime) -> int | None:
        """Index of the event, None if it moves nothing; an error if its turn has passed."""
        index = self._walk.find(kind, unit.name)
        if index is None and (unit.gathers if self.phase == "eval" else unit.moves):
            raise faults.late(kind, unit.name, _PHASES[self.phase], self._walk)
        return index

    def _pass_until(self, index: int) -> None:
        """Join in what lies before `index` on behalf of units that this rank does not run."""
        walk = self._walk
        while walk.position < index:
            action = walk.actions[walk.position]
            unit = self.units[action.event.unit]
            if any(action.items) and action.kind == "reduce":
                raise faults.left_out(unit.name)
            if action.event.kind == "leave" and unit.depth:
                raise faults.still_running(unit.name, _PHASES[self.phase])
            walk.meet(walk.position)
            if action.kind == "gather":
                unit.drop()
            if action.event.kind == "enter" and self.phase == "train":
                self._skip(action, unit)

    def _skip(self, action: Action, unit: UnitRuntime) -> None:
        leaves = [leaf for _, leaf in unit.leaves()]
        if action.event.grad and leaves:
            with torch.enable_grad():
                (token,) = Enter.apply(Call(unit, []), self, *leaves)
            self._tokens.append(token)


_PHASES = {"idle": "outside a step", "train": "forward", "eval": "eval", "backward": "backward"}
