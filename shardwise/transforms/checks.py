"""Checks of the first step: nothing communicates or keeps weights behind the engine's back."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.compat import FakeTensor, TorchDispatchMode, storage_key
from shardwise.sharding.errors import ImplicitCommError, UnitError
from shardwise.sharding.movement import Mover
from shardwise.transforms.outputs import place
from shardwise.transforms.unit_runtime import UnitRuntime

_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


class _OnlyOurs(TorchDispatchMode):
    """Refuses collectives that do not go through the mover, and what a trace has left behind."""

    def __init__(self, mover: Mover) -> None:
        super().__init__()
        self._mover = mover

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the namespace and the arguments of every operation."""
        if any(isinstance(arg, FakeTensor) for arg in _tensors(args)):
            raise _from_the_trace(str(func))
        if func.namespace in _COLLECTIVE_NAMESPACES and not self._mover.busy:
            nbytes = sum(arg.nbytes for arg in _tensors(args))
            raise ImplicitCommError(
                f"{func} ran inside the step, outside of the plan.",
                where="loss_fn, or a module it runs",
                facts=[f"{nbytes:,} bytes of tensors were passed"],
                why="Every collective of a step is derived from the plan and listed first.",
                fix="remove the call: losses, gradients and buffers are reduced by the program",
                nbytes=nbytes,
            )
        return func(*args, **(kwargs or {}))


def _from_the_trace(operation: str) -> UnitError:
    return UnitError(
        "A tensor without values, from the trace of the first pass, came into a step.",
        where=f"{operation}, in loss_fn or a module it runs",
        why="The first pass runs your code on fake tensors. What a function keeps for later, by "
        "functools.cache or in a global, is then fake.",
        fix="clear that cache (function.cache_clear()) and call the function once with real "
        "values before lower(), or let the module keep what it computes",
    )


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)


class _Saved:
    """A tensor that autograd saved and whose memory belongs to a unit."""

    def __init__(self, tensor: Tensor, unit: str) -> None:
        self.tensor = tensor
        self.unit = unit


class Packing:
    """Marks what autograd saves of the weights of units."""

    def __init__(self, units: Mapping[str, UnitRuntime]) -> None:
        self._units = units
        self._owners: dict[int, str] = {}

    def __call__(self, tensor: Tensor) -> Any:
        """The tensor itself if it is no weight."""
        if not place(tensor):
            return tensor
        if not self._owners:  # by now the units have loaded the weights of this step
            for unit in self._units.values():
                self._owners.update((key, unit.name) for key in unit.storage_keys)
        owner = self._owners.get(storage_key(tensor))
        return tensor if owner is None else _Saved(tensor.detach(), owner)


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    tensor = saved.tensor
    if tensor.untyped_storage().nbytes():
        return tensor
    raise UnitError(
        f"Backward needs a weight of unit {saved.unit or '(root)'!r} that is not gathered.",
        where=f"a tensor of shape {tuple(tensor.shape)} computed in unit {saved.unit!r}",
        facts=["It left the unit by a side door: an attribute, a global, or a hook."],
        why="A unit is gathered again when backward reaches the outputs it returned; a tensor "
        "that left otherwise reaches its operations too early.",
        fix="return the tensor from the unit's forward, for example as part of a tuple",
        unit=saved.unit,
    )


def refuse_reentrant(losses: Sequence[Tensor]) -> None:
    """Refuse `torch.utils.checkpoint(use_reentrant=True)` anywhere in the graph of the loss terms.

    Its backward runs a pass of its own that accumulates into `.grad`, where no step looks.

    Raises:
        UnitError: the graph holds such a checkpoint.
    """
    seen: set[Any] = set()
    waiting = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise _reentrant()
        waiting += [following for following, _ in node.next_functions]


def _reentrant() -> UnitError:
    return UnitError(
        "The model uses torch.utils.checkpoint with use_reentrant=True.",
        where="loss_fn(model, batch)",
        facts="The graph of the loss holds a CheckpointFunctionBackward.",
        why="A reentrant checkpoint accumulates into .grad in a pass of its own; gradients of a "
        "step are values and would miss it.",
        fix="checkpoint(..., use_reentrant=False)",
    )


@contextmanager
def checked(units: Mapping[str, UnitRuntime], mover: Mover, *, enabled: bool) -> Generator[None]:
    """Run a forward and a backward pass with both checks, if enabled."""
    if not enabled:
        yield
        return
    hooks = torch.autograd.graph.saved_tensors_hooks(Packing(units), _unpack)
    with hooks, _OnlyOurs(mover):
        yield
