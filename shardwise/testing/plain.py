"""A plain copy of a model, trained by plain autograd: values go in, a part's gradients come out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.optim.base import Tensors
from shardwise.sharding.errors import StateError
from shardwise.transforms.loss import Loss, parse_loss

LossFunction = Callable[[Any, Any], Any]


class Part(NamedTuple):
    """What one part of a batch gives: its loss as a sum, and gradients of that sum."""

    loss: Loss
    grads: dict[str, Tensor | None]  # None: this part did not use the parameter
    buffers: Tensors  # after the forward pass


class PlainModel:
    """A private copy of a module; the module itself is never modified.

    Args:
        model: any module; on the meta device if `params` and `buffers` give all values.
        params: values by `named_parameters()` path; default: the module's own.
        buffers: values by path; default: the module's own.
        frozen: paths that do not train, beside those whose `requires_grad` is off.

    Raises:
        StateError: a parameter or buffer has no value.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Mapping[str, Tensor] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        self.module = copy.deepcopy(model)
        if not self.module.training:
            self.module.train()
        self.params: Tensors = {}
        self._leaves: dict[str, nn.Parameter] = {}
        buffer_sites = list(_sites(self.module, "_buffers"))
        self._buffers = {path: (owner, name) for path, owner, name in buffer_sites}
        ties: dict[int, str] = {}
        for path, owner, name in _sites(self.module, "_parameters"):
            old = owner._parameters[name]
            first = ties.setdefault(id(old), path)
            if first == path:
                self._leaves[path] = _leaf(old, _value(path, old, params), path in frozen)
                self.params[path] = self._leaves[path].data
            owner._parameters[name] = self._leaves[first]
        for path, (owner, name) in self._buffers.items():
            owner._buffers[name] = _value(path, owner._buffers[name], buffers)

    @property
    def trainable(self) -> Tensors:
        """Values of the parameters that train, by path; written by an optimizer in place."""
        return {path: self.params[path] for path, p in self._leaves.items() if p.requires_grad}

    def buffers(self) -> Tensors:
        """Copies of the buffers by path."""
        sites = self._buffers.items()
        return {path: owner.get_buffer(name).detach().clone() for path, (owner, name) in sites}

    def write_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Put copies of values in the place of the buffers."""
        for path, value in values.items():
            owner, name = self._buffers[path]
            owner._buffers[name] = value.clone()

    def run(self, loss_fn: LossFunction, batch: Any) -> Part:
        """Forward and backward over one part of a batch."""
        with torch.enable_grad():
            loss = parse_loss(loss_fn(self.module, batch), batch)
            if loss.terms:
                # A sum of means: this part is taken for the whole batch.
                counts = [torch.as_tensor(count).double() for count in loss.counts.values()]
                joined = loss.joined(torch.stack(counts))
                loss = replace(joined, count=torch.ones((), dtype=torch.float64))
        leaves = {path: leaf for path, leaf in self._leaves.items() if leaf.requires_grad}
        if not loss.total.requires_grad:
            return Part(loss, dict.fromkeys(leaves), self.buffers())
        grads = torch.autograd.grad(loss.total, list(leaves.values()), allow_unused=True)
        return Part(loss, dict(zip(leaves, grads, strict=True)), self.buffers())


def _sites(module: nn.Module, table: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Path, owner and name of every parameter or buffer; a module seen twice counts once."""
    for prefix, owner in module.named_modules():
        for name, value in getattr(owner, table).items():
            if value is not None:
                yield (f"{prefix}.{name}" if prefix else name), owner, name


def _leaf(old: Tensor | None, value: Tensor, frozen: bool) -> nn.Parameter:
    trains = old is not None and old.requires_grad and not frozen
    return nn.Parameter(value, requires_grad=trains)


def _value(path: str, old: Tensor | None, given: Mapping[str, Tensor] | None) -> Tensor:
    value = given.get(path) if given is not None else old
    if value is None or value.is_meta:
        raise StateError(
            f"The plain copy of the model has no value for {path!r}.",
            where="split_reference or unsharded_run",
            why="A model on the meta device has shapes only.",
            fix="pass params= and buffers=, for example sw.to_global(state.params)",
            path=path,
        )
    return value.detach().clone(memory_format=torch.contiguous_format)
