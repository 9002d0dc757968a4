"""CFG-2 and CFG-3: degrees that do not fit, options that are misspelt or have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.sharding.errors import MeshError, PlanError

pytestmark = pytest.mark.abstract


# -- CFG-2 ------------------------------------------------------------------------------------


ONES = dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), 1)
GOOD = [
    ({"dp": 8}, 8, {"dp": 8}),
    ({"dp": 2, "tp": 4}, 8, {"dp": 2, "tp": 4}),
    ({"dp": -1, "tp": 4}, 8, {"dp": 2, "tp": 4}),
    ({"pp": 2, "dp": -1, "cp": 2, "tp": 2}, 16, {"pp": 2, "dp": 2, "cp": 2, "tp": 2}),
    ({"dp": -1, "ep": 8}, 8, {"dp": 1, "ep": 8}),
    (
        {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1},
        1,
        dict.fromkeys(["dp", "tp", "pp", "cp", "ep"], 1),
    ),
]
BAD = [
    ({"dp": 3, "tp": 4}, 8, ["dp=3", "tp=4", "12", "8"]),
    ({"dp": 2, "tp": 2}, 8, ["dp=2", "tp=2", "4", "8"]),
    ({"dp": -1, "tp": 3}, 8, ["dp=-1", "tp=3", "8 % 3 == 2"]),
    ({"dp": -1, "tp": -1}, 8, ["dp=-1", "tp=-1"]),
    ({"dp": -1, "pp": 16}, 8, ["dp=-1", "pp=16", "8 % 16 == 8"]),
    ({"dp": 0, "tp": 8}, 8, ["'dp'", "size 0"]),
    ({"dp": 8, "tp": -2}, 8, ["'tp'", "size -2"]),
    ({"dp": 8, "ep": 1.0}, 8, ["'ep'", "size 1.0"]),
]


@pytest.mark.parametrize(("axes", "world", "sizes"), GOOD)
def test_cfg_2_degrees_that_fit(axes, world, sizes):
    mesh = sw.Mesh(world=world, **axes)
    assert {name: mesh[name] for name in mesh.names} == sizes
    assert mesh.size == world


@pytest.mark.parametrize(("axes", "world", "texts"), BAD)
def test_cfg_2_degrees_that_do_not_fit(axes, world, texts):
    with pytest.raises(MeshError) as caught:
        sw.Mesh(world=world, **axes)
    for text in texts:
        assert text in str(caught.value)
    assert caught.value.fix
    assert not dist.is_initialized()


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, 4, 8))


@pytest.mark.parametrize(("experts", "fits"), [(8, True), (4, True), (6, False), (3, False)])
def test_cfg_2_experts_that_the_expert_axis_does_not_divide(experts, fits):
    mesh = sw.Mesh(dp=2, ep=4, world=8)
    transform = sw.shard_params("ep", on="experts")
    axes = {"weight": "experts embed mlp"}
    if fits:
        plan = sw.plan(Experts(experts), mesh, transform, axes=axes)
        assert str(plan.params["weight"]) == "experts/ep embed mlp"
        return
    with pytest.raises(PlanError) as caught:
        sw.plan(Experts(experts), mesh, transform, axes=axes)
    assert f"'experts' has size {experts}; mesh axis 'ep' has size 4" in str(caught.value)


class Heads(nn.Module):
    """An attention of 6 heads, of which 2 have keys and values."""

    axes: ClassVar[dict[str, str | int]] = {
        "query.weight": "(heads hd) embed",
        "key.weight": "(kv hd) embed",
        "query.bias": "(heads hd)",
        "key.bias": "(kv hd)",
        "heads": "heads",
        "hd": 4,
    }

    def __init__(self) -> None:
        super().__init__()
        self.heads = 6
        self.query, self.key = nn.Linear(8, 24), nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("tp", "facts", "fix"),
    [
        (1, "", ""),
        (2, "", ""),
        (6, "", ""),  # three ranks share each head of keys
        (3, "kv is 2; mesh axis 'tp' has 3 ranks; 2 % 3 == 2.", "tp=1"),
        (4, "heads is 6; mesh axis 'tp' has 4 ranks; 6 % 4 == 2.", "tp=2"),
        (12, "heads is 6; mesh axis 'tp' has 12 ranks; 6 % 12 == 6.", "tp=6"),
    ],
)
def test_cfg_2_heads_that_the_tensor_axis_does_not_divide(tp, facts, fix):
    mesh = sw.Mesh(dp=-1, tp=tp, world=24)
    if not facts:
        plan = sw.plan(Heads(), mesh, sw.tensor_parallel("tp"))
        assert plan.mesh.size == 24
        assert plan.tensor.ints == ({"heads": 6 // tp} if tp > 1 else {})
        return
    with pytest.raises(PlanError) as caught:
        sw.plan(Heads(), mesh, sw.tensor_parallel("tp"))
    assert facts in str(caught.value)
    assert f"Fix: {fix}, or where= to leave these out" in str(caught.value)
    assert caught.value.numbers["ranks"] == tp
    assert not dist.is_initialized()


# -- CFG-3 ------------------------------------------------------------------------------------


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
MESH = sw.Mesh(fsdp=2)


def plan(*transforms: Any, **options: Any) -> sw.Plan:
    return sw.plan(MODEL, MESH, *transforms, **options)


def program() -> sw.Program:
    return sw.lower(sw.plan(MODEL, sw.Mesh(fsdp=1)), len, sw.optim.sgd(0.1)).bind()


MISSPELT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str]] = {
    "zero": (sw.zero, (3, "fsdp"), "wher", "where"),
    "shard_params": (sw.shard_params, ("fsdp",), "padd", "pad"),
    "shard_grads": (sw.shard_grads, ("fsdp",), "onn", "on"),
    "shard_optimizer": (sw.shard_optimizer, ("fsdp",), "were", "where"),
    "freeze": (sw.freeze, (), "wheer", "where"),
    "keep_gathered": (sw.keep_gathered, (), "kep", "keep"),
    "prefetch": (sw.prefetch, (), "distanec", "distance"),
    "tensor_parallel": (sw.tensor_parallel, ("tp",), "name", "names"),
    "sequence_parallel": (sw.sequence_parallel, ("tp",), "activ", "active"),
    "chain": (sw.chain, (), "nam", "name"),
    "masked": (sw.masked, (sw.zero(0, None),), "wehre", "where"),
    "plan": (sw.plan, (MODEL, MESH), "unit", "units"),
    "lower": (sw.lower, (), "optimiser", "optimizer"),
    "adamw": (sw.optim.adamw, (0.1,), "weight_decy", "weight_decay"),
    "sgd": (sw.optim.sgd, (0.1,), "nestrov", "nesterov"),
    "clip_by_global_norm": (sw.optim.clip_by_global_norm, (), "max_nrom", "max_norm"),
    "warmup_cosine": (sw.optim.warmup_cosine, (0.1,), "warmpup", "warmup"),
    "spawn": (sw.spawn, (print,), "rank", "ranks"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_cfg_3_a_misspelt_option_names_the_nearest(name):
    function, args, wrong, right = MISSPELT[name]
    with pytest.raises(TypeError) as caught:
        function(*args, **{wrong: 1})
    assert str(caught.value) == f"{name}() has no argument {wrong!r}; did you mean {right!r}?"


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [("init", "sed", "seed"), ("step", "donat", "donate"), ("update", "donte", "donate")],
)
def test_cfg_3_a_misspelt_option_of_a_program(call, wrong, right):
    with pytest.raises(TypeError) as caught:
        getattr(program(), call)(**{wrong: 1})
    assert str(caught.value) == f"{call}() has no argument {wrong!r}; did you mean {right!r}?"


NESTED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "axes": (lambda: plan(axes={"0.wieght": "a b"}), ["'0.wieght'", "did you mean 'weight'?"]),
    "links": (
        lambda: sw.Mesh(fsdp=2, links={"fdsp": "nvlink"}),
        ["'fdsp'", "did you mean 'fsdp'?"],
    ),
    "axis": (lambda: plan(sw.zero(3, "fspd")), ["'fspd'", "did you mean 'fsdp'?"]),
    "axes of several": (lambda: plan(sw.zero(3, ("fspd",))), ["'fspd'", "did you mean 'fsdp'?"]),
    "home": (
        lambda: plan(sw.tree_at("param", "0.weight", "d0 d1")),
        ["'param'", "did you mean 'params'?"],
    ),
    "dimension": (lambda: plan(sw.zero(3, "fsdp", on="d00")), ["'d00'"]),
    "in a chain": (
        lambda: plan(sw.chain(sw.zero(0, None), sw.zero(3, "fsdp", where="0.wieght"))),
        ["zero(3, 'fsdp', where='0.wieght')", "did you mean 'weight'?"],
    ),
    "in a mask": (
        lambda: plan(sw.masked(sw.zero(3, "fsdp", where="biass"), "0")),
        ["'biass'", "did you mean 'bias'?"],
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_cfg_3_a_misspelt_name_inside_an_option(name):
    call, texts = NESTED[name]
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


WRONG_TYPES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "level": (lambda: sw.zero("3", "fsdp"), ["'3'", "0 to 3"]),
    "axis": (lambda: sw.zero(3, 2), ["2 (int)", "mesh axis"]),
    "where": (lambda: plan(sw.zero(3, "fsdp", where=3)), ["3 is no pattern", "zero(3, 'fsdp'"]),
    "distance": (lambda: sw.prefetch(1.5), ["1.5"]),
    "size": (lambda: sw.Mesh(fsdp="2"), ["'fsdp'", "'2'"]),
    "rate": (lambda: sw.optim.adamw("0.1"), ["learning_rate", "'0.1'"]),
    "momentum": (lambda: sw.optim.sgd(0.1, momentum="0.9"), ["momentum", "'0.9'"]),
    "norm": (lambda: sw.optim.clip_by_global_norm("1"), ["max_norm", "'1'"]),
    "units": (lambda: plan(units="layers"), ["units", "str"]),
    "mesh": (lambda: sw.plan(MODEL, 2), ["mesh", "int"]),
    "model": (lambda: sw.plan([MODEL], MESH), ["model", "list"]),
    "transform": (lambda: plan(lambda plan: None), ["not a transform", "NoneType"]),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_cfg_3_a_value_of_the_wrong_type(name):
    call, texts = WRONG_TYPES[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: sw.zero(3, "fsdp", pad=True), "pad=True has no effect"),
        (lambda: sw.plan(nn.Linear(2, 2), MESH, sw.keep_gathered()), "the model has no units"),
    ],
)
def test_cfg_3_an_option_without_effect_warns(call, text):
    with pytest.warns(UserWarning, match=text):
        call()
