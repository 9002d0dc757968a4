"""One crossing on one rank, forward and back, and the crossing that several layers share."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.sharding.collectives import Collective
from shardwise.sharding.movement import Mover, finish
from shardwise.transforms.crossings import (
    Crossing,
    all_reduced,
    beside_zeros,
    crossed,
    gathered,
    own_block,
    scattered,
    stacked,
)


class CrossingRun:
    """What moves for one activation; bytes are those of its own shape.

    Args:
        crossing: what happens.
        place: of the boundary.
        tensor: that crosses.
        mover: the choke point.
        rows: of a cut dimension on all ranks, if blocks may be padded; 0: they are full.
    """

    def __init__(
        self,
        crossing: Crossing,
        place: str,
        tensor: Tensor,
        mover: Mover,
        *,
        rows: int = 0,
    ) -> None:
        self._crossing = crossing
        self._given = tensor.shape, tensor.dtype, rows
        self._mover = mover
        self._ranks = mover.mesh[crossing.axis]
        self._rows = tensor.shape[crossing.dim] if tensor.ndim else 1
        if crossing.kind in ("gather", "collect"):
            self._rows = crossing.rows or rows or self._rows * self._ranks
        self.items = crossed(
            crossing,
            tensor.shape,
            tensor.dtype,
            rows=self._rows,
            ranks=self._ranks,
            place=place,
        )
        self._forward, self._backward = self.items.forward, self.items.backward

    def serves(self, crossing: Crossing, tensor: Tensor, rows: int) -> bool:
        """Whether it moves what another tensor needs too."""
        same = self._crossing is crossing
        return same and self._given == (tensor.shape, tensor.dtype, rows)

    @property
    def _place(self) -> int:
        mesh = self._mover.mesh
        return mesh.index(mesh.parts(self._crossing.axis), self._mover.coords)

    def forward(self, tensor: Tensor) -> Tensor:
        """The value on the other side."""
        kind, dim = self._crossing.kind, self._crossing.dim
        if kind in ("copy", "first"):
            return tensor
        if kind in ("slice", "take"):
            return own_block(tensor, dim, self._place, self._ranks)
        item = self._ahead()
        if kind == "reduce":
            return all_reduced(self._mover, tensor, item)
        if kind == "scatter":
            return scattered(self._mover, tensor, item, dim)
        if kind == "numbers":
            return stacked(self._mover, tensor, item)
        return gathered(self._mover, tensor, item, dim, self._rows)

    def in_place(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks in the place of a summand; autograd sees nothing."""
        item = self._ahead()
        finish(self._mover.all_reduce(tensor.detach().view(-1), item))
        return tensor

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient on this side."""
        kind, dim = self._crossing.kind, self._crossing.dim
        if kind == "reduce":
            return grad
        if kind == "collect":
            return own_block(grad, dim, self._place, self._ranks)
        if kind == "take":
            return beside_zeros(grad, dim, self._place, self._ranks)
        if kind == "first":
            return torch.zeros_like(grad) if self._place else grad
        item = self._back()
        if kind == "copy":
            return all_reduced(self._mover, grad, item)
        if kind == "gather":
            return scattered(self._mover, grad, item, dim)
        return gathered(self._mover, grad, item, dim, self._rows)

    def _ahead(self) -> Collective:
        assert self._forward is not None
        self._forward = self._mover.amend(self._forward)  # the same object next time
        return self._forward

    def _back(self) -> Collective:
        assert self._backward is not None
        self._backward = self._mover.amend(self._backward)
        return self._backward


class Recent:
    """The last crossing: layers side by side (q, k and v) read one input, which crosses once."""

    def __init__(self) -> None:
        self._last: tuple[Crossing, Tensor, Tensor] | None = None

    def find(self, crossing: Crossing, tensor: Tensor) -> Tensor | None:
        """What the same tensor became when it last crossed alike."""
        if self._last is not None and self._last[1] is tensor and self._last[0] == crossing:
            return self._last[2]
        return None

    def add(self, crossing: Crossing, tensor: Tensor, result: Tensor) -> None:
        """Remember a crossing; it holds both tensors until the next one."""
        self._last = (crossing, tensor, result)

    def clear(self) -> None:
        """Forget it."""
        self._last = None
