"""INI-1, INI-2, RNG-3 (init) and HYB-1 (start and training): initial values on any mesh."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import InitError

MESHES = {
    "1": sw.Mesh(fsdp=1),
    "2": sw.Mesh(fsdp=2),
    "3": sw.Mesh(fsdp=3),
    "4": sw.Mesh(fsdp=4),
    "2x2": sw.Mesh(dp=2, fsdp=2),
}


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def initial(module: nn.Module, mesh: sw.Mesh, *transforms: sw.Transform, **options: Any) -> Any:
    """The lifted state that a seed gives."""
    with sw.simulate(mesh):
        plan = sw.plan(module, mesh, *transforms)
        return sw.lower(plan, mean_square, sw.optim.sgd(0.1)).bind().init(**options)


@pytest.mark.simulated
@pytest.mark.parametrize("axes", ["fsdp", ("dp", "fsdp")])
def test_ini_1_no_two_slices_repeat_and_replicas_are_equal(axes):
    def normal(module: nn.Module) -> None:
        nn.init.normal_(module.weight, std=0.02)

    module = on_meta(lambda: nn.Linear(64, 64))
    state = initial(module, sw.Mesh(dp=2, fsdp=2), sw.zero(3, axes), seed=0, init=normal)
    whole = sw.to_global(state.params["weight"])
    assert whole.std().item() == pytest.approx(0.02, rel=0.05)
    assert len(torch.unique(whole, dim=0)) == 64
    assert len(torch.unique(whole, dim=1)) == 64
    local = [one.params["weight"].to_local() for one in state.ranks]
    blocks = 4 if axes == ("dp", "fsdp") else 2
    assert local[0].numel() == 64 * 64 // blocks
    for (i, a), (j, b) in itertools.combinations(enumerate(local), 2):
        replicas = blocks == 2 and i % 2 == j % 2
        assert torch.equal(a, b) == replicas


class Rules(nn.Module):
    """Values that the constructor computes, with or without a hook that computes them again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 32))
        self.bias = nn.Parameter(torch.empty(64))
        self.register_buffer("table", torch.arange(5.0) ** 2)
        self.register_buffer("places", torch.arange(5))
        self.register_buffer("mask", torch.arange(5) > 2, persistent=False)
        self.set_values()

    def set_values(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.constant_(self.bias, 3.0)
        self.table.copy_(torch.arange(5.0) ** 2)
        self.places.copy_(torch.arange(5))
        self.mask.copy_(torch.arange(5) > 2)


class Hooked(Rules):
    def reset_parameters(self) -> None:
        self.set_values()


@pytest.mark.simulated
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_ini_2_the_reset_hook_gives_what_the_constructor_gave(ranks, place):
    with torch.device(place):
        module = Hooked()
    state = initial(module, sw.Mesh(fsdp=ranks), sw.zero(3, "fsdp"), seed=0)
    params, buffers = sw.to_global(state.params), sw.to_global(state.buffers)
    assert params["weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(params["bias"], torch.full((64,), 3.0))
    eager = Hooked()
    assert all(torch.equal(buffers[name], value) for name, value in eager.named_buffers())
    assert buffers.keys() == dict(eager.named_buffers()).keys()


@pytest.mark.simulated
@pytest.mark.parametrize("ranks", [1, 2])
def test_ini_2_what_nobody_initialises_is_reported_by_name(ranks):
    model = nn.Sequential(on_meta(Rules), nn.Linear(3, 3))
    with pytest.raises(InitError) as caught:
        initial(model, sw.Mesh(fsdp=ranks), sw.zero(3, "fsdp"), seed=0)
    assert caught.value.facts == ("0.table", "0.places", "0.mask", "0.weight", "0.bias")
    assert caught.value.numbers["count"] == 5


@pytest.mark.simulated
def test_ini_2_an_init_function_takes_the_place_of_the_hook():
    def values(module: nn.Module) -> None:
        if isinstance(module, Rules):
            module.set_values()

    model = nn.Sequential(on_meta(Rules), nn.Linear(3, 3))
    state = initial(model, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"), seed=0, init=values)
    assert torch.equal(sw.to_global(state.params["0.bias"]), torch.full((64,), 3.0))
    assert torch.equal(sw.to_global(state.buffers)["0.places"], torch.arange(5))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.six = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.six(x)


@pytest.mark.simulated
def test_rng_3_init_does_not_depend_on_the_layout():
    """One seed, one set of whole values: replicated, on either dim, on one or two axes."""
    layouts: list[tuple[sw.Mesh, list[sw.Transform]]] = [
        (mesh, [sw.zero(level, "fsdp")]) for mesh in MESHES.values() for level in (0, 1, 3)
    ]
    layouts += [(MESHES["4"], [sw.zero(3, "fsdp", on=1, pad=True, where="weight")])]
    layouts += [(MESHES["2x2"], [sw.zero(3, ("dp", "fsdp"))])]
    runs = []
    for mesh, transforms in layouts:
        state = initial(on_meta(Several), mesh, *transforms, seed=3)
        runs.append(sw.to_global(state.params))
    for run in runs[1:]:
        assert all(torch.equal(run[path], value) for path, value in runs[0].items())
    whole = runs[0]
    assert not torch.equal(whole["layers.0.weight"], whole["layers.1.weight"])
    other = sw.to_global(initial(on_meta(Several), MESHES["2"], seed=4).params)
    assert not any(torch.equal(other[path], value) for path, value in whole.items())


def replicas(source: str) -> dict[str, Any]:
    """One of four ranks: what it holds at the start and after five steps, and what rank 0 built."""
    mesh = sw.Mesh(dp=2, fsdp=2)
    rank = sw.launch.join_job().rank
    torch.manual_seed(rank)
    model = on_meta(Several) if source == "seed" else Several()
    own = None if source == "seed" else {n: p.detach().clone() for n, p in model.named_parameters()}
    plan = sw.plan(model, mesh, sw.zero(3, "fsdp"))
    program = sw.lower(plan, mean_square, sw.optim.adamw(1e-2)).bind()
    state = program.init(seed=rank) if source == "seed" else program.init(sw.from_module(model))
    whole = sw.to_global(dict(state.params))
    start = {path: leaf.to_local().clone() for path, leaf in state.params.items()}
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        batch = program.shard_batch(torch.randn(8, 4, generator=generator))
        state, _ = program.step(state, batch)
    end = {path: leaf.to_local() for path, leaf in state.params.items()}
    return {"start": start, "end": end, "whole": whole, "own": own}


@pytest.mark.gloo
@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", ["seed", "module"])
def test_hyb_1_replicas_start_and_stay_equal(source):
    ranks = sw.spawn(replicas, ranks=4, args=(source,), timeout=30)
    for first, second in ((0, 2), (1, 3)):
        for moment in ("start", "end"):
            a, b = ranks[first][moment], ranks[second][moment]
            assert all(torch.equal(a[path], b[path]) for path in a)
    assert not torch.equal(ranks[0]["end"]["six.weight"], ranks[0]["start"]["six.weight"])
    if source == "module":
        assert all(torch.equal(ranks[3]["whole"][p], v) for p, v in ranks[0]["own"].items())
        assert not torch.equal(ranks[3]["own"]["six.weight"], ranks[0]["own"]["six.weight"])
