"""Failures of one replay: collected first, then raised together and summarised by pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.sharding.errors import PlanError, summarise
from shardwise.sharding.repeats import collapse, render_group

_SUMMARISE_ABOVE = 5


class Failure(NamedTuple):
    """Why one parameter cannot have what an edit asks.

    `problem` continues the sentence that `by` begins and holds `{count}`; `tail` follows the path
    on its line, `fact` is the line below.
    """

    by: str
    problem: str
    path: str
    tail: str
    why: str
    fix: str
    fact: str = ""
    numbers: Mapping[str, Any] = {}

    @property
    def group(self) -> tuple[str, str, str]:
        """Failures of one group are one sentence."""
        return self.by, self.problem, self.why


def raise_failures(failures: Sequence[Failure], num_params: int) -> None:
    """Raise one error for all failures; return when there are none.

    Raises:
        PlanError: there is at least one; numbers are those of the first.
    """
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault(failure.group, []).append(failure)
    blocks = [(_headline(group, num_params), _lines(group)) for group in groups.values()]
    if not blocks:
        return
    (what, lines), *others = blocks
    first = failures[0]
    numbers = {**first.numbers, "path": first.path, "num_params": num_params}
    raise PlanError(
        what,
        where=lines[0],
        facts=[*lines[1:], *(line for head, more in others for line in (head, *more))],
        why=first.why,
        fix=first.fix,
        num_failed=len({failure.path for failure in failures}),
        **numbers,
    )


def _headline(group: Sequence[Failure], num_params: int) -> str:
    count = f"{len({failure.path for failure in group})} of {num_params} parameters"
    return f"{group[0].by} {group[0].problem.format(count=count)}."


def _lines(group: Sequence[Failure]) -> list[str]:
    """Two lines per parameter, or per set of repeated parameters when there are many."""
    by_path = {failure.path: failure for failure in group}
    if len(by_path) > _SUMMARISE_ABOVE:
        sets = collapse(by_path, lambda path: (by_path[path].tail, by_path[path].fact))
    else:
        sets = [[path] for path in by_path]
    entries = [
        "\n".join(filter(None, (f"{render_group(paths)}   {of.tail}", of.fact)))
        for paths in sets
        for of in (by_path[paths[0]],)
    ]
    return summarise(entries, above=_SUMMARISE_ABOVE)
