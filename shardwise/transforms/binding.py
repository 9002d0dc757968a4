"""Binding: tensors in the place of a unit's placeholders, and the hooks that ask for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from shardwise.offload.saved import Keeper
from shardwise.sharding.boundaries import Cast
from shardwise.sharding.derived import Remat
from shardwise.sharding.errors import UnitError
from shardwise.sharding.functional import Template
from shardwise.sharding.plan import Plan, Unit
from shardwise.transforms.casts import install_casts
from shardwise.transforms.draws import locate
from shardwise.transforms.dropout import Dropout
from shardwise.transforms.places import Forward, Places, placed
from shardwise.transforms.regions import Region
from shardwise.transforms.replaying import aside
from shardwise.transforms.tensor_context import current_tensor_context
from shardwise.transforms.tensor_layers import (
    Boundary,
    Run,
    find_boundaries,
    install_boundary,
    install_ints,
)

_NOTHING: Mapping[str, Remat] = {}
_NO_CASTS: Mapping[str, Cast] = {}


class Binding:
    """Where the parameters of one unit are looked up in the template."""

    def __init__(self, unit: str, paths: Sequence[str], template: Template) -> None:
        self.unit = unit
        self.paths = tuple(paths)
        self.index = {path: index for index, path in enumerate(paths)}
        self._sites = [
            (table, name, index, template.placeholders[path])
            for index, path in enumerate(paths)
            for table, name in template.sites[path]
        ]

    def bind(self, parameters: Sequence[Tensor]) -> None:
        """Put tensors in the places of the parameters, in the order of `paths`."""
        for table, name, index, _ in self._sites:
            table[name] = parameters[index]

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Refuse another tensor in the place of a parameter.

        Raises:
            UnitError: the module has put one there.
        """
        for table, name, index, _ in self._sites:
            if table.get(name) is not parameters[index]:
                self.restore()
                raise _rebound(self.unit, self.paths[index])

    def unbind(self, parameters: Sequence[Tensor]) -> None:
        """Put the placeholders back.

        Raises:
            UnitError: the module has put another tensor in the place of a parameter.
        """
        self.check(parameters)
        self.restore()

    def restore(self) -> None:
        """Put the placeholders back, whatever is in their place."""
        for table, name, _, placeholder in self._sites:
            table[name] = placeholder


