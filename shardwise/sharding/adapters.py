"""Adapters: low-rank pairs beside a layer, whose dimensions are those of the layer.

[Note: adapters]
A wrapper holds the layer as `base_layer` (or `base`) and pairs `lora_A` of shape `(r, in)` and
`lora_B` of shape `(out, r)`, each a parameter or a module, or several by name. `A` is `rank` by the
layer's inputs, `B` the layer's outputs by `rank`; so of a layer cut over its outputs `B` is cut,
and of one cut over its inputs `A` is. The layer goes by the name of its wrapper in every table.
Pairs beside an embedding stay whole: they are looked up, and only a whole one has every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shardwise.sharding.axes import Axes
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo

_BASES = ("base_layer", "base")
_DOWN, _UP = "lora_A", "lora_B"
_PAIRS = (_DOWN, _UP, "lora_embedding_A", "lora_embedding_B")


def find_adapters(model: nn.Module) -> FrozenMap[str, str]:
    """Path of the layer by the path of its wrapper.

    >>> wrapper = nn.ModuleDict({"base": nn.Linear(4, 2), "lora_A": nn.Linear(4, 1)})
    >>> find_adapters(nn.Sequential(wrapper))
    FrozenMap({'0': '0.base'})
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        children = dict(module.named_children()) | dict(module.named_parameters(recurse=False))
        bases = [name for name in _BASES if isinstance(children.get(name), nn.Module)]
        if bases and any(name in children for name in _PAIRS):
            found[path] = f"{path}.{bases[0]}".lstrip(".")
    return FrozenMap(found)


def plain_path(path: str, adapters: Mapping[str, str]) -> str:
    """A path as it is without adapters.

    >>> plain_path("0.base.weight", {"0": "0.base"})
    '0.weight'
    """
    for wrapper, base in adapters.items():
        if path == base or path.startswith(f"{base}."):
            path = f"{wrapper}{path[len(base) :]}".lstrip(".")
    return path


def adapter_axes(
    model: nn.Module,
    infos: Sequence[ParamInfo],
    adapters: Mapping[str, str],
    named: Mapping[str, str],
) -> dict[str, tuple[str, str]]:
    """Axes of the parameters of adapters, with the path of the parameter they follow.

    Args:
        model: that holds them.
        infos: of all parameters.
        adapters: see `find_adapters`.
        named: axes of parameters that have some.
    """
    by_path = {name: info for info in infos for name in info.names}
    found: dict[str, tuple[str, str]] = {}
    for wrapper, base in adapters.items():
        weight = by_path.get(f"{base}.weight")
        if weight is None or weight.path not in named or len(weight.shape) != 2:
            continue
        axes = Axes.parse(named[weight.path])
        layer = [(weight.shape[dim], axes.dim_name(dim)) for dim in (0, 1)]
        if _is_transposed(model, wrapper, base):
            layer.reverse()
        prefix = f"{wrapper}." if wrapper else ""
        for path, info in by_path.items():
            kind = path[len(prefix) :].partition(".")[0] if path.startswith(prefix) else ""
            text = _pair(kind, info, *layer)
            if text is not None:
                found[info.path] = text, weight.path
    return found


def _is_transposed(model: nn.Module, wrapper: str, base: str) -> bool:
    """Whether a layer keeps its weight as input by output, as the `Conv1D` of GPT-2 does."""
    layer = model.get_submodule(base)
    asked = getattr(model.get_submodule(wrapper), "fan_in_fan_out", False) is True
    return asked or type(layer).__name__ == "Conv1D"


def _pair(
    kind: str, info: ParamInfo, outputs: tuple[int, str], inputs: tuple[int, str]
) -> str | None:
    """Axes of one parameter of a pair; None if it is none, or has another shape."""
    if kind == _DOWN and info.shape[1:] == inputs[:1]:
        return f"rank {inputs[1]}"
    if kind == _UP and len(info.shape) == 2 and info.shape[:1] == outputs[:1]:
        return f"{outputs[1]} rank"
    if kind == _UP and info.shape == outputs[:1]:
        return outputs[1]
    return None
