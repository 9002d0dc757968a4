"""Boundaries: modules of the template at which activations cross, where an axis cuts layers.

[Note: boundaries]
A module that holds cut parameters is a boundary: its floating inputs and outputs are offered to
the guide, which says how they cross (a trace decides by types, a step repeats it). So is a
*region*, the module that holds such layers side by side and reads shapes from its input (an
attention block): with a cut sequence, its input must be whole before its forward looks at it. And
so are the ends of a stack of blocks between which the sequence is cut. Two modules are more than
that: an embedding whose vocabulary is cut looks up what it has, and a linear layer whose input is
cut adds its bias after the sum. Everything happens on the private template, in the place of
`forward`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.sharding.errors import PlanError
from shardwise.sharding.plan import Plan
from shardwise.sharding.tensor_cuts import TensorAxis
from shardwise.transforms.outputs import convert_tensors
from shardwise.transforms.replaying import aside


@dataclass(frozen=True, slots=True)
class Boundary:
    """A module at which activations cross.

    Args:
        path: of the module.
        role: `layer`, `region`, `begin` or `end` of a stack.
        axes: tensor axes that it is about.
        stack: path of the list of modules that it is in, if the sequence is cut there.
        is_logits: whether its output is over a cut vocabulary.
        rows: of the vocabulary.
        cuts_input: whether a layer's output is a summand, so that its bias has to wait.
        is_fresh: whether that output is a tensor that nothing else reads.
        label: what it is called in reports.
    """

    path: str
    role: str
    axes: tuple[str, ...]
    stack: str = ""
    is_logits: bool = False
    rows: int = 0
    cuts_input: bool = False
    is_fresh: bool = False
    label: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        role = "" if self.role == "layer" else f" ({self.role})"
        object.__setattr__(self, "label", f"{self.path}{role}")

    def way(self, place: str) -> str:
        """What the names of crossings at a kind of places (`in` or `out`) begin with."""
        return f"{self.label} {place}"

    def crossing(self, place: str, axis: str) -> str:
        """What a crossing is called in events and reports."""
        return f"{self.label} {place} {axis}"


Run = Callable[[Tensor], Tensor]
"""The forward of an embedding."""


class Crosser(Protocol):
    """Who is asked at a boundary."""

    def cross(self, boundary: Boundary, place: str, tensor: Tensor, /) -> Tensor:
        """The tensor on the other side."""
        ...

    def crosses(self, way: str, /) -> bool:
        """Whether anything may cross there; see `Boundary.way`."""
        ...

    def look_up(
        self, boundary: Boundary, module: nn.Embedding, run: Run, tokens: Tensor, /
    ) -> Tensor:
        """Rows of an embedding whose vocabulary is cut: zeros for tokens of other ranks."""
        ...


def find_boundaries(plan: Plan, module: nn.Module) -> tuple[Boundary, ...]:
    """All boundaries, outer ones first.

    Args:
        plan: says what is cut.
        module: the model or its template.
    """
    tensor = plan.tensor
    if not tensor.frames:
        return ()
    by_part = {part: axis.name for axis in tensor.axes.values() for part in axis.parts}
    owners: dict[str, set[str]] = {}
    for path, frame in tensor.frames.items():
        for name in plan.info(path).names:
            axes = owners.setdefault(name.rpartition(".")[0], set())
            axes |= {by_part[part] for part in frame.axes}
    for axis in tensor.axes.values():
        for path in shared_by_all(plan, axis):
            for name in plan.info(path).names:
                owners.setdefault(_above(name), set()).add(axis.name)
    stacks = _stacks(plan, module, owners)
    units = {unit.name for unit in plan.units if unit.kind != "child"}
    found: dict[tuple[str, str], Boundary] = {}
    for path, axes in owners.items():
        stack = next((one for one in stacks if path.startswith(f"{one}.")), "")
        names = tuple(sorted(axes))
        parent, layer = path.rpartition(".")[0], module.get_submodule(path)
        if stack and parent and parent not in units and _is_cut(plan, path, layer, ends=1):
            found.setdefault((parent, "region"), Boundary(parent, "region", names, stack))
        logits, rows = _vocabulary(plan, path, layer)
        sums = _is_cut(plan, path, layer, ends=0)
        found[path, "layer"] = Boundary(
            path,
            "layer",
            names,
            stack,
            logits,
            rows,
            cuts_input=sums,
            is_fresh=sums and _is_linear(layer),
        )
    for stack, (first, last, axes) in stacks.items():
        found[first, "begin"] = Boundary(first, "begin", axes, stack)
        found[last, "end"] = Boundary(last, "end", axes, stack)
    order = {path: number for number, (path, _) in enumerate(module.named_modules())}
    return tuple(sorted(found.values(), key=lambda one: order[one.path]))


def shared_by_all(plan: Plan, axis: TensorAxis) -> dict[str, int]:
    """Whole parameters whose one head every rank of an axis uses with heads of its own.

    To a trace they are as if each rank had one of as many heads, which are copies: so k and v fit
    the heads of q, and each rank has a part of the gradient.

    Args:
        plan: says what is cut.
        axis: that cuts layers.

    Returns:
        By path the dimension that the head is in.
    """
    names = {name for name, parts in axis.cuts.items() if parts == 1}
    if plan.mesh[axis.name] == 1 or not names:
        return {}
    framed = plan.tensor.frames.items()
    cut = [path for path, frame in framed if not set(axis.parts).isdisjoint(frame.axes)]
    beside = {_above(_above(name)) for path in cut for name in plan.info(path).names}
    found: dict[str, int] = {}
    for info in plan.infos:
        places = [at for name in names for at in info.axes.places().get(name, ())]
        near = any(_above(_above(name)) in beside for name in info.names)
        if places and near and info.path not in cut:
            found[info.path] = places[0][0]
    return found


def _above(path: str) -> str:
    return path.rpartition(".")[0]


def _stacks(
    plan: Plan, module: nn.Module, owners: Mapping[str, set[str]]
) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Lists of units with cut layers over an axis that cuts the sequence: first, last, axes."""
    axes = tuple(axis.name for axis in plan.tensor.axes.values() if axis.sequence)
    found: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    if not axes:
        return found
    for unit in plan.units:
        if unit.kind == "unit" and any(path.startswith(f"{unit.name}.") for path in owners):
            stack = unit.name.rpartition(".")[0]
            first = found[stack][0] if stack in found else unit.name
            found[stack] = (first, unit.name, axes)
    return found


