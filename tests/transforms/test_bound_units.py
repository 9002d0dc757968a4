"""Units whose weights are used where they rest, and what the turn to backward leaves room for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.transforms import tiled_loss
from shardwise.transforms.memory import first_backward_bytes
from shardwise.transforms.unit_runtime import UnitRuntime

pytestmark = pytest.mark.simulated

WIDTH, CLASSES = 4, 12


class Layers(nn.Module):
    """A sparse table, a layer that only some batches use, and one that is called twice."""

    def __init__(self, *, branches: bool = True) -> None:
        super().__init__()
        self.branches = branches
        self.table = nn.Embedding(CLASSES, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if not self.branches or tokens.max() >= CLASSES // 2:
            x = self.layers[0](x)
        return self.layers[2](self.layers[1](self.layers[2](x)))


def head_loss(model: Any, tokens: Tensor) -> Any:
    return sw.Mean(model.head(model(tokens)).logsumexp(-1).sum(), tokens.numel())


def tiled(model: Any, tokens: Tensor) -> Any:
    hidden = model(tokens)
    loss = sw.linear_cross_entropy(hidden, model.head.weight, tokens, bias=model.head.bias)
    return sw.Mean(loss, tokens.numel())


def layers(loss_fn: Any) -> Layers:
    torch.manual_seed(0)
    return Layers(branches=loss_fn is head_loss).double()


def program_of(mesh: sw.Mesh, loss_fn: Any, *transforms: Any, batch: Tensor) -> Any:
    model = layers(loss_fn)
    return sw.lower(
        sw.plan(model, mesh, *transforms), loss_fn, sw.optim.sgd(0.1), batch=batch
    ).bind()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_passes_add_up_what_each_of_them_uses(order: tuple[int, ...]) -> None:
    tokens = torch.tensor([[1, 2], [7, 8], [3, 4]])[list(order)]
    whole = layers(head_loss)
    with sw.simulate(sw.Mesh(dp=1)):
        micro = sw.accumulate(3)
        program = program_of(sw.Mesh(dp=1), head_loss, micro, batch=tokens)
        state = program.init(sw.from_module(whole))
        grads, _ = program.grads(state, tokens)
    for row in tokens:
        (head_loss(whole, row[None]).total / tokens.numel()).backward()
    want = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    got = sw.to_global(grads.leaves)
    assert grads.ranks[0].used == want.keys() == got.keys() - {"unused"}
    for path, grad in want.items():
        torch.testing.assert_close(got[path], grad.to_dense(), rtol=1e-12, atol=1e-12)


def test_a_later_pass_adds_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a second pass are not held beside those of the first."""
    new: list[int] = []
    reduce = UnitRuntime.reduce

    def noted(self: UnitRuntime, grads: Any, items: Any, *, ends: bool) -> None:
        new.append(sum(grad is not None for grad in grads))
        reduce(self, grads, items, ends=ends)

    monkeypatch.setattr(UnitRuntime, "reduce", noted)
    tokens = torch.tensor([[7, 2], [7, 8], [9, 4]])
    with sw.simulate(sw.Mesh(dp=1)):
        program = program_of(sw.Mesh(dp=1), head_loss, sw.accumulate(3), batch=tokens)
        program.grads(program.init(sw.from_module(layers(head_loss))), tokens)
    count = len(new) // 3
    assert sum(new[:count]) == 9  # all parameters but `unused`
    assert not any(new[count:])


def test_a_tile_of_logits_takes_what_backward_takes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound of 64 MiB out of the way the memory model decides, by the plan."""
    rows: list[int] = []
    find = tiled_loss._rows

    def noted(*args: Any) -> int:
        rows.append(find(*args))
        return rows[-1]

    monkeypatch.setattr(tiled_loss, "_TILE_BYTES", 1)
    monkeypatch.setattr(tiled_loss, "_rows", noted)
    tokens = torch.arange(CLASSES).repeat(2)[None]
    losses: list[float] = []
    for ranks in (1, 2):
        mesh = sw.Mesh(dp=ranks)
        with sw.simulate(mesh):
            program = program_of(mesh, tiled, sw.zero(3, "dp"), batch=tokens)
            room = first_backward_bytes(program.lowered)
            _, metrics = program.step(program.init(sw.from_module(layers(tiled))), tokens)
        losses.append(float(metrics.loss))
        count, per_row = tokens.numel(), CLASSES * 8
        least = max(room, count * WIDTH * 8) // per_row
        assert rows[-1] == -(-count // -(-count // least))
        assert rows[-1] < count
    assert rows[-1] > rows[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
