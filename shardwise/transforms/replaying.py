"""Dispatch modes that keep results of a forward pass and give them back in its recomputation.

[Note: replaying]
Eager recomputation cannot leave out what nobody needs, so a kept value must take the place of its
operation. `Recording` runs around a module's forward and numbers the calls of each operation;
`Replaying` runs around the recomputation and answers the calls whose results were kept. A call is
known by its operation and number, so both passes must run the same operations: what the engine does
in between (gathers, aliases) is set aside by `aside`.

A kept value must stay as it was. An operation that writes it in place gets the original, and a copy
is kept; a write after the module has ended is an error. Where the kept operation itself wrote in
place, the recomputation copies the kept value there. A kept operation that drew random numbers
leaves the generators as it left them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.offload.saved import Group, Saved
from shardwise.sharding.compat import (
    StorageWeakRef,
    TorchDispatchMode,
    detached,
    dispatch_modes,
)
from shardwise.sharding.derived import Remat
from shardwise.sharding.errors import RematError

T = TypeVar("T")

Key = tuple[Any, int]

_DOT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
_DOTS = frozenset(
    getattr(torch.ops.aten, name).default for name in _DOT_NAMES if hasattr(torch.ops.aten, name)
)
# Saving and unpacking detach, and they differ between a pass and its recomputation.
_UNCOUNTED = frozenset({torch.ops.aten.detach.default, torch.ops.prim.device.default})


@dataclass(eq=False, slots=True)
class _Made:
    """One call of an operation, while its result may still be kept; and then, while it is.

    Args:
        key: operation and number.
        form: dtype, size, stride and offset of the one result in its storage; None for several.
        results: alias or aliases of the results; None where `form` can make it from the storage.
        writes: whether the operation wrote an argument in place; the result stands for that one.
        rng: states of the generators after a random operation.
        flops: of the operation, when they are counted.
        at_flops: count before the operation.
    """

    key: Key
    form: tuple[torch.dtype, Any, Any, Any] | None
    results: Any
    writes: bool = False
    rng: tuple[Tensor, ...] = ()
    flops: int = 0
    at_flops: int = 0
    versions: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The kept results."""
        return list(_tensors((self.results,)))


