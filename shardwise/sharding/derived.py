"""What replaying the edits of a plan gives: the four layouts of every parameter, and settings."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.sharding.mesh import Mesh
from shardwise.sharding.rules import Rules
from shardwise.sharding.spec import Spec
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo, Unit


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of the program; None: the parameter's own."""

    params: str | None = None
    compute: str | None = None
    reduce: str | None = None


@dataclass(frozen=True, slots=True)
class Base:
    """What a plan starts from, before any edit."""

    mesh: Mesh
    infos: tuple[ParamInfo, ...]
    units: tuple[Unit, ...]
    rules: Rules | None = None


@dataclass(frozen=True, slots=True)
class Derived:
    """Everything lowering reads; equal when two plans lay every tensor out alike."""

    mesh: Mesh
    infos: tuple[ParamInfo, ...]
    units: tuple[Unit, ...]
    params: FrozenMap[str, Spec]
    grads: FrozenMap[str, Spec]
    opt: FrozenMap[str, Spec]
    compute: FrozenMap[str, Spec]
    batch: tuple[str, ...]
    keep: frozenset[str]
    prefetch: int
    precision: Precision
