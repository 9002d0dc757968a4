"""Units: which parameters a module has, and which of them are gathered together.

[Note: units]
A unit is entered and left through its own `forward`, so only modules that define one can be units.
The rules, for a module tree without `units=`:

- *unit*: every child of the outermost `ModuleList`/`Sequential` whose children are alike (same
  class, same parameter names and shapes, two or more). Left as soon as it has run.
- *child*: outside of units, a module that contains none and hangs below the root or below a module
  that does contain one (embedding, final norm, head). Entered at first use, stays open.
- *root*: everything else: parameters held directly by the root or by a module around units, and
  every parameter whose ties reach into two of the above. Gathered for the whole step.

Modules count by identity: one block registered at two paths is one unit, and its parameters, seen
under two names, cross nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import PlanError
from shardwise.sharding.tree import match_exact, no_match

Kind: TypeAlias = Literal["root", "child", "unit"]


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What a plan knows of one parameter; `aliases` are its other names when it is tied."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    axes: Axes
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The path and every alias."""
        return (self.path, *self.aliases)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together; the root unit is named `""`."""

    name: str
    kind: Kind
    params: tuple[str, ...]


def param_infos(module: nn.Module) -> tuple[ParamInfo, ...]:
    """Every parameter once, in `named_parameters()` order, with anonymous axes.

    >>> [info.path for info in param_infos(nn.Linear(2, 3))]
    ['weight', 'bias']
    """
    infos: dict[int, ParamInfo] = {}
    for path, param in module.named_parameters(remove_duplicate=False):
        known = infos.get(id(param))
        if known is not None:
            infos[id(param)] = replace(known, aliases=(*known.aliases, path))
            continue
        if isinstance(param, UninitializedParameter):
            raise _lazy(path)
        dtype = dtype_name(param.dtype)
        axes = Axes.anonymous(param.ndim)
        infos[id(param)] = ParamInfo(path, tuple(param.shape), dtype, param.requires_grad, axes)
    return tuple(infos.values())


def _lazy(path: str) -> PlanError:
    return PlanError(
        f"Parameter {path!r} has no shape yet.",
        where=f"parameter {path}",
        why="A plan lays out shapes; those of lazy modules are known after their first forward.",
        fix="run the module once on a small input, or build it with all sizes (nn.Linear)",
        path=path,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name a spec uses.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def find_units(
    module: nn.Module, infos: Sequence[ParamInfo], patterns: Sequence[str] | None = None
) -> tuple[Unit, ...]:
    """Group parameters by the module that gathers them: the root first, then module order.

    Args:
        module: the model.
        infos: its parameters.
        patterns: over module paths; the modules matched are the units, instead of the rule in
            [Note: units]. They may nest: a parameter belongs to the innermost.

    Raises:
        PatternError: a pattern matches no module.
        PlanError: a pattern matches a module that has no `forward` of its own.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> [(unit.name, unit.kind, unit.params[:1]) for unit in find_units(model, param_infos(model))]
    [('', 'root', ()), ('0', 'unit', ('0.weight',)), ('1', 'unit', ('1.weight',))]
    """
    found = _alike_children(module) if patterns is None else _matched(module, tuple(patterns))
    kinds: dict[int, Kind] = {id(part): "unit" for part in found}
    kinds |= {id(part): "child" for part in _children(module, kinds)}
    names = {id(part): path for path, part in module.named_modules() if id(part) in kinds}
    owners = _owners(module, names)
    params: dict[str, list[str]] = {"": [], **{name: [] for name in names.values()}}
    for info in infos:
        around = {owners[name] for name in info.names}
        params[around.pop() if len(around) == 1 else ""].append(info.path)
    root = Unit("", "root", tuple(params[""]))
    others = (Unit(name, kinds[part], tuple(params[name])) for part, name in names.items())
    return (root, *(unit for unit in others if unit.params))


def _has_forward(module: nn.Module) -> bool:
    # ModuleList, ModuleDict and ParameterList are never called, so no hook of theirs ever fires.
    return type(module).forward is not nn.Module.forward


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _alike_children(module: nn.Module) -> Iterator[nn.Module]:
    """Children of the outermost lists whose children are alike."""
    if isinstance(module, nn.ModuleList | nn.Sequential) and _alike(module):
        yield from module.children()
        return
    for child in module.children():
        yield from _alike_children(child)


def _alike(children: nn.ModuleList | nn.Sequential) -> bool:
    if len(children) < 2 or not all(_has_forward(part) and _has_params(part) for part in children):
        return False
    forms = {
        (type(child), tuple((name, param.shape) for name, param in child.named_parameters()))
        for child in children
    }
    return len(forms) == 1


def _matched(module: nn.Module, patterns: tuple[str, ...]) -> Iterator[nn.Module]:
    """Modules with parameters that one of the patterns matches."""
    parts = [(path, part) for path, part in module.named_modules() if path and _has_params(part)]
    paths = [path for path, _ in parts]
    for pattern in patterns:
        if not any(match_exact(pattern, path) for path in paths):
            raise no_match(pattern, paths)
    for path, part in parts:
        if not any(match_exact(pattern, path) for pattern in patterns):
            continue
        if not _has_forward(part):
            raise PlanError(
                f"units={list(patterns)!r} makes a unit of {path!r}, which is never called.",
                where=f"{path}   {type(part).__name__} with {len(list(part.children()))} children",
                why="A unit is entered through its own forward; this module defines none.",
                fix=f"name its children instead: '{path}.*'",
                path=path,
            )
        yield part


def _children(module: nn.Module, units: Container[int]) -> list[nn.Module]:
    """Modules outside units that are entered at first use."""
    parts = list(module.modules())
    inside = {id(part) for unit in parts if id(unit) in units for part in unit.modules()}
    around = {
        id(part)
        for part in parts
        if any(id(below) in units for below in part.modules() if below is not part)
    }

    def walk(part: nn.Module) -> Iterator[nn.Module]:
        for child in part.children():
            if id(child) in inside or not _has_params(child):
                continue
            if id(child) in around or not _has_forward(child):
                yield from walk(child)
            else:
                yield child

    return list(walk(module))


def _owners(module: nn.Module, names: dict[int, str]) -> dict[str, str]:
    """For every parameter name, aliases included, the innermost unit or child around it."""
    around: dict[str, str] = {}
    owners: dict[str, str] = {}
    # Parents come before their children, and a module registered twice comes twice.
    for path, part in module.named_modules(remove_duplicate=False):
        above = around.get(path.rpartition(".")[0], "")
        around[path] = names.get(id(part), above)
        for name, _ in part.named_parameters(recurse=False, remove_duplicate=False):
            owners[_join(path, name)] = around[path]
    return owners


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
