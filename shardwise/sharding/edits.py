"""Edits: the frozen values that make a plan; plain data, so that plans compare and travel."""

from __future__ import annotations

import math
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

REDUCE_MODES = ("auto", "each", "once")
"""When micro-steps bring gradients to their shards."""

LOGITS_MODES = ("auto", "gathered", "cut")
"""What the last layer of a model whose vocabulary is cut gives."""

GATHER_MODES = ("micro", "step")
"""How long gathered weights are kept."""

_MAX_POWER = 126
"""Powers of two up to this one, and down to its inverse, are ordinary float32 numbers."""

REMAT_POLICIES = ("everything", "dots", "save", "offload", "nothing")
"""What is recomputed: all, all but matrix products, all but named values, nothing at all."""

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
class TensorEdit(Edit):
    """Cut layers over a mesh axis, by the names of the dimensions of their parameters.

    `names` are those that are cut, None: by the rules of the plan or the default ones. `logits`
    says what the last layer gives: `auto`, `gathered` or `cut`.
    """

    kind: ClassVar[str] = "tensor"
    axis: str
    names: tuple[str, ...] | None = None
    logits: str = "auto"

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        if self.logits not in LOGITS_MODES:
            raise PlanError(
                f"{self.by or 'a tensor edit'} has no possible logits.",
                where="argument logits of tensor_parallel()",
                facts=f"logits is {self.logits!r}; allowed: {', '.join(map(repr, LOGITS_MODES))}.",
                why="It says whether ranks have all logits of their tokens, or a part of each.",
                fix=nearest(str(self.logits), LOGITS_MODES),
                logits=self.logits,
            )

    @property
    def phase(self) -> str:
        """Before data axes cut what it leaves."""
        return "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEdit(Edit):
    """Cut activations along the sequence over a tensor axis, between the layers it cuts."""

    kind: ClassVar[str] = "sequence"
    axis: str
    active: bool = True

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        _refuse_mask(self, "Activations between layers are cut alike")

    @property
    def phase(self) -> str:
        """Its own."""
        return "sequence"


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
class LossScaleEdit(Edit):
    """Multiply the loss before backward; a setting of the whole plan. `value` 0: dynamic."""

    kind: ClassVar[str] = "loss_scale"
    value: float = 0
    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive_hysteresis: bool = False
    maximum: float = 2.0**32

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        _refuse_mask(self, "The loss is one number, and so is its scale")
        numbers = (self.value, self.minimum, self.maximum)
        for name, number in zip(("value", "minimum", "maximum"), numbers, strict=True):
            if not isinstance(number, int | float) or isinstance(number, bool):
                raise _no_loss_scale(self, name, "a number")
        if (
            type(self.initial_power) is not int
            or not -_MAX_POWER <= self.initial_power <= _MAX_POWER
        ):
            raise _no_loss_scale(self, "initial_power", f"a whole number, at most {_MAX_POWER}")
        initial, largest = 2.0**self.initial_power, self.maximum
        for name, fits, rule in (
            ("value", 0 <= self.value < math.inf, "0 <= value < inf, where 0 means dynamic"),
            ("window", _counts(self.window), "a whole number of steps, at least 1"),
            ("hysteresis", _counts(self.hysteresis), "a whole number of overflows, at least 1"),
            ("minimum", 0 < self.minimum <= initial, "0 < minimum <= 2**initial_power"),
            ("maximum", initial <= largest, "2**initial_power <= maximum"),
        ):
            if not fits:
                raise _no_loss_scale(self, name, rule)

    @property
    def phase(self) -> str:
        """A matter of precision."""
        return "precision"


