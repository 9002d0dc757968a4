"""Edits: the frozen values that make a plan; plain data, so that plans compare and travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.homes import HOMES

PHASES = (
    "mesh",
    "freeze",
    "tensor",
    "sequence",
    *HOMES,
    "precision",
    "memory",
    "remat",
    "accumulation",
    "pipeline",
    "kernels",
    "override",
)
"""Order of replay. Edits of one phase replay in the order given, so order across never matters."""

Clauses: TypeAlias = tuple[tuple[str, ...], ...]
"""A selection: every clause, itself a tuple of patterns, has to select the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit(ABC):
    """One change to a plan.

    Args:
        where: clauses that all have to select a parameter; none: every parameter.
        by: the call as the user wrote it; for errors and the log, not compared.
    """

    kind: ClassVar[str]
    where: Clauses = ()
    by: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # One selection, one value: neither the order of clauses nor "everything" means anything.
        clauses = {tuple(clause) for clause in self.where} - {("**",)}
        object.__setattr__(self, "where", tuple(sorted(clauses)))

    @property
    @abstractmethod
    def phase(self) -> str:
        """One of `PHASES`."""

    def within(self, clauses: Clauses) -> Edit:
        """The same edit for the parameters that these clauses select as well."""
        return replace(self, where=(*self.where, *clauses))


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeEdit(Edit):
    """Set the data axes of one home; `axis=None` clears them."""

    kind: ClassVar[str] = "home"
    home: str
    axis: tuple[str, ...] | None
    on: str | int = "auto"
    pad: bool = False

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        check_home(self.home, self.by)
        axes = self.axis or ()
        if len(set(axes)) != len(axes):
            raise PlanError(
                f"{self.by or 'a home edit'} names a mesh axis twice.",
                facts=f"axis={axes!r}",
                why="A mesh axis cuts a tensor once.",
                fix=f"axis={tuple(dict.fromkeys(axes))!r}",
            )
        if not axes:
            # Clearing has no dimension: all ways to write it are one value.
            object.__setattr__(self, "axis", None)
            object.__setattr__(self, "on", "auto")
            object.__setattr__(self, "pad", False)

    @property
    def phase(self) -> str:
        """The home is its own phase."""
        return self.home


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeEdit(Edit):
    """Take parameters out of training: no gradient, no optimizer state."""

    kind: ClassVar[str] = "freeze"

    @property
    def phase(self) -> str:
        """Before anything is laid out."""
        return "freeze"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEdit(Edit):
    """Leave units gathered between their forward and their backward; `where` is over units."""

    kind: ClassVar[str] = "keep"
    keep: bool = True

    @property
    def phase(self) -> str:
        """A matter of memory."""
        return "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchEdit(Edit):
    """Start gathering that many units ahead; a setting of the whole plan."""

    kind: ClassVar[str] = "prefetch"
    distance: int

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        if type(self.distance) is not int or self.distance < 0:
            raise PlanError(
                f"prefetch({self.distance!r}) is not a number of units.",
                why="It counts the units that are gathered ahead; each adds its own bytes.",
                fix="prefetch(1), or prefetch(0) for none",
                distance=self.distance,
            )
        if self.where:
            raise PlanError(
                f"{self.by or 'prefetch'} cannot be masked.",
                facts=f"mask {self.where!r}",
                why="Prefetch is one distance for the whole plan, not one per parameter.",
                fix="apply it outside of masked and partition",
            )

    @property
    def phase(self) -> str:
        """A matter of memory."""
        return "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAtEdit(Edit):
    """Put one home of one parameter at a given spec, after everything else."""

    kind: ClassVar[str] = "tree_at"
    home: str
    path: str
    spec: str

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        check_home(self.home, self.by)

    @property
    def phase(self) -> str:
        """Last of all."""
        return "override"


def check_home(home: str, by: str) -> None:
    """Raise `PlanError` for a word that names no home."""
    if home not in HOMES:
        raise PlanError(
            f"{by or 'an edit'} names the unknown home {home!r}.",
            why=f"The resting layouts of a parameter are {', '.join(HOMES)}.",
            fix=nearest(home, HOMES),
            home=home,
        )
