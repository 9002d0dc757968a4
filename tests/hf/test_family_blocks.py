"""Blocks and integers of families compute what whole modules compute, without any engine.

Attention and MLP of every rank are copies of the whole ones with the rank's blocks as weights and
its integers as attributes. Each is called as the whole one was; then outputs of the ranks are added
(a row-parallel layer ends the module) or laid side by side (it comes after).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardwise.sharding.axes_sources import evaluate
from shardwise.sharding.frames import Frame
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.naming import Named, name_parameters, with_axes
from shardwise.sharding.tensor_cuts import Asked, Cuts, cut_tensors
from shardwise.sharding.units import param_infos
from tests.hf.test_families import MODELS
from tests.hf.zoo import VOCAB

pytestmark = pytest.mark.abstract

ADDED = ("self_attn", "attn", "attention", "mlp")
BESIDE = ("self", "intermediate")


class Call(NamedTuple):
    """How a module of a running model was called, and what it gave."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


def test_every_family_has_calls_to_compare() -> None:
    for name in MODELS:
        model = MODELS[name]()
        assert len(calls(name, model)) == 4, name  # attention and MLP of two layers


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_compute_what_the_module_computes(name: str, ranks: int) -> None:
    """Two kv heads on four ranks are copied: heads of the ranks must find their own."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    infos = param_infos(model)
    named = name_parameters(model, infos, {}, {})
    infos = with_axes(infos, named)
    asked = [Asked("tp", None, (), tuple(info.path for info in infos), "tensor_parallel('tp')")]
    cuts = cut_tensors(Mesh(tp=ranks), asked, {info.path: info for info in infos}, named.sizes)
    assert not cuts.failures
    assert (ranks > 1) == bool(cuts.frames)
    for call in calls(name, model):
        zero_row_bias(model.get_submodule(call.path), name)
    for call in calls(name, model):
        whole = model.get_submodule(call.path)
        parts = [
            first(local_module(whole, call.path, place, cuts, named)(*call.args, **call.kwargs))
            for place in places(cuts.mesh)
        ]
        beside = call.path.rpartition(".")[2] in BESIDE
        got = torch.cat(parts, dim=-1) if beside else torch.stack(parts).sum(0)
        assert ranks == 1 or not torch.allclose(parts[0], parts[1])
        torch.testing.assert_close(got, call.output, rtol=1e-10, atol=1e-10)


def calls(name: str, model: Any) -> list[Call]:
    """One forward pass, and the calls of modules that are cut."""
    found: list[Call] = []
    hooks = []
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        wanted = BESIDE if name == "bert" else ADDED
        if last in wanted:

            def note(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                found.append(Call(path, args, kwargs, first(output).detach()))

            hooks.append(module.register_forward_hook(note, with_kwargs=True))
    tokens = torch.arange(3, 15).reshape(2, 6) % VOCAB
    with torch.no_grad():
        model(tokens, **({} if name == "bert" else {"use_cache": False}))
    for hook in hooks:
        hook.remove()
    return found


def first(output: Any) -> Tensor:
    """What a module computes, without attention weights."""
    return output[0] if isinstance(output, tuple) else output


def zero_row_bias(module: nn.Module, name: str) -> None:
    """The bias of a row-parallel layer is added once, after the sum: not what this tests."""
    ends = ("c_proj", "dense", "dense_4h_to_h") if name != "bert" else ()
    for path, part in module.named_modules():
        if path in ends and isinstance(getattr(part, "bias", None), nn.Parameter):
            nn.init.zeros_(part.bias)  # type: ignore[arg-type]


def places(mesh: Mesh) -> Iterator[dict[str, int]]:
    """Coordinates of every rank."""
    for place in itertools.product(*(range(mesh[axis]) for axis in mesh)):
        yield dict(zip(mesh, place, strict=True))


def local_module(
    whole: nn.Module, path: str, place: dict[str, int], cuts: Cuts, named: Named
) -> nn.Module:
    """A copy with the blocks and integers of one rank, and with a configuration of its own."""
    module: Any = copy.deepcopy(whole)
    for name, parameter in module.named_parameters():
        frame = cuts.frames.get(f"{path}.{name}")
        if frame is not None:
            parameter.data = block(frame, parameter.data, cuts.mesh, place)
    parts = {name: n for axis in cuts.axes.values() for name, n in axis.cuts.items()}
    sizes = {name: -(-size // parts.get(name, 1)) for name, size in named.sizes.items()}
    for where, text in named.local_ints.items():
        if where.startswith(f"{path}."):
            above, _, attribute = where[len(path) + 1 :].rpartition(".")
            holder = module
            for part in filter(None, above.split(".")):
                holder = getattr(holder, part)
            setattr(holder, attribute, evaluate(text, sizes))
    return module


def block(frame: Frame, values: Tensor, mesh: Mesh, place: dict[str, int]) -> Tensor:
    """The block of one rank."""
    index = 0
    for axis in frame.axes:
        index = index * mesh[axis] + place[axis]
    found = values.new_zeros(frame.block)
    for tile in frame.tiles(index):
        source = tuple(slice(a, a + n) for a, n in zip(tile.offsets, tile.sizes, strict=True))
        target = tuple(slice(a, a + n) for a, n in zip(tile.at, tile.sizes, strict=True))
        found[target] = values[source]
    return found