class Kept:
    """The values that one call of a module keeps for its recomputation.

    Args:
        module: its path.
        group: puts them on a tier when the module has ended; None: they stay.
    """

    def __init__(self, module: str, group: Group | None = None) -> None:
        self.module = module
        self._group = group
        self.made: dict[Key, _Made] = {}
        self._by_storage: dict[int, list[_Made]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All kept results."""
        return [tensor for made in self.made.values() for tensor in made.tensors]

    def add(self, made: _Made) -> None:
        """Keep the results of a call."""
        if made.key not in self.made:
            self.made[made.key] = made
            for tensor in made.tensors:
                self._by_storage.setdefault(_storage(tensor), []).append(made)

    def before_write(self, written: list[Tensor]) -> None:
        """Keep copies of what an operation is about to write; see [Note: replaying]."""
        for tensor in written:
            for made in self._by_storage.pop(_storage(tensor), ()):
                made.results = _map(made.results, torch.clone)
                for copy in made.tensors:
                    self._by_storage.setdefault(_storage(copy), []).append(made)
                made.versions = tuple(copy._version for copy in made.tensors)

    def close(self) -> None:
        """The module has ended: from now on nobody may write what is kept."""
        for made in self.made.values():
            if self._group is not None:
                made.results = _map(made.results, self._put)
            made.versions = tuple(tensor._version for tensor in made.tensors)

    def _put(self, tensor: Tensor) -> Any:
        assert self._group is not None
        saved = self._group.save(tensor)
        return tensor if saved is None else saved

    def check(self, made: _Made) -> None:
        """Raise if a kept value has been written since."""
        for tensor, version in zip(made.tensors, made.versions, strict=True):
            if tensor._version != version:
                raise _written(self.module, made.key, tensor, tensor._version - version)
        for saved in _all_of(Saved, made.results):
            if saved.times_written:
                raise _written(self.module, made.key, saved.take(), saved.times_written)


class _Mode(TorchDispatchMode, ABC):
    """Numbers the calls of the operations that its policy may keep."""

    def __init__(self, kept: Kept, policy: Remat, device: torch.device) -> None:
        super().__init__()
        self.kept = kept
        self.paused = False
        self._names = policy.names
        self._only_dots = policy.policy == "dots"
        self._device = device
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count, and let the subclass decide."""
        kwargs = kwargs or {}
        if self.paused or func in _UNCOUNTED:
            return func(*args, **kwargs)
        written = _written_arguments(func, args, kwargs) if func._schema.is_mutable else []
        if self._only_dots and func not in _DOTS:
            self.kept.before_write(written)
            return func(*args, **kwargs)
        key = (func, self._calls[func])
        self._calls[func] += 1
        return self._run(key, args, kwargs, written)

    @abstractmethod
    def _run(self, key: Key, args: Any, kwargs: Mapping[str, Any], written: list[Tensor]) -> Any:
        """Run a counted call, or answer it."""


class Recording(_Mode):
    """Around the forward of a module: keeps what the policy says.

    Args:
        kept: where to.
        policy: `dots` or `save`.
        device: whose random generator counts beside the CPU's.
        meter: counts flops so far; for a trace.
    """

    def __init__(
        self,
        kept: Kept,
        policy: Remat,
        device: torch.device,
        meter: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(kept, policy, device)
        self._meter = meter
        # A weak reference keeps the number of a storage from being used again.
        self._makers: dict[int, tuple[_Made, StorageWeakRef]] = {}

    def keep(self, tensor: Tensor, label: str) -> None:
        """Keep the result of the operation that made a tensor, if the policy names it."""
        if label not in self._names or _storage(tensor) not in self._makers:
            return  # the policy does not name it, or it comes from outside and is saved anyway
        made, _ = self._makers[_storage(tensor)]
        if made.form is not None:
            with _Pause([self]), torch.no_grad():
                made.results = _in_form(tensor.detach(), *made.form)
        self.kept.add(made)

    def _run(self, key: Key, args: Any, kwargs: Mapping[str, Any], written: list[Tensor]) -> Any:
        func = key[0]
        self.kept.before_write(written)
        before = self._meter()
        out = func(*args, **kwargs)
        flops = self._meter() - before
        random = torch.Tag.nondeterministic_seeded in func.tags
        rng = _generator_states(self._device) if random else ()
        if self._only_dots:
            made = _Made(key, None, _map(out, detached), rng=rng, flops=flops, at_flops=before)
            self.kept.add(made)
            return out
        if written:
            one = written[0]
            made = _Made(key, _form(one), None, True, rng, flops, before)
            for tensor in written:
                self._makers.pop(_storage(tensor), None)
            if len(written) == 1:
                self._remember(one, made)
            return out
        inputs = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        outputs = list(_tensors((out,)))
        new = [tensor for tensor in outputs if _storage(tensor) not in inputs]
        if new:
            one = len(outputs) == 1 and isinstance(out, Tensor)
            form = _form(new[0]) if one else None
            results = None if one else _map(out, detached)
            made = _Made(key, form, results, False, rng, flops, before)
            for tensor in new:
                self._remember(tensor, made)
        return out

    def _remember(self, tensor: Tensor, made: _Made) -> None:
        self._makers[_storage(tensor)] = made, StorageWeakRef(tensor.untyped_storage())


class Replaying(_Mode):
    """Around the recomputation: answers the calls whose results were kept."""

    def __enter__(self) -> Any:
        """Count from the start; backward may need a recomputation more than once."""
        self._calls.clear()
        return super().__enter__()

    def _run(self, key: Key, args: Any, kwargs: Mapping[str, Any], written: list[Tensor]) -> Any:
        func = key[0]
        made = self.kept.made.get(key)
        if made is None:
            self.kept.before_write(written)
            return func(*args, **kwargs)
        self.kept.check(made)
        if made.rng:
            _set_generator_states(made.rng, self._device)
        results = _back(made.results)
        if not made.writes:
            return _map(results, detached)
        (target,) = written
        target.copy_(results)
        return target if func._schema.returns else None


def recordings() -> list[Recording]:
    """The recordings that are on their way in this thread."""
    return [mode for mode in dispatch_modes() if isinstance(mode, Recording)]


def aside(run: Callable[..., Any], *args: Any) -> Any:
    """Call what is no part of the model, so that no mode counts its operations."""
    modes = dispatch_modes()
    if not modes:
        return run(*args)
    with _Pause([mode for mode in modes if isinstance(mode, _Mode)]):
        return run(*args)


class _Pause:
    """Context in which modes let everything pass."""

    def __init__(self, modes: list[Any]) -> None:
        self._modes = [mode for mode in modes if not mode.paused]

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.paused = True

    def __exit__(self, *_: object) -> None:
        for mode in self._modes:
            mode.paused = False


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors among arguments or results, also in lists."""
    return _all_of(Tensor, value)


def _all_of(kind: type[T], value: Any) -> Iterator[T]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _all_of(kind, part)
    elif isinstance(value, dict):
        yield from _all_of(kind, list(value.values()))


def _back(value: Any) -> Any:
    """Results as the operation gave them, wherever they have waited."""
    if isinstance(value, Saved):
        return value.take()
    if isinstance(value, list | tuple):
        return type(value)(map(_back, value))
    return value


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(part, function) for part in value)
    return value


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _form(tensor: Tensor) -> tuple[torch.dtype, Any, Any, Any]:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


def _in_form(view: Tensor, dtype: torch.dtype, size: Any, stride: Any, offset: Any) -> Tensor:
    """What lies behind a view, as the operation returned it."""
    if view.dtype != dtype:
        view = torch.view_as_real(view) if view.is_complex() else view.view(dtype)
    return view.as_strided(size, stride, offset)


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    arguments = func._schema.arguments
    given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
    names = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
    return list(_tensors([given.get(name) for name in names]))


def _generator_states(device: torch.device) -> tuple[Tensor, ...]:
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state(device)) if device.type == "cuda" else states


def _set_generator_states(states: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _written(module: str, key: Key, tensor: Tensor, times: int) -> RematError:
    return RematError(
        f"A value that remat keeps of {module or '(root)'!r} was written in place after the module "
        "had ended.",
        where=f"result of {key[0]}, call {key[1]}",
        facts=f"shape {tuple(tensor.shape)}, {tensor.nbytes:,} bytes, written {times} times",
        why="The recomputation gives the kept value in the place of the operation, so it must stay "
        "as it was.",
        fix="use the operation that is not in place on the output of the module, or "
        f"remat({module!r}, 'everything')",
        module=module,
        nbytes=tensor.nbytes,
    )
