"""CLP-1 and CLP-2: clipping over parameters whose gradients live on different axes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

pytestmark = pytest.mark.simulated

MAX_NORM = 0.5


class Dense(nn.Module):
    """Dense weights, two "experts", and one parameter that is whole everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.dense(x)))
        return sum((expert(x) for expert in self.experts), x)


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    out = model(batch)
    return sw.Mean(out.pow(4).sum(), batch.shape[0])


def homes(axes: Any, where: str) -> list[sw.Transform]:
    """All three homes of some parameters over the same axes."""
    shard = (sw.shard_params, sw.shard_grads, sw.shard_optimizer)
    return [one(axes, where=where) for one in shard]


CLP_1 = {
    "dense over both axes, experts over one": [
        *homes(("dp", "ep"), "dense"),
        *homes("ep", "experts"),
    ],
    "experts over both axes, dense over one": [
        *homes("dp", "dense"),
        *homes(("ep", "dp"), "experts"),
    ],
    "the optimizer only": [sw.shard_optimizer(("ep", "dp"), where="dense")],
    "all over one axis": [sw.zero(3, "dp")],
    "nothing": [],
}
CLP_2 = {
    "column": [*homes("ep", "dense")],
    "column, row and a norm over the other axis": [
        *homes("ep", "dense"),
        *homes("ep", "experts"),
        *homes("dp", "norm"),
    ],
}


def one_process(model: nn.Module, data: list[Tensor], ord: float) -> list[Tensor]:
    """The norms; parameters of `model` are stepped."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms: list[Tensor] = []
    for batch in data:
        optimizer.zero_grad()
        mean = loss_fn(model, batch)
        (mean.total / mean.count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, ord))
        optimizer.step()
    return norms


@pytest.mark.parametrize("ord", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("kind", [*CLP_1, *CLP_2])
def test_one_norm_and_one_factor_over_mixed_meshes(kind: str, ord: float) -> None:
    torch.manual_seed(0)
    model = Dense().double()
    data = [torch.randn(8, 4, dtype=torch.float64) for _ in range(2)]
    mesh = sw.Mesh(dp=2, ep=2)
    plan = sw.plan(model, mesh, *{**CLP_1, **CLP_2}[kind])
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(MAX_NORM, ord), sw.optim.sgd(0.1))
    norms: list[Tensor] = []
    with sw.simulate(mesh):
        program = sw.lower(plan, loss_fn, optimizer).bind(debug=True)
        state = program.init(sw.from_module(model))
        for batch in data:
            state, metrics = program.step(state, program.shard_batch(batch))
            assert metrics.grad_norm is not None
            norms.append(metrics.grad_norm)
            assert program.last_collectives == program.lowered.collectives()
        after = {path: sw.to_global(state.params)[path] for path in dict(model.named_parameters())}
    expected = one_process(model, data, ord)
    assert all(norm > MAX_NORM for norm in expected)  # so every step is clipped
    torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0.0)
    for path, parameter in model.named_parameters():
        torch.testing.assert_close(after[path], parameter.detach(), rtol=1e-11, atol=1e-13)


def test_the_local_value_would_be_another_norm() -> None:
    """What the threads warn of: the norm of what one rank holds, and replicas counted each."""
    torch.manual_seed(0)
    model = Dense().double()
    mesh = sw.Mesh(dp=2, ep=2)
    plan = sw.plan(model, mesh, *CLP_1["dense over both axes, experts over one"])
    batch = torch.randn(8, 4, dtype=torch.float64)
    with sw.simulate(mesh):
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1), grad_norm=True).bind()
        state = program.init(sw.from_module(model))
        grads: Any = program.grads(state, program.shard_batch(batch))[0]
        local = [sw.optim.power_sum(list(one.flats.values())).item() for one in grads.ranks]
        _, metrics = program.step(state, program.shard_batch(batch))
    assert metrics.grad_norm is not None
    square = metrics.grad_norm.item() ** 2
    assert all(one < 0.95 * square for one in local)
    assert sum(local) > 1.05 * square
