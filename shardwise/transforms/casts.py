"""Casts at module boundaries, by hooks on the private template; see [Note: casts].

A module that has no cast has no hook. Input hooks run after those of the user and output hooks
before them, so that users' hooks see what the modules around see.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.boundaries import Cast
from shardwise.transforms.outputs import convert_tensors


def install_casts(module: nn.Module, casts: Mapping[str, Cast]) -> None:
    """Put the hooks of a plan's casts on a template.

    Output hooks go to the front: whatever is put before them later, as the hooks of units are, runs
    first and so sees what the module itself returned.

    Args:
        module: of the template.
        casts: by path, from `Precision.casts`.
    """
    for path, cast in casts.items():
        target = module.get_submodule(path)
        if cast.inputs is not None:
            hook = partial(_cast_inputs, getattr(torch, cast.inputs))
            target.register_forward_pre_hook(hook, with_kwargs=True)
        if cast.outputs is not None:
            hook = partial(_cast_output, getattr(torch, cast.outputs))
            target.register_forward_hook(hook, prepend=True)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """A nested structure with its floating tensors in another dtype; parts without any stay.

    >>> cast_floats({"x": torch.ones(1), "n": torch.tensor(1)}, torch.bfloat16)
    {'x': tensor([1.], dtype=torch.bfloat16), 'n': tensor(1)}
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return convert_tensors(tree, cast)


def cast_buffers(buffers: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """Buffers in the dtypes that they rest in."""
    return {
        name: buffer.to(getattr(torch, dtypes[name])) if name in dtypes else buffer
        for name, buffer in buffers.items()
    }


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return cast_floats((args, kwargs), dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats(output, dtype)
