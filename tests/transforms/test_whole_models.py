"""Whole models of plain torch, as people write them, trained against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from tests.oracles.one_process import Run, assert_same, one_process, sharded

pytestmark = pytest.mark.simulated

PLANS = {
    "zero 1": (sw.Mesh(fsdp=2), [sw.zero(1, "fsdp")]),
    "zero 3 uneven": (sw.Mesh(fsdp=3), [sw.zero(3, "fsdp")]),
    "hybrid": (sw.Mesh(dp=2, fsdp=2), [sw.zero(3, "fsdp"), sw.prefetch(1)]),
}
ROWS = 12  # the same number on 1, 2, 3 and 4 ranks


class Translator(nn.Module):
    """`nn.Transformer`: an encoder and a decoder, masks, a head that reads the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., 0].abs() * 10).long() % 11
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        out = self.body(self.embed(tokens), self.embed(tokens.flip(1)), tgt_mask=mask)
        return F.linear(out, self.embed.weight).logsumexp(-1)


class Convolutions(nn.Module):
    """Residual blocks with batch norm, a stage that downsamples, pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.down = nn.Conv2d(4, 6, 1, stride=2, bias=False)
        self.head = nn.Linear(6, 5)

    @staticmethod
    def block() -> nn.Module:
        conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x[:, None])
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(self.down(x).mean((2, 3)))


class Recurrent(nn.Module):
    """Two layers of LSTM in both directions, and its final state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out, (state, _) = self.lstm(x)
        return self.head(out[:, -1]) + state.sum()


class Nested(nn.Module):
    """Lists in lists; every inner list of its own width."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Linear(6, 6, bias=bool(stage)) for _ in range(2)) for stage in range(3)
        )
        self.ends = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 3)})
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for stage, scale in zip(self.stages, self.scales, strict=True):
            for layer in stage:
                x = x + torch.tanh(layer(x)) * scale
        return torch.cat([self.ends["b"](x), self.ends["a"](x)], -1)


class Shared(nn.Module):
    """One module at two places of one list, and one inside two units."""

    def __init__(self) -> None:
        super().__init__()
        common, twice = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        others = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
        self.layers = nn.ModuleList([others[0], twice, others[1], twice])
        self.outer = nn.ModuleList(nn.Sequential(common, nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.outer):
            x = x + layer(x)
        return x


class CalledTwice(nn.Module):
    """The same weights at every depth, and a unit called inside another one's turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            for layer in self.layers:
                x = self.norm(x + torch.tanh(layer(x)))
        return self.layers[1](self.layers[0](self.layers[0](x)))


class ReadOutside(nn.Module):
    """Parameters of the root and of its children that only the root's forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.token = nn.Parameter(torch.randn(6))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.table = nn.Embedding(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, 6), x], 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x[:, 0] @ self.table.weight.T * self.temperature.exp()


MODELS: dict[str, Callable[[], nn.Module]] = {
    maker.__name__: maker
    for maker in (
        Translator,
        Convolutions,
        Recurrent,
        Nested,
        Shared,
        CalledTwice,
        ReadOutside,
    )
}


def loss_fn(model: Any, batch: Tensor) -> sw.Mean:
    out = model(batch)
    return sw.Mean((out * out.detach().cos()).sum(), len(batch))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, 4, 6, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_one_process(name: str, kind: str) -> None:
    """Losses, gradients, weights and momentum; batch norm sees the rows of its rank."""
    torch.manual_seed(1)
    model = MODELS[name]().double()
    mesh, transforms = PLANS[kind]
    plan = sw.plan(model, mesh, *transforms)
    want = one_process(
        model, loss_fn, batches(), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), parts=mesh.size
    )
    got = sharded(model, plan, loss_fn, batches(), sw.optim.sgd(0.05, momentum=0.9))
    assert_same(without_statistics(got), without_statistics(want))


def without_statistics(run: Run) -> Run:
    """One process updates running statistics once for each part; a program averages them."""
    run.buffers = {n: b for n, b in run.buffers.items() if "running" not in n and "num_" not in n}
    return run


def test_groups_of_the_models() -> None:
    """What is gathered together: lists that are alike, and nothing twice."""
    units = {
        name: [unit.name for unit in sw.plan(make(), sw.Mesh(fsdp=2)).units if unit.kind == "unit"]
        for name, make in MODELS.items()
    }
    assert units["Translator"] == [
        f"body.{part}.layers.{layer}" for part in ("encoder", "decoder") for layer in range(2)
    ]
    assert units["Convolutions"] == [f"blocks.{block}" for block in range(3)]
    assert units["Nested"] == [f"stages.{i}.{j}" for i in range(3) for j in range(2)]
    assert units["Shared"] == ["layers.0", "layers.1", "layers.2", "outer.0", "outer.1"]
