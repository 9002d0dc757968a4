"""RNG-1 and RNG-3: recomputed masks, and values that are the same for any layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.bits import global_index, uniform
from shardwise.sharding.mesh import Mesh

ROWS, WIDTH = 6, 4


class Block(nn.Module):
    """Linear, dropout, linear."""

    def __init__(self, dropout: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.dropout = dropout(0.5)
        self.second = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.first(x)))


class Model(nn.Module):
    def __init__(self, dropout: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def gradients(
    mesh: Mesh, dropout: type[nn.Module], *transforms: Any, axes: dict[str, str] | None = None
) -> dict[str, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    with sw.simulate(mesh):
        plan = sw.plan(Model(dropout), mesh, *transforms, axes=axes or {})
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        grads, _ = program.grads(program.init(seed=1), program.shard_batch(x))
        return {path: grad.clone() for path, grad in sw.to_global(grads.leaves).items()}


@pytest.mark.simulated
@pytest.mark.parametrize("dropout", [nn.Dropout, sw.Dropout])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rng_1_gradients_with_remat_are_those_without(dropout: type[nn.Module], ranks: int) -> None:
    mesh = sw.Mesh(fsdp=ranks)
    plain = gradients(mesh, dropout, sw.zero(3, "fsdp"))
    ours = gradients(mesh, dropout, sw.zero(3, "fsdp"), sw.remat("layers.*"))
    for path, want in plain.items():
        assert torch.equal(ours[path], want), path
        assert want.count_nonzero(), path


@pytest.mark.simulated
def test_rng_1_with_layout_independent_dropout_two_ranks_are_one_process() -> None:
    ours = gradients(sw.Mesh(fsdp=2), sw.Dropout, sw.zero(3, "fsdp"), sw.remat("layers.*"))
    torch.testing.assert_close(ours, gradients(sw.Mesh(fsdp=1), sw.Dropout), rtol=1e-6, atol=1e-7)
    other = gradients(sw.Mesh(fsdp=2), nn.Dropout, sw.zero(3, "fsdp"))
    assert any(not torch.allclose(other[path], ours[path], rtol=0.1) for path in ours)


@pytest.mark.simulated
@pytest.mark.parametrize("dropout", [nn.Dropout, sw.Dropout])
@pytest.mark.parametrize("mesh", [sw.Mesh(tp=2), sw.Mesh(fsdp=2, tp=2)])
@pytest.mark.parametrize("policy", ["everything", "dots"])
def test_rng_1_where_the_hidden_units_are_cut(
    dropout: type[nn.Module], mesh: sw.Mesh, policy: str
) -> None:
    """Remat changes no bit where ranks of a tensor axis draw apart, or cut one mask."""
    axes = {"first.weight": "mlp embed", "first.bias": "mlp", "second.weight": "embed mlp"}
    level = [sw.zero(3, "fsdp")] if "fsdp" in mesh else []
    cut = [sw.tensor_parallel("tp"), *level]
    plain = gradients(mesh, dropout, *cut, axes=axes)
    ours = gradients(mesh, dropout, *cut, sw.remat("layers.*", policy), axes=axes)
    for path, want in plain.items():
        assert torch.equal(ours[path], want), path
        assert want.count_nonzero(), path
    if dropout is sw.Dropout:
        alone = gradients(sw.Mesh(fsdp=1), dropout)
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-7)


class Normal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        (sw.Mesh(fsdp=1), []),
        (sw.Mesh(fsdp=2), []),
        (sw.Mesh(fsdp=4), []),
        *[(sw.Mesh(fsdp=ranks), [sw.zero(3, "fsdp", on=0, pad=True)]) for ranks in (2, 3, 4)],
        *[(sw.Mesh(fsdp=ranks), [sw.zero(3, "fsdp", on=1, pad=True)]) for ranks in (2, 3, 4)],
        (sw.Mesh(a=2, b=2), [sw.shard_params("a", on=0), sw.shard_optimizer(("a", "b"))]),
        (sw.Mesh(a=2, b=2), [sw.zero(3, ("a", "b"), on=1)]),
    ],
    ids=lambda value: f"{value}" if isinstance(value, Mesh) else f"{len(value)} transforms",
)
def test_rng_3_a_normal_init_is_that_of_one_device(mesh: sw.Mesh, transforms: list[Any]) -> None:
    def initial(mesh: sw.Mesh, transforms: list[Any]) -> tuple[Tensor, list[Tensor]]:
        with sw.simulate(mesh):
            plan = sw.plan(Normal(), mesh, *transforms)
            state = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind().init(seed=7)
            ranks = [state.ranks[rank].params["weight"] for rank in range(mesh.size)]
            whole = sw.to_global(state.params)["weight"].clone()
            return whole, [rank.to_local().clone() for rank in ranks]

    whole, parts = initial(mesh, transforms)
    want, _ = initial(sw.Mesh(fsdp=1), [])
    assert torch.equal(whole, want)
    assert want.unique().numel() == 24
    sharded = [part for part in parts if 0 < part.numel() < 24]
    assert not sharded or any(not torch.equal(part, sharded[0]) for part in sharded)


@pytest.mark.abstract
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_rng_3_bits_of_an_activation_sharded_on_either_dim_are_those_of_the_whole(
    ranks: int, dim: int
) -> None:
    shape = (6, 4)
    whole = uniform(11, global_index(shape, shape))
    start, parts = 0, []
    for cut in torch.arange(shape[dim]).chunk(ranks):
        size = len(cut)
        block = [size if place == dim else other for place, other in enumerate(shape)]
        parts.append(uniform(11, global_index(shape, block, dim, start)))
        start += size
    assert torch.equal(torch.cat(parts, dim), whole)
    assert whole.unique().numel() == 24


def losses() -> list[float]:
    """Of three steps over seven rows, on the ranks there are."""
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plan = sw.plan(Model(sw.Dropout).double(), sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
    state, found = program.init(seed=1), []
    for _ in range(3):
        state, metrics = program.step(state, program.shard_batch(x))
        found.append(metrics.loss.item())
    return found


@pytest.mark.gloo
@pytest.mark.timeout(60)
def test_rng_3_dropout_in_two_processes_is_that_of_one() -> None:
    want = losses()
    for found in sw.spawn(losses, ranks=2, timeout=50):
        assert found == pytest.approx(want, rel=1e-12)


def cut_losses(dropout: type[nn.Module] = nn.Dropout, mesh: Mesh | None = None) -> list[float]:
    """Of three steps in which every rank has a part of the hidden units."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    axes = {"first.weight": "mlp embed", "first.bias": "mlp", "second.weight": "embed mlp"}
    plan = sw.plan(
        Model(dropout).double(), mesh or sw.Mesh(tp=-1), sw.tensor_parallel("tp"), axes=axes
    )
    program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
    state, found = program.init(seed=1), []
    for _ in range(3):
        state, metrics = program.step(state, program.shard_batch(x))
        found.append(metrics.loss.item())
    return found


@pytest.mark.gloo
@pytest.mark.timeout(90)
@pytest.mark.parametrize("dropout", [nn.Dropout, sw.Dropout])
def test_two_processes_with_cut_layers_draw_as_two_simulated_ranks(
    dropout: type[nn.Module],
) -> None:
    with sw.simulate(sw.Mesh(tp=2)):
        want = cut_losses(dropout, sw.Mesh(tp=2))
    for found in sw.spawn(functools.partial(cut_losses, dropout), ranks=2, timeout=80):
        assert found == pytest.approx(want, rel=1e-12)
    alone = cut_losses(dropout, sw.Mesh(tp=1))
    assert (alone == pytest.approx(want, rel=1e-12)) == (dropout is sw.Dropout)