@dataclass(frozen=True, slots=True, kw_only=True)
class RematEdit(Edit):
    """Recompute modules in backward; `modules` are patterns over their paths, `""` is the root.

    `where` holds only the masks around the call, which select a module by its path or one above it.
    """

    kind: ClassVar[str] = "remat"
    modules: tuple[str, ...]
    policy: str
    names: tuple[str, ...] = ()
    tier: str = ""

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        if self.policy not in REMAT_POLICIES:
            raise PlanError(
                f"{self.by or 'a remat edit'} names the unknown policy {self.policy!r}.",
                where="argument policy of remat(where, policy)",
                facts=f"policies: {', '.join(REMAT_POLICIES)}",
                why="A policy says what is kept of a module's forward, so that it travels in JSON.",
                fix=f"{nearest(self.policy, REMAT_POLICIES)}; to keep values of your choice: "
                "policy=sw.save('name') with sw.name(x, 'name') in the module",
                policy=self.policy,
            )
        if bool(self.names) != (self.policy in {"save", "offload"}):
            raise PlanError(
                f"{self.by or 'a remat edit'} keeps {len(self.names)} names under the policy "
                f"{self.policy!r}.",
                where="argument policy of remat(where, policy)",
                facts=f"names: {', '.join(self.names) or 'none'}",
                why="'save' and 'offload' keep what sw.name(x, name) names; others have no names.",
                fix="sw.save('attn_out') with at least one name, or the policy 'everything'",
                names=self.names,
            )
        if bool(self.tier) != (self.policy == "offload"):
            raise PlanError(
                f"{self.by or 'a remat edit'} has the tier {self.tier!r} under {self.policy!r}.",
                why="Only 'offload' keeps values on a tier, and it names one.",
                fix="policy=sw.offload_to('pinned_host', 'attn_out')",
                tier=self.tier,
            )
        object.__setattr__(self, "names", tuple(sorted(set(self.names))))

    @property
    def phase(self) -> str:
        """After everything that lays tensors out."""
        return "remat"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulateEdit(Edit):
    """Run a step in several passes over micro-batches; a setting of the whole plan."""

    kind: ClassVar[str] = "accumulate"
    steps: int
    reduce: str = "auto"
    gather: str = "micro"

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        _refuse_mask(self, "All parameters see the same micro-batches")
        if not _counts(self.steps):
            raise PlanError(
                f"{self.by or 'accumulate'} has no possible number of micro-batches.",
                where="argument n of accumulate()",
                facts=f"n is {self.steps!r}; allowed: a whole number, at least 1.",
                why="A step runs one forward and one backward pass over each micro-batch.",
                fix="accumulate(4), or accumulate(1) for none",
                steps=self.steps,
            )
        for name, known in (("reduce", REDUCE_MODES), ("gather", GATHER_MODES)):
            value = getattr(self, name)
            if value not in known:
                raise PlanError(
                    f"{self.by or 'accumulate'} has no possible {name}.",
                    where=f"argument {name} of accumulate()",
                    facts=f"{name} is {value!r}; allowed: {', '.join(map(repr, known))}.",
                    why="It says when micro-steps move gradients or weights.",
                    fix=nearest(str(value), known),
                    **{name: value},
                )

    @property
    def phase(self) -> str:
        """Its own."""
        return "accumulation"


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


def _counts(value: object) -> bool:
    return type(value) is int and value > 0


def _refuse_mask(edit: Edit, why: str) -> None:
    if edit.where:
        raise PlanError(
            f"{edit.by or edit.kind} cannot be masked.",
            facts=f"mask {edit.where!r}",
            why=f"{why}, for the whole plan and not per parameter.",
            fix="apply it outside of masked and partition",
        )


def _no_loss_scale(edit: LossScaleEdit, name: str, rule: str) -> PlanError:
    value = getattr(edit, name)
    return PlanError(
        f"{edit.by or 'a loss scale edit'} has no possible {name}.",
        where=f"argument {name} of loss_scale()",
        facts=f"{name} is {value!r}, initial_power is {edit.initial_power!r}; allowed: {rule}.",
        why="The scale starts at 2**initial_power and stays between minimum and maximum.",
        fix="loss_scale() for a dynamic scale, or loss_scale(128.0) for a fixed one",
        **{name: value},
    )


def check_home(home: str, by: str) -> None:
    """Raise `PlanError` for a word that names no home."""
    if home not in HOMES:
        raise PlanError(
            f"{by or 'an edit'} names the unknown home {home!r}.",
            why=f"The resting layouts of a parameter are {', '.join(HOMES)}.",
            fix=nearest(home, HOMES),
            home=home,
        )
