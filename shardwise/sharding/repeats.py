"""Repeated blocks: paths that differ only in their numbers are grouped and printed once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence


def collapse(paths: Iterable[str], same: Callable[[str], Hashable] = bool) -> list[list[str]]:
    """Group paths that differ only in numbers; `render_group` gives the text of a group.

    Args:
        paths: what to group; groups come in order of their first path.
        same: paths are grouped only if this is equal.

    >>> [render_group(group) for group in collapse(["a.0.w", "b", "a.1.w", "a.2.w"])]
    ['a.{0..2}.w', 'b']
    """
    paths = tuple(paths)
    groups: dict[Hashable, list[str]] = {}
    for path in paths:
        shape = tuple("0" if part.isdigit() else part for part in path.split("."))
        groups.setdefault((shape, same(path)), []).append(path)
    blocks = [block for group in groups.values() for block in _rectangles(group)]
    block_of = {path: i for i, block in enumerate(blocks) for path in block}
    order = dict.fromkeys(block_of[path] for path in paths)
    return [blocks[i] for i in order]


def render_group(paths: Sequence[str]) -> str:
    """One text for paths of one group.

    >>> render_group(["layers.0.wq", "layers.1.wq", "layers.3.wq"])
    'layers.{0..1,3}.wq'
    """
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(_render_column(tuple(dict.fromkeys(column))) for column in columns)


def _render_column(parts: tuple[str, ...]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(int(part) for part in parts)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return "{" + ",".join(texts) + "}"


def _rectangles(paths: list[str]) -> list[list[str]]:
    """Split paths of one shape so that each part is a full product of its numbers."""
    return [list(block) for block in _split([tuple(path.split(".")) for path in paths])]


def _split(rows: list[tuple[str, ...]]) -> list[list[str]]:
    if not rows[0]:
        return [[""]]
    below: dict[str, list[tuple[str, ...]]] = {}
    for head, *rest in rows:
        below.setdefault(head, []).append(tuple(rest))
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for head, rest in below.items():
        alike.setdefault(tuple(rest), []).append(head)
    return [
        [f"{head}.{tail}".removesuffix(".") for head, tail in itertools.product(heads, tails)]
        for rest, heads in alike.items()
        for tails in _split(list(rest))
    ]
