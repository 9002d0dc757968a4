"""Steps of optimizers on flat host tensors, in one pass over memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.kernels.native import library
from shardwise.kernels.recipes import Recipe

_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_NO_SHADOW = 4
_NUM_CONSTANTS = 8
_ZEROS = ((0, 0), (0,), ())
"""Places of states that an optimizer does not have."""

_SQUARES_BLOCK = 4096


class Group(NamedTuple):
    """Tensors of one length that are stepped together.

    Attributes:
        param: changed; float32 or float64.
        grad: read; of the same dtype, or a narrower one.
        states: changed; like the parameter, as many as the recipe has.
        shadow: written: the new parameter in 16 bits; None: nobody wants it.
    """

    param: Tensor
    grad: Tensor
    states: tuple[Tensor, ...] = ()
    shadow: Tensor | None = None


def takes(group: Group) -> bool:
    """Whether the kernel is there, and takes these tensors.

    >>> takes(Group(torch.ones(3, device="meta"), torch.ones(3, device="meta")))
    False
    """
    param, grad, states, shadow = group
    dtypes = (param.dtype, grad.dtype, None if shadow is None else shadow.dtype)
    if dtypes not in _taken():
        return False
    tensors = (param, grad, *states) if shadow is None else (param, grad, *states, shadow)
    for one in tensors:
        if type(one) is not Tensor or not one.is_cpu or not one.is_contiguous():
            return False
    return True


@functools.cache
def _taken() -> frozenset[tuple[torch.dtype, torch.dtype, torch.dtype | None]]:
    """Dtypes of parameter, gradient and shadow that the library has a way for."""
    if library() is None:
        return frozenset()
    halves = [torch.bfloat16, *([torch.float16] if library().sw_has_half() else [])]
    grads = {torch.float32: [torch.float32, *halves]}
    grads[torch.float64] = [torch.float64, *grads[torch.float32]]
    shadows = [None, *halves]
    return frozenset((p, g, s) for p, known in grads.items() for g in known for s in shadows)


@torch.no_grad()
def step_(recipe: Recipe, groups: Sequence[Group], *, scale: float = 1.0) -> None:
    """Step all groups: one pass over memory, with as many threads as torch has.

    Its bits depend neither on how a tensor is cut nor on the number of threads, and are those of
    `reference_`. Moves `28 B` per float32 element for AdamW: 16 read, 12 written.

    Args:
        recipe: what is done to each element.
        groups: each of which `takes` has taken.
        scale: multiplies gradients.

    >>> from shardwise.kernels import recipes
    >>> param = torch.tensor([1.0, 2.0])
    >>> recipe = recipes.sgd(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
    >>> reference_(recipe, [Group(param, torch.tensor([1.0, -1.0]))], scale=2.0)
    >>> param
    tensor([0., 3.])
    """
    alike: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}
    for param, grad, states, shadow in groups:
        key = (param.dtype, grad.dtype, None if shadow is None else shadow.dtype)
        at, lengths = alike.setdefault(key, ([], []))
        at += (param.data_ptr(), grad.data_ptr())
        at += [state.data_ptr() for state in states]
        at += _ZEROS[len(states)]
        at.append(0 if shadow is None else shadow.data_ptr())
        lengths.append(param.numel())
    constants = (ctypes.c_double * _NUM_CONSTANTS)(*recipe.constants)
    for (dtype, grads, shadows), (at, lengths) in alike.items():
        library().sw_step(
            recipe.which,
            len(lengths),
            (ctypes.c_void_p * len(at))(*at),
            (ctypes.c_int64 * len(lengths))(*lengths),
            _KINDS[dtype],
            _KINDS[grads],
            _NO_SHADOW if shadows is None else _KINDS[shadows],
            scale,
            constants,
            recipe.flags,
            torch.get_num_threads(),
        )


@torch.no_grad()
def reference_(recipe: Recipe, groups: Sequence[Group], *, scale: float = 1.0) -> None:
    """The same with torch, in many passes, on any device.

    Args:
        recipe: what is done to each element.
        groups: any.
        scale: multiplies gradients.
    """
    for param, grad, states, shadow in groups:
        wide = grad.to(param.dtype)
        recipe.reference(param, wide if scale == 1.0 else wide * scale, states)
        if shadow is not None:
            # Through float32, as there is one way from there to 16 bits.
            shadow.copy_(param.float())


def squares(flat: Tensor) -> float:
    """The sum of the squares of all elements, infinite or NaN if one of them is.

    Added up in float64, in blocks, in an order that does not depend on threads. One pass tells both
    the norm and whether all gradients are finite.

    Args:
        flat: contiguous, on the host.

    >>> squares(torch.tensor([3.0, 4.0]))
    25.0
    """
    native: Any = library()
    known = flat.dtype in _KINDS and flat.is_contiguous()
    if native is None or not known or (flat.dtype == torch.float16 and not native.sw_has_half()):
        return float(flat.double().square().sum())
    blocks = torch.empty(-(-flat.numel() // _SQUARES_BLOCK), dtype=torch.float64)
    kind, threads = _KINDS[flat.dtype], torch.get_num_threads()
    return native.sw_squares(flat.data_ptr(), flat.numel(), kind, threads, blocks.data_ptr())
