"""A plan: a base (model and mesh) plus edits, and every layout that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from torch import nn

from shardwise.sharding.derived import (
    Accumulation,
    Acts,
    Base,
    Derived,
    LossScale,
    Naming,
    Precision,
    Remat,
    Rests,
    TensorParallel,
)
from shardwise.sharding.deriving import uses_half
from shardwise.sharding.describe import describe, difference, explain
from shardwise.sharding.draft import selected
from shardwise.sharding.edits import Clauses, Edit
from shardwise.sharding.errors import PatternError, PlanError, strict_keywords
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.modules import callable_modules, float_buffers, module_patterns
from shardwise.sharding.naming import name_parameters, with_axes
from shardwise.sharding.plan_json import decode, encode
from shardwise.sharding.replay import replay, replay_order
from shardwise.sharding.rules import Rules
from shardwise.sharding.scope import OUTERMOST, Scope, call_site, scoped
from shardwise.sharding.spec import Spec
from shardwise.sharding.tree import FrozenMap, Where, as_patterns, no_match
from shardwise.sharding.units import ParamInfo, Unit, find_units, param_infos


@dataclass(frozen=True, repr=False)
class Plan:
    """The layouts of every tensor of a training program; made by `plan`, changed by transforms.

    A plan is its base and its edits: two plans are equal when these are, in phase order, whatever
    the module, the log and the scope. Everything else is derived from them by replay.

    Args:
        base: mesh, parameters, units and rules.
        edits: sorted by phase.
        log: for every edit the place it was written.
        module: the user's module, never modified; None after pickling or JSON.
        scope: set only while a combinator runs.
    """

    base: Base
    edits: tuple[Edit, ...] = ()
    log: tuple[str, ...] = ()
    module: nn.Module | None = None
    scope: Scope = OUTERMOST

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.edits == other.edits and self.base == other.base

    def __hash__(self) -> int:
        return hash((self.base, self.edits))

    def __repr__(self) -> str:
        made = dict.fromkeys(edit.by or edit.kind for edit in self.edits)
        return f"Plan({', '.join([repr(self.mesh), f'{len(self.infos)} parameters', *made])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Make IPython and hypothesis print `repr`; for dataclasses they would list all fields."""
        del cycle
        printer.text(repr(self))

    def __str__(self) -> str:
        return describe(self.derived)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.base, self.edits, self.log)

    @cached_property
    def derived(self) -> Derived:
        """What the edits amount to."""
        return replay(self.base, self.edits)

    @property
    def mesh(self) -> Mesh:
        """The mesh, after the edits that split axes."""
        return self.derived.mesh

    @property
    def infos(self) -> tuple[ParamInfo, ...]:
        """Every parameter once, in `named_parameters()` order."""
        return self.derived.infos

    @property
    def units(self) -> tuple[Unit, ...]:
        """The root first, then module order."""
        return self.derived.units

    @property
    def rules(self) -> Rules | None:
        """Logical axes to mesh axes."""
        return self.base.rules

    @property
    def params(self) -> FrozenMap[str, Spec]:
        """Where parameters rest."""
        return self.derived.params

    @property
    def grads(self) -> FrozenMap[str, Spec]:
        """Where gradients are reduced to; frozen parameters have no entry."""
        return self.derived.grads

    @property
    def opt(self) -> FrozenMap[str, Spec]:
        """Where optimizer state and master weights rest; frozen parameters have no entry."""
        return self.derived.opt

    @property
    def compute(self) -> FrozenMap[str, Spec]:
        """What parameters look like while their module runs."""
        return self.derived.compute

    @property
    def batch(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        return self.derived.batch

    @property
    def keep(self) -> frozenset[str]:
        """Units that stay gathered between forward and backward."""
        return self.derived.keep

    @property
    def prefetch(self) -> int:
        """How many units are gathered ahead."""
        return self.derived.prefetch

    @property
    def accumulation(self) -> Accumulation:
        """How many passes a step takes, and what it keeps between them."""
        return self.derived.accumulation

    @property
    def precision(self) -> Precision:
        """Dtypes on the wire, casts, and rounding; those at rest are in the specs."""
        return self.derived.precision

    @property
    def loss_scale(self) -> LossScale | None:
        """How the loss is scaled; None: not at all."""
        return self.derived.loss_scale

    @property
    def remat(self) -> FrozenMap[str, Remat]:
        """Modules that are recomputed in backward, and what is kept of them; outer ones first."""
        return self.derived.remat

    @property
    def rests(self) -> FrozenMap[str, Rests]:
        """The tiers of every parameter of which a part rests off the device."""
        return self.derived.rests

    @property
    def acts(self) -> FrozenMap[str, Acts]:
        """Modules whose saved values wait off the device; outer ones first."""
        return self.derived.acts

    @property
    def tensor(self) -> TensorParallel:
        """How layers are cut over tensor axes."""
        return self.derived.tensor

    @cached_property
    def uses_half(self) -> bool:
        """Whether float16 computes or carries gradients."""
        return uses_half(self.compute, self.grads, self.precision.reduce)

    def info(self, path: str) -> ParamInfo:
        """The parameter of that path or alias.

        Raises:
            PatternError: there is none; names the nearest.
        """
        for info in self.infos:
            if path in info.names:
                return info
        raise no_match(path, [name for info in self.infos for name in info.names])

    def clauses(self, where: Where) -> Clauses:
        """A selection as patterns, checked against the parameters.

        Raises:
            PatternError: it selects nothing, or a pattern is malformed.
        """
        found = (as_patterns(where, [info.path for info in self.base.infos]),)
        selected(self.base.infos, found)
        return found

    def unit_clauses(self, where: Where) -> Clauses:
        """A selection of units, by the path of their module, as patterns."""
        return (as_patterns(where, [unit.name for unit in self.units if unit.kind == "unit"]),)

    def module_patterns(self, where: Where) -> tuple[str, ...]:
        """A selection of modules, by their own paths, as patterns."""
        return module_patterns(where, self.base.modules)

    def buffer_patterns(self, where: Where) -> tuple[str, ...]:
        """A selection of floating buffers as patterns."""
        return as_patterns(where, self.base.buffers)

    def edit(self, *edits: Edit, site: str = "") -> Plan:
        """This plan with more edits; of equal edits only the last counts.

        Args:
            edits: what to add.
            site: where they were written; default: the nearest caller outside of shardwise.

        Raises:
            PlanError: no layout fulfils all edits.
        """
        site = site or call_site()
        added = tuple(scoped(edit, self.scope) for edit in edits)
        kept = [pair for pair in zip(self.edits, self.log, strict=True) if pair[0] not in added]
        pairs = [*kept, *((edit, site) for edit in dict.fromkeys(added))]
        pairs.sort(key=lambda pair: replay_order(pair[0]))
        plan = replace(
            self, edits=tuple(edit for edit, _ in pairs), log=tuple(site for _, site in pairs)
        )
        return plan if self.scope.unfinished else plan.checked()

    def checked(self) -> Plan:
        """This plan.

        Raises:
            PlanError: no layout fulfils all edits.
        """
        _ = self.derived
        return self

    def within(self, clauses: Clauses = (), *, name: str = "") -> Plan:
        """This plan, in which further edits are masked and named; undone by `leave`."""
        names = ": ".join(filter(None, (self.scope.name, name)))
        clauses = (*self.scope.clauses, *clauses)
        return replace(self, scope=Scope(clauses, names, unfinished=True))

    def leave(self, outer: Plan) -> Plan:
        """This plan in the scope of `outer`; checked if that is all."""
        plan = replace(self, scope=outer.scope)
        return plan if outer.scope.unfinished else plan.checked()

    def same_layout(self, other: Plan) -> bool:
        """Whether both lay every tensor out alike, however they were written."""
        return self.derived == other.derived

    def diff(self, other: Plan) -> tuple[str, ...]:
        """One line per difference in layout, from this plan to the other; empty: same layout."""
        return difference(self.derived, other.derived)

    def why(self, path: str) -> str:
        """Every edit that touches a parameter, with its call site, and the specs that result.

        Raises:
            PatternError: no parameter has that path.
        """
        info, edits = self.info(path), zip(self.edits, self.log, strict=True)
        return explain(self.derived, info, edits, self.base.naming.sources.get(info.path, ""))

    def to_json(self) -> str:
        """The plan as JSON text; the module is left out."""
        return encode(self.base, self.edits, self.log)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of `to_json`.

        Raises:
            PlanError: not a plan, of another schema version, or with unknown keys.
        """
        plan = Plan(*decode(text))
        _ = plan.derived
        return plan


Transform: TypeAlias = Callable[[Plan], Plan]
"""A pure function from plan to plan."""


@strict_keywords
def plan(
    model: nn.Module,
    mesh: Mesh,
    /,
    *transforms: Transform,
    rules: Rules | None = None,
    axes: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    units: Sequence[str] | None = None,
) -> Plan:
    """Lay out a model on a mesh; without transforms everything is replicated.

    Costs no communication and touches no parameter: a model on the meta device will do.

    Args:
        model: any module; never modified.
        mesh: named axes.
        transforms: applied in order; their phases, not this order, decide.
        rules: logical axes to mesh axes, for transforms that need them.
        axes: axes pattern by path pattern, the first match wins; then come the `axes` of modules
            and what is known of Hugging Face models; others get `d0 d1 ...`.
        sizes: of names that the shapes leave open, such as `hd`.
        units: patterns over module paths, instead of the rule in [Note: units].

    Raises:
        PlanError: the transforms contradict the model, the mesh or each other.

    >>> print(plan(nn.Linear(4, 2), Mesh(fsdp=2)).params["weight"])
    d0 d1
    """
    _check_arguments(model, mesh, units)
    infos = param_infos(model)
    known = name_parameters(model, infos, axes or {}, sizes or {})
    infos = with_axes(infos, known)
    naming = Naming(known.source, known.guesses, known.sizes, known.local_ints)
    found = find_units(model, infos, units)
    paths = (callable_modules(model), float_buffers(model))
    base = Base(mesh, infos, found, rules, *paths, naming)
    bare = Plan(base, module=model)
    result = bare.within()
    for transform in transforms:
        result = apply_transform(transform, result)
    return result.leave(bare)


def _check_arguments(model: Any, mesh: Any, units: Any) -> None:
    expected: dict[str, tuple[Any, Any, str]] = {
        "model": (model, nn.Module, "a torch.nn.Module"),
        "mesh": (mesh, Mesh, "a Mesh, such as sw.Mesh(fsdp=2)"),
        "units": (units, (list, tuple, type(None)), "a list of patterns, such as ['layers.*']"),
    }
    for name, (value, kind, words) in expected.items():
        if not isinstance(value, kind):
            raise PlanError(
                f"plan(...) was given an object of type {type(value).__name__} as its {name}.",
                why=f"The {name} of a plan is {words}.",
                fix="plan(model, mesh, *transforms, rules=..., axes=..., units=[...])",
                argument=name,
            )


def apply_transform(transform: Transform, before: Plan) -> Plan:
    """Apply, and check that a plan comes back.

    Raises:
        PatternError: a pattern of it matches nothing.
        PlanError: it is not a transform.
    """
    try:
        after = transform(before) if callable(transform) else None
    except PatternError as error:
        # A pattern is compiled and matched far below the transform that it was written in.
        error.where = error.where or getattr(transform, "__name__", "")
        raise
    if isinstance(after, Plan):
        return after
    gave = f"returned a {type(after).__name__}" if callable(transform) else "is no function"
    raise PlanError(
        f"{getattr(transform, '__name__', transform)!r} is not a transform.",
        facts=f"it {gave}.",
        why="A transform is a function that takes a plan and returns a plan.",
        fix="call its constructor first: sw.zero(3, 'fsdp'), not sw.zero",
    )


def named(transform: Transform, name: str) -> Transform:
    """The transform, called `name` in errors and compositions."""
    transform.__name__ = name
    return transform
