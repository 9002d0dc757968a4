"""How a plan cuts a batch and adds up what its data ranks found, done in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from shardwise.optim.base import Tensors
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan
from shardwise.sharding.spec import Spec
from shardwise.testing.plain import Part

Place = tuple[int, ...]
"""Coordinates along the batch axes that have more than one rank, major to minor."""


class Split:
    """The order of addition that a plan's movement has; see [Note: the split reference].

    Args:
        plan: any plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._mesh = plan.mesh
        self.axes = tuple(axis for axis in plan.batch if plan.mesh[axis] > 1)
        self._orders = {path: self._order(plan, path) for path in plan.opt}
        self._dtypes = {path: getattr(torch, spec.dtype) for path, spec in plan.grads.items()}

    def _order(self, plan: Plan, path: str) -> tuple[str, ...]:
        """Axes in the order in which the gradient of one parameter is added over them."""
        grads, opt = plan.grads[path], plan.opt[path]
        landing = cutting_axes(opt if refines(opt, grads, self._mesh) else grads, self._mesh)
        others = tuple(axis for axis in self.axes if axis not in landing)
        return (*reversed(landing), *reversed(others))

    def cut(self, batch: Any) -> dict[Place, Any]:
        """The part of every data rank, in rank order."""
        places = [
            tuple(coords[axis] for axis in self.axes)
            for coords in (self._mesh.coords(rank) for rank in range(self._mesh.size))
        ]
        count = self._mesh.product(self.axes)
        cuts = optree.tree_map(
            lambda leaf: leaf.tensor_split(count) if _is_cut(leaf) else (leaf,) * count, batch
        )
        is_cut = lambda leaf: isinstance(leaf, tuple) and len(leaf) == count  # noqa: E731
        ordered = sorted(set(places))
        return {
            place: optree.tree_map(lambda leaf, i=index: leaf[i], cuts, is_leaf=is_cut)
            for index, place in enumerate(ordered)
        }

    def total(self, values: Mapping[Place, Tensor], order: tuple[str, ...]) -> Tensor:
        """Add over one axis after the other, in rank order along each."""
        for axis in order:
            position = self.axes.index(axis)
            sums: dict[Place, Tensor] = {}
            for place in sorted(values):
                rest = (*place[:position], 0, *place[position + 1 :])
                sums[rest] = sums[rest] + values[place] if rest in sums else values[place]
            values = sums
        (whole,) = values.values()
        return whole
