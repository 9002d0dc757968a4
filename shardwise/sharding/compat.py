"""The one place that imports private parts of torch; supports torch 2.11 to 2.13."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.sharding.mesh import Mesh

try:
    from torch._C._autograd import _top_saved_tensors_default_hooks
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.distributed_c10d import _get_default_store as job_store
    from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.storage import _dtype_to_storage_type_map
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _get_current_dispatch_mode_stack,
    )
except ImportError as error:
    raise ImportError(
        f"shardwise needs private parts of torch 2.11 to 2.13; torch {torch.__version__} moved "
        f"one of them: {error}"
    ) from error

__all__ = [
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "StorageInfo",
    "StorageWeakRef",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "add_all",
    "assert_on_device",
    "check_and_multiply_all",
    "copy_all",
    "detached",
    "device_mesh_without_backend",
    "dispatch_modes",
    "fused_adamw",
    "job_store",
    "joined_group",
    "norms_of_all",
    "offset_in_file",
    "plain_tensors",
    "rebuild_parts",
    "saved_hooks_on_top",
    "saved_tensor_hooks",
    "set_group_timeout",
    "set_thread_value",
    "storage_key",
    "thread_value",
    "timeout_of",
    "without_functions",
    "zero_all",
]

without_functions = torch._C.DisableTorchFunction
"""Context in which no mode sees which functions are called."""

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Context in which subclasses are computed with as the plain tensors they are."""

add_all = torch._foreach_add_
"""Add a list of tensors to a list of tensors of the same shapes, in one call."""

zero_all = torch._foreach_zero_
"""Fill a list of tensors with zeros, in one call."""

copy_all = torch._foreach_copy_
"""Copy a list of tensors into a list of tensors of the same shapes, in one call."""

norms_of_all = torch._foreach_norm
"""The norms of a list of tensors, in one call; on CUDA one kernel, which casts in registers."""

check_and_multiply_all = torch._amp_foreach_non_finite_check_and_unscale_
"""`(tensors, found, factor)`: multiply in place, and set `found` to 1 if an element was not finite;
one call, and on CUDA one kernel, for tensors of one dtype."""


assert_on_device = torch._assert_async
"""`(condition, message)`: fail where the tensor lives, without waiting for it."""

fused_adamw = torch._fused_adamw_
"""The kernel of `torch.optim.AdamW(fused=True)`, for lists of tensors of one dtype: without the
Python around it, which takes longer than the call for a list of small tensors."""


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes of this thread, innermost last; costs nothing where there are none.

    >>> dispatch_modes()
    []
    """
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """An alias made inside of a dispatch mode that shares the version counter, as views outside do.

    Autograd may make it the result of an operation: it has no history of its own.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return tensor.detach()


def saved_hooks_on_top() -> tuple[Any, Any] | None:
    """What now packs and unpacks the tensors that autograd saves; None if nothing does."""
    return _top_saved_tensors_default_hooks(True)


def saved_tensor_hooks() -> Any:
    """What now packs the tensors that autograd saves; None if nothing does.

    >>> with torch.autograd.graph.save_on_cpu():
    ...     saved_tensor_hooks() is None
    False
    """
    hooks = saved_hooks_on_top()
    return hooks[0] if hooks else None


def set_thread_value(name: str, value: object) -> None:
    """Hold a value for this thread, and for the threads of a backward pass that it starts.

    A `ContextVar` is not seen by the threads in which autograd runs the backward of a device.
    """
    torch._C._stash_obj_in_tls(name, value)


def thread_value(name: str) -> Any:
    """What `set_thread_value` holds here; None if nothing.

    >>> thread_value("nothing") is None
    True
    """
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else None


def timeout_of(group: dist.ProcessGroup, device_type: str) -> datetime.timedelta | None:
    """How long a collective of a group may wait; None where the backend does not say."""
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)


def joined_group(device_mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup:
    """The group of the ranks that differ along any of several axes of a mesh."""
    return device_mesh[names]._flatten().get_group()


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors that share a storage have in common, also when it is emptied and refilled.

    >>> whole = torch.zeros(4)
    >>> [storage_key(one) == storage_key(whole) for one in (whole[2:], whole.clone())]
    [True, False]
    """
    return tensor.untyped_storage()._cdata


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


def rebuild_parts(dtype: torch.dtype) -> tuple[Any, Any]:
    """What `torch.save` names for a tensor: the function that rebuilds it, and its storage class.

    >>> rebuild_parts(torch.float32)[1], rebuild_parts(torch.float8_e4m3fn)[1]
    (<class 'torch.FloatStorage'>, <class 'torch.storage.UntypedStorage'>)
    """
    name = _dtype_to_storage_type_map().get(dtype)
    if name is None:
        return _rebuild_tensor_v3, torch.UntypedStorage
    return _rebuild_tensor_v2, getattr(torch, name)


def offset_in_file(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor begins in the file that torch.load has read without memory."""
    offset: int | None = vars(tensor.untyped_storage()).get("_checkpoint_offset")
    if offset is None:
        raise ImportError(
            f"torch {torch.__version__} does not tell where storages lie in files of torch.save"
        )
    return offset