def _is_cut(plan: Plan, path: str, module: nn.Module, *, ends: int) -> bool:
    """Whether a layer's input (`ends` 0) or output (1) is cut."""
    info = next((i for i in plan.infos if f"{path}.weight" in i.names), None)
    frame = None if info is None else plan.tensor.frames.get(info.path)
    if frame is None or len(frame.shape) < 2 or isinstance(module, nn.Embedding):
        return False
    inputs = 0 if type(module).__name__ == _TRANSPOSED else 1
    return (inputs in frame.cut_dims) != bool(ends)


_TRANSPOSED = "Conv1D"
"""The class of transformers whose weights are inputs x outputs."""


def _vocabulary(plan: Plan, path: str, module: nn.Module) -> tuple[bool, int]:
    """Whether a layer gives logits over a cut vocabulary, and how many there are."""
    weight = f"{path}.weight"
    known = next((i for i in plan.infos if weight in i.names), None)
    if known is None or known.path not in plan.tensor.frames or "vocab" not in known.axes.names:
        return False, 0
    return not isinstance(module, nn.Embedding), known.shape[known.axes.names.index("vocab")]


def install_ints(template: nn.Module, ints: Mapping[str, int]) -> None:
    """Make integers that modules read local: head counts, sizes of splits.

    An attribute of something that a module holds (a configuration) is set on a copy that only this
    module of the template has.

    Args:
        template: the private copy.
        ints: by path of an attribute.
    """
    modules = dict(template.named_modules())
    for place, value in ints.items():
        path, _, name = place.rpartition(".")
        if path in modules:
            setattr(modules[path], name, value)
            continue
        owner, _, held = path.rpartition(".")
        own = copy.copy(getattr(modules[owner], held))
        setattr(own, name, value)
        setattr(modules[owner], held, own)


