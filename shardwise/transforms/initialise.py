"""Initial values: each module's own init under a key of (seed, path), one module at a time.

[Note: initialisation]
A rank runs the init of every module on whole tensors, in the order in which modules are built
(children first), keeps its own block and drops the rest. The generator is keyed by the seed and the
path of the module, so every mesh and every rank gets the same values bit for bit, and the peak is
the shard and the largest module. Before init all values are NaN: what is NaN afterwards was not
initialised by anybody and is reported by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.compat import copy_all
from shardwise.sharding.errors import InitError, summarise
from shardwise.sharding.functional import Placeholder, Template
from shardwise.sharding.layout import Layout, Regroup, make_layout
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.rng import key, keyed
from shardwise.sharding.state import Flats
from shardwise.sharding.units import ParamInfo

InitModule = Callable[[nn.Module], Any]
_RESETS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True)
class FromModule:
    """Take initial values from a module; see `from_module`."""

    tensors: Mapping[str, Tensor]


def from_module(module: nn.Module) -> FromModule:
    """A source for `program.init`: the values that this module has now; it is not modified.

    Rank 0's values count: they are broadcast, so ranks whose modules differ still start equal.

    >>> sorted(from_module(nn.Linear(2, 2)).tensors)
    ['bias', 'weight']
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    return FromModule({name: value.detach() for name, value in named})


class Shards:
    """Takes whole parameters and keeps this rank's blocks of them, in flat buckets."""

    def __init__(
        self, buckets: Sequence[Bucket], mesh: Mesh, coords: Mapping[str, int], device: torch.device
    ) -> None:
        self._mesh = mesh
        self._coords = coords
        self._device = device
        self.flats: Flats = {}
        self.masters: Flats = {}
        self._targets: dict[str, list[tuple[Tensor, Layout]]] = {}
        for bucket in buckets:
            self.flats[bucket.name] = self._empty(bucket.params)
            targets = [(self.flats[bucket.name], bucket.params)]
            if bucket.has_master and bucket.opt:
                self.masters[bucket.name] = self._empty(bucket.opt)
                targets.append((self.masters[bucket.name], bucket.opt))
            for path in bucket.paths:
                self._targets[path] = targets

    def _empty(self, layout: Layout) -> Tensor:
        return torch.zeros(layout.length, dtype=layout.dtype, device=self._device)

    def put(self, path: str, whole: Tensor) -> None:
        """Keep this rank's blocks of one whole parameter."""
        for flat, layout in self._targets[path]:
            entry = layout.by_path[path]
            if not layout.axes:
                entry.view(flat).copy_(whole)
                continue
            one = [(path, entry.shape, entry.dim)]
            coarse = make_layout(one, (), self._mesh, layout.dtype)
            fine = make_layout(one, layout.axes, self._mesh, layout.dtype)
            cut = Regroup(coarse, fine, self._mesh)
            block = flat[entry.offset : entry.offset + fine.length]
            place = self._mesh.index(layout.axes, self._coords)
            pairs = cut.own_pieces(0, whole.detach().to(self._device), block, place)
            if pairs:
                copy_all([mine for _, mine in pairs], [part for part, _ in pairs])


