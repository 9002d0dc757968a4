"""Lowering: plan + loss function + optimizer -> everything a step will move, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from shardwise.optim.base import GradientTransform, parts_of
from shardwise.sharding.buckets import make_buckets
from shardwise.sharding.collectives import payload_bytes
from shardwise.sharding.errors import LowerError, strict_keywords
from shardwise.sharding.functional import make_template
from shardwise.sharding.plan import Plan
from shardwise.transforms.binding import Stage
from shardwise.transforms.buffer_sync import bind_buffers, find_buffers, read_buffers
from shardwise.transforms.casts import cast_buffers
from shardwise.transforms.joining import bind
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.memory import Memory, predict_memory
from shardwise.transforms.micro import first_micro
from shardwise.transforms.order import registration_order
from shardwise.transforms.precision import warn_of_lost_updates
from shardwise.transforms.program import Program
from shardwise.transforms.regions import Region
from shardwise.transforms.room import check_budget
from shardwise.transforms.tensor_layers import Boundary
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
        width = max((len(reason) + 2 for reason, _, _ in totals), default=0)
        lines += [
            f"  {reason:<{max(width, 10)}}{kind:<15}{axis:<8}x{number:<5}{nbytes:>16,} B"
            for (reason, kind, axis), (number, nbytes) in totals.items()
        ]
        lines += self._crossing_lines()
        lines.append(str(self.memory()))
        if self.forward_flops is not None:
            part = "rank" if self.plan.accumulation.steps == 1 else "micro-batch"
            lines.append(f"forward pass of one {part}: {self.forward_flops:,} flops")
        lines += [self._remat_text()] if self.plan.remat else []
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _crossing_lines(self) -> list[str]:
        """What activations move over tensor axes in one pass, by kind."""
        tensor = self.plan.tensor
        if not tensor.frames:
            return []
        axes = ", ".join(axis.name for axis in tensor.axes.values())
        if not self.traced:
            return [
                f"note: what activations move over {axes} is not known until the first step "
                "(no batch given)"
            ]
        first = [item for item in self.schedule.items if item.reason == "activations"]
        totals: dict[tuple[str, str], list[int]] = {}
        for item in first:
            totals.setdefault((item.kind, item.axis), []).append(item.nbytes)
        moved = [f"{kind} {a} x{len(n)} {sum(n):,} B" for (kind, a), n in totals.items()]
        return [f"activations of one micro-batch: {', '.join(moved) or 'nothing moves'}"]

    def _remat_text(self) -> str:
        """What remat gives, and what it takes."""
        cost, with_remat, flops = self.recomputation, self.activation_bytes, self.forward_flops
        if cost is None or with_remat is None or flops is None:
            return "remat: its bytes and flops are unknown (no batch given, or see the notes)"
        share = f" (+{cost.flops / (3 * flops):.0%} of a step)" if flops else ""
        return (
            f"remat: activations {cost.plain_bytes:,} B -> {with_remat:,} B, and up to "
            f"{cost.peak_bytes:,} B while recomputing, for {cost.flops:,} flops{share}"
        )

    def bind(
        self,
        *,
        device: torch.device | str | None = None,
        debug: bool = False,
        timeout: float | None = None,
    ) -> Program:
        """A `Program` on this job's devices.

        Inside `simulate(mesh)` all ranks live in this process. Else an initialised process group is
        used and left alone; else one is made from the launcher's environment; else the world is
        one.

        Args:
            device: default: this rank's CUDA device if there is one, else the CPU.
            debug: check in every step what is otherwise checked in the first: that no tensor keeps
                weights behind the engine's back, that nothing else communicates, and that batches
                have one structure; and in every call that ranks make the same call, run the same
                collectives and report the same. Costs about the host time of the step again.
            timeout: seconds that a collective may wait for the other ranks before it is an error;
                default SHARDWISE_TIMEOUT_SECONDS, else 600, or that of the group that exists.

        Raises:
            LaunchError: the job cannot be joined, or a timeout that is no time.
            MeshError: the mesh does not multiply to the number of ranks.
        """
        return bind(self, device=device, debug=debug, timeout=timeout)


@strict_keywords
def lower(
    plan: Plan,
    loss_fn: LossFunction,
    optimizer: GradientTransform,
    *,
    batch: Any = None,
    module: nn.Module | None = None,
    count_fn: Callable[[Any], Mapping[str, Any]] | None = None,
    grad_norm: bool = False,
    budget: Mapping[str, int] | None = None,
) -> Lowered:
    """Work out what a step of this plan runs, moves and holds. No process group, no device.

    Args:
        plan: from `plan(...)`.
        loss_fn: `loss_fn(model, batch)`; returns a scalar, a `Mean`, or a dict of `Mean`s that are
            the terms of the loss, optionally in a tuple with a dict of metrics.
        optimizer: a gradient transform.
        batch: one rank's batch (or `like(shape, dtype)` leaves) to trace the order of units;
            without it units are taken in registration order until the first step.
        module: the module, for a plan that was read from JSON.
        count_fn: `count_fn(batch) -> {term: count}`, what the loss counts, without running the
            model; needed for a loss of several terms under `accumulate(n)`.
        grad_norm: report the 2-norm of the gradient in every step's metrics, also if the optimizer
            does not clip; 8 bytes per distinct set of mesh axes in one packed reduction.
        budget: bytes that one rank may hold at its peak, by kind of memory (`device`,
            `pinned_host`, `disk`); activations count only as far as a batch has shown them.

    Raises:
        PlanError: the plan needs more than its budget.
        LowerError: the module is missing or another one, the optimizer is none of ours, or several
            terms over several micro-batches have no `count_fn`.
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
    warn_of_lost_updates(plan, stacklevel=4)
    shapes = {info.path: info.shape for info in plan.infos if info.trainable}
    parts = parts_of(optimizer, shapes)
    buckets = make_buckets(plan, parts)
    events = registration_order(plan, buckets)
    about: dict[str, Any] = {"count_fn": count_fn, "grad_norm": grad_norm}
    lowered = Lowered(plan, loss_fn, optimizer, module, buckets, events, **about)
    if batch is None:
        check_budget(lowered.memory(), budget)
        return lowered
    device = torch.device("cpu")
    template, precision = make_template(module, plan.infos, device), plan.precision
    stage = Stage(template, plan.units, _Nobody(), plan.remat, precision.casts, plan=plan)
    sites = find_buffers(stage.template.module)
    bind_buffers(sites, cast_buffers(read_buffers(sites), precision.buffers), ())
    micro = first_micro(batch, plan.accumulation.steps)
    seen = trace(plan, stage, loss_fn, micro, buffers=sites, device=device, staying=lowered.staying)
    traced = cast(Lowered, lowered.with_trace(seen, seen.events))
    check_budget(traced.memory(), budget)
    return traced


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

    def run(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module itself."""
        return region.forward(*args, **kwargs)

    def cross(self, boundary: Boundary, place: str, tensor: Any) -> Any:
        """Unchanged."""
        return tensor

    def crosses(self, way: str) -> bool:
        """Nothing does."""
        return False

    def saving(self, path: str) -> Any:
        """Nothing is saved."""
        return nullcontext()

    def look_up(self, boundary: Boundary, module: nn.Embedding, run: Any, tokens: Any) -> Any:
        """There is nobody to ask."""
        raise LowerError(f"Module {boundary.path!r} is called while nothing runs.")


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, GradientTransform):
        raise LowerError(
            f"The optimizer is a {type(optimizer).__name__}, not a gradient transform.",
            where="lower(plan, loss_fn, optimizer)",
            why="An optimizer is a value without parameters; its state is made by program.init.",
            fix="sw.optim.adamw(3e-4) in the place of torch.optim.AdamW(model.parameters(), 3e-4)",
        )
