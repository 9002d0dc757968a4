"""The one place that imports private parts of torch; supports torch 2.11 to 2.13."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.sharding.mesh import Mesh

try:
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise ImportError(
        f"shardwise needs private parts of torch 2.11 to 2.13; torch {torch.__version__} moved "
        f"one of them: {error}"
    ) from error

__all__ = [
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "copy_all",
    "device_mesh_without_backend",
    "plain_tensors",
]

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Context in which subclasses are computed with as the plain tensors they are."""

copy_all = torch._foreach_copy_
"""Copy a list of tensors into a list of tensors of the same shapes, in one call."""


def device_mesh_without_backend(mesh: Mesh, rank: int, device_type: str) -> DeviceMesh:
    """A torch `DeviceMesh` with the axes of `mesh`, seen from `rank`, without a process group.

    Good for layouts and offsets; a collective on it fails.

    >>> device_mesh = device_mesh_without_backend(Mesh(fsdp=2, tp=2), 3, "cpu")
    >>> device_mesh.mesh_dim_names, device_mesh.get_coordinate()
    (('fsdp', 'tp'), (1, 1))
    """
    ranks = torch.arange(mesh.size, dtype=torch.int).reshape(mesh.sizes)
    return DeviceMesh(
        device_type, ranks, mesh_dim_names=mesh.names, _init_backend=False, _rank=rank
    )
