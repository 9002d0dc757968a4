"""Axes of parameters: patterns over paths give every dimension its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import AxesError, PlanError, summarise
from shardwise.sharding.repeats import collapse, render_group
from shardwise.sharding.tree import match, no_match
from shardwise.sharding.units import ParamInfo


def name_axes(infos: Iterable[ParamInfo], axes: Mapping[str, str]) -> tuple[ParamInfo, ...]:
    """Give parameters the axes of the first pattern that matches them, by path or alias.

    Args:
        infos: parameters.
        axes: axes pattern by path pattern.

    Raises:
        PatternError: a path pattern matches nothing.
        AxesError: an axes pattern does not parse.
        PlanError: axes do not fit the shapes of parameters; all of them in one error.
    """
    infos = tuple(infos)
    known = [name for info in infos for name in info.names]
    parsed = {pattern: Axes.parse(text) for pattern, text in axes.items()}
    for pattern in parsed:
        if not any(match(pattern, name) for name in known):
            raise no_match(pattern, known)
    named: list[ParamInfo] = []
    faults: dict[str, tuple[str, str]] = {}
    for info in infos:
        pattern = _first_match(parsed, info)
        if pattern is None:
            named.append(info)
            continue
        try:
            parsed[pattern].check(info.shape)
        except AxesError as error:
            faults[info.path] = (f"shape {info.shape}   axes={{{pattern!r}: ...}}", error.what)
        named.append(replace(info, axes=parsed[pattern]))
    _raise_misfits(faults, len(infos))
    return tuple(named)


def _first_match(patterns: Iterable[str], info: ParamInfo) -> str | None:
    hits = (pattern for pattern in patterns if any(match(pattern, name) for name in info.names))
    return next(hits, None)


def _raise_misfits(faults: Mapping[str, tuple[str, str]], num_params: int) -> None:
    if not faults:
        return
    lines = [
        f"{render_group(group)}   {faults[group[0]][0]}\n{faults[group[0]][1]}"
        for group in collapse(faults, lambda path: faults[path])
    ]
    raise PlanError(
        f"plan(..., axes=...) does not fit {len(faults)} of {num_params} parameters.",
        facts=summarise(lines),
        why="Axes name every dimension of a parameter; the first matching pattern wins.",
        fix="correct the axes, or put a more exact path pattern before it",
        num_failed=len(faults),
        path=next(iter(faults)),
    )
