"""HNG-2: ranks that run out of batches at different times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.launch import join_job

NUM_BATCHES = (5, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    return sw.Mean(model(batch).square().sum(), len(batch))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def batches(rank: int) -> list[Tensor]:
    """This rank's own batches, of different sizes."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(2 + rank + index, 4, generator=generator, dtype=torch.float64)
        for index in range(NUM_BATCHES[rank])
    ]


def make_program(model: nn.Module) -> tuple[sw.Program, sw.State]:
    plan = sw.plan(model, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
    return program, program.init(sw.from_module(model))


def train_to_the_shortest(data: Any) -> Any:
    program, state = make_program(make_model())
    source, steps = iter(data), 0
    while program.agree((batch := next(source, None)) is not None):
        state, _ = program.step(state, batch)
        steps += 1
    return steps, whole(state)


def train_to_the_longest(data: Any) -> Any:
    program, state = make_program(make_model())
    source, steps = iter(data), 0
    no_rows = data[0][:0]
    while not program.agree((batch := next(source, None)) is None):
        state, _ = program.step(state, no_rows if batch is None else batch)
        steps += 1
    return steps, whole(state)


def evaluate(data: Any) -> float:
    """The mean over all rows of all batches."""
    program, state = make_program(make_model())
    source, total, rows = iter(data), 0.0, 0.0
    while not program.agree((batch := next(source, None)) is None):
        metrics = program.eval(state, data[0][:0] if batch is None else batch)
        total += float(metrics.loss * metrics.tokens)
        rows += float(metrics.tokens)
    return total / rows


def whole(state: sw.State) -> dict[str, Tensor]:
    return {path: value.clone() for path, value in sw.to_global(state.params).items()}


def by_hand(num_steps: int) -> dict[str, Tensor]:
    """One process on the rows that the ranks have in each step."""
    model = make_model()
    data = [batches(rank) for rank in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(num_steps):
        rows = torch.cat([mine[step] for mine in data if step < len(mine)])
        optimizer.zero_grad()
        (loss_fn(model, rows).total / len(rows)).backward()
        optimizer.step()
    return {path: value.detach() for path, value in model.named_parameters()}


def both_loops_and_eval() -> list[Any]:
    """Both loops and the evaluation on this rank of a job."""
    mine = batches(join_job().rank)
    return [train_to_the_shortest(mine), train_to_the_longest(mine), evaluate(mine)]


@pytest.mark.gloo
@pytest.mark.timeout(60)
def test_hng_2_ranks_stop_together_at_the_shortest_or_the_longest() -> None:
    found = sw.spawn(both_loops_and_eval, ranks=2, timeout=50)
    rows = torch.cat([batch for rank in range(2) for batch in batches(rank)])
    with torch.no_grad():
        mean = float(loss_fn(make_model(), rows).total / len(rows))
    for (short, at_3), (long, at_5), evaluated in found:
        assert (short, long) == (min(NUM_BATCHES), max(NUM_BATCHES))
        torch.testing.assert_close(at_3, by_hand(3), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(at_5, by_hand(5), rtol=1e-10, atol=1e-12)
        assert evaluated == pytest.approx(mean, rel=1e-12)


@pytest.mark.simulated
@pytest.mark.parametrize("mesh", [sw.Mesh(fsdp=1), sw.Mesh(fsdp=2), sw.Mesh(dp=2, fsdp=2)])
def test_hng_2_agreement_is_the_and_of_all_ranks_in_one_reduction(mesh: sw.Mesh) -> None:
    with sw.simulate(mesh):
        plan = sw.plan(make_model(), mesh, sw.zero(3, "fsdp"))
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        assert program.agree(True) is True
        axes = [axis for axis in mesh.names if mesh[axis] > 1]
        assert sorted(item.axis for item in program.last_collectives) == sorted(axes)
        assert {item.reason for item in program.last_collectives} <= {"agree"}
        assert program.agree(False) is False
        for rank in range(mesh.size):
            answers = [other != rank for other in range(mesh.size)]
            assert program.agree(sw.Lifted(answers)) is False
