"""Lowering: plan + loss function + optimizer -> everything a step will move, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from shardwise.optim.base import GradientTransform, parts_of
from shardwise.sharding.buckets import make_buckets
from shardwise.sharding.errors import LowerError, strict_keywords
from shardwise.sharding.functional import make_template
from shardwise.sharding.movement import payload_bytes
from shardwise.sharding.plan import Plan
from shardwise.transforms.binding import Stage
from shardwise.transforms.buffer_sync import find_buffers
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.memory import Memory, predict_memory
from shardwise.transforms.order import registration_order
from shardwise.transforms.program import Program, bind
from shardwise.transforms.trace import LossFunction, trace


@dataclass(frozen=True, eq=False)
class Lowered(Lowering):
    """A program before it is bound to devices: its collectives and bytes are known."""

    def memory(self) -> Memory:
        """Bytes per rank, at rest and at the peak of a step beyond that."""
        return predict_memory(self)

    def text(self) -> str:
        """A report: collectives by unit and reason, bytes, and what is not known."""
        items = self.collectives()
        lines = [
            repr(self.plan),
            f"order of units: {'traced' if self.traced else 'as registered (no batch given)'}",
            f"{len(items)} collectives a step, {payload_bytes(items):,} payload bytes a rank",
        ]
        totals: dict[tuple[str, str, str], tuple[int, int]] = {}
        for item in items:
            key = (item.reason, item.kind, item.axis)
            number, nbytes = totals.get(key, (0, 0))
            totals[key] = (number + 1, nbytes + item.nbytes)
        lines += [
            f"  {reason:<9}{kind:<15}{axis:<8}x{number:<5}{nbytes:>16,} B"
            for (reason, kind, axis), (number, nbytes) in totals.items()
        ]
        lines.append(str(self.memory()))
        if self.forward_flops is not None:
            lines.append(f"forward pass of one rank: {self.forward_flops:,} flops")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def bind(self, *, device: torch.device | str | None = None, debug: bool = False) -> Program:
        """A `Program` on this job's devices.

        Inside `simulate(mesh)` all ranks live in this process. Else an initialised process group is
        used and left alone; else one is made from the launcher's environment; else the world is
        one.

        Args:
            device: default: this rank's CUDA device if there is one, else the CPU.
            debug: check in every step what is otherwise checked in the first: that no tensor keeps
                weights behind the engine's back, that nothing else communicates, and that batches
                have one structure. Costs about the host time of the step again.

        Raises:
            MeshError: the mesh does not multiply to the number of ranks.
        """
        return bind(self, device=device, debug=debug)


@strict_keywords
def lower(
    plan: Plan,
    loss_fn: LossFunction,
    optimizer: GradientTransform,
    *,
    batch: Any = None,
    module: nn.Module | None = None,
) -> Lowered:
    """Work out what a step of this plan runs, moves and holds. No process group, no device.

    Args:
        plan: from `plan(...)`.
        loss_fn: `loss_fn(model, batch)`; returns a scalar or a `Mean`, optionally with metrics.
        optimizer: a gradient transform.
        batch: one rank's batch (or `like(shape, dtype)` leaves) to trace the order of units;
            without it units are taken in registration order until the first step.
        module: the module, for a plan that was read from JSON.

    Raises:
        LowerError: the module is missing or another one, or the optimizer is none of ours.
        PatternError: a pattern of the optimizer matches no trainable parameter.
    """
    module = module if module is not None else plan.module
    if module is None:
        raise LowerError(
            "The plan has no module.",
            where="lower(plan, loss_fn, optimizer)",
            why="A plan that was read from JSON or a pickle is only data.",
            fix="lower(plan, loss_fn, optimizer, module=model)",
        )
    _check_optimizer(optimizer)
    shapes = {info.path: info.shape for info in plan.infos if info.trainable}
    buckets = make_buckets(plan, parts_of(optimizer, shapes))
    events = registration_order(plan, buckets)
    lowered = Lowered(plan, loss_fn, optimizer, module, buckets, events)
    if batch is None:
        return lowered
    device = torch.device("cpu")
    stage = Stage(make_template(module, plan.infos, device), plan.units, _Nobody())
    sites = find_buffers(stage.template.module)
    seen = trace(plan, stage, loss_fn, batch, buffers=sites, device=device, staying=lowered.staying)
    return cast(Lowered, lowered.with_trace(seen, seen.events))


class _Nobody:
    """The guide of a template outside of any pass."""

    def enter(self, unit: str, inputs: Any = None) -> Any:
        """Nothing is bound."""

    def leave(self, unit: str, output: Any, inputs: Any = None) -> Any:
        """Unchanged."""
        return output

    def resolve(self, path: str, unit: str) -> Any:
        """There is no value."""
        raise LowerError(f"Parameter {path!r} is read while nothing runs.")


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, GradientTransform):
        raise LowerError(
            f"The optimizer is a {type(optimizer).__name__}, not a gradient transform.",
            where="lower(plan, loss_fn, optimizer)",
            why="An optimizer is a value without parameters; its state is made by program.init.",
            fix="sw.optim.adamw(3e-4) in the place of torch.optim.AdamW(model.parameters(), 3e-4)",
        )
