"""The guide of a trace: binds fake parameters and writes down who came when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.compat import FakeTensorMode
from shardwise.sharding.plan import Plan, Unit
from shardwise.sharding.pytree import tree_leaves
from shardwise.transforms.activations import Activations
from shardwise.transforms.binding import Binding, Stage
from shardwise.transforms.faults import read_outside, written_in_place
from shardwise.transforms.order import Event, call_of
from shardwise.transforms.outputs import replace_tensors
from shardwise.transforms.regions import Region
from shardwise.transforms.tensor_layers import Boundary, Run
from shardwise.transforms.typed_trace import Typed


class Tracer:
    """The guide of a trace: binds fake parameters and writes down who came when."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        mode: FakeTensorMode,
        device: torch.device,
        staying: frozenset[str],
        *,
        collects: bool = False,
    ) -> None:
        self._staying = staying
        self._bindings: dict[str, Binding] = {}
        self._values: dict[str, list[Tensor]] = {}
        self._open: dict[str, int] = {}
        self._entered: dict[str, int] = {}
        self._around: list[str] = []
        self._num_calls: Counter[str] = Counter()
        self.events: list[Event] = []
        self.activations: Activations | None = None
        self._acts = plan.acts
        infos = {info.path: info for info in plan.infos}
        with mode:
            for unit in plan.units:
                self._bindings[unit.name] = Binding(unit.name, unit.params, stage.template)
                self._values[unit.name] = [
                    _fake_parameter(
                        plan.tensor.block(infos[path]),
                        plan.compute[path].dtype,
                        device,
                        infos[path].trainable,
                    )
                    for path in unit.params
                ]
        self.typed: Typed | None = None
        if plan.tensor.axes:
            values = {path: value for unit in plan.units for path, value in self._named(unit)}
            self.typed = Typed(plan, values, self.events, self._around, collects=collects)
        self._trainable = {
            unit.name: any(infos[path].trainable for path in unit.params) for unit in plan.units
        }

    def enter(self, unit: str, inputs: Any = None) -> Any:
        """Bind and note."""
        if self._open.get(unit):
            self._open[unit] += unit not in self._staying
            return
        self._open[unit] = 1
        self._bindings[unit].bind(self._values[unit])
        self._entered[unit] = len(self.events)
        grad = self._trainable[unit] and (unit in self._staying or torch.is_grad_enabled())
        self.events.append(Event("enter", unit, grad, tuple(self._around)))

    def leave(self, unit: str, output: Any, inputs: Any = None) -> Any:
        """Unbind and note; a frozen unit has a backward if its output has one."""
        if unit in self._staying:
            return output
        self._open[unit] -= 1
        if self._open[unit]:
            return output
        entered = self._entered[unit]
        grad = self.events[entered].grad or _requires_grad(output, unit)
        self.events[entered] = replace(self.events[entered], grad=grad)
        self.events.append(Event("leave", unit, grad, tuple(self._around)))
        self._bindings[unit].unbind(self._values[unit])
        return output

    def resolve(self, path: str, unit: str) -> Tensor:
        """A read binds a child of the root."""
        if unit in self._staying and not self._open.get(unit):
            self.enter(unit)
        if not self._open.get(unit) or unit not in self._staying:
            raise read_outside(path, unit, "the trace of the forward pass")
        return self._values[unit][self._bindings[unit].index[path]]

    def run(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module once and count what its recomputation will do."""
        if not torch.is_grad_enabled() or self.activations is None:
            return region.forward(*args, **kwargs)
        call = call_of(region.name, self._num_calls[region.name])
        self._num_calls[region.name] += 1
        first = len(self.events)
        self._around.append(call)
        if self.typed is not None:
            self.typed.crossings.recent.clear()
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            with self.activations.region(region, inputs):
                output = region.forward(*args, **kwargs)
        finally:
            self._around.pop()
            if self.typed is not None:
                self.typed.crossings.recent.clear()
        if region.spans and not _requires_grad(output, region.name):
            # Backward never comes here, so nothing inside is gathered again.
            self.events[first:] = [_outside(event, call) for event in self.events[first:]]
        return output

    def cross(self, boundary: Boundary, place: str, tensor: Tensor) -> Tensor:
        """Choose how an activation crosses, by its type."""
        return tensor if self.typed is None else self.typed.crossings.cross(boundary, place, tensor)

    def crosses(self, way: str) -> bool:
        """Nothing is chosen yet."""
        return True

    def saving(self, path: str) -> AbstractContextManager[None]:
        """Count apart what the module saves."""
        if self.activations is None:
            return nullcontext()
        acts = self._acts[path]
        return self.activations.on_tier(str(acts.tier), acts.prefetch)

    def look_up(self, boundary: Boundary, module: nn.Embedding, run: Run, tokens: Tensor) -> Tensor:
        """Each rank has a summand."""
        assert self.typed is not None
        return self.typed.look_up(boundary, module, run, tokens)

    def _named(self, unit: Unit) -> Iterable[tuple[str, Tensor]]:
        return zip(unit.params, self._values[unit.name], strict=True)

    @property
    def parameters(self) -> list[Tensor]:
        """All fake parameters."""
        return [value for values in self._values.values() for value in values]

    def refuse_writes(self, storages: set[int]) -> None:
        """Raise if the forward pass has written parameters, given the storages it has written."""
        for unit, values in self._values.items():
            for path, value in zip(self._bindings[unit].paths, values, strict=True):
                if storage_of(value) in storages:
                    raise written_in_place(path, unit)

    def close(self) -> None:
        """Put all placeholders back."""
        for binding in self._bindings.values():
            binding.restore()


def _fake_parameter(
    shape: tuple[int, ...], dtype: str, device: torch.device, trainable: bool
) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device, requires_grad=trainable)


def _outside(event: Event, call: str) -> Event:
    return replace(event, regions=tuple(region for region in event.regions if region != call))


def _requires_grad(output: Any, unit: str) -> bool:
    found = False

    def look(tensors: list[Tensor]) -> Sequence[Tensor]:
        nonlocal found
        found = any(tensor.requires_grad for tensor in tensors)
        return tensors

    replace_tensors(output, unit, look)
    return found


def storage_of(tensor: Tensor) -> int:
    """Which storage a fake tensor has: a number, as it has no address."""
    return tensor.untyped_storage()._cdata
