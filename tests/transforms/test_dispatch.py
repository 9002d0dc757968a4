"""What a step dispatches, on a fake group of 8 ranks: no DTensor, no collective off the list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.sharding.compat import TorchDispatchMode

pytestmark = pytest.mark.abstract

COLLECTIVES = {
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "all_reduce": "allreduce_",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


class Watch(TorchDispatchMode):
    """Counts DTensor arguments and lists collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.dtensors = 0
        self.collectives: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.dtensors += any(issubclass(kind, DTensor) for kind in types)
        if func.namespace == "c10d":
            self.collectives.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.usefixtures("fake_group")
def test_step_runs_the_listed_collectives_on_plain_tensors(level: int) -> None:
    plan = sw.plan(Model(), sw.Mesh(dp=2, fsdp=4), sw.zero(level, "fsdp"), sw.prefetch(1))
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-3))
    program = sw.lower(plan, loss_fn, optimizer).bind(device="cpu")
    state = program.init(seed=0)
    tokens = torch.randint(0, 16, (2, 5))
    state, _ = program.step(state, tokens)
    with Watch() as watch:
        state, _ = program.step(state, tokens)
    assert watch.dtensors == 0
    expected = [COLLECTIVES[item.kind] for item in program.lowered.collectives()]
    assert watch.collectives == expected


@pytest.mark.usefixtures("fake_group")
def test_watch_sees_dtensors() -> None:
    """The watch would notice: reading a leaf and computing with it dispatches a DTensor."""
    plan = sw.plan(Model(), sw.Mesh(fsdp=8), sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind(device="cpu")
    leaf = program.init(seed=0).params["embed.weight"]
    with Watch() as watch:
        leaf + leaf
    assert watch.dtensors > 0
