"""Law 4 where a tensor axis cuts layers: rest and peak are the predicted ones.

As in `test_memory`, one rank is measured alone, with echoes for peers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import measure, rest_bytes
from shardwise.testing.echo import bind_alone

MIB = 2**20
WIDTH = 384
AXES = {
    "embed.weight": "vocab embed",
    "up.weight": "mlp embed",
    "up.bias": "mlp",
    "down.weight": "embed mlp",
    "down.bias": "embed",
    "norm.*": "norm",
    "head.weight": "vocab embed",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Big(nn.Module):
    """A vocabulary that does not divide, and tied or untied matrices over it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(999, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 701, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return sw.cross_entropy(model(tokens), tokens, reduction="mean")


PLANS = {
    "tensor": [],
    "sequence": [sw.sequence_parallel("tp")],
    "zero 3": [sw.zero(3, "fsdp")],
    "zero 1, sequence": [sw.zero(1, "fsdp"), sw.sequence_parallel("tp")],
    "zero 3, sequence, prefetch": [
        sw.zero(3, "fsdp"),
        sw.sequence_parallel("tp"),
        sw.prefetch(1),
    ],
    "zero 3, kept, bf16": [
        sw.zero(3, "fsdp"),
        sw.keep_gathered("layers.1"),
        sw.precision(compute="bfloat16"),
    ],
    "zero 2, passes": [sw.zero(2, "fsdp"), sw.accumulate(2)],
}
MESH, OTHER = sw.Mesh(fsdp=2, tp=2), sw.Mesh(tp=4, fsdp=2)
CHOSEN = [*((name, MESH) for name in PLANS), ("zero 3", OTHER), ("zero 1, sequence", OTHER)]


def lower(mesh: sw.Mesh, name: str, *, rows: int, length: int) -> sw.Lowered:
    plan = sw.plan(Big(), mesh, sw.tensor_parallel("tp"), *PLANS[name], axes=AXES)
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-3))
    batch = torch.zeros((rows, length), dtype=torch.int64)
    return sw.lower(plan, loss_fn, optimizer, batch=batch)


def measured_peak(lowered: sw.Lowered, rows: int, length: int) -> int:
    """Beyond rest, of the second step: the first one traces."""
    batch = torch.zeros((rows, length), dtype=torch.int64)
    program = bind_alone(lowered)
    state, _ = program.step(program.init(0, None), batch)
    _, usage = measure(lambda: program.step(state, batch))
    return usage.peak


@pytest.mark.abstract
@pytest.mark.parametrize(("name", "mesh"), CHOSEN, ids=str)
def test_the_peak_is_the_predicted_one(name: str, mesh: sw.Mesh) -> None:
    """Activations of a few tokens are nothing beside the weights."""
    lowered = lower(mesh, name, rows=2, length=4)
    memory = lowered.memory()
    assert memory.activations is not None
    transient = measured_peak(lowered, 2, 4) - memory.grads - memory.activations
    assert abs(transient - memory.transient) <= 0.05 * memory.transient + MIB / 4


@pytest.mark.abstract
@pytest.mark.parametrize("name", ["tensor", "zero 3, sequence, prefetch", "zero 2, passes"])
def test_activations_are_the_predicted_ones(name: str) -> None:
    """With many tokens, about half of the peak is activations, or more."""
    lowered = lower(MESH, name, rows=4, length=256)
    memory = lowered.memory()
    assert memory.activations is not None
    predicted = memory.grads + memory.activations + memory.transient
    peak = measured_peak(lowered, 4, 256)
    assert memory.activations > 0.4 * predicted
    assert 0.8 * predicted < peak < 1.05 * predicted + MIB / 4


@pytest.mark.simulated
@pytest.mark.parametrize("mesh", [MESH, sw.Mesh(tp=4)], ids=repr)
def test_rest_is_the_predicted_one_on_every_rank(mesh: sw.Mesh) -> None:
    name = "zero 1, sequence" if "fsdp" in mesh else "tensor"
    lowered = lower(mesh, name, rows=2, length=3)
    with sw.simulate(mesh):
        program = lowered.bind()
        state: Any = program.init(0)
        tokens = torch.zeros((mesh.product(lowered.plan.batch) * 2, 3), dtype=torch.int64)
        state, _ = program.step(state, program.shard_batch(tokens))
        assert {rest_bytes(rank) for rank in state.ranks} == {lowered.memory().rest_bytes}


@pytest.mark.abstract
@pytest.mark.parametrize("size", [1, 2, 4])
def test_padding_is_what_no_element_needs(size: int) -> None:
    """999 rows in two blocks of 500, or four of 250; and the gaps between tensors."""
    lowered = lower(sw.Mesh(tp=size), "tensor", rows=2, length=4)
    plan, memory = lowered.plan, lowered.memory()
    elements = sum(
        math.prod(info.shape) / (size if info.path in plan.tensor.frames else 1)
        for info in plan.infos
    )
    counts = 2 * 8  # steps of the optimizer, and of its schedule
    # Weights and two moments.
    assert memory.padding == pytest.approx(memory.rest_bytes - counts - 12 * elements, abs=16)
    rows = -(-999 // size) * size - 999 + -(-701 // size) * size - 701
    assert memory.padding >= 12 * rows * WIDTH // size
