"""Initial values from a seed: each module's own init under a key of (seed, path).

[Note: initialisation]
A rank runs the init of every module on whole tensors, in the order in which modules are built
(children first), keeps its own block and drops the rest. The generator is keyed by the seed and the
path of the module, so every mesh and every rank gets the same values bit for bit, and the peak is
the shard and the largest module. Before init all values are NaN: what is NaN afterwards was not
initialised by anybody and is reported by name.

With a function of the user (`init=`) everything inside a unit is real at once, for such a function
may look below the module it is called for: transformers scales the output projections of GPT-2 when
it is called for the attention around them. The peak is then the shard and the largest unit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.errors import InitError, UnitError, summarise
from shardwise.sharding.functional import Placeholder, Template
from shardwise.sharding.rng import key, keyed
from shardwise.transforms.initialise import Shards

InitModule = Callable[[nn.Module], Any]
_RESETS = ("reset_parameters", "_reset_parameters")


def init_from_seed(
    template: Template,
    shards: Shards,
    seed: int,
    *,
    device: torch.device,
    init: InitModule | None,
    units: Container[str] = (),
) -> None:
    """Run every module's init and keep this rank's blocks; fills meta buffers of the template.

    Args:
        template: modules with placeholders.
        shards: takes the values.
        seed: together with its path the key of a module's generator.
        device: where values are made.
        init: called for each module after its own.
        units: modules that are real as a whole when there is an `init`.

    Raises:
        InitError: parameters or buffers that no init touched, by name.
    """
    missing: list[str] = []
    done: set[str] = set()
    filled: list[_Site] = []
    for group in _groups(template.module, units if init else ()):
        sites = [s for s in group.sites("_parameters") if isinstance(s.value, Placeholder)]
        buffers = [s for s in group.sites("_buffers") if s.value.is_meta]
        if not (sites or buffers or init or _is_reset(group.module)):
            continue
        real = {id(site.value): _unset_parameter(site.value, device) for site in sites}
        for site in sites:
            site.table[site.key] = real[id(site.value)]
        for buffer in buffers:
            buffer.table[buffer.key] = _unset(buffer.value, device)
        filled += buffers
        blanks = {buffer.path: _mark(buffer.table[buffer.key]) for buffer in buffers}
        try:
            _run(group, seed, device, init)
            missing += [b.path for b in buffers if _is_blank(b.table[b.key], blanks[b.path])]
            for site in sites:
                if site.value.path not in done:
                    done.add(site.value.path)
                    value = site.table[site.key].detach()
                    missing += [site.value.path] if _is_unset(value) else []
                    shards.put(site.value.path, value)
        finally:
            for site in sites:
                site.table[site.key] = site.value
    if missing:
        for buffer in filled:
            buffer.table[buffer.key] = buffer.value
        raise _not_initialised(missing)


@dataclass(frozen=True)
class _Site:
    """A parameter or buffer, and the table of the module that holds it."""

    path: str
    table: dict[str, Any]
    key: str
    value: Any


@dataclass(frozen=True)
class _Group:
    """Modules that are real together; `alone` leaves the children out."""

    prefix: str
    module: nn.Module
    alone: bool

    def sites(self, kind: str) -> list[_Site]:
        """All parameters (`_parameters`) or buffers (`_buffers`) of the group."""
        modules = self.module.named_modules(prefix=self.prefix)
        return [
            _Site(_join(name, key_), getattr(child, kind), key_, value)
            for name, child in ([(self.prefix, self.module)] if self.alone else modules)
            for key_, value in getattr(child, kind).items()
            if value is not None
        ]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _is_reset(module: nn.Module) -> bool:
    return any(callable(getattr(module, name, None)) for name in _RESETS)


def _groups(root: nn.Module, units: Container[str], prefix: str = "") -> Iterator[_Group]:
    """The outermost modules that have an init of their own, and single modules around them.

    Everything inside such a module, or a unit, is real while its init runs, as when it is built.
    """
    children = list(root.named_children())
    if _is_reset(root) or not children or (prefix and prefix in units):
        yield _Group(prefix, root, alone=False)
        return
    yield _Group(prefix, root, alone=True)
    for name, child in children:
        yield from _groups(child, units, _join(prefix, name))


def _run(group: _Group, seed: int, device: torch.device, init: InitModule | None) -> None:
    """Children first, as constructors do, each under its own key."""
    if not group.alone:
        for name, child in group.module.named_children():
            inner = _Group(_join(group.prefix, name), child, alone=False)
            _run(inner, seed, device, init)
    with keyed(key(seed, "init", group.prefix), device), torch.no_grad():
        for name in _RESETS:
            reset = getattr(group.module, name, None)
            if callable(reset):
                reset()
                break
        if init is not None:
            _run_own(init, group)


def _run_own(init: InitModule, group: _Group) -> None:
    try:
        init(group.module)
    except UnitError as error:
        path, unit = error.numbers.get("path"), error.numbers.get("unit")
        raise InitError(
            f"init= uses the parameter {path!r} when it is called for a module outside its unit.",
            where=f"init({type(group.module).__name__} {group.prefix or '(root)'!r})",
            facts=f"unit {unit!r}",
            why="Only the module itself and what is inside the same unit have values at a time, so "
            "that no rank ever holds the whole model.",
            fix="set that parameter when init is called for its own module",
            path=path,
            unit=unit,
        ) from error


def _unset_parameter(value: Placeholder, device: torch.device) -> nn.Parameter:
    return nn.Parameter(_unset(value, device), requires_grad=value.requires_grad)


def _unset(value: Tensor, device: torch.device) -> Tensor:
    """Memory for a value, filled with NaN where the dtype has it."""
    empty = torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
    return empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()


def _is_unset(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())


def _mark(value: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written or replaced."""
    return id(value), value._version


def _is_blank(value: Tensor, before: tuple[int, int]) -> bool:
    """NaN tells floats apart, also in part; other dtypes have no value to spare."""
    return _is_unset(value) or _mark(value) == before


def _not_initialised(names: Sequence[str]) -> InitError:
    return InitError(
        f"init(seed) left {len(names)} tensors without a value.",
        facts=summarise(list(names)),
        why="Initial values come from reset_parameters() of the module that holds them.",
        fix="give that module a reset_parameters(), pass init(seed, init=function of a module), or "
        "take the values of a built module with init(sw.from_module(model))",
        count=len(names),
    )
