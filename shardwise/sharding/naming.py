"""Axes of parameters: patterns over paths give every dimension its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardwise.sharding.adapters import adapter_axes, find_adapters
from shardwise.sharding.axes import Axes
from shardwise.sharding.axes_sources import Findings, evaluate, from_modules, from_user, names_in
from shardwise.sharding.errors import AxesError, PlanError, nearest, summarise
from shardwise.sharding.guesses import guess_axes
from shardwise.sharding.hugging_face import from_hugging_face
from shardwise.sharding.repeats import collapse, render_group
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo

# Projections of one attention are guessed together or not at all.
_OF_HEADS = ("heads", "kv", "hd")


@dataclass(frozen=True, slots=True)
class Named:
    """What all sources say together; see [Note: sources of axes].

    Args:
        axes: by parameter, of those that some source names.
        source: by parameter of `axes` or `guesses`: `user`, `module`, `family llama`, `tp plan`
            or `guess`.
        sizes: by name, as far as they are known without the shapes.
        local_ints: by path of an integer attribute of a module, what it counts.
        guesses: by parameter that no source names, what it may be.
    """

    axes: FrozenMap[str, str]
    source: FrozenMap[str, str]
    sizes: FrozenMap[str, int]
    local_ints: FrozenMap[str, str]
    guesses: FrozenMap[str, str]


def name_parameters(
    model: nn.Module,
    infos: Sequence[ParamInfo],
    user_axes: Mapping[str, str],
    user_sizes: Mapping[str, int],
) -> Named:
    """Find the axes of every parameter, the sizes of their names and the integers they tell.

    Args:
        model: any module; only read.
        infos: its parameters.
        user_axes: of `plan(..., axes=)`.
        user_sizes: of `plan(..., sizes=)`; they go before those of a configuration.

    Raises:
        PatternError: a pattern matches nothing.
        AxesError: an axes pattern does not parse.
        PlanError: axes do not fit shapes, sizes or integers, a rule is never used, or a size has
            a name that no parameter has.

    >>> linear = nn.Linear(4, 6)
    >>> infos = (ParamInfo("weight", (6, 4), "float32", True, Axes.anonymous(2)),)
    >>> named = name_parameters(linear, infos, {"weight": "(heads hd) embed"}, {"hd": 3})
    >>> named.axes["weight"], named.source["weight"]
    ('(heads hd) embed', 'user')
    """
    said = Findings(sizes=dict(user_sizes))
    from_user(model, infos, user_axes, said)
    from_modules(model, infos, said)
    given = dict(said.sizes)
    _check_sizes(given)
    adapters = find_adapters(model)
    fits, maybe = from_hugging_face(model, infos, adapters)
    _check_fits(infos, said)
    said.merge(fits)
    canonical = {name: info.path for info in infos for name in info.names}
    known = [name for name, path in canonical.items() if path in said.axes or path in maybe.axes]
    guessed = guess_axes(model, known)
    for path, text in guessed.axes.items():
        maybe.name(canonical[path], text, "guess")
    _drop_misfits(infos, maybe, said, guessed)
    for named in (said, maybe):
        for path, (text, base) in adapter_axes(model, infos, adapters, named.axes).items():
            if path not in said.axes:
                named.name(path, text, named.source[base])
    _check_names(given, (*said.axes.values(), *maybe.axes.values(), *said.ints.values()))
    sizes = _complete(model, infos, said)
    return Named(
        axes=FrozenMap(said.axes),
        source=FrozenMap(maybe.source | said.source),
        sizes=FrozenMap(sizes),
        local_ints=FrozenMap(said.ints),
        guesses=FrozenMap((k, v) for k, v in maybe.axes.items() if k not in said.axes),
    )


def with_axes(infos: Iterable[ParamInfo], named: Named) -> tuple[ParamInfo, ...]:
    """The parameters with the axes that some source names; guesses are left to their user.

    Args:
        infos: parameters.
        named: see `name_parameters`.
    """
    return tuple(
        replace(info, axes=Axes.parse(named.axes[info.path])) if info.path in named.axes else info
        for info in infos
    )


def _known_sizes(axes: Axes, info: ParamInfo, sizes: Mapping[str, int]) -> dict[str, int]:
    return axes.known_sizes(info.shape, **{n: sizes[n] for n in axes.names if n in sizes})


def _check_fits(infos: Sequence[ParamInfo], said: Findings) -> None:
    """Refuse what a user or a module says, if shapes or sizes contradict it."""
    faults: dict[str, tuple[str, str]] = {}
    for info in infos:
        if info.path in said.axes:
            axes = Axes.parse(said.axes[info.path])
            try:
                _known_sizes(axes, info, said.sizes)
            except AxesError as error:
                source = said.source[info.path]
                told = f"shape {info.shape}   axes '{axes}', from the {source}"
                faults[info.path] = (told, "\n".join((error.what, *error.facts)))
    _raise_misfits(faults, len(infos))


def _drop_misfits(
    infos: Sequence[ParamInfo], maybe: Findings, said: Findings, guessed: Findings
) -> None:
    """Leave out guesses that contradict sizes that are known; keep what the others count."""
    sizes = guessed.sizes | said.sizes
    clash = {name for name, size in guessed.sizes.items() if said.sizes.get(name, size) != size}
    for info in infos:
        if maybe.source.get(info.path) != "guess":
            continue
        axes = Axes.parse(maybe.axes[info.path])
        try:
            _known_sizes(axes, info, sizes)
        except AxesError:
            clash |= set(axes.names) & set(sizes)
    if clash & set(_OF_HEADS):
        clash |= set(_OF_HEADS)
    for path in [path for path, source in maybe.source.items() if source == "guess"]:
        if clash & set(Axes.parse(maybe.axes[path]).names):
            del maybe.axes[path], maybe.source[path]
    said.sizes = {name: size for name, size in sizes.items() if name not in clash} | said.sizes
    ints = {path: text for path, text in guessed.ints.items() if not clash & set(names_in(text))}
    said.ints = ints | said.ints


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(
                f"the name {name!r} is given the size {size}.",
                where=f"sizes={{{name!r}: {size}}}",
                why="A size is a positive number.",
                fix=f"sizes={{{name!r}: 1}} or more",
                name=name,
                size=size,
            )


def _check_names(sizes: Mapping[str, int], texts: Iterable[str]) -> None:
    used = tuple(dict.fromkeys(name for text in texts for name in names_in(text)))
    for name, size in sizes.items():
        if name not in used:
            raise PlanError(
                f"a size is given to {name!r}, which names no dimension.",
                where=f"sizes={{{name!r}: {size}}}",
                facts=f"{len(used)} names are in use: {', '.join(used) or 'none'}.",
                why="A size belongs to a name that some parameter or integer has.",
                fix=nearest(name, used),
                name=name,
                size=size,
            )


def _complete(model: nn.Module, infos: Sequence[ParamInfo], said: Findings) -> dict[str, int]:
    """All sizes that integers need, from shapes where nobody tells them; and check the integers."""
    sizes = dict(said.sizes)
    needed = {name for text in said.ints.values() for name in names_in(text)}
    for info in infos:
        text = said.axes.get(info.path)
        if text is not None and needed - set(sizes):
            found = _known_sizes(Axes.parse(text), info, sizes)
            sizes |= {n: size for n, size in found.items() if n in needed and n not in sizes}
    for path, text in said.ints.items():
        value, missing = _integer(model, path), [n for n in names_in(text) if n not in sizes]
        if missing:
            raise _unknown_size(path, text, missing)
        if evaluate(text, sizes) != value:
            counted = ", ".join(f"{name}={sizes[name]}" for name in names_in(text))
            raise PlanError(
                f"{path} is {value}, but '{text}' is {evaluate(text, sizes)}.",
                where=path,
                facts=f"sizes: {counted}.",
                why="An integer is made the part of its rank by the names that it counts.",
                fix="correct the expression, or give sizes=",
                path=path,
                value=value,
                counted=evaluate(text, sizes),
            )
    return sizes


def _integer(model: nn.Module, path: str) -> int:
    value: object = model
    for name in path.split("."):
        value = getattr(value, name)
    assert isinstance(value, int)
    return value


def _unknown_size(path: str, text: str, missing: Sequence[str]) -> PlanError:
    return PlanError(
        f"the size of {' and '.join(map(repr, missing))} is unknown.",
        where=path,
        facts=f"{path} counts '{text}'; {len(missing)} of {len(names_in(text))} sizes are missing.",
        why="What an integer counts is known by the sizes of its names.",
        fix=f"sw.plan(..., sizes={{{missing[0]!r}: ...}})",
        path=path,
        missing=tuple(missing),
    )


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
