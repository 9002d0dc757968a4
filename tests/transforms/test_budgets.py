"""Budgets: bytes on the wire against the optimum, at rest against the formula, planning time."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

pytestmark = pytest.mark.abstract

WIDTH, DEPTH = 256, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def lowered(mesh: sw.Mesh, *transforms: sw.Transform) -> sw.Lowered:
    with torch.device("meta"):
        model = Stack()
    return sw.lower(sw.plan(model, mesh, *transforms), loss_fn, sw.optim.adamw(1e-3))


ELEMENTS = DEPTH * 2 * 4 * WIDTH * WIDTH


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize(("level", "volumes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_payload_is_the_optimum(ranks: int, level: int, volumes: int) -> None:
    program = lowered(sw.Mesh(fsdp=ranks), sw.zero(level, "fsdp"))
    payload = sum(item.nbytes for item in program.collectives())
    optimum = volumes * 4 * ELEMENTS * (ranks - 1) / ranks
    assert optimum <= payload <= 1.01 * optimum


def test_hybrid_sends_one_shard_between_groups() -> None:
    program = lowered(sw.Mesh(dp=4, fsdp=8), sw.zero(3, "fsdp"))
    between = [item.nbytes for item in program.collectives() if item.axis == "dp"]
    shard = 4 * ELEMENTS / 8
    optimum = 2 * shard * 3 / 4
    assert optimum <= sum(between) <= 1.01 * optimum


def test_optimizer_over_the_whole_job_moves_no_more_between_groups() -> None:
    """Params inside a node, optimizer over nodes: gradients and params cross as one shard each."""
    mesh = sw.Mesh(node=4, fsdp=8)
    program = lowered(mesh, sw.zero(3, "fsdp"), sw.shard_optimizer(("node", "fsdp")))
    between = sum(item.nbytes for item in program.collectives() if item.axis == "node")
    assert between <= 1.01 * 2 * (4 * ELEMENTS / 8) * 3 / 4


@pytest.mark.parametrize(
    ("level", "per_element"),
    [(0, lambda n: 12), (1, lambda n: 4 + 8 / n), (2, lambda n: 4 + 8 / n), (3, lambda n: 12 / n)],
)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_rest_bytes_are_the_formula(ranks: int, level: int, per_element: object) -> None:
    """Parameters 4 bytes, Adam moments 8, each over the shards of its home (no master at fp32)."""
    assert callable(per_element)
    memory = lowered(sw.Mesh(fsdp=ranks), sw.zero(level, "fsdp")).memory()
    formula = per_element(ranks) * ELEMENTS
    assert formula <= memory.rest_bytes <= 1.02 * formula + memory.padding


def test_zero2_gradients_are_shards() -> None:
    memory = lowered(sw.Mesh(fsdp=8), sw.zero(2, "fsdp")).memory()
    assert memory.grads == 4 * ELEMENTS // 8


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"q": 4096, "k": 1024, "v": 1024, "o": 4096, "gate": 14336, "up": 14336}
        for name, rows in shapes.items():
            setattr(self, name, nn.Linear(4096, rows, bias=False))
        self.down = nn.Linear(14336, 4096, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(4096), nn.RMSNorm(4096)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128256, 4096)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(32))
        self.norm = nn.RMSNorm(4096)
        self.head = nn.Linear(4096, 128256, bias=False)


def test_planning_for_4096_ranks_takes_under_two_seconds() -> None:
    """The one timed assertion: the issue gives a bound, and the measured time is a tenth of it."""
    with torch.device("meta"):
        model = Llama().bfloat16()
    start = time.process_time()
    with_master = sw.precision(params="bfloat16")
    plan = sw.plan(model, sw.Mesh(dp=16, fsdp=256), sw.zero(3, "fsdp"), with_master)
    text = str(plan)
    items = sw.lower(plan, loss_fn, sw.optim.adamw(1e-3)).collectives()
    assert time.process_time() - start < 2
    assert "layers.{0..31}.q.weight" in text
    assert len({item.unit for item in items}) == 32 + 3 + 1
