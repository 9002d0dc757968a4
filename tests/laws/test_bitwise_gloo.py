"""Law 1 on real processes: gloo gives the bits of the split reference, and of ZeRO by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import split_reference
from shardwise.testing.models import Toy
from tests.oracles import reference_zero

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

STEPS = 3
TOYS = {
    "tokens": Toy(width=12, hidden=31, depth=3, vocab=33, features=("attention", "tied", "scalar")),
    "floats": Toy(width=5, hidden=7, depth=2, features=("batchnorm", "branch", "dropout")),
    # Weights above the sizes from which gloo moves by broadcasts and adds in pieces.
    "large": Toy(width=1025, hidden=2200, depth=2),
}
OPTIMIZERS = {
    "adamw": sw.optim.adamw(1e-2),
    "sgd": sw.optim.sgd(0.1, momentum=0.9, weight_decay=0.01),
}

Plans = list[tuple[str, dict[str, int], str, str]]
TRANSFORMS = {
    "zero 0": (),
    "zero 1": (sw.zero(1, "fsdp"),),
    "zero 2": (sw.zero(2, "fsdp"),),
    "zero 3": (sw.zero(3, "fsdp"), sw.prefetch(1)),
    "hybrid": (sw.zero(3, "fsdp"), sw.shard_optimizer(("dp", "fsdp"))),
    "all axes": (sw.zero(2, ("dp", "fsdp")), sw.shard_params("dp")),
}
ON_TWO: Plans = [
    *[(f"zero {k}", {"fsdp": 2}, "tokens", "adamw") for k in range(4)],
    *[(f"zero {k}", {"fsdp": 2}, "floats", "sgd") for k in range(4)],
    ("zero 0", {"fsdp": 2}, "large", "sgd"),
    ("zero 3", {"fsdp": 2}, "large", "sgd"),
]
ON_FOUR: Plans = [
    *[(f"zero {k}", {"fsdp": 4}, "tokens", "adamw") for k in range(1, 4)],
    *[(name, {"dp": 2, "fsdp": 2}, "tokens", "adamw") for name in ("zero 2", "zero 3", "hybrid")],
    ("all axes", {"dp": 2, "fsdp": 2}, "floats", "sgd"),
    ("zero 0", {"dp": 2, "fsdp": 2}, "floats", "sgd"),
    ("hybrid", {"dp": 2, "fsdp": 2}, "large", "sgd"),
]


def train(plans: Plans) -> list[list[str]]:
    """Train by each plan beside its split reference; what differs, by plan."""
    return [differences(*one) for one in plans]


def differences(name: str, sizes: dict[str, Any], toy_name: str, optimizer_name: str) -> list[str]:
    toy, optimizer = TOYS[toy_name], OPTIMIZERS[optimizer_name]
    model = toy.build()
    plan = sw.plan(model, sw.Mesh(**sizes), *TRANSFORMS[name])
    program = sw.lower(plan, toy.loss_fn, optimizer).bind()
    state = program.init(7)
    batches = [toy.batch(11, seed) for seed in range(1 if toy_name == "large" else STEPS)]
    steps = split_reference(
        model,
        toy.loss_fn,
        batches,
        plan=plan,
        optimizer=optimizer,
        params=whole(state.params),
        buffers=whole(state.buffers),
        seed=7,
    )
    found: list[str] = []
    for number, (batch, theirs) in enumerate(zip(batches, steps, strict=True)):
        state, metrics = program.step(state, program.shard_batch(batch))
        found += unequal(f"{number} params", whole(state.params), theirs.params)
        found += unequal(f"{number} buffers", whole(state.buffers), theirs.buffers)
        found += unequal(f"{number} loss", {"": metrics.loss}, {"": theirs.loss})
        for moment in ("mu", "nu"):
            if hasattr(state.opt, moment):
                ours = whole(getattr(state.opt, moment))
                found += unequal(f"{number} {moment}", ours, getattr(theirs.opt, moment))
        if program.last_collectives != program.lowered.collectives():
            found.append(f"{number} collectives")
    return found


def whole(values: Any) -> dict[str, Tensor]:
    return {path: value.clone() for path, value in sw.to_global(values).items()}


def unequal(what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [f"{what} {path}" for path in ours if not torch.equal(ours[path], theirs[path])]


def test_two_ranks_give_the_bits_of_the_split_reference() -> None:
    for found in sw.spawn(train, ranks=2, args=(ON_TWO,), timeout=60):
        assert dict(zip(ON_TWO_NAMES, found, strict=True)) == {name: [] for name in ON_TWO_NAMES}


def test_four_ranks_give_the_bits_of_the_split_reference() -> None:
    for found in sw.spawn(train, ranks=4, args=(ON_FOUR,), timeout=60):
        assert dict(zip(ON_FOUR_NAMES, found, strict=True)) == {name: [] for name in ON_FOUR_NAMES}


ON_TWO_NAMES = [" ".join(map(str, plan)) for plan in ON_TWO]
ON_FOUR_NAMES = [" ".join(map(str, plan)) for plan in ON_FOUR]


class Net(nn.Module):
    """Layers whose rows do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def loss_sum(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def mean_loss(model: Any, batch: Tensor) -> sw.Mean:
    return sw.Mean(loss_sum(model, batch), len(batch))


def beside_zero_by_hand(level: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor], Any]]:
    """Losses, weights and momentum of both, after a few steps on this rank's rows."""
    torch.manual_seed(0)
    model = Net().double()
    batches = list(torch.randn(STEPS, 7, 5, dtype=torch.float64))
    optimizer = sw.optim.sgd(0.05, momentum=0.9)
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(level, "fsdp", on=0, pad=True))
    program = sw.lower(plan, mean_loss, optimizer).bind()
    state = program.init(sw.from_module(model))
    losses = []
    for batch in batches:
        state, metrics = program.step(state, program.shard_batch(batch))
        losses.append(metrics.loss)
    ours = whole(state.params), whole(state.opt.mu), losses
    mine = [batch.tensor_split(dist.get_world_size())[dist.get_rank()] for batch in batches]
    by_hand = reference_zero.train(model, loss_sum, mine, level=level, lr=0.05)
    return [ours, (by_hand[1], by_hand[2], by_hand[0])]


@pytest.mark.parametrize("level", [1, 3])
def test_two_ranks_do_what_zero_by_hand_does(level: int) -> None:
    for ours, by_hand in sw.spawn(beside_zero_by_hand, ranks=2, args=(level,), timeout=60):
        torch.testing.assert_close(ours, by_hand, rtol=1e-12, atol=1e-14)
