"""The private template: a copy of the user's module whose parameters are placeholders.

The user's module is never touched. In the copy every parameter is a `Placeholder` on the meta
device until its unit is entered; then plain tensors are bound in its place. A placeholder answers
questions about shape and dtype; used in a computation it asks the engine for its value, which binds
it or says where the parameter may be read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.compat import plain_tensors
from shardwise.sharding.errors import LowerError, summarise
from shardwise.sharding.plan import ParamInfo
from shardwise.sharding.pytree import tree_map

Resolve = Callable[[str], Tensor]

_ANSWERED_BY_META = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "requires_grad", "ndim", "is_leaf", "layout", "grad", "is_meta")
) | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.ndimension,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.__len__,
}
_DEVICE = Tensor.device.__get__


class Placeholder(torch.Tensor):
    """A parameter that is not bound: its shape and dtype, without values."""

    path: str
    resolve: Resolve
    device_bound: torch.device
    _is_param = True

    @classmethod
    def make(cls, info: ParamInfo, device: torch.device) -> Placeholder:
        """A placeholder for one parameter of the plan."""
        empty = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
        self = empty.as_subclass(cls)
        with plain_tensors():
            self.requires_grad_(info.trainable)
        self.path = info.path
        self.device_bound = device
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer from the meta tensor, or compute with what the engine has bound."""
        if func is _DEVICE:
            return args[0].device_bound
        if func in _ANSWERED_BY_META:
            with plain_tensors():
                return func(*args, **(kwargs or {}))
        args, keywords = tree_map(bound, (args, dict(kwargs or {})), none_is_leaf=True)
        return func(*args, **keywords)

    def __repr__(self, **_: Any) -> str:
        return f"Placeholder({self.path!r}, shape={tuple(self.shape)})"


def bound(value: Any) -> Any:
    """What the engine has bound in the place of a placeholder; anything else as it is.

    A placeholder has the shape of the whole parameter: a function that asks a parameter for its
    shape, and not only computes with it, has to see the block that this rank has.

    >>> bound(3)
    3
    """
    return value.resolve(value.path) if isinstance(value, Placeholder) else value


@dataclass(frozen=True)
class Template:
    """A module copy and where each parameter is bound in it.

    Args:
        module: the copy.
        placeholders: by parameter path.
        sites: per path the `(_parameters, name)` of every module that holds it; ties have several.
    """

    module: nn.Module
    placeholders: Mapping[str, Placeholder]
    sites: Mapping[str, tuple[tuple[dict[str, Any], str], ...]]

    def watch(self, resolve: Resolve) -> None:
        """Say who gives a value to a placeholder that is used in a computation."""
        for placeholder in self.placeholders.values():
            placeholder.resolve = resolve


def make_template(module: nn.Module, infos: Iterable[ParamInfo], device: torch.device) -> Template:
    """Copy `module` with placeholders for its parameters and its buffers copied to `device`.

    Raises:
        LowerError: the module cannot be copied, is not the one the plan was made from, or has hooks
            on its parameters.
    """
    by_path = {info.path: info for info in infos}
    params = dict(module.named_parameters())
    if params.keys() != by_path.keys():
        odd = sorted(params.keys() ^ by_path.keys())
        raise LowerError(
            f"The module does not have the parameters of the plan: {len(odd)} differ.",
            facts=odd[:5],
            why="A plan belongs to the module it was made from (paths are named_parameters()).",
            fix="pass the module that the plan was made from, or make the plan again",
            differing=len(odd),
        )
    _refuse_hooks(params)
    placeholders = {path: Placeholder.make(info, device) for path, info in by_path.items()}
    memo: dict[int, Any] = {id(params[path]): placeholders[path] for path in by_path}
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise LowerError(
            f"{type(module).__name__} cannot be copied: {error}",
            why="The step runs on a private copy, so that your module stays as it is.",
            fix="make the module deep-copyable (no open files, locks or generators in it)",
        ) from error
    return Template(copied, placeholders, _find_sites(copied, placeholders))


def refuse_written_views(module: nn.Module, written: Iterable[str]) -> None:
    """Refuse a written buffer that shares memory with another: each is a value of its own.

    Raises:
        LowerError: there is one; names both.
    """
    buffers = {name: value for name, value in module.named_buffers() if _has_storage(value)}
    for name in buffers.keys() & set(written):
        for other, value in buffers.items():
            if other != name and _storage(value) == _storage(buffers[name]):
                raise LowerError(
                    f"Buffer {name!r} is written and shares memory with buffer {other!r}.",
                    where=f"buffer {name}",
                    why="A state holds each buffer as a value of its own; a view would not see "
                    "what is written to the other.",
                    fix="register one of them, and take the view of it in forward",
                    buffer=name,
                    other=other,
                )


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _refuse_hooks(params: Mapping[str, nn.Parameter]) -> None:
    """Parameters of a step are other tensors, on which hooks of the user's would never run."""
    hooked = [
        path
        for path, param in params.items()
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
    ]
    if hooked:
        raise LowerError(
            f"{len(hooked)} of {len(params)} parameters have hooks on their gradients.",
            where=f"parameter {hooked[0]}",
            facts=summarise(hooked),
            why="A step computes gradients of its own copies of the parameters, so hooks of "
            "register_hook() would silently not run.",
            fix="change gradients in the optimizer, as a gradient transform, and remove the hooks",
            path=hooked[0],
            count=len(hooked),
        )


def _find_sites(
    module: nn.Module, placeholders: Mapping[str, Placeholder]
) -> dict[str, tuple[tuple[dict[str, Any], str], ...]]:
    paths = {id(placeholder): path for path, placeholder in placeholders.items()}
    sites: dict[str, list[tuple[dict[str, Any], str]]] = {path: [] for path in placeholders}
    for child in module.modules():
        for name, value in child._parameters.items():
            if id(value) in paths:
                sites[paths[id(value)]].append((child._parameters, name))
    return {path: tuple(found) for path, found in sites.items()}