def install_boundary(module: nn.Module, boundary: Boundary, guide: Callable[[], Crosser]) -> None:
    """Put a boundary in the place of a module's forward.

    Args:
        module: of the template.
        boundary: what it is.
        guide: gives who is asked now.

    Raises:
        PlanError: an embedding has options that need all of its rows.
    """
    inner: Callable[..., Any] = module.forward
    if boundary.role == "layer" and isinstance(module, nn.Embedding) and boundary.rows:
        _refuse_options(boundary.path, module)

        own: Callable[..., Any] = module.forward

        def look_up(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            def run(local: Tensor) -> Tensor:
                return own(local, *args, **kwargs)

            return guide().look_up(boundary, module, run, tokens)

        inner = look_up
    adds_bias = boundary.cuts_input and _is_linear(module) and _has_bias(module)
    enters, leaves = boundary.way("in"), boundary.way("out")

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        now = guide()
        if now.crosses(enters):
            if len(args) == 1 and not kwargs:  # nearly always: no containers to walk
                args = (_crossed(args[0], "in", boundary, now),)
            else:
                args, kwargs = _crossed((args, kwargs), "in", boundary, now)
        if not now.crosses(leaves):
            return inner(*args, **kwargs)
        if adds_bias:
            return _crossed_linear(module, args[0], boundary, now)
        return _crossed(inner(*args, **kwargs), "out", boundary, now)

    vars(module)["forward"] = forward


def _crossed(tree: Any, way: str, boundary: Boundary, guide: Crosser) -> Any:
    if isinstance(tree, Tensor):
        if not tree.is_floating_point():
            return tree
        return aside(guide.cross, boundary, f"{way}0", tree)
    number = -1

    def convert(tensor: Tensor) -> Tensor:
        nonlocal number
        if not tensor.is_floating_point():
            return tensor
        number += 1
        return aside(guide.cross, boundary, f"{way}{number}", tensor)

    return convert_tensors(tree, convert)


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer is a product with its weight, and a bias if it has one."""
    return type(module).forward is nn.Linear.forward or type(module).__name__ == _TRANSPOSED


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def _crossed_linear(module: Any, x: Tensor, boundary: Boundary, guide: Crosser) -> Tensor:
    """A linear layer with its bias added to what has crossed: once, not on every rank."""
    transposed = type(module).__name__ == _TRANSPOSED
    weight = module.weight.t() if transposed else module.weight
    whole = _crossed(functional.linear(x, weight), "out", boundary, guide)
    return whole + module.bias


def _refuse_options(path: str, module: nn.Embedding) -> None:
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            raise PlanError(
                f"The vocabulary of {path!r} cannot be cut: it has {name}={getattr(module, name)}.",
                where=f"module {path}",
                why="A rank sees the tokens and rows of its own part only.",
                fix=f"make the embedding without {name}, or leave it out with where=",
                path=path,
            )


def cut_lookup(
    module: nn.Embedding, run: Run, tokens: Tensor, *, place: int, rows: int, check: bool = True
) -> Tensor:
    """Rows of the tokens that this rank has, zeros for the others: the sum over ranks is whole.

    Args:
        module: bound to this rank's rows.
        run: its forward, in which a row of the result depends on its own token.
        tokens: of the whole vocabulary.
        place: of the rank.
        rows: of the vocabulary.
        check: look for tokens that are none.

    Raises:
        IndexError: on the CPU: a token that is none.
    """
    count = module.weight.shape[0]
    if check and tokens.device.type == "cpu" and tokens.numel():
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= rows:
            raise IndexError(f"tokens from {low} to {high}; the vocabulary has {rows} rows")
    local = tokens - place * count
    mine = (local >= 0) & (local < count)
    padding = module.padding_idx
    if padding is not None:
        here = padding - place * count
        module.padding_idx = here if 0 <= here < count else None
    try:
        found = run(torch.where(mine, local, 0))
    finally:
        module.padding_idx = padding
    return torch.where(mine.unsqueeze(-1), found, found.new_zeros(()))
