"""The types of one traced forward pass: where they start, how they cross, and what they end as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.sharding.errors import PlanError, summarise
from shardwise.sharding.functional import bound
from shardwise.sharding.plan import Plan
from shardwise.transforms.activation_types import (
    Constant,
    Free,
    Invariant,
    Partial,
    Sharded,
    Type,
    Types,
)
from shardwise.transforms.call_facts import CallFacts
from shardwise.transforms.crossing_trace import CrossingTrace
from shardwise.transforms.declared_trace import DeclaredTrace
from shardwise.transforms.loss import Loss
from shardwise.transforms.order import Event
from shardwise.transforms.places import Places
from shardwise.transforms.random_cuts import RandomTrace
from shardwise.transforms.tensor_calls import TracedCalls
from shardwise.transforms.tensor_layers import Boundary, Run, cut_lookup, shared_by_all
from shardwise.transforms.typing_mode import TypingMode


class Typed:
    """Types along the tensor axes of a plan.

    Args:
        plan: says what is cut.
        values: fake parameters by path.
        events: of the trace.
        around: calls of recomputed modules that are open.
        collects: whether logits are collected.
    """

    def __init__(
        self,
        plan: Plan,
        values: Mapping[str, Tensor],
        events: list[Event],
        around: list[str],
        *,
        collects: bool,
    ) -> None:
        self._plan = plan
        axes = [axis for axis in plan.tensor.axes.values() if plan.mesh[axis.name] > 1]
        self.types = Types([axis.name for axis in axes])
        self.places = Places()
        self.random = RandomTrace(self.places)
        self.mode = TypingMode(self.types, where=lambda: self.places.path, seen=self.random.saw)
        self.crossings = CrossingTrace(
            plan.mesh,
            self.types,
            events,
            around,
            collects=collects,
            sequences=frozenset(axis.name for axis in axes if axis.sequence),
        )
        self.calls = TracedCalls(
            plan.mesh,
            self.types,
            events,
            around,
            untyped=self.mode.untyped,
            enter=self._enter,
            declared=DeclaredTrace(
                plan.mesh,
                self.types,
                self.mode,
                self.crossings,
                places=self.places,
                parameters=values,
            ),
            places=self.places,
            closed=lambda: self.crossings.closed,
        )
        for path, value in values.items():
            self.types.set(value, {axis.name: _start(plan, path, axis.parts) for axis in axes})
        self._shared = {axis.name: shared_by_all(plan, axis) for axis in axes}
        for axis, shared in self._shared.items():
            for path, dim in shared.items():
                value = values[path]
                kind = Sharded(dim, (value.shape[dim],), copies=plan.mesh[axis])
                self.types.set(value, axis, kind)

    def look_up(self, boundary: Boundary, module: nn.Embedding, run: Run, tokens: Tensor) -> Tensor:
        """What a rank finds of a cut vocabulary: a summand."""
        with self.mode.untyped():
            found = cut_lookup(module, run, tokens, place=0, rows=boundary.rows, check=False)
        weight = bound(module.weight)
        kinds = {axis: self.types.of(weight, axis) for axis in self.types.axes}
        for axis, kind in kinds.items():
            if axis in boundary.axes:
                kinds[axis] = Partial()
            elif isinstance(kind, Sharded):
                kinds[axis] = replace(kind, dim=found.ndim - 1)
        self.types.set(found, kinds)
        return found

    def _enter(self, name: str, tensor: Tensor, axis: str) -> Tensor:
        return self.crossings.cross(Boundary(name, "call", (axis,)), "in0", tensor)

    def finish(self, loss: Loss) -> None:
        """Check that the loss is equal on all ranks, and note which crossings backward reaches.

        Raises:
            PlanError: it is not.
        """
        totals = [mean.total for mean in loss.terms.values()] or [loss.total]
        for total in totals:
            for axis in self.types.axes if isinstance(total, Tensor) else ():
                kind = self.types.of(total, axis)
                if not isinstance(kind, Free | Invariant | Constant):
                    raise _no_loss(axis, kind)
                self.types.use(total, axis, "invariant")
        joined = torch.stack([total.double().sum() for total in totals]).sum()
        self.crossings.mark_reached(joined)

    @property
    def facts(self) -> CallFacts:
        """What a step has to know of calls inside of modules."""
        return self.calls.facts(self.random.apart)

    def replicated(self) -> dict[str, frozenset[str]]:
        """By axis, trainable whole parameters of whose gradient each rank has a part.

        Raises:
            PlanError: one of them is used in both ways.
        """
        found: dict[str, frozenset[str]] = {}
        for axis in self.types.axes:
            used = self.types.used.get(axis, {})
            both = [path for path, ways in used.items() if len(ways) > 1]
            if both:
                raise _used_both_ways(axis, both)
            paths = [path for path, ways in used.items() if "replicated" in ways]
            paths += self._shared.get(axis, {})
            found[axis] = frozenset(path for path in paths if path in self._plan.opt)
        return found


def _start(plan: Plan, path: str, parts: tuple[str, ...]) -> Type:
    frame = plan.tensor.frames.get(path)
    if frame is None or not set(parts) & set(frame.axes):
        return Free((path,) if path in plan.opt else ())
    if len(frame.cut_dims) > 1:
        raise _cut_twice(plan, path)
    dim = next(iter(frame.cut_dims), 0)
    rows = frame.shape[dim]
    uneven = any(run.count != frame.block[dim] for cut in frame.cuts for run in cut[dim][:1])
    known = rows if uneven and len(frame.segments[dim]) == 1 else None
    held = plan.mesh.product(tuple(part for part in parts if part in frame.axes))
    kind = Sharded(dim, frame.segments[dim], known, copies=plan.mesh.product(parts) // held)
    if not frame.has_copies:
        return kind
    places = [cut[dim] for cut in frame.cuts]
    starts = [{runs[at].start for runs in places} for at in range(len(frame.segments[dim]))]
    return replace(kind, mixed=tuple(len(places) // len(one) for one in starts))


def _cut_twice(plan: Plan, path: str) -> PlanError:
    info, spec = plan.info(path), plan.compute[path]
    dims = [info.axes.dim_name(dim) for dim in plan.tensor.frames[path].cut_dims]
    return PlanError(
        f"Tensor axes cut {len(dims)} dimensions of one parameter, and no step can use it.",
        where=path,
        facts=f"'{spec}': {' and '.join(map(repr, dims))} are cut.",
        why="A layer computes with a part of its inputs or of its outputs, not of both.",
        fix=f"names= that leave {dims[0]!r} or {dims[1]!r} whole; states of such a plan can be "
        "saved, restored and resharded",
        path=path,
        dims=tuple(dims),
    )


def untraced(note: str) -> PlanError:
    """The error for a pass under tensor axes that cannot be traced to its end."""
    return PlanError(
        "The forward pass cannot be traced, so that nothing says how layers that are cut talk.",
        where="loss_fn, or a module it runs",
        facts=note,
        why="What crosses between ranks follows from the types of activations in one traced pass.",
        fix="remove the branch on a value, or leave these layers whole with where=",
    )


def _no_loss(axis: str, kind: Type) -> PlanError:
    return PlanError(
        f"The loss is not the same on all ranks of {axis!r}.",
        where="loss_fn(model, batch)",
        facts=f"it is {kind}.",
        why="Ranks along a tensor axis compute one loss of one batch.",
        fix="sw.cross_entropy for logits over a cut vocabulary, or logits='gathered'",
        axis=axis,
    )


def _used_both_ways(axis: str, paths: list[str]) -> PlanError:
    return PlanError(
        f"{len(paths)} whole parameters are used both inside and outside of what {axis!r} cuts.",
        where=paths[0],
        facts=summarise(paths),
        why="Inside, their gradient is a sum over ranks; outside, every rank has all of it.",
        fix="use two parameters, or cut this one as well with axes=",
        path=paths[0],
    )
