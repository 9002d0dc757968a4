"""Every optimizer under every way of sharding, against one process on whole tensors in float64.

The reference of `assert_equivalent` uses only `update` on whole tensors by path; a program uses the
in-place forms on flat groups, and gathers what must be seen whole. Compared after each step:
losses, gradients, parameters, optimizer state, and the collectives that ran with those listed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import optim
from shardwise.testing import assert_equivalent

pytestmark = pytest.mark.simulated


class Model(nn.Module):
    """Matrices that no mesh divides, vectors, a scalar, a three-dimensional weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in "ab")
        self.cube = nn.Parameter(torch.empty(3, 4, 2))
        self.scale = nn.Parameter(torch.empty(()))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.cube)
        nn.init.constant_(self.scale, 0.7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        mixed = torch.einsum("bd,kde->b", x, self.cube.tanh())
        return self.head(self.norm(x)) * self.scale + mixed[:, None]


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    out = model(batch["tokens"])
    loss = nn.functional.cross_entropy(out.tanh() * 3, batch["target"], reduction="sum")
    return sw.Mean(loss + 0.1 * out.square().sum(), batch["target"].numel())


def batches(steps: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "tokens": torch.randint(0, 9, (8,), generator=generator),
            "target": torch.randint(0, 7, (8,), generator=generator),
        }
        for _ in range(steps)
    ]


def adamw(**options: float) -> optim.GradientTransform:
    return optim.adamw(1e-2, eps=1e-4, **options)


OPTIMIZERS: dict[str, Callable[[], optim.GradientTransform]] = {
    "adamw": adamw,
    "sgd": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: optim.adam(1e-2, eps=1e-4, weight_decay=0.1),
    "lion": lambda: optim.lion(1e-2, weight_decay=0.1),
    "adagrad": lambda: optim.adagrad(0.1, initial=0.1),
    "rmsprop": lambda: optim.rmsprop(1e-2, eps=1e-3, momentum=0.9, centred=True),
    "adafactor": lambda: optim.adafactor(1e-2, weight_decay=0.1),
    "lamb": lambda: optim.lamb(1e-2, eps=1e-4),
    "muon": lambda: optim.muon(1e-2, rest=adamw()),
    "muon but embeddings": lambda: optim.muon(
        1e-2, where=("layers.**.weight", "head.weight"), rest=optim.lion(1e-3)
    ),
    "clipped muon": lambda: optim.chain(
        optim.clip_by_global_norm(0.5), optim.muon(optim.wsd(0.1, warmup=2, stable=1, decay=2))
    ),
    "partition": lambda: optim.partition(
        {"decay": adamw(weight_decay=0.3), "plain": adamw(weight_decay=0.0), "trust": lamb()},
        {"plain": ("*norm*", "bias"), "trust": lambda path, shape: len(shape) == 3},
        otherwise="decay",
    ),
    "masked": lambda: optim.chain(optim.masked(optim.clip_by_value(1e-3), "layers.*"), adamw()),
    "ema": lambda: optim.ema(adamw(), decay=0.9),
    "ema of muon": lambda: optim.ema(optim.muon(1e-2, rest=adamw()), decay=0.9),
    "inject": lambda: optim.inject(
        optim.adamw, learning_rate=1e-2, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1
    ),
    "torch nadam": lambda: optim.from_torch(torch.optim.NAdam, lr=1e-2, eps=1e-4),
    "torch adafactor": lambda: optim.from_torch(
        torch.optim.Adafactor, schedule=optim.linear(1e-2, 0.0, steps=9)
    ),
    "whole tree": lambda: optim.lamb(1e-2, eps=1e-4)._replace(couples="tree"),
}


def lamb() -> optim.GradientTransform:
    return optim.lamb(1e-2, eps=1e-4)


PLANS = {
    "zero 0": (sw.Mesh(fsdp=2), [sw.zero(0, "fsdp")]),
    "zero 1": (sw.Mesh(fsdp=2), [sw.zero(1, "fsdp")]),
    "zero 3": (sw.Mesh(fsdp=3), [sw.zero(3, "fsdp")]),
    "hsdp": (sw.Mesh(dp=2, fsdp=2), [sw.zero(3, "fsdp")]),
    "nested": (sw.Mesh(dp=2, fsdp=2), [sw.zero(3, "fsdp"), sw.shard_optimizer(("fsdp", "dp"))]),
    "crossed": (
        sw.Mesh(dp=2, fsdp=2),
        [sw.shard_params("fsdp"), sw.shard_grads("dp"), sw.shard_optimizer("dp")],
    ),
    "mixed": (
        sw.Mesh(fsdp=2),
        [sw.zero(1, "fsdp"), sw.zero(3, "fsdp", where="layers.*"), sw.zero(0, None, where="norm")],
    ),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_exact_on_every_plan(name: str, plan: str) -> None:
    mesh, transforms = PLANS[plan]
    model = Model()
    assert_equivalent(
        model,
        loss_fn,
        batches(),
        plan=sw.plan(model, mesh, *transforms),
        optimizer=OPTIMIZERS[name](),
    )
