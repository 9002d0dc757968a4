"""Casts at module boundaries: where modules that compute in different dtypes hand over tensors.

[Note: casts]
The floating inputs of the model are cast to the dtype that most of its trainable elements compute
in. A module is a boundary if it holds parameters and none of them computes in the dtype around it:
its floating inputs are cast to its own dtype, and what it returns back to the dtype around it. A
module that `outputs=` is given for returns that dtype instead. Parameters of a list count for the
module around the list, since a list is never called. A plan that leaves the dtypes of the module
alone casts nothing, so that a mixed model runs as its author wrote it. Casts are made where a
module is called: a method of another name than `forward` gets its inputs as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.sharding.precision import is_float
from shardwise.sharding.spec import Spec
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo


@dataclass(frozen=True, slots=True)
class Cast:
    """The dtypes that floating inputs and outputs of a module are cast to; None: not at all."""

    inputs: str | None = None
    outputs: str | None = None

    def __str__(self) -> str:
        texts = [
            self.inputs or "as it comes",
            *([f"returns {self.outputs}"] if self.outputs else []),
        ]
        return ", ".join(texts)


def find_casts(
    infos: Sequence[ParamInfo],
    compute: Mapping[str, Spec],
    modules: Sequence[str],
    outputs: Mapping[str, str],
) -> FrozenMap[str, Cast]:
    """The casts of every module that has some, in module order; see [Note: casts].

    Args:
        infos: all parameters.
        compute: their compute layouts.
        modules: paths of what there is to call, outer ones first.
        outputs: dtypes that modules were told to return.
    """
    floats = [info for info in infos if is_float(info.dtype)]
    if all(compute[info.path].dtype == info.dtype for info in floats):
        return FrozenMap((path, Cast(None, outputs[path])) for path in modules if path in outputs)
    most = _most(_elements([i for i in floats if i.trainable] or floats, compute))
    callable_paths = frozenset(modules)
    held: dict[str, list[ParamInfo]] = {}
    for info in floats:
        for owner in _owners(info, callable_paths):
            held.setdefault(owner, []).append(info)
    around: dict[str, str] = {}
    casts: dict[str, Cast] = {}
    for path in modules:
        above = _above(path, callable_paths)
        outer = most if above is None else around[above]
        own = _elements(held.get(path, ()), compute)
        is_boundary = above is not None and bool(own) and outer not in own
        around[path] = _most(own) if is_boundary else outer
        if is_boundary or above is None:
            back = outer if is_boundary else None
            casts[path] = Cast(around[path], outputs.get(path, back))
        elif path in outputs:
            casts[path] = Cast(None, outputs[path])
    return FrozenMap(casts)


def _elements(infos: Iterable[ParamInfo], compute: Mapping[str, Spec]) -> Counter[str]:
    """How many elements compute in each dtype."""
    count: Counter[str] = Counter()
    for info in infos:
        count[compute[info.path].dtype] += math.prod(info.shape)
    return count


def _most(elements: Counter[str]) -> str:
    """The dtype of most elements; the wider one of two with as many."""
    return max(elements, key=lambda name: (elements[name], getattr(torch, name).itemsize, name))


def _owners(info: ParamInfo, modules: frozenset[str]) -> tuple[str, ...]:
    """The modules that read a parameter as their own."""
    direct = [name.rpartition(".")[0] for name in info.names]
    found = tuple(dict.fromkeys(path for path in direct if path in modules))
    if found:
        return found
    above = _above(info.path, modules)
    return () if above is None else (above,)


def _above(path: str, modules: frozenset[str]) -> str | None:
    """The nearest module around a path that is called; None: there is none."""
    while path:
        path = path.rpartition(".")[0]
        if path in modules:
            return path
    return None
