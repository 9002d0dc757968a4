"""How a plan cuts a batch and adds up what its data ranks found, done in one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from shardwise.optim.base import Tensors
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan
from shardwise.sharding.spec import Spec
from shardwise.testing.plain import Part

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


def addition_order(plan: Plan, path: str) -> tuple[str, ...]:
    """Axes in the order in which the gradient of one parameter is added over them.

    Gradients land in the optimizer's home if that cuts their own home further. The axes that cut
    the landed gradient come first, then the rest of the batch axes, each group from the innermost
    axis of the mesh to the outermost.

    Args:
        plan: any plan.
        path: a trainable parameter.
    """
    grads, opt = cut_of(plan.grads[path], plan.mesh), cut_of(plan.opt[path], plan.mesh)
    inside = opt.axes[: len(grads.axes)] == grads.axes and (not grads.axes or opt.dim == grads.dim)
    landing = opt.axes if inside else grads.axes
    others = [axis for axis in plan.batch if plan.mesh[axis] > 1 and axis not in landing]
    inner_first = plan.mesh.names[::-1]
    return (*sorted(landing, key=inner_first.index), *sorted(others, key=inner_first.index))


class Split:
    """The data ranks of a plan, as places in the order of the batch axes.

    Args:
        plan: any plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.axes = tuple(axis for axis in plan.batch if plan.mesh[axis] > 1)
        self.places: list[Place] = list(
            itertools.product(*(range(plan.mesh[axis]) for axis in self.axes))
        )
        self._orders = {path: addition_order(plan, path) for path in plan.grads}
        self._dtypes = {path: getattr(torch, spec.dtype) for path, spec in plan.grads.items()}

    def cut(self, batch: Any) -> dict[Place, Any]:
        """Every data rank's part of a global batch."""
        count = len(self.places)

        def part(index: int) -> Any:
            return optree.tree_map(
                lambda leaf: leaf.tensor_split(count)[index] if _has_rows(leaf) else leaf, batch
            )

        return {place: part(index) for index, place in enumerate(self.places)}

    def add(self, values: Mapping[Place, Tensor], order: tuple[str, ...]) -> Tensor:
        """Add over one axis after the other, in rank order along each."""
        for axis in order:
            at = self.axes.index(axis)
            sums: dict[Place, Tensor] = {}
            for place in self.places:
                if place in values:
                    head = (*place[:at], 0, *place[at + 1 :])
                    sums[head] = sums[head] + values[place] if head in sums else values[place]
            values = sums
        (whole,) = values.values()
        return whole

    def add_scalars(self, values: Mapping[Place, Any]) -> Tensor:
        """Add scalars in float64 over all batch axes, innermost first."""
        doubles = {place: torch.as_tensor(v).detach().double() for place, v in values.items()}
        return self.add(doubles, tuple(reversed(self.axes)))

    def add_gradients(self, parts: Mapping[Place, Part], factor: Tensor) -> Tensors:
        """The gradients of the global mean; parameters that no part used are absent."""
        result: Tensors = {}
        for path, order in self._orders.items():
            found = {place: part.grads[path] for place, part in parts.items()}
            if all(grad is None for grad in found.values()):
                continue
            like = next(grad for grad in found.values() if grad is not None)
            dtype = self._dtypes[path]
            filled = {
                place: (torch.zeros_like(like) if grad is None else grad).to(dtype)
                for place, grad in found.items()
            }
            # Copied because with one part this is autograd's own tensor. Flat because a 0-dim
            # tensor would be multiplied in the wider dtype of the two.
            flat = self.add(filled, order).reshape(-1).clone().mul_(factor)
            result[path] = flat.view(like.shape)
        return result

    def average_buffers(self, before: Tensors, parts: Mapping[Place, Part]) -> Tensors:
        """Buffers after a step: the mean over ranks of what changed, the largest for integers."""
        result = dict(before)
        for path, old in before.items():
            values = {place: part.buffers[path] for place, part in parts.items()}
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


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0