def init_from_seed(
    template: Template,
    infos: Sequence[ParamInfo],
    shards: Shards,
    seed: int,
    *,
    device: torch.device,
    init: InitModule | None,
) -> None:
    """Run every module's init and keep this rank's blocks; fills meta buffers of the template.

    Raises:
        InitError: parameters or buffers that no init touched, by name.
    """
    owners = {path: info for info in infos for path in info.names}
    missing: list[str] = []
    done: set[str] = set()
    filled: list[_Site] = []
    for prefix, module in _groups(template.module):
        sites = [site for site in _sites(module, prefix) if isinstance(site.value, Placeholder)]
        buffers = [b for b in _buffers(module, prefix) if b.value.is_meta]
        if not sites and not buffers and not _is_reset(module):
            continue
        real = {
            id(site.value): nn.Parameter(
                _unset(site.value.shape, owners[site.value.path].dtype, device),
                requires_grad=site.value.requires_grad,
            )
            for site in sites
        }
        for site in sites:
            site.table[site.key] = real[id(site.value)]
        for buffer in buffers:
            name = str(buffer.value.dtype).removeprefix("torch.")
            buffer.table[buffer.key] = _unset(buffer.value.shape, name, device)
        filled += buffers
        blanks = {buffer.path: _mark(buffer.table[buffer.key]) for buffer in buffers}
        try:
            _run(module, prefix, seed, device, init)
            for buffer in buffers:
                value = buffer.table[buffer.key]
                # NaN tells floats apart, also in part; other dtypes have no value to spare.
                if _is_unset(value) or _mark(value) == blanks[buffer.path]:
                    missing.append(buffer.path)
            for site in sites:
                path = site.value.path
                if path not in done:
                    done.add(path)
                    value = site.table[site.key].detach()
                    missing += [path] if _is_unset(value) else []
                    shards.put(path, value)
        finally:
            for site in sites:
                site.table[site.key] = site.value
    if missing:
        for buffer in filled:
            buffer.table[buffer.key] = buffer.value
        raise _not_initialised(missing)


@dataclass(frozen=True)
class _Site:
    path: str
    table: dict[str, Any]
    key: str
    value: Any


def _sites(module: nn.Module, prefix: str) -> list[_Site]:
    found = []
    for name, child in module.named_modules(prefix=prefix):
        for key_, value in child._parameters.items():
            if value is not None:
                found.append(
                    _Site(f"{name}.{key_}" if name else key_, child._parameters, key_, value)
                )
    return found


def _buffers(module: nn.Module, prefix: str) -> list[_Site]:
    found = []
    for name, child in module.named_modules(prefix=prefix):
        for key_, value in child._buffers.items():
            if value is not None:
                found.append(_Site(f"{name}.{key_}" if name else key_, child._buffers, key_, value))
    return found


def _is_reset(module: nn.Module) -> bool:
    return any(callable(getattr(module, name, None)) for name in _RESETS)


def _groups(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that have an init of their own, or hold values without any below.

    Everything inside such a module is real while its init runs, as it is when it is built.
    """

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if _is_reset(module) or not any(True for _ in module.children()):
            yield prefix, module
            return
        own = _Own(module)
        if own.holds_values:
            yield prefix, own
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}.{name}" if prefix else name)

    yield from walk(root, "")


class _Own(nn.Module):
    """A module seen without its children."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = module._parameters
        self._buffers = module._buffers
        self.holds_values = any(
            value is not None
            for table in (self._parameters, self._buffers)
            for value in table.values()
        )


def _run(
    module: nn.Module, prefix: str, seed: int, device: torch.device, init: InitModule | None
) -> None:
    """Children first, as constructors do, each under its own key."""
    for name, child in module.named_children():
        _run(child, f"{prefix}.{name}" if prefix else name, seed, device, init)
    with keyed(key(seed, "init", prefix), device), torch.no_grad():
        for name in _RESETS:
            reset = getattr(module, name, None)
            if callable(reset):
                reset()
                break
        if init is not None:
            init(module)


def _unset(shape: Sequence[int], dtype: str, device: torch.device) -> Tensor:
    empty = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
    return empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()


def _is_unset(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())


def _mark(value: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written or replaced."""
    return id(value), value._version


def _not_initialised(names: Sequence[str]) -> InitError:
    return InitError(
        f"init(seed) left {len(names)} tensors without a value.",
        facts=summarise(list(names)),
        why="Initial values come from reset_parameters() of the module that holds them.",
        fix="give that module a reset_parameters(), pass init(seed, init=function of a module), or "
        "take the values of a built module with init(sw.from_module(model))",
        count=len(names),
    )
