"""RNG-1 and REM-1: dropout in a recomputation, and every order of recomputing and sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.sharding.errors import UnitError
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated

WIDTH, ROWS = 8, 8


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Inside(Block):
    """shard(checkpoint(block)): the unit checkpoints what it does itself."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Model(nn.Module):
    """Two blocks; `call` says how the model calls them."""

    def __init__(self, drop: float = 0.0, *, make: type[Block] = Block, reentrant: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(make(drop) for _ in range(2))
        for layer in self.layers:
            layer.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Outside(Model):
    """checkpoint(shard(block)): the model checkpoints its calls of units."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=layer.reentrant)
        return x


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def gradients(
    make: Callable[[], nn.Module], mesh: sw.Mesh, *transforms: sw.Transform
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = make().double()
    with sw.simulate(mesh):
        plan = sw.plan(model, mesh, *transforms)
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        grads, _ = program.grads(state, program.shard_batch(batch()))
        assert tuple(program.last_collectives) == tuple(program.lowered.grads_items)
        return {path: grad.clone() for path, grad in sw.to_global(grads.leaves).items()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert not [path for path in want if not torch.equal(got[path], want[path])]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rng_1_no_way_to_recompute_draws_another_mask(ranks: int) -> None:
    mesh, zero = sw.Mesh(fsdp=ranks), sw.zero(3, "fsdp")
    want = gradients(lambda: Model(0.5), mesh, zero)
    without = gradients(Model, mesh, zero)
    assert any(not torch.allclose(want[path], without[path]) for path in want)
    for where in ("layers.*", "", "**.drop", ["", "layers.*"]):
        for policy in ("everything", "dots"):
            got = gradients(lambda: Model(0.5), mesh, zero, sw.remat(where, policy))
            assert_equal(got, want)
    assert_equal(gradients(lambda: Model(0.5, make=Inside), mesh, zero), want)
    assert_equal(gradients(lambda: Outside(0.5), mesh, zero), want)


def plain_gradients() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model().double()
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss_fn(model, batch()), list(named.values()))
    return dict(zip(named, grads, strict=True))


ORDERS: dict[str, tuple[Callable[[], nn.Module], list[sw.Transform]]] = {
    "remat, then shard": (Model, [sw.remat("layers.*"), sw.zero(3, "fsdp")]),
    "shard, then remat": (Model, [sw.zero(3, "fsdp"), sw.remat("layers.*")]),
    "remat around shards": (Model, [sw.zero(3, "fsdp"), sw.remat("")]),
    "remat in and around shards": (Model, [sw.zero(3, "fsdp"), sw.remat(["", "layers.*", "up"])]),
    "own inside": (lambda: Model(make=Inside), [sw.zero(3, "fsdp")]),
    "own outside": (Outside, [sw.zero(3, "fsdp")]),
    "own inside ours": (lambda: Model(make=Inside), [sw.remat("layers.*"), sw.zero(3, "fsdp")]),
    "ours inside own": (Outside, [sw.remat("layers.*"), sw.zero(3, "fsdp")]),
}


@pytest.mark.parametrize("order", ORDERS)
def test_rem_1_each_order_gives_the_gradients_of_the_plain_model(order: str) -> None:
    make, transforms = ORDERS[order]
    got, want = gradients(make, sw.Mesh(fsdp=2), *transforms), plain_gradients()
    assert got.keys() == want.keys()
    for path, grad in want.items():
        torch.testing.assert_close(got[path], grad, rtol=1e-10, atol=1e-14)


def test_rem_1_the_two_orders_are_one_plan() -> None:
    mesh, (first, second) = sw.Mesh(fsdp=2), (sw.remat("layers.*"), sw.zero(3, "fsdp"))
    assert sw.plan(Model(), mesh, first, second) == sw.plan(Model(), mesh, second, first)


REENTRANT: dict[str, tuple[Callable[[], nn.Module], list[sw.Transform]]] = {
    "inside": (lambda: Model(make=Inside, reentrant=True), []),
    "outside": (lambda: Outside(reentrant=True), []),
    "inside ours": (lambda: Model(make=Inside, reentrant=True), [sw.remat("layers.*")]),
    "outside ours": (lambda: Outside(reentrant=True), [sw.remat("layers.*")]),
    "inside the whole": (lambda: Outside(reentrant=True), [sw.remat("")]),
}


@pytest.mark.parametrize("order", REENTRANT)
def test_rem_1_a_reentrant_checkpoint_is_refused_with_the_right_way(order: str) -> None:
    make, remats = REENTRANT[order]
    with pytest.raises(UnitError) as caught:
        gradients(make, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"), *remats)
    error = check(caught.value, UnitError, "use_reentrant=True", "in a pass of its own")
    assert "use_reentrant=False" in error.fix
