"""One rank of a job, alone: its collectives answer at once with echoes of its own tensors.

Values are meaningless; memory, shapes, the list of collectives and host time are those of a real
rank. All of it happens on the calling thread, where `measure` sees it: real process groups free
tensors on threads of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.compat import device_mesh_without_backend
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.transport import (
    all_reduce_scratch_bytes,
    scratch_bytes,
    stays_in_flight,
)
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.rank_program import RankProgram


class _InFlight:
    """A collective that has ended, but holds its scratch memory until it is waited for."""

    def __init__(self, scratch: Tensor) -> None:
        self._scratch: Tensor | None = scratch

    def wait(self) -> None:
        """Free the scratch memory."""
        self._scratch = None


class Echo:
    """A transport that needs no peers and takes the scratch memory that gloo takes.

    Args:
        mesh: sizes of the axes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def all_gather(self, out: Tensor, mine: Tensor, axis: str) -> None:
        """Every peer has what this rank has."""
        out.view(self._mesh[axis], -1).copy_(mine.reshape(-1))

    def reduce_scatter(self, out: Tensor, whole: Tensor, axis: str) -> _InFlight | None:
        """Every peer has what this rank has."""
        size = self._mesh[axis]
        scratch = _scratch(scratch_bytes(whole.nbytes, size))
        torch.mul(whole.view(size, -1)[0], size, out=out.view(-1))
        return _InFlight(scratch) if stays_in_flight(whole.nbytes) else None

    def all_reduce(self, whole: Tensor, axis: str) -> None:
        """Every peer has what this rank has."""
        scratch = _scratch(all_reduce_scratch_bytes(whole.nbytes, self._mesh[axis]))
        whole.mul_(self._mesh[axis])
        del scratch

    def all_to_all(
        self, out: Tensor, mine: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Every peer sends zeros."""
        out.zero_()

    def broadcast(self, whole: Tensor) -> None:
        """Rank 0 has what this rank has."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every peer says what this rank says."""
        return [value] * self._mesh.size


def bind_alone(lowering: Lowering, rank: int = 0) -> RankProgram:
    """Bind one rank of a job to this process.

    Args:
        lowering: from `lower`, for a mesh of any size.
        rank: which rank.

    >>> import shardwise as sw
    >>> model = torch.nn.Linear(64, 64)
    >>> plan = sw.plan(model, Mesh(fsdp=64), sw.zero(3, "fsdp"))
    >>> rank = bind_alone(sw.lower(plan, lambda m, x: m(x).mean(), sw.optim.sgd(0.1)), 63)
    >>> rank.init(0, None).params["weight"].to_local().shape
    torch.Size([1, 64])
    """
    mesh = lowering.plan.mesh
    device_mesh = device_mesh_without_backend(mesh, rank, "cpu")
    cpu = torch.device("cpu")
    return RankProgram(lowering, rank, Echo(mesh), device_mesh=device_mesh, device=cpu, debug=False)


def _scratch(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
