"""How a plan cuts a batch and adds up what its data ranks found, done in one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardwise.optim.base import Tensors
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan
from shardwise.sharding.spec import Spec
from shardwise.testing.plain import Part
from shardwise.transforms.micro import cut_batch
from shardwise.transforms.uneven import Parts, own_part

Place: TypeAlias = tuple[int, ...]
"""Coordinates along the batch axes that have more than one rank, major to minor."""


class Cut(NamedTuple):
    """The dimension that a home cuts, and over which axes; no axes: whole."""

    dim: int
    axes: tuple[str, ...]


def cut_of(spec: Spec, mesh: Mesh) -> Cut:
    """Read the cut from a home; axes of size 1 cut nothing.

    >>> cut_of(Spec.parse("d0 d1/(dp fsdp)"), Mesh(dp=1, fsdp=2))
    Cut(dim=1, axes=('fsdp',))
    """
    for dim in range(spec.axes.ndim):
        axes = tuple(axis for axis in spec.dim_axes(dim) if mesh[axis] > 1)
        if axes:
            return Cut(dim, axes)
    return Cut(0, ())


def landing_axes(plan: Plan, path: str) -> tuple[str, ...]:
    """Axes that cut the landed gradient of one parameter, in the order in which it is added.

    Gradients land in the optimizer's home if that cuts their own home further.
    """
    grads, opt = cut_of(plan.grads[path], plan.mesh), cut_of(plan.opt[path], plan.mesh)
    inside = opt.axes[: len(grads.axes)] == grads.axes and (not grads.axes or opt.dim == grads.dim)
    landing = opt.axes if inside else grads.axes
    return tuple(sorted(landing, key=plan.mesh.names[::-1].index))


def addition_order(plan: Plan, path: str) -> tuple[str, ...]:
    """Axes in the order in which the gradient of one parameter is added over them.

    The axes that cut the landed gradient come first, then the rest of the batch axes, each group
    from the innermost axis of the mesh to the outermost.

    Args:
        plan: any plan.
        path: a trainable parameter.
    """
    landing = landing_axes(plan, path)
    others = [axis for axis in plan.batch if plan.mesh[axis] > 1 and axis not in landing]
    return (*landing, *sorted(others, key=plan.mesh.names[::-1].index))


def each_pass(plan: Plan, path: str) -> tuple[str, ...]:
    """Axes over which the gradient of one parameter is added after every pass of a step.

    The others are added once, over the sums of all passes.
    """
    accumulation, landing = plan.accumulation, landing_axes(plan, path)
    whole = not cut_of(plan.grads[path], plan.mesh).axes
    if accumulation.reduce == "once" or (accumulation.reduce == "auto" and whole):
        return ()
    return landing


class Split:
    """The data ranks of a plan, as places in the order of the batch axes.

    Args:
        plan: any plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._mesh = plan.mesh
        self.axes = tuple(axis for axis in plan.batch if plan.mesh[axis] > 1)
        self.places: list[Place] = list(
            itertools.product(*(range(plan.mesh[axis]) for axis in self.axes))
        )
        self.steps = plan.accumulation.steps
        self._orders = {path: addition_order(plan, path) for path in plan.grads}
        self._early = {path: each_pass(plan, path) for path in plan.grads}
        self._dtypes = {path: getattr(torch, spec.dtype) for path, spec in plan.grads.items()}

    def cut(self, batch: Any) -> dict[Place, tuple[Any, ...]]:
        """Every data rank's micro-batches of a global batch."""
        parts = Parts(self._mesh, self.axes)
        owned = {
            place: own_part(batch, parts, dict(zip(self.axes, place, strict=True)))
            for place in self.places
        }
        return {place: cut_batch(part, self.steps) for place, part in owned.items()}

    def add(self, values: Mapping[Place, Tensor], order: tuple[str, ...]) -> dict[Place, Tensor]:
        """Add over one axis after the other, in rank order along each; one value for each group."""
        sums = dict(values)
        for axis in order:
            at = self.axes.index(axis)
            values, sums = sums, {}
            for place in self.places:
                if place in values:
                    head = (*place[:at], 0, *place[at + 1 :])
                    sums[head] = sums[head] + values[place] if head in sums else values[place]
        return sums

    def add_scalars(self, values: Mapping[Place, Sequence[Any]]) -> Tensor:
        """Add scalars in float64: those of each place in turn, then over axes, innermost first."""
        sums = {place: torch.zeros((), dtype=torch.float64) for place in self.places}
        for place, mine in values.items():
            for value in mine:
                sums[place] = sums[place] + torch.as_tensor(value).detach().double()
        (whole,) = self.add(sums, tuple(reversed(self.axes))).values()
        return whole

    def add_gradients(self, parts: Mapping[Place, Sequence[Part]], factor: Tensor) -> Tensors:
        """The gradients of the global mean; parameters that no part used are absent."""
        result: Tensors = {}
        for path, order in self._orders.items():
            grads = (one.grads[path] for mine in parts.values() for one in mine)
            found = [grad for grad in grads if grad is not None]
            if not found:
                continue
            zero = torch.zeros_like(found[0], dtype=self._dtypes[path])
            early = self._early[path]
            sums: dict[Place, Tensor] = {}
            for number in range(self.steps):
                filled = {
                    place: _gradient(mine, number, path, zero) for place, mine in parts.items()
                }
                for place, grad in self.add(filled, early).items():
                    sums[place] = sums[place] + grad if place in sums else grad
            (whole,) = self.add(sums, tuple(axis for axis in order if axis not in early)).values()
            # Copied because with one part this is autograd's own tensor. Flat because a 0-dim
            # tensor would be multiplied in the wider dtype of the two.
            result[path] = whole.reshape(-1).clone().mul_(factor).view(zero.shape)
        return result

    def average_buffers(self, before: Tensors, parts: Mapping[Place, Sequence[Part]]) -> Tensors:
        """Buffers after a step: the mean over ranks of what changed, the largest for integers."""
        result = dict(before)
        for path, old in before.items():
            values = {place: mine[-1].buffers[path] for place, mine in parts.items() if mine}
            if all(torch.equal(value, old) for value in values.values()):
                continue
            values = {place: value.double() for place, value in values.items()}
            for axis in reversed(self.axes):
                values = self._join(values, axis, mean=old.is_floating_point())
            result[path] = values[next(iter(values))].to(old.dtype)
        return result

    def _join(self, values: dict[Place, Tensor], axis: str, *, mean: bool) -> dict[Place, Tensor]:
        at = self.axes.index(axis)
        rows: dict[Place, list[Tensor]] = {}
        for place in self.places:
            if place in values:
                rows.setdefault((*place[:at], 0, *place[at + 1 :]), []).append(values[place])
        stacks = {head: torch.stack(found) for head, found in rows.items()}
        return {head: s.mean(0) if mean else s.amax(0) for head, s in stacks.items()}


def _gradient(parts: Sequence[Part], number: int, path: str, zero: Tensor) -> Tensor:
    """What one pass of one rank has found, in the dtype in which gradients are added."""
    grad = parts[number].grads[path] if number < len(parts) else None
    return zero if grad is None else grad.to(zero.dtype)
