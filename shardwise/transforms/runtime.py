"""The engine of one rank: walks the schedules, enters and leaves units when it is their turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.movement import Mover
from shardwise.sharding.pytree import tree_leaves
from shardwise.transforms import faults
from shardwise.transforms.bound_units import BoundUnits
from shardwise.transforms.brackets import Enter, Join, Leave, guard_inputs
from shardwise.transforms.crosser import StepCrosser
from shardwise.transforms.order import CROSS, RECROSS, Action, Schedule, Walk, call_of
from shardwise.transforms.outputs import place, replace_tensors
from shardwise.transforms.regions import Region, checkpointed
from shardwise.transforms.unit_runtime import Call, UnitRuntime, walk_along


class Engine:
    """Walks one rank's forward and backward passes; see [Note: passes].

    Args:
        units: runtimes of all units by name; the root is `""`.
        mover: the choke point.
    """

    def __init__(self, units: dict[str, UnitRuntime], mover: Mover) -> None:
        self.units = units
        self.mover = mover
        self.crosser = StepCrosser(mover, phase=lambda: self.phase, meet=self._meet_crossing)
        self.cross, self.look_up = self.crosser.cross, self.crosser.look_up
        self.saving: Callable[[str], AbstractContextManager[Any]] = lambda path: nullcontext()
        self.phase = "idle"
        self.used: set[str] = set()
        self.given: frozenset[int] = frozenset()  # storages of the batch of a pass
        self._tokens: list[Tensor] = []
        self._bound = BoundUnits(units.values())
        self._calls: list[Call] = []
        self._walk = Walk((), 0, lambda action: None)
        self._schedule: Schedule | None = None
        self._is_open = False
        self._reopened: dict[str, int] = {}
        self._num_calls: Counter[str] = Counter()
        self._reducing: UnitRuntime | None = None

    # -- one pass ---------------------------------------------------------------------------

    def open(self) -> None:
        """Start a call of one pass or several."""
        if self._is_open:  # an interrupt (not an Exception) ended the call before
            self.close()
        self._is_open = True
        self.used = set()

    def begin(self, flats: dict[str, Tensor], phase: str, schedule: Schedule) -> None:
        """Start a pass: enter the root.

        Args:
            flats: the resting shards.
            phase: `train` or `eval`.
            schedule: what this pass moves.
        """
        for unit in self.units.values():
            unit.load(flats)
        self._bound.bind(self.used, grad=phase == "train")
        self.phase = phase
        self._schedule = schedule
        self._walk = walk_along(schedule.forward, schedule, self.units)
        self._num_calls.clear()
        if not self.units[""].rests_bound:
            self.enter("")

    def drain_forward(self) -> None:
        """Join in the rest of the forward pass that this rank did not meet."""
        self._pass_until(len(self._walk.actions))

    def end_forward(self, total: Tensor) -> Tensor:
        """Drain the forward pass and turn round; return the loss joined with all tokens."""
        self.drain_forward()
        self._bound.check()
        if self.phase == "eval":
            self.close()
            return total
        assert self._schedule is not None
        self.phase = "backward"
        self._walk = walk_along(self._schedule.backward, self._schedule, self.units)
        return Join.apply(total, *self._tokens) if self._tokens else total

    def backward(self, loss: Tensor) -> None:
        """Run backward and end the pass; gradients are added to those of earlier passes.

        Autograd leaves some on leaves of bound units only; `Enter` hands on those of its unit.
        """
        moved = (unit for unit in self.units.values() if not unit.rests_bound)
        leaves = [*self._bound.leaves, *(leaf for unit in moved for _, leaf in unit.leaves())]
        self._tokens = []
        if leaves and loss.requires_grad:
            torch.autograd.backward(loss, inputs=leaves)
        self._pass_until(len(self._walk.actions))
        self.used.update(self._bound.take_grads())
        for unit in self.units.values():
            unit.rest(keep=self._keeps)
        self._forget()

    def take_landed(self) -> dict[str, Tensor]:
        """End a call after its last pass: landed, unnormalised gradients by bucket name."""
        self._is_open = False
        return {
            buffers.bucket.name: buffers.take_landed()
            for unit in self.units.values()
            for buffers, _ in unit.leaves()
        }

    def close(self) -> None:
        """End the call, whatever its state: unbind and free everything."""
        for unit in self.units.values():
            unit.reset()
        self._forget()
        self._is_open = False

    def _forget(self) -> None:
        for call in self._calls:
            call.parameters = []  # they point to the graph, and the graph to the call
        self._calls = []
        self._tokens = []
        self._bound.forget()
        self._schedule = None
        self._reopened = {}
        self._reducing = None
        self.crosser.recent.clear()
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
        return guard_inputs(call, inputs)

    def leave(self, name: str, /, output: Any, inputs: Any = None) -> Any:
        """Unbind, empty, and put `Leave` on what the unit returns."""
        unit = self.units[name]
        if self.phase == "backward" and name in self._reopened:
            return self._leave_again(unit, output)
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
        raise faults.read_outside(path, name, faults.PHASES[self.phase])

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

    def on_enter_backward(self, call: Call, grads: Sequence[Tensor | None]) -> None:
        """Unbind, empty, and give the unit's buffers their gradients to add and move."""
        unit = call.unit
        if self.phase != "backward":
            raise faults.inner_backward(unit.name)
        index = self._turn("enter", unit)
        action = None
        if index is not None:
            self._pass_until(index)
            action = self._walk.meet(index)
        unit.unbind()
        if not self._keeps:
            unit.empty()
        call.parameters = []
        self.used.update([p for p, g in zip(unit.trainable, grads, strict=False) if g is not None])
        grads = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
        if self._reducing is not None:
            # One unit at a time: its reduce-scatter had all of this unit's backward to arrive.
            self._reducing.collect()
        self._reducing = unit
        if action is None:
            unit.reduce(grads, (), ends=False)
        else:
            unit.reduce(grads, action.items, ends=action.ends)

    # -- crossings --------------------------------------------------------------------------

    def crosses(self, way: str, /) -> bool:
        """Whether anything crosses there, as a trace has found."""
        return way in self.crosser.ways

    def _meet_crossing(self, name: str, again: bool) -> None:
        kind = RECROSS if again else CROSS
        if self._walk.take(kind, name):
            return
        index = self._walk.find(kind, name)
        if index is None:
            raise faults.late("cross", name, faults.PHASES[self.phase], self._walk)
        self._pass_until(index)
        self._walk.meet(index)

    # -- recomputation ----------------------------------------------------------------------

    def run(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Run a module so that backward recomputes it, if there will be a backward."""
        self.crosser.recent.clear()
        try:
            return self._run(region, args, kwargs)
        finally:
            self.crosser.recent.clear()

    def _run(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return region.forward(*args, **kwargs)
        if not region.spans or self.phase != "train":
            return checkpointed(region, args, kwargs, self._recomputing, lambda: None)
        call = call_of(region.name, self._num_calls[region.name])
        self._num_calls[region.name] += 1
        return checkpointed(region, args, kwargs, self._recomputing, lambda: self._end(call))

    def _end(self, call: str) -> None:
        """Join in what a region holds that this rank has not met, before backward can reach it.

        Backward comes to what was created last first: after this region's recomputation.
        """
        inside = [i for i, a in enumerate(self._walk.actions) if call in a.event.regions]
        if inside:
            self._pass_until(inside[-1] + 1)

    @contextmanager
    def _recomputing(self, region: Region) -> Generator[None]:
        """Units that the recomputation enters are closed again, also where it stops in one."""
        if region.spans and self.phase != "backward":
            raise faults.inner_backward(region.name)
        around, self._reopened = self._reopened, {}
        self.crosser.recent.clear()
        try:
            yield
        finally:
            self.crosser.recent.clear()
            for name in reversed(self._reopened):
                self.units[name].unbind()
                self.units[name].empty()
            self._reopened = around

    def _enter_recompute(self, unit: UnitRuntime) -> None:
        """Gather a unit for a recomputation around it, unless it is full for its own backward."""
        if unit.name in self._reopened:
            self._reopened[unit.name] += 1
            return
        if unit.is_bound:
            return
        index = self._walk.find("recompute", unit.name)
        if index is None:
            raise faults.recomputed(unit.name)
        self._pass_until(index)
        self._walk.meet(index)
        unit.finish()
        # Leaves of a graph that is thrown away: with them the same tensors are saved as before.
        unit.bind(Call(unit, [alias.requires_grad_() for alias in unit.aliases()]))
        self._reopened[unit.name] = 1

    def _leave_again(self, unit: UnitRuntime, output: Any) -> Any:
        self._reopened[unit.name] -= 1
        if self._reopened[unit.name]:
            return output
        pointers = unit.storage_pointers - {0}

        def own(tensors: list[Tensor]) -> Sequence[Tensor]:
            return [t.clone() if place(t) in pointers else t for t in tensors]

        output = replace_tensors(output, unit.name, own)
        del self._reopened[unit.name]
        unit.unbind()
        unit.empty()
        return output

    # -- the list ---------------------------------------------------------------------------

    def _turn(self, kind: str, unit: UnitRuntime) -> int | None:
        """Index of the event, None if it moves nothing; an error if its turn has passed."""
        index = self._walk.find(kind, unit.name)
        if index is None and (unit.gathers if self.phase == "eval" else unit.moves):
            raise faults.late(kind, unit.name, faults.PHASES[self.phase], self._walk)
        return index

    def _pass_until(self, index: int) -> None:
        """Join in what lies before `index` on behalf of units that this rank does not run."""
        walk = self._walk
        while walk.position < index:
            action = walk.actions[walk.position]
            if action.kind == "cross":
                walk.meet(walk.position)
                self.mover.skip([item for items in action.items for item in items])
                continue
            unit = self.units[action.event.unit]
            if any(action.items) and action.kind == "reduce":
                raise faults.left_out(unit.name)
            if action.event.kind == "leave" and unit.depth:
                raise faults.still_running(unit.name, faults.PHASES[self.phase])
            walk.meet(walk.position)
            if action.kind == "gather" and self._keeps:
                unit.finish()  # a later pass may need it, and finds it full
            elif action.kind == "gather":
                unit.drop()
            if action.event.kind == "enter" and self.phase == "train":
                self._skip(action, unit)

    @property
    def _keeps(self) -> bool:
        return self._schedule is not None and self._schedule.keeps

    def _skip(self, action: Action, unit: UnitRuntime) -> None:
        leaves = [leaf for _, leaf in unit.leaves()]
        if action.event.grad and leaves:
            with torch.enable_grad():
                (token,) = Enter.apply(Call(unit, []), self, *leaves)
            self._tokens.append(token)
