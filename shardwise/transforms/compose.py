"""Composition: chains, masks, partitions, and the override of a single spec."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.sharding.draft import selected
from shardwise.sharding.edits import Clauses, TreeAtEdit
from shardwise.sharding.errors import PatternError, strict_keywords
from shardwise.sharding.plan import Plan, Transform, apply_transform, named
from shardwise.sharding.scope import call_site
from shardwise.sharding.spec import Spec
from shardwise.sharding.tree import Where


@strict_keywords
def chain(*transforms: Transform, name: str | None = None) -> Transform:
    """Several transforms as one, applied in order; no transforms: the identity.

    Args:
        transforms: what to apply.
        name: shown before each part in errors and in the log.

    Raises:
        PlanError: when applied, what its parts raise.

    >>> chain(name="my_recipe").__name__
    'my_recipe'
    """

    def apply(plan: Plan) -> Plan:
        inner = plan.within(name=name or "")
        for transform in transforms:
            inner = apply_transform(transform, inner)
        return inner.leave(plan)

    parts = ", ".join(getattr(transform, "__name__", "transform") for transform in transforms)
    return named(apply, name or f"chain({parts})")


@strict_keywords
def masked(transform: Transform, where: Where) -> Transform:
    """A transform that changes only some parameters.

    Args:
        transform: what to apply.
        where: to which parameters.

    Raises:
        PlanError: when applied: `where` matches nothing, or nothing that the transform selects.

    >>> masked(chain(name="recipe"), "layers.*").__name__
    "masked(recipe, 'layers.*')"
    """

    def apply(plan: Plan) -> Plan:
        return apply_transform(transform, plan.within(plan.clauses(where))).leave(plan)

    return named(apply, f"masked({getattr(transform, '__name__', 'transform')}, {where!r})")


@strict_keywords
def partition(transforms: Mapping[str, Transform]) -> Transform:
    """Different transforms for different parameters: the first pattern that matches decides.

    Parameters that no pattern matches stay as they are; end with `"**"` to reach all.

    Args:
        transforms: transform by pattern.

    Raises:
        PlanError: when applied: a pattern that matches nothing, or nothing that is still free.

    >>> partition({"embed": chain(name="a"), "**": chain(name="b")}).__name__
    "partition({'embed': a, '**': b})"
    """

    def apply(plan: Plan) -> Plan:
        taken: Clauses = ()
        result = plan
        for pattern, transform in transforms.items():
            mine = plan.clauses(pattern)
            _check_free(plan, pattern, taken, (*mine, *taken))
            inner = result.within((*mine, *taken))
            result = apply_transform(transform, inner).leave(plan)
            taken = (*taken, (_negated(pattern),))
        return result

    parts = (f"{k!r}: {getattr(t, '__name__', 'transform')}" for k, t in transforms.items())
    return named(apply, f"partition({{{', '.join(parts)}}})")


@strict_keywords
def tree_at(home: str, path: str, spec: Spec | str) -> Transform:
    """Put one home of one parameter at an exact spec; replays after everything else.

    Args:
        home: `params`, `grads` or `opt`.
        path: the parameter, by path or alias.
        spec: a spec or its text; taken as it is, so a dtype left out means float32.

    Raises:
        SpecError: the text does not parse.
        PlanError: unknown home; when applied: unknown path, axes or mesh axes that do not fit.

    >>> tree_at("opt", "embed.weight", "d0/fsdp d1").__name__
    "tree_at('opt', 'embed.weight', 'd0/fsdp d1')"
    """
    text = str(Spec.parse(spec) if isinstance(spec, str) else spec)
    by, site = f"tree_at({home!r}, {path!r}, {text!r})", call_site()
    edit = TreeAtEdit(home=home, path=path, spec=text, by=by)
    return named(lambda plan: plan.edit(edit, site=site), by)


def _negated(pattern: str) -> str:
    return pattern.removeprefix("~") if pattern.startswith("~") else f"~{pattern}"


def _check_free(plan: Plan, pattern: str, taken: Clauses, clauses: Clauses) -> None:
    try:
        selected(plan.infos, clauses)
    except PatternError as error:
        raise PatternError(
            f"partition has nothing left for {pattern!r}.",
            facts=f"taken by {', '.join(repr(_negated(clause[0])) for clause in taken)}",
            why="Every parameter goes to the first pattern that matches it.",
            fix="put the more exact pattern first",
            pattern=pattern,
        ) from error
