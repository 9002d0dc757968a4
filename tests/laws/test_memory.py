"""Law 4: what a program holds, at rest and at its peak, is what `lowered.memory()` says.

One rank is measured alone, with echoes for peers (`shardwise.testing.echo`): all allocations are
then made on one thread, where the profiler sees them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import measure, rest_bytes
from shardwise.testing.echo import bind_alone
from shardwise.testing.strategies import Training, make_optimizer, trainings

MIB = 2**20
WIDTH = 384

clipped = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-3))
OPTIMIZERS = {"momentum": sw.optim.sgd(0.1, momentum=0.9), "clipped": clipped}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Big(nn.Module):
    """Large weights; with a batch of two tokens, activations are nothing beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(999, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 701, bias=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


BATCH = torch.tensor([[1], [2]])

PLANS = {
    "replicated": lambda axes: [],
    "zero 1": lambda axes: [sw.zero(1, axes)],
    "zero 2": lambda axes: [sw.zero(2, axes)],
    "zero 3": lambda axes: [sw.zero(3, axes)],
    "prefetch": lambda axes: [sw.zero(3, axes), sw.prefetch(2)],
    "kept": lambda axes: [sw.zero(3, axes), sw.keep_gathered("layers.1")],
    "params only": lambda axes: [sw.shard_params(axes)],
    "grads only": lambda axes: [sw.shard_grads(axes)],
    "params and opt": lambda axes: [sw.shard_params(axes), sw.shard_optimizer(axes)],
    "inner params": lambda axes: [sw.zero(3, axes), sw.shard_params(axes[-1])],
    "frozen": lambda axes: [sw.zero(3, axes), sw.freeze("layers.1"), sw.freeze("embed")],
}
MESHES = [sw.Mesh(fsdp=2), sw.Mesh(fsdp=3), sw.Mesh(dp=2, fsdp=4)]


def lower(mesh: sw.Mesh, name: str, optimizer: str) -> sw.Lowered:
    plan = sw.plan(Big(), mesh, *PLANS[name](mesh.names))
    return sw.lower(plan, loss_fn, OPTIMIZERS[optimizer], batch=BATCH)


def measured_transient(lowered: sw.Lowered) -> int:
    """Of the second step: the first one traces."""
    program = bind_alone(lowered)
    state, _ = program.step(program.init(0, None), BATCH)
    _, usage = measure(lambda: program.step(state, BATCH))
    memory = lowered.memory()
    assert memory.activations is not None
    return usage.peak - memory.grads - memory.activations


@pytest.mark.abstract
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("name", PLANS)
def test_the_peak_is_the_predicted_one(name: str, mesh: sw.Mesh, optimizer: str) -> None:
    lowered = lower(mesh, name, optimizer)
    predicted = lowered.memory().transient
    assert abs(measured_transient(lowered) - predicted) <= 0.05 * predicted + MIB / 4


@pytest.mark.abstract
@pytest.mark.parametrize("distance", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_zero_3_holds_three_units_and_one_more_for_each_prefetched(
    ranks: int, distance: int
) -> None:
    mesh = sw.Mesh(fsdp=ranks)
    plan = sw.plan(Big(), mesh, sw.zero(3, "fsdp"), sw.prefetch(distance))
    lowered = sw.lower(plan, loss_fn, OPTIMIZERS["momentum"], batch=BATCH)
    sizes = {path: 4 * p.numel() for path, p in Big().named_parameters()}
    by_kind: dict[str, list[int]] = {"root": [], "child": [], "unit": []}
    for unit in plan.units:
        by_kind[unit.kind].append(sum(sizes[path] for path in unit.params))
    root, children, unit = sum(by_kind["root"]), sum(by_kind["child"]), max(by_kind["unit"])
    # The children of the root stay open for the whole step, so all of them count.
    bound = root + children + (3 + distance) * unit
    assert measured_transient(lowered) <= 1.02 * bound + MIB / 4


@pytest.mark.simulated
@given(trainings())
def test_rest_is_the_predicted_one_on_every_rank(training: Training) -> None:
    model = training.model
    optimizer = make_optimizer(training.optimizer)
    lowered = sw.lower(training.plan(model), training.toy.loss_fn, optimizer)
    predicted = lowered.memory().rest_bytes
    with sw.simulate(training.mesh):
        program = lowered.bind()
        state: Any = program.init(training.seed)
        assert [rest_bytes(rank) for rank in state.ranks] == [predicted] * training.mesh.size
        state, _ = program.step(state, program.shard_batch(training.batches[0]))
        assert [rest_bytes(rank) for rank in state.ranks] == [predicted] * training.mesh.size


@pytest.mark.abstract
def test_the_measure_would_notice() -> None:
    """A tensor that somebody keeps, or takes for a moment, shows."""
    lowered = lower(sw.Mesh(fsdp=2), "zero 3", "momentum")
    program = bind_alone(lowered)
    state, _ = program.step(program.init(0, None), BATCH)
    _, usage = measure(lambda: program.step(state, BATCH))
    kept: list[Tensor] = []

    def wasteful() -> Any:
        kept.append(torch.empty(4 * MIB, dtype=torch.uint8))
        return program.step(new_state, BATCH)

    new_state, _ = program.step(program.init(0, None), BATCH)
    _, more = measure(wasteful)
    assert more.peak == usage.peak + 4 * MIB
    assert more.kept == usage.kept + 4 * MIB
