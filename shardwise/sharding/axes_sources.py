"""Where names of dimensions come from: what a user or a module says of parameters and integers.

[Note: sources of axes]
In order of precedence: `plan(..., axes=)`; the `axes` attribute of a module; the table of a family
of Hugging Face models; the tensor-parallel plan such a model brings along; guesses from well-known
names, which only `tensor_parallel` uses. An adapter (`lora_A`, `lora_B`) follows the layer that it
is added to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import AxesError, PlanError, nearest
from shardwise.sharding.frames import measure
from shardwise.sharding.tree import match, match_exact, no_match
from shardwise.sharding.units import ParamInfo


@dataclass(slots=True)
class Findings:
    """What sources say: axes and their source by parameter, sizes by name, integers by path."""

    axes: dict[str, str] = field(default_factory=dict[str, str])
    source: dict[str, str] = field(default_factory=dict[str, str])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    ints: dict[str, str] = field(default_factory=dict[str, str])

    def name(self, path: str, axes: str, source: str) -> None:
        """Take the axes of a parameter, unless an earlier source has named it."""
        if path not in self.axes:
            self.axes[path], self.source[path] = axes, source

    def merge(self, other: Findings) -> None:
        """Take what earlier sources leave open."""
        for path, axes in other.axes.items():
            self.name(path, axes, other.source[path])
        self.sizes = other.sizes | self.sizes
        self.ints = other.ints | self.ints


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """What an expression over names counts.

    Args:
        text: one dimension of an axes pattern, or the quotient of two.
        sizes: of all names in it.

    >>> evaluate("((heads + kv + kv) hd)", {"heads": 4, "kv": 2, "hd": 8})
    64
    >>> evaluate("heads // kv", {"heads": 4, "kv": 2})
    2
    """
    values = [measure(Axes.parse(part).dims[0], sizes) for part in text.split("//")]
    return values[0] // values[1] if len(values) > 1 else values[0]


def names_in(text: str) -> tuple[str, ...]:
    """The names in an expression.

    >>> names_in("(3 heads hd) // kv")
    ('heads', 'hd', 'kv')
    """
    return tuple(
        dict.fromkeys(name for part in text.split("//") for name in Axes.parse(part).names)
    )


def integer_at(module: Any, chain: Sequence[str]) -> int | None:
    """The integer that a chain of attributes leads to; None where there is none.

    >>> integer_at(nn.Linear(3, 2), ["out_features"])
    2
    """
    for name in chain:
        module = getattr(module, name, None)
    return module if isinstance(module, int) and not isinstance(module, bool) else None


def find_integers(
    modules: Sequence[tuple[str, str, nn.Module]], pattern: str
) -> Iterator[tuple[str, int]]:
    """Integer attributes that a pattern selects, as paths with their values.

    Args:
        modules: path, the name that patterns are matched against, and the module.
        pattern: of modules, then an attribute, or one of the module's `config`.
    """
    anchor, body = ("^", pattern[1:]) if pattern.startswith("^") else ("", pattern)
    segments = body.split(".")
    length = 2 if segments[-2:-1] == ["config"] else 1
    above, chain = ".".join(segments[:-length]), segments[-length:]
    for path, name, module in modules:
        fits = bool(name) and match_exact(anchor + above, name) if above else not (anchor and name)
        value = integer_at(module, chain) if fits else None
        if value is not None:
            yield ".".join(filter(None, (path, *chain))), value


def from_user(
    model: nn.Module, infos: Sequence[ParamInfo], axes: Mapping[str, str], found: Findings
) -> None:
    """What `plan(..., axes=)` says; the first pattern that matches a parameter counts.

    Raises:
        PatternError: a pattern matches nothing.
        AxesError: an axes pattern does not parse.
        PlanError: a pattern selects no parameter, or only some that earlier ones name otherwise.
    """
    known = [name for info in infos for name in info.names]
    for pattern, text in axes.items():
        hits = [info for info in infos if any(match(pattern, name) for name in info.names)]
        if not hits:
            _user_integers(model, pattern, text, known, found)
            continue
        wanted = Axes.parse(text)
        free = [info for info in hits if info.path not in found.axes]
        # Both names of a tied matrix may be given, if they say the same.
        if not free and any(Axes.parse(found.axes[info.path]) != wanted for info in hits):
            raise _shadowed(pattern, text, hits, axes)
        for info in free:
            found.name(info.path, text, "user")


def _user_integers(
    model: nn.Module, pattern: str, text: str, known: Sequence[str], found: Findings
) -> None:
    modules = [(path, path, module) for path, module in model.named_modules()]
    ints = dict(find_integers(modules, pattern))
    if ints:
        check_expression(text, f"axes={{{pattern!r}: ...}}")
        _take_integers(ints, text, found)
        return
    others = [name for name, _ in model.named_buffers() if match(pattern, name)]
    inside = [path for path, _ in model.named_modules() if path and match_exact(pattern, path)]
    if not others and not inside:
        raise no_match(pattern, known)
    what = f"buffer {others[0]!r}" if others else f"module {inside[0]!r}, which has no parameters"
    raise PlanError(
        f"plan(..., axes=) has a pattern {pattern!r} that selects no parameter.",
        where=others[0] if others else inside[0],
        facts=f"it selects the {what}; {len(known)} parameters.",
        why="Axes name dimensions of parameters, or what an integer attribute of a module counts.",
        fix=nearest(pattern, known),
        pattern=pattern,
        num_params=len(known),
    )


def _take_integers(ints: Mapping[str, int], text: str, found: Findings) -> None:
    """Keep integers; one that counts a single name tells its size."""
    for path, value in ints.items():
        found.ints.setdefault(path, text)
        if names_in(text) == (text,):
            _take_size(path, text, value, found)


def _take_size(where: str, name: str, value: int, found: Findings) -> None:
    known = found.sizes.setdefault(name, value)
    if known != value:
        raise PlanError(
            f"the name {name!r} has two sizes: {known} and {value}.",
            where=where,
            facts=f"here {name} is {value}; elsewhere it is {known}.",
            why="A name has one size in a model.",
            fix=f"another name for one of them, such as '{name}2', with a rule for it",
            name=name,
            sizes=(known, value),
        )


def check_expression(text: str, where: str) -> None:
    """Refuse what counts no integer.

    Raises:
        PlanError: it is more than one dimension, or names with axes of a mesh.
    """
    parts = text.split("//")
    try:
        good = len(parts) <= 2 and all(Axes.parse(part).ndim == 1 for part in parts)
    except AxesError as error:
        error.where = error.where or where
        raise
    if not good:
        raise PlanError(
            f"{text!r} does not say what an integer counts.",
            where=where,
            facts=f"{len(parts)} parts around '//', of "
            f"{', '.join(str(Axes.parse(part).ndim) for part in parts)} dimensions.",
            why="An integer is one dimension of an axes pattern, or the quotient of two.",
            fix="examples: 'heads', '(heads hd)', 'heads // kv'",
            text=text,
        )


def _shadowed(
    pattern: str, text: str, hits: Sequence[ParamInfo], axes: Mapping[str, str]
) -> PlanError:
    first = next(other for other in axes if any(match(other, name) for name in hits[0].names))
    return PlanError(
        f"plan(..., axes=) has two rules for {len(hits)} parameters: {first!r} and {pattern!r}.",
        where=hits[0].path,
        facts=f"{first!r}: '{axes[first]}' comes first; {pattern!r}: '{text}' names no parameter.",
        why="The first pattern that matches a parameter counts; one that never does is a mistake.",
        fix=f"leave one of them out, or put {pattern!r} before {first!r}",
        pattern=pattern,
        num_params=len(hits),
    )


def from_modules(model: nn.Module, infos: Sequence[ParamInfo], found: Findings) -> None:
    """What modules say in their `axes` attribute; of several the innermost counts.

    Raises:
        PlanError: a name in it is neither a parameter nor an integer, or is given two sizes.
        AxesError: an axes pattern does not parse.
    """
    modules = sorted(model.named_modules(), key=lambda pair: -pair[0].count("."))
    modules.sort(key=lambda pair: not pair[0])  # the model itself comes last
    for path, module in modules:
        said = getattr(module, "axes", None)
        if isinstance(said, Mapping):
            for entry in cast("Mapping[Any, Any]", said).items():
                _module_says((path, module), entry, infos, found)


def _module_says(
    at: tuple[str, nn.Module],
    entry: tuple[Any, Any],
    infos: Sequence[ParamInfo],
    found: Findings,
) -> None:
    (path, module), (name, value) = at, entry
    where = f"axes of {path or 'the model'}, a {type(module).__name__}"
    if isinstance(name, str) and isinstance(value, int) and not isinstance(value, bool):
        _take_size(where, name, value, found)
        return
    if not isinstance(name, str) or not isinstance(value, str):
        raise PlanError(
            f"the {where} has an entry {name!r}: {value!r}.",
            where=f"module {path or '(root)'}",
            why="It maps names of parameters or integers to axes patterns, or names to sizes.",
            fix="examples: {'qkv.weight': '(3 heads hd) embed', 'num_heads': 'heads', 'hd': 64}",
            path=path,
        )
    pattern = f"^{path}.{name}" if path else f"^{name}"
    hits = [info for info in infos if any(match(pattern, known) for known in info.names)]
    inside = [(below, below, part) for below, part in module.named_modules(prefix=path)]
    ints = {} if hits else dict(find_integers(inside, pattern))
    if not hits and not ints:
        local = [known for known, _ in module.named_parameters()]
        raise PlanError(
            f"the {where} names {name!r}, which is no parameter and no integer of it.",
            where=path,
            facts=f"it has {len(local)} parameters.",
            why="A name that matches nothing is a mistake: the dimension would stay unnamed.",
            fix=nearest(name, local),
            path=path,
            name=name,
            num_params=len(local),
        )
    if ints:
        check_expression(value, where)
        _take_integers(ints, value, found)
        return
    Axes.parse(value)
    for info in hits:
        found.name(info.path, value, "module")
