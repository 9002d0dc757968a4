"""Models of transformers, recognised by their configuration: families, and the plan they bring.

transformers itself is not imported: what counts is a module with `config.model_type`, the outermost
of those inside of one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from shardwise.sharding.adapters import plain_path
from shardwise.sharding.axes import Axes
from shardwise.sharding.axes_sources import Findings, evaluate, find_integers, names_in
from shardwise.sharding.errors import AxesError
from shardwise.sharding.families import FAMILIES, LLAMA, Family, sizes_of
from shardwise.sharding.tree import match_exact
from shardwise.sharding.units import ParamInfo

_COLUMN = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
_GATHERED = ("colwise_rep", "colwise_gather_output")
_ROW = ("rowwise", "rowwise_rep", "local_rowwise")
_EMBEDDING = ("embedding_rowwise",)


class _Model(NamedTuple):
    path: str
    module: nn.Module
    config: Any


def from_hugging_face(
    model: nn.Module, infos: Sequence[ParamInfo], adapters: Mapping[str, str]
) -> tuple[Findings, Findings]:
    """What tables of families and models' own plans say; the latter where there is no table.

    Args:
        model: that is, or holds, models of transformers.
        infos: of all parameters.
        adapters: layers are named as if there were none.

    A name has one size in a plan: of a second model with other heads, what is made of heads stays
    unnamed.

    Returns:
        What fits the shapes, and what does not.
    """
    fits, misfits = Findings(), Findings()
    for found in _models(model):
        inside = [
            (info, plain_path(name, adapters))
            for info in infos
            for name in info.names
            if not found.path or name.startswith(f"{found.path}.")
        ]
        sizes = sizes_of(found.config)
        family = FAMILIES.get(found.config.model_type)
        if family is not None:
            named = _by_table(inside, family)
            source = f"family {found.config.model_type}"
        else:
            named = _by_plan(found, inside, sizes)
            family, source = LLAMA, "tp plan"
        clash = {name for name, size in fits.sizes.items() if sizes.get(name, size) != size}
        for path, (info, text) in named.items():
            if not clash & set(_inner_names(text)):
                (fits if _fits(text, info, sizes) else misfits).name(path, text, source)
        ints = _integers(found, family, adapters, sizes)
        ints = {path: text for path, text in ints.items() if not clash & set(names_in(text))}
        used = {name for text in ints.values() for name in names_in(text)}
        used |= {name for text in fits.axes.values() for name in _inner_names(text)}
        fits.sizes |= {n: sizes[n] for n in sizes if n in used and n not in clash}
        fits.ints |= ints
    return fits, misfits


def _models(model: nn.Module) -> Iterator[_Model]:
    seen: list[str] = []
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        inside = any(not above or path.startswith(f"{above}.") for above in seen)
        if not inside and isinstance(getattr(config, "model_type", None), str):
            seen.append(path)
            yield _Model(path, module, config)


def _by_table(
    inside: Sequence[tuple[ParamInfo, str]], family: Family
) -> dict[str, tuple[ParamInfo, str]]:
    found: dict[str, tuple[ParamInfo, str]] = {}
    for info, name in inside:
        texts = (text for pattern, text in family.axes.items() if match_exact(pattern, name))
        text = next(texts, None)
        if text is not None:
            found.setdefault(info.path, (info, text))
    return found


def _by_plan(
    found: _Model, inside: Sequence[tuple[ParamInfo, str]], sizes: Mapping[str, int]
) -> dict[str, tuple[ParamInfo, str]]:
    """Axes from styles by module: known names where they fit, plain cuts otherwise."""
    styles = _styles(found)
    known = _by_table(inside, LLAMA)
    result: dict[str, tuple[ParamInfo, str]] = {}
    for info, name in inside:
        module, _, kind = name.rpartition(".")
        hits = (style for pattern, style in styles.items() if match_exact(pattern, module))
        style = next(hits, None)
        text = None if style is None else _cut_by(style, kind, info, sizes)
        if text is not None and info.path in known and _fits(known[info.path][1], info, sizes):
            text = known[info.path][1]
        if text is not None:
            result.setdefault(info.path, (info, text))
    return result


def _styles(found: _Model) -> dict[str, str]:
    """Style by pattern of modules; the model's own plan holds that of its base with a prefix."""
    merged: dict[str, str] = {}
    for plan in (
        getattr(found.module, "_tp_plan", None),
        getattr(found.config, "base_model_tp_plan", None),
    ):
        if isinstance(plan, Mapping):
            for pattern, style in cast("Mapping[Any, Any]", plan).items():
                if isinstance(pattern, str) and isinstance(style, str):
                    merged.setdefault(pattern.removesuffix(".weight"), style)
    return merged


def _cut_by(style: str, kind: str, info: ParamInfo, sizes: Mapping[str, int]) -> str | None:
    """Plain cuts of one layer; None where the style says nothing that can be kept.

    An output that is gathered at once belongs to a head over the vocabulary, or to rows of unlike
    parts one after the other: those are not cut blindly.
    """
    if kind not in ("weight", "bias") or len(info.shape) != (2 if kind == "weight" else 1):
        return None
    text = None
    if style in _EMBEDDING or (style in _GATHERED and info.shape[0] == sizes.get("vocab")):
        text = "vocab embed"
    elif style in _COLUMN and style not in _GATHERED:
        text = "tp_out embed"
    elif style in _ROW:
        text = "embed tp_in"
    return text if text is None or kind == "weight" else text.partition(" ")[0]


def _inner_names(text: str) -> tuple[str, ...]:
    """Names inside of composite dimensions, whose sizes shapes may leave open."""
    axes = Axes.parse(text)
    return tuple(n for n, places in axes.places().items() if any(at[1:] for at in places))


def _fits(text: str, info: ParamInfo, sizes: Mapping[str, int]) -> bool:
    axes = Axes.parse(text)
    try:
        axes.known_sizes(info.shape, **{k: v for k, v in sizes.items() if k in axes.names})
    except AxesError:
        return False
    return True


def _integers(
    found: _Model, family: Family, adapters: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[str, str]:
    """Integers of a table that this model has, and that count what the table says."""
    modules = [
        (path, plain_path(path, adapters), module)
        for path, module in found.module.named_modules(prefix=found.path)
    ]
    return {
        path: text
        for pattern, text in family.ints.items()
        if all(name in sizes for name in names_in(text))
        for path, value in find_integers(modules, pattern)
        if value == evaluate(text, sizes)
    }
