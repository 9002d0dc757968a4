"""DET-2: two runs give the same bits, whatever delays their ranks meet."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.launch import join_job

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(60)]

STEPS = 20
DELAY_SECONDS = 0.002


class Model(nn.Module):
    """Units with dropout, and a rank that may be slow in forward and backward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Slow:
    """A transport that sleeps before it starts anything and before it ends a wait."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._transport, name)

        def late(*args: Any) -> Any:
            time.sleep(DELAY_SECONDS)
            pending = method(*args)
            return Late(pending) if hasattr(pending, "wait") else pending

        return late


class Late:
    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def wait(self) -> None:
        time.sleep(DELAY_SECONDS)
        self._pending.wait()


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    return sw.Mean(model(batch).square().sum(), len(batch))


def make_model(dropout: float, *, slow: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Model(dropout)
    if slow:
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda module, args: time.sleep(DELAY_SECONDS))
            layer.register_full_backward_pre_hook(lambda module, gout: time.sleep(DELAY_SECONDS))
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, 6, generator=generator) for _ in range(STEPS)]


def train(dropout: float, slow: str) -> dict[str, Tensor]:
    """Losses and weights; rank 1 sleeps in hooks, in its transport, or not at all."""
    late = join_job().rank == 1
    model = make_model(dropout, slow=late and slow == "hooks")
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"), sw.prefetch(2))
    program = sw.lower(plan, loss_fn, sw.optim.adamw(1e-2)).bind()
    state = program.init(sw.from_module(model), seed=5)
    mover = program._ranks[0].mover
    if late and slow == "transport":
        mover.transport = Slow(mover.transport)
    losses = []
    for batch in batches():
        state, metrics = program.step(state, program.shard_batch(batch))
        losses.append(metrics.loss)
    params = {path: value.clone() for path, value in sw.to_global(state.params).items()}
    return {"loss": torch.stack(losses), **params}


def train_in_all_ways() -> tuple[dict[str, Tensor], ...]:
    ways = [("nobody", 0.2), ("nobody", 0.2), ("hooks", 0.2), ("transport", 0.2), ("hooks", 0.0)]
    return tuple(train(dropout, slow) for slow, dropout in ways)


def test_det_2_delays_change_nothing() -> None:
    """Two runs, one with slow hooks and one with slow transport have the same bits."""
    found = sw.spawn(train_in_all_ways, ranks=2, timeout=50)
    for first, *others, without_dropout in found:
        for other in others:
            assert all(torch.equal(other[name], first[name]) for name in first)
        torch.testing.assert_close(without_dropout, one_process(), rtol=1e-6, atol=1e-6)
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name])


def one_process() -> dict[str, Tensor]:
    model = make_model(0.0).double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_fn(model, batch.double()).total / len(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    params = {path: value.detach().float() for path, value in model.named_parameters()}
    return {"loss": torch.stack(losses), **params}
