"""Errors in five parts: what failed, where, the facts (numbers), why (the rule), and the fix."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SUMMARISE_ABOVE = 5


class ShardwiseError(Exception):
    """Base of every error raised on purpose.

    Args:
        what: one sentence, naming the call as the user wrote it.
        where: transform, parameter path, argument or call site.
        facts: lines that carry every number involved.
        why: the rule that was broken and where it came from.
        fix: one or two concrete edits.
        numbers: the same numbers by name, available as `error.numbers`.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        facts: str | Sequence[str] = (),
        why: str = "",
        fix: str = "",
        **numbers: Any,
    ) -> None:
        self.what = what
        self.where = where
        self.facts = (facts,) if isinstance(facts, str) else tuple(facts)
        self.why = why
        self.fix = fix
        self.numbers = numbers
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {line}" for line in self.where.splitlines()]
        lines += [f"  {line}" for fact in self.facts for line in fact.splitlines()]
        lines += [f"  {line}" for line in self.why.splitlines()]
        if self.fix:
            lines.append(f"  Fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep all five parts when an error crosses a process boundary."""
        parts = {"where": self.where, "facts": self.facts, "why": self.why, "fix": self.fix}
        return _rebuild, (type(self), self.what, parts, self.numbers)


def _rebuild(
    kind: type[ShardwiseError], what: str, parts: dict[str, Any], numbers: dict[str, Any]
) -> ShardwiseError:
    return kind(what, **parts, **numbers)


class MeshError(ShardwiseError, ValueError):
    """Axis names or sizes that do not make a mesh, or a mesh that does not fit the job."""


class AxesError(ShardwiseError, ValueError):
    """An axes pattern that does not parse or does not fit a shape."""


class SpecError(ShardwiseError, ValueError):
    """A spec that does not parse, or that no tensor can have."""


class PlanError(ShardwiseError, ValueError):
    """A plan that cannot be: raised before any tensor moves, on every rank alike."""


class PatternError(PlanError):
    """A pattern that is malformed or matches nothing."""


class OptimError(ShardwiseError, ValueError):
    """A hyperparameter that no optimizer can have, or transforms that do not chain."""


class LowerError(ShardwiseError):
    """A plan, loss function and optimizer that do not fit together."""


class InitError(ShardwiseError):
    """Parameters or buffers that nobody initialised."""


class BatchError(ShardwiseError, ValueError):
    """A batch that cannot be cut, or whose structure differs between ranks."""


class LossError(ShardwiseError, TypeError):
    """A loss function that returned something else than a scalar or a `Mean`."""


class UnitError(ShardwiseError):
    """A module that does with its parameters what a unit does not allow."""


class OrderError(ShardwiseError):
    """Units entered in another order than the one that was lowered."""


class ImplicitCommError(ShardwiseError):
    """A collective that ran without being in `lowered.collectives()`."""


class DonatedStateError(ShardwiseError):
    """A state handle that was used after `step` had consumed it."""


class StateError(ShardwiseError, ValueError):
    """A state that does not have the structure, shapes or dtypes of the program."""


class RandomError(ShardwiseError, ValueError):
    """Random bits that cannot be drawn as asked, or a place that has no step to key them by."""


class RematError(ShardwiseError):
    """A recomputation that would not give what the forward pass gave."""


class LossScaleError(ShardwiseError):
    """Gradients that overflow at the smallest loss scale; raised on every rank."""


class RankError(ShardwiseError):
    """A rank failed; raised on every rank, with that rank's own words."""


class CheckpointError(ShardwiseError):
    """A checkpoint that cannot be written whole, or read as what it says it is."""


class OffloadError(ShardwiseError):
    """A tier that cannot hold, or give back, what a plan puts there."""


class SimulationError(ShardwiseError):
    """Simulated ranks that wait for each other for ever, or a misuse of `simulate`."""


class LaunchError(ShardwiseError):
    """A job that cannot be started or joined."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The closest known word as a phrase for a fix, or the known words when none is close.

    >>> nearest("fdsp", ["fsdp", "tp"])
    "did you mean 'fsdp'?"
    >>> nearest("x", ["fsdp", "tp"])
    'known: fsdp, tp'
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return f"known: {shown}" if known else "there are none"


def summarise(lines: Sequence[str], *, above: int = _SUMMARISE_ABOVE) -> list[str]:
    """At most `above` lines, the rest counted.

    >>> summarise(["a", "b", "c"], above=2)
    ['a', 'b', '... and 1 more']
    """
    if len(lines) <= above:
        return list(lines)
    return [*lines[:above], f"... and {len(lines) - above} more"]


def strict_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Name the closest valid keyword when a caller misspells one (plain Python does not)."""
    known = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for key in kwargs:
            if key not in known:
                name = getattr(function, "__name__", "call")
                raise TypeError(f"{name}() has no argument {key!r}; {nearest(key, known)}")
        return function(*args, **kwargs)

    return checked
