"""Enter and Leave: the brackets around a unit, and the only place where parameters move in a step.

[Note: Enter and Leave]
`Enter` is created before the operations of its unit and `Leave` after them. Autograd runs ready
nodes latest-created first, so in backward `Leave` comes before all of them and `Enter` after all of
them. `Enter.forward` gathers the unit's parameters and returns views of the buffer; the leave hook
empties the buffer; `Leave.backward` refills it; `Enter.backward` empties it and reduces the
gradients to their landing layout, which is the shape of Enter's one differentiable input per
bucket. So full weights live only while a unit runs and full gradients never rest. Every Enter also
returns a zero *token* that is added to the loss: a unit whose output is not used, or that this rank
skips, still joins backward, and all ranks run the same collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import OrderError, UnitError
from shardwise.transforms.order import Action, Schedule, Walk
from shardwise.transforms.outputs import replace_tensors
from shardwise.transforms.unit_runtime import Call, UnitRuntime


class Enter(torch.autograd.Function):
    """Leaves of the landing shapes -> the unit's parameters and a token."""

    @staticmethod
    def forward(ctx: Any, call: Call, engine: Engine, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Give out aliases of the filled views; nothing for a call that this rank skips."""
        ctx.call, ctx.engine = call, engine
        ctx.set_materialize_grads(False)
        return (*call.parameters, leaves[0].new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Empty the unit, then reduce."""
        return (None, None, *ctx.engine.on_enter_backward(ctx.call, grads[:-1]))


class Leave(torch.autograd.Function):
    """The tensors that leave a unit, unchanged; backward refills the unit first."""

    @staticmethod
    def forward(ctx: Any, call: Call, engine: Engine, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Alias by `detach`: it keeps the version counter, so in-place use stays checked."""
        ctx.call, ctx.engine = call, engine
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Refill, then let the gradients pass."""
        ctx.engine.on_leave_backward(ctx.call)
        return (None, None, *grads)


class Close(torch.autograd.Function):
    """Placed on the inputs of a unit without trainable parameters: backward empties it."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Alias the inputs."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The unit's backward is over."""
        ctx.call.unit.unbind()
        ctx.call.unit.empty()
        return (None, *grads)


class Join(torch.autograd.Function):
    """The loss, with the tokens of all calls as further inputs that get no gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tokens: Tensor) -> Tensor:
        """Alias the loss."""
        ctx.num_tokens = len(tokens)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """All of it to the loss."""
        return (grad, *([None] * ctx.num_tokens))


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
            self._close_all()
            return total
        self.phase = "backward"
        self._walk = Walk(self.schedule.backward, self.schedule.prefetch, self._start)
        return Join.apply(total, *self._tokens) if self._tokens else total

    def backward(self, loss: Tensor) -> dict[str, Tensor]:
        """Landed, unnormalised gradients by bucket name."""
        leaves = [(b, leaf) for unit in self.units.values() for b, leaf in unit.leaves()]
        wanted = [leaf for _, leaf in leaves]
        self._tokens = []
        grads = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
        self._pass_until(len(self._walk.actions))
        landed: dict[str, Tensor] = {}
        for (buffers, leaf), grad in zip(leaves, grads, strict=True):
            landed[buffers.bucket.name] = torch.zeros_like(leaf) if grad is None else grad
        self._close_all()
        return landed

    def abort(self) -> None:
        """Take part in all that is left of this pass with nothing to give, then forget it.

        Other ranks are in the middle of the same list of collectives; they must not be left alone.
        """
        self._tokens = []
        if self.phase in ("train", "eval"):
            self._pass_until(len(self._walk.actions), silent=True)
            if self.phase == "train":
                self._walk = Walk(self.schedule.backward, self.schedule.prefetch, self._start)
                self.phase = "backward"
        if self.phase == "backward":
            self._pass_until(len(self._walk.actions), silent=True)
        self._close_all()

    def _close_all(self) -> None:
        for unit in self.units.values():
            unit.reset()
        for call in self._calls:
            call.parameters = []  # they point to the graph, and the graph to the call
        self._calls = []
        self.phase = "idle"

    # -- forward ----------------------------------------------------------------------------

    def enter(self, name: str, inputs: Any = None) -> Any:
        """Bind the unit's parameters; returns the inputs to use when they had to be replaced."""
        unit = self.units[name]
        if self.phase == "backward":
            self._enter_recompute(unit)
            return None
        if self.phase == "idle":
            raise _outside(unit)
        if unit.depth or unit.is_bound:
            unit.depth += 1
            return None
        index = self._turn("enter", unit)
        if index is not None:
            self._pass_until(index)
            action = self._walk.meet(index)
        unit.finish()
        unit.depth = 1
        return self._open(unit, action if index is not None else None, inputs)

    def _open(self, unit: UnitRuntime, action: Action | None, inputs: Any) -> Any:
        call = Call(unit, unit.aliases())
        leaves = [leaf for _, leaf in unit.leaves()]
        expects_grad = action is None or action.event.grad
        if self.phase == "eval" or not torch.is_grad_enabled():
            if self.phase == "train" and action is not None:
                self._skip(action, unit)
            unit.bind(call)
            return None
        if leaves and not expects_grad:
            raise _needs_grad(unit)
        self._calls.append(call)
        if leaves:
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

    def leave(self, name: str, output: Any) -> Any:
        """Unbind, empty, and put `Leave` on what the unit returns."""
        unit = self.units[name]
        if self.phase == "backward" or self.phase == "idle":
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
        output = replace_tensors(output, unit.name, lambda tensors: self._leave(call, tensors))
        unit.unbind()
        unit.empty()
        return output

    def _leave(self, call: Call, tensors: list[Tensor]) -> Sequence[Tensor]:
        pointers = call.unit.storage_pointers
        tensors = [
            t.clone() if t.numel() and t.untyped_storage().data_ptr() in pointers else t
            for t in tensors
        ]
        wanted = [t for t in tensors if t.requires_grad]
        if not wanted:
            return tensors
        new = iter(Leave.apply(call, self, *wanted))
        return [next(new) if t.requires_grad else t for t in tensors]

    def resolve(self, path: str, name: str) -> Tensor:
        """A value for a placeholder that is read: children of the root are entered by a read."""
        unit = self.units[name]
        if self.phase in ("train", "eval") and unit.stays and not unit.is_bound:
            self.enter(name)
            unit.depth = 0
        if unit.is_bound and unit.stays:
            return unit.bound(path)
        raise read_outside(path, name, _PHASES[self.phase])

    # -- backward ---------------------------------------------------------------------------

    def on_leave_backward(self, call: Call) -> None:
        """Refill a unit that was emptied, and bind it for a recomputation inside."""
        unit = call.unit
        index = self._turn("leave", unit)
        if index is not None:
            self._pass_until(index)
            self._walk.meet(index)
        unit.finish()
        unit.bind(call)

    def on_enter_backward(self, call: Call, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Unbind, empty, reduce; the landed gradients in the order of the unit's leaves."""
        unit = call.unit
        index = self._turn("enter", unit)
        items: Sequence[Any] = ()
        if index is not None:
            self._pass_until(index)
            items = self._walk.meet(index).items
        unit.unbind()
        unit.empty()
        call.parameters = []
        self.used.update(p for p, g in zip(unit.trainable, grads, strict=False) if g is not None)
        return unit.reduce(grads, items)

    def _enter_recompute(self, unit: UnitRuntime) -> None:
        if unit.is_bound:
            return
        raise UnitError(
            f"Unit {unit.name!r} is run again in backward while it is not gathered.",
            where="a recomputation (torch.utils.checkpoint) that spans several units, or "
            "use_reentrant=True",
            why="A unit is gathered again when backward reaches its output, so one recomputed "
            "region must lie inside one unit.",
            fix="checkpoint each unit by itself with use_reentrant=False",
            unit=unit.name,
        )

    # -- the list ---------------------------------------------------------------------------

    def _start(self, action: Action) -> None:
        self.units[action.event.unit].start(action.items)

    def _turn(self, kind: str, unit: UnitRuntime) -> int | None:
        """Index of the event, None if it moves nothing; an error if its turn has passed."""
        index = self._walk.find(kind, unit.name)
        if index is None and unit.moves:
            following = self._walk.actions[self._walk.position :]
            raise OrderError(
                f"Unit {unit.name or '(root)'!r}: {kind!r} came when its turn had passed.",
                where=f"{_PHASES[self.phase]}, at position {self._walk.position} of "
                f"{len(self._walk.actions)}",
                facts=[f"next in the lowered order: {', '.join(str(a.event) for a in following[:3]) or 'nothing'}"],
                why="All ranks walk one list of collectives, made from the order of the first step.",
                fix="keep the order in which modules run the same in every step, or lower again",
                unit=unit.name,
                position=self._walk.position,
            )
        return index

    def _pass_until(self, index: int, *, silent: bool = False) -> None:
        """Join in what lies before `index` on behalf of units that this rank does not run."""
        walk = self._walk
        while walk.position < index:
            action = walk.actions[walk.position]
            unit = self.units[action.event.unit]
            if action.kind == "reduce":
                self._pass_reduce(action, unit, silent)
                continue
            if action.event.kind == "leave" and unit.depth and not silent:
                raise OrderError(
                    f"Unit {unit.name!r} is still running where the lowered order has left it.",
                    where=_PHASES[self.phase],
                    why="All ranks walk one list of collectives, made from the order of the first step.",
                    fix="keep the nesting of modules the same in every step, or lower again",
                    unit=unit.name,
                )
            walk.meet(walk.position)
            if action.kind == "gather":
                unit.drop()
            if action.event.kind == "enter" and self.phase == "train" and not silent:
                self._skip(action, unit)

    def _skip(self, action: Action, unit: UnitRuntime) -> None:
        leaves = [leaf for _, leaf in unit.leaves()]
        if action.event.grad and leaves:
            with torch.enable_grad():
                (token,) = Enter.apply(Call(unit, []), self, *leaves)
            self._tokens.append(token)

    def _pass_reduce(self, action: Action, unit: UnitRuntime, silent: bool) -> None:
        if any(action.items) and not silent:
            raise OrderError(
                f"Backward left unit {unit.name or '(root)'!r} out.",
                where="backward",
                why="Every unit reduces its gradients in the reverse of the forward order.",
                fix="report this with the model: it is a fault of shardwise",
                unit=unit.name,
            )
        self._walk.meet(self._walk.position)
        if any(action.items):
            unit.reduce([], action.items)


_PHASES = {"idle": "outside a step", "train": "forward", "eval": "eval", "backward": "backward"}


def read_outside(path: str, unit: str, phase: str) -> UnitError:
    """A parameter that is read where it has no value."""
    return UnitError(
        f"Parameter {path!r} is read outside its unit.",
        where=f"unit {unit or '(root)'!r}, during {phase}",
        why="A unit's parameters are gathered while its forward runs and nowhere else.",
        fix=f"read it inside the forward of {unit!r}, or make it a root parameter with "
        "units=[...] that leave this module out",
        path=path,
        unit=unit,
    )


def _needs_grad(unit: UnitRuntime) -> OrderError:
    return OrderError(
        f"Unit {unit.name!r} runs with gradients where the first step ran it without.",
        where="forward",
        why="All ranks walk one list of collectives, made from the order of the first step.",
        fix="keep torch.no_grad() around the same calls in every step, or lower again",
        unit=unit.name,
    )


def _outside(unit: UnitRuntime) -> UnitError:
    return UnitError(
        f"Unit {unit.name or '(root)'!r} is called outside a step.",
        where="the model that loss_fn was given",
        why="Parameters are bound only while loss_fn runs.",
        fix="do not keep the model that loss_fn receives; use program.eval(state, batch)",
        unit=unit.name,
    )