class Guide(Protocol):
    """What the hooks of the template ask: the engine of a step, or a trace."""

    def enter(self, unit: str, /, inputs: Any = None) -> Any:
        """Before the unit's forward; returns inputs to use instead, or None."""
        ...

    def leave(self, unit: str, /, output: Any, inputs: Any = None) -> Any:
        """After the unit's forward; returns the output to use."""
        ...

    def resolve(self, path: str, unit: str, /) -> Tensor:
        """A value for a placeholder that is read."""
        ...

    def run(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """The forward of a module that backward is to recompute."""
        ...

    def cross(self, boundary: Boundary, place: str, tensor: Tensor, /) -> Tensor:
        """An activation on the other side of a boundary."""
        ...

    def crosses(self, way: str, /) -> bool:
        """Whether anything may cross a boundary on its way in or out."""
        ...

    def look_up(
        self, boundary: Boundary, module: nn.Embedding, run: Run, tokens: Tensor, /
    ) -> Tensor:
        """Rows of an embedding whose vocabulary is cut."""
        ...

    def saving(self, path: str, /) -> AbstractContextManager[Any]:
        """Around the forward of a module whose saved values go to a tier."""
        ...


class Stage:
    """A template with its hooks; `guide` is asked and may be exchanged between passes.

    Args:
        template: the private copy of the module.
        units: from the plan.
        guide: who is asked.
        remat: modules to recompute and what to keep of them.
        casts: of inputs and outputs of modules.
        plan: for what tensor axes cut, and for saved values on tiers.
        bound: units whose parameters the guide binds for a whole pass; their hooks are left out.
    """

    def __init__(
        self,
        template: Template,
        units: Sequence[Unit],
        guide: Guide,
        remat: Mapping[str, Remat] = _NOTHING,
        casts: Mapping[str, Cast] = _NO_CASTS,
        *,
        plan: Plan | None = None,
        bound: Collection[str] = (),
    ) -> None:
        self.template = template
        self.guide = guide
        modules = list(template.module.modules())
        root_trains = template.module.training
        self._modules = [(module, module.training or not root_trains) for module in modules]
        self._locate(lambda module: isinstance(module, Dropout))
        self._training: bool | None = None
        owner = {path: unit.name for unit in units for path in unit.params}
        template.watch(lambda path: aside(self.guide.resolve, path, owner[path]))
        boundaries: tuple[Boundary, ...] = ()
        if plan is not None and plan.tensor.axes:
            install_ints(template.module, plan.tensor.ints)
            boundaries = find_boundaries(plan, template.module)
        for boundary in boundaries:
            module = template.module.get_submodule(boundary.path)
            install_boundary(module, boundary, lambda: self.guide)
        install_casts(template.module, casts)
        trainable = {path for path, p in template.placeholders.items() if p.requires_grad}
        for unit in units:
            if unit.kind != "root" and unit.name not in bound:
                module = template.module.get_submodule(unit.name)
                self._install(unit, module, frozen=not trainable.intersection(unit.params))
        inner = {id(template.module.get_submodule(u.name)) for u in units if u.kind != "root"}
        self._crossed = {id(template.module.get_submodule(one.path)) for one in boundaries}
        names = {id(buffer): name for name, buffer in template.module.named_buffers()}
        self._regions = [
            self._recompute(path, policy, inner, names) for path, policy in remat.items()
        ]
        for path in plan.acts if plan is not None else ():
            self._put_aside(path)

    def locate_all(self) -> None:
        """Have every module say that it runs, since `dropout` may be called by any of them."""
        self._locate(lambda module: not isinstance(module, Dropout))

    def surround(self, path: str, wrap: Callable[[Forward], Forward]) -> None:
        """Put a forward around a module's own, inside of what recomputes the module.

        Args:
            path: of the module.
            wrap: gives the new forward.
        """
        region = next((one for one in self._regions if one.name == path), None)
        if region is not None:
            region.forward = wrap(region.forward)
            return
        module = self.template.module.get_submodule(path)
        vars(module)["forward"] = wrap(module.forward)

    def place_modules(self, paths: Iterable[str] | None = None) -> None:
        """Have modules say that they run, to the tensor context of the pass.

        Args:
            paths: of the modules; None: all of them.
        """
        named = dict(self.template.module.named_modules())
        for path in named if paths is None else paths:
            self.surround(path, functools.partial(placed, path=path, places=_current_places))

    def _locate(self, wanted: Callable[[nn.Module], bool]) -> None:
        for path, module in self.template.module.named_modules():
            if wanted(module):
                locate(module, path)

    def set_written(self, buffers: Collection[str]) -> None:
        """Say which buffers a forward pass writes: a recomputation must not write them again."""
        for region in self._regions:
            region.written = frozenset(buffers)

    def _recompute(
        self, path: str, policy: Remat, units: set[int], buffers: Mapping[int, str]
    ) -> Region:
        module = self.template.module.get_submodule(path)
        inside = {id(part) for part in module.modules() if part is not module}
        crosses = not self._crossed.isdisjoint({*inside, id(module)})
        spans = crosses or not units.isdisjoint(inside)
        region = Region(path, module, policy, spans=spans, crosses=crosses, buffers=buffers)

        @functools.wraps(region.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.guide.run(region, args, kwargs)

        vars(module)["forward"] = forward
        return region

    def keep_with(self, keeper: Keeper) -> None:
        """Say what puts the values on a tier that recomputed modules keep there."""
        for region in self._regions:
            region.keeper = keeper

    def _put_aside(self, path: str) -> None:
        """Outside of what recomputes the module: a checkpoint saves what it is given."""
        module = self.template.module.get_submodule(path)
        run = module.forward

        @functools.wraps(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.guide.saving(path):
                return run(*args, **kwargs)

        vars(module)["forward"] = forward

    def set_training(self, training: bool) -> None:
        """Train or eval mode; what was in eval mode under a training root stays so."""
        if training is not self._training:
            self._training = training
            for module, trains in self._modules:
                module.training = training and trains

    def _install(self, unit: Unit, module: nn.Module, *, frozen: bool) -> None:
        name = unit.name

        def enter(module: nn.Module, args: Any) -> None:
            aside(self.guide.enter, name)

        def enter_frozen(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return aside(self.guide.enter, name, (args, kwargs))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return aside(self.guide.leave, name, output, (args, kwargs))

        if frozen:
            module.register_forward_pre_hook(enter_frozen, prepend=True, with_kwargs=True)
        else:
            module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, prepend=True, with_kwargs=True)


def _current_places() -> Places | None:
    context = current_tensor_context()
    return None if context is None else context.places


def _rebound(unit: str, path: str) -> UnitError:
    return UnitError(
        f"The forward of unit {unit or '(root)'!r} replaced its parameter {path!r}.",
        where=f"parameter {path}",
        why="A step computes gradients for the tensors it bound; an assigned one would be lost.",
        fix="compute with a local variable instead of assigning to the parameter",
        path=path,
        unit=unit,
    )
