"""Paths of parameters: immutable maps over them, and the patterns that select them.

[Note: patterns]
A pattern is a sequence of dot segments, matched against whole segments of a path. It is anchored
at the end and free at the start (`wq.weight` finds `layers.0.attn.wq.weight`) unless it begins
with `^`. `*` is one segment, or any part of one (`*norm*`); `**` is any number of segments; `~` in
front negates. A pattern selects a parameter by its path or by the path of a module above it, so
`layers.*` selects every parameter of every layer. A tuple of patterns selects what one of them
matches (or everything, when all are negated) except what a negated one names.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from shardwise.sharding.errors import PatternError, nearest, summarise
from shardwise.sharding.repeats import collapse, render_group

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Where: TypeAlias = str | Sequence[str] | Callable[[str], bool]
"""What selects parameters: a pattern, several, or a predicate over paths."""


class FrozenMap(Mapping[K, V]):
    """An immutable mapping that keeps insertion order; equal as a dict, hashable if its values are.

    >>> FrozenMap(a=1) | {"b": 2}
    FrozenMap({'a': 1, 'b': 2})
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = (), /, **more: V) -> None:
        self._items: dict[K, V] = dict(items, **more)
        self._hash: int | None = None

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __or__(self, other: Mapping[K, V]) -> FrozenMap[K, V]:
        return FrozenMap({**self._items, **other})

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMap):
            return self._items == other._items
        return self._items == other if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The cached hash stays behind: string hashes differ between processes.
        return FrozenMap, (self._items,)


def match(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path or a module above it; see [Note: patterns].

    Raises:
        PatternError: the pattern is malformed.

    >>> match("layers.*", "model.layers.3.mlp.up.weight"), match("~*norm*", "layers.0.norm2.bias")
    (True, False)
    """
    negated, find = _compile(pattern)
    return bool(find(_text(path))) is not negated


def match_exact(pattern: str, path: str) -> bool:
    """Whether a pattern matches this very path, not one above it.

    >>> match_exact("layers.*", "layers.3"), match_exact("layers.*", "layers.3.mlp")
    (True, False)
    """
    negated, find = _compile(pattern, r"\Z")
    return bool(find(_text(path))) is not negated


def select(where: Where, paths: Iterable[str]) -> tuple[str, ...]:
    """The paths that `where` selects, in the order given.

    Args:
        where: a pattern, a tuple or list of patterns, or a predicate over paths.
        paths: what there is.

    Raises:
        PatternError: a pattern is malformed, or it or the whole selection matches nothing.

    >>> select(("layers.*", "~bias"), ["embed.weight", "layers.0.weight", "layers.0.bias"])
    ('layers.0.weight',)
    """
    paths = tuple(paths)
    clause = as_patterns(where, paths)
    found = tuple(path for path in paths if selects(clause, (path,)))
    for pattern in clause:
        if not any(match(pattern, path) for path in paths):
            raise no_match(pattern, paths)
    if not found:
        raise nothing_left(", ".join(map(repr, clause)), paths)
    return found


def as_patterns(where: Where, paths: Iterable[str]) -> tuple[str, ...]:
    """`where` as well-formed patterns; a predicate becomes the exact paths it holds for.

    >>> as_patterns(lambda path: path.endswith("bias"), ["a.weight", "a.bias"])
    ('^a.bias',)
    """
    if callable(where):
        found = tuple(f"^{path}" for path in paths if where(path))
        if not found:
            raise nothing_left(getattr(where, "__name__", "predicate"), tuple(paths))
        return found
    clause = tuple(where) if isinstance(where, tuple | list) else (where,)
    if not clause:
        raise PatternError(
            "an empty tuple of patterns selects nothing.",
            why="A selection that matches nothing is an error.",
            fix="where='**' selects everything",
        )
    for pattern in clause:
        if not isinstance(pattern, str):
            raise PatternError(
                f"{pattern!r} is no pattern.",
                why="A selection is a pattern, a tuple of patterns, or one predicate over paths.",
                fix="write where=predicate, or where=('layers.*', '~bias')",
            )
        _compile(pattern)
    return tuple(str(pattern) for pattern in clause)


def selects(clause: Sequence[str], names: Sequence[str]) -> bool:
    """Whether patterns select a leaf that goes by one or (when tied) several names."""
    wanted = [pattern for pattern in clause if not pattern.startswith("~")]
    if wanted and not any(match(pattern, name) for pattern in wanted for name in names):
        return False
    refused = (pattern for pattern in clause if pattern.startswith("~"))
    return all(match(pattern, name) for pattern in refused for name in names)


def no_match(pattern: str, paths: Sequence[str]) -> PatternError:
    """The error for a pattern (or a path) that selects none of `paths`."""
    return PatternError(
        f"pattern {pattern!r} matches none of {len(paths)} paths.",
        facts=summarise([render_group(group) for group in collapse(paths)]),
        why="A pattern names whole dot segments up to the end of a path or of a module above it.",
        fix=_suggest(pattern, paths),
        pattern=pattern,
        num_paths=len(paths),
    )


def nothing_left(selection: str, paths: Sequence[str]) -> PatternError:
    """The error for patterns that match something each but nothing together, or a predicate."""
    return PatternError(
        f"the selection {selection} matches none of {len(paths)} paths.",
        facts=summarise([render_group(group) for group in collapse(paths)]),
        why="A transform that changes nothing is an error.",
        fix="widen the selection, or leave the transform out",
        selection=selection,
        num_paths=len(paths),
    )


def _text(path: str) -> str:
    """A path with a dot behind every segment, so that patterns end at segment borders."""
    return f"{path}." if path else ""


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str, end: str = "") -> tuple[bool, Callable[[str], re.Match[str] | None]]:
    body = pattern.removeprefix("~")
    anchored = body.startswith("^")
    segments = body.removeprefix("^").split(".")
    for segment in segments:
        if not segment or re.search(r"[~^\s]", segment) or ("**" in segment and segment != "**"):
            raise PatternError(
                f"pattern {pattern!r} is malformed at segment {segment!r}.",
                why="Segments are names with '*', or '**' alone, with dots between them; "
                "'~' (not) and '^' (from the root) stand in front.",
                fix="examples: 'layers.*', '*norm*', '^embed.weight', '~**.bias'",
                pattern=pattern,
            )
    free = "" if anchored else r"(?:[^.]+\.)*"
    expression = free + "".join(_segment(segment) for segment in segments) + end
    return pattern.startswith("~"), re.compile(expression).match


def _segment(segment: str) -> str:
    if segment == "**":
        return r"(?:[^.]+\.)*"
    if segment == "*":
        return r"[^.]+\."
    return "[^.]*".join(re.escape(part) for part in segment.split("*")) + r"\."


def _suggest(pattern: str, paths: Sequence[str]) -> str:
    """Nearest name for the first segment no path has, else the nearest paths."""
    names = dict.fromkeys(itertools.chain.from_iterable(path.split(".") for path in paths))
    body = re.sub(r"^~?\^?", "", pattern)
    for segment in body.split("."):
        if not any(re.fullmatch(_segment(segment), f"{name}.") for name in names):
            known = [name for name in names if not name.isdigit()]
            return f"no segment is {segment!r}; {nearest(segment.strip('*'), known)}"
    return nearest(body, (render_group(group) for group in collapse(paths)))
