"""Failures on real ranks: every rank ends with an error, nothing hangs, and training can go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import (
    BatchError,
    ImplicitCommError,
    LossError,
    MeshError,
    OrderError,
    RankError,
    ShardwiseError,
    UnitError,
)

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(60)]

MESH = sw.Mesh(fsdp=2)


class Model(nn.Module):
    """Two units; what is odd about a run stands in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x, odd = batch["x"], batch["odd"]
        order = [1, 0] if odd == "order" else [0, 1]
        for index in order:
            if odd == "forward" and index == 1 and type(x) is Tensor:
                raise ValueError("sample 17 is broken")
            x = self.layers[index](x)
        if odd == "read":
            x = x + self.layers[0].weight.sum()
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Any:
    out = model(batch)
    if batch["odd"] == "collective":
        dist.all_reduce(out)
    if batch["odd"] == "loss":
        return out
    return sw.Mean(out.square().sum(), out.shape[0])


def rows() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def start() -> tuple[sw.Program, Any]:
    torch.manual_seed(0)
    plan = sw.plan(Model(), MESH, sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
    return program, program.init(seed=0)


def attempt(odd: str, everywhere: bool, after: int) -> tuple[Exception | None, float, float]:
    """One rank: `after` good steps, one that fails, and one that goes on from the old state."""
    program, state = start()
    rank = sw.launch.join_job().rank
    mine = odd if everywhere or rank == 1 else ""
    good = program.shard_batch({"x": rows(), "odd": ""})
    for _ in range(after):
        state, _ = program.step(state, good)
    bad = {**good, "odd": mine}
    if mine == "structure":
        bad["extra"] = torch.ones(2)
    failure = None
    try:
        program.step(state, bad)
    except ShardwiseError as error:
        failure = error
    _, metrics = program.step(state, good)
    program, state = start()
    for _ in range(after):
        state, _ = program.step(state, good)
    _, want = program.step(state, good)
    return failure, metrics.loss.item(), want.loss.item()


CASES = {
    # name: on every rank, steps before, the error of rank 0, that of rank 1, text, numbers
    "structure": (False, 0, BatchError, BatchError, "differ in structure", {"rank": 1}),
    "forward": (False, 0, RankError, RankError, "sample 17 is broken", {"rank": 1, "failed": 1}),
    "forward, later": (False, 2, RankError, RankError, "Rank 1 failed", {"rank": 1, "failed": 1}),
    "read": (False, 1, RankError, UnitError, "'layers.0.weight' is read outside", {}),
    "loss": (False, 0, RankError, LossError, "shape (2, 2)", {}),
    "order": (False, 0, OrderError, OrderError, "orders that contradict each other", {}),
    "order, later": (False, 1, RankError, OrderError, "when its turn had passed", {}),
    "collective": (True, 0, ImplicitCommError, ImplicitCommError, "outside of the plan", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_with_an_error_and_can_go_on(case):
    everywhere, after, first, second, text, numbers = CASES[case]
    odd = case.partition(",")[0]
    ranks = sw.spawn(attempt, ranks=2, args=(odd, everywhere, after), timeout=30)
    for (error, loss, want), kind in zip(ranks, (first, second), strict=True):
        assert isinstance(error, kind), repr(error)
        assert text in str(error)
        assert error.why
        assert error.fix
        assert error.numbers.items() >= numbers.items()
        assert loss == want


def wrong_mesh() -> str:
    plan = sw.plan(Model(), sw.Mesh(fsdp=3), sw.zero(3, "fsdp"))
    with pytest.raises(MeshError) as caught:
        sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
    assert caught.value.numbers == {"size": 3, "world": 2}
    return str(caught.value)


def test_a_mesh_of_another_size_is_refused_on_every_rank():
    for text in sw.spawn(wrong_mesh, ranks=2, timeout=30):
        assert "Mesh(fsdp=3) does not fit this job of 2 ranks" in text


def test_an_error_that_nobody_catches_ends_the_job():
    with pytest.raises(RankError) as caught:
        sw.spawn(uncaught, ranks=2, timeout=30)
    assert "sample 17 is broken" in str(caught.value)


def uncaught() -> None:
    program, state = start()
    odd = "forward" if sw.launch.join_job().rank == 1 else ""
    program.step(state, program.shard_batch({"x": rows(), "odd": odd}))
