"""Paths of modules and buffers: what there is to call in a model, and what selects it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.sharding.errors import PatternError
from shardwise.sharding.tree import Where, as_patterns, match_exact, no_match, nothing_left

ROOT = ""
"""The path of the model itself; as a pattern it selects the model and nothing else."""


def callable_modules(module: nn.Module) -> tuple[str, ...]:
    """Paths of all modules that define a `forward`, the model first; a shared one counts once.

    >>> callable_modules(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.ReLU()])))
    ('', '0', '1.0')
    """
    return tuple(
        path for path, part in module.named_modules() if type(part).forward is not nn.Module.forward
    )


def float_buffers(module: nn.Module) -> tuple[str, ...]:
    """Paths of all floating buffers; a shared one counts once.

    >>> float_buffers(nn.BatchNorm1d(2))
    ('running_mean', 'running_var')
    """
    return tuple(path for path, value in module.named_buffers() if value.is_floating_point())


def module_patterns(where: Where, modules: Sequence[str]) -> tuple[str, ...]:
    """A selection of modules as patterns; a predicate becomes the exact paths it holds for.

    Raises:
        PatternError: a pattern is malformed, or a predicate holds for no module.

    >>> module_patterns(lambda path: "." not in path, ["", "norm", "layers.0"])
    ('', '^norm')
    """
    if callable(where):
        exact = as_patterns(where, modules)
        return tuple(ROOT if pattern == "^" else pattern for pattern in exact)
    if where == ROOT:
        return (ROOT,)
    if isinstance(where, str):
        return as_patterns(where, modules)
    others = tuple(pattern for pattern in where if pattern != ROOT)
    found = as_patterns(others, modules) if others or not where else ()
    return (*found, ROOT) if len(others) < len(where) else found


def select_modules(patterns: Sequence[str], modules: Sequence[str]) -> tuple[str, ...]:
    """The modules whose very path one of the patterns matches, less those of negated ones.

    Args:
        patterns: see [Note: patterns]; `""` is the model itself.
        modules: paths of what there is to call.

    Raises:
        PatternError: a pattern matches no module, or all together leave none.

    >>> select_modules(("layers.*", "~layers.1"), ["", "layers.0", "layers.0.up", "layers.1"])
    ('layers.0',)
    """
    for pattern in patterns:
        if not any(_matches(pattern, path) for path in modules):
            raise _no_module(pattern, modules)
    wanted = [pattern for pattern in patterns if not pattern.startswith("~")]
    refused = [pattern for pattern in patterns if pattern.startswith("~")]
    found = tuple(
        path
        for path in modules
        if (not wanted or any(_matches(pattern, path) for pattern in wanted))
        and all(_matches(pattern, path) for pattern in refused)
    )
    if not found:
        raise nothing_left(", ".join(map(repr, patterns)), [path or "(root)" for path in modules])
    return found


def _matches(pattern: str, path: str) -> bool:
    return path == ROOT if pattern == ROOT else match_exact(pattern, path)


def _no_module(pattern: str, modules: Sequence[str]) -> PatternError:
    """Says so if the pattern names a list of modules, which is never called itself."""
    above = {path.rpartition(".")[0] for path in modules} - {*modules}
    lists = [path for path in above if path and _matches(pattern, path)]
    if not lists:
        return no_match(pattern, [path for path in modules if path])
    inside = [path for path in modules if path.startswith(f"{lists[0]}.")]
    return PatternError(
        f"pattern {pattern!r} selects {lists[0]!r}, which is never called.",
        where=lists[0],
        facts=f"It holds {len(inside)} modules that are: {', '.join(inside[:3])}, ...",
        why="A list of modules has no forward of its own; its children are called one by one.",
        fix=f"name its children: '{pattern}.*'",
        pattern=pattern,
        num_inside=len(inside),
    )
