"""Losses where tensor axes cut layers: of logits or heads that are whole, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import PlanError
from tests.laws.tensor_models import IGNORED, Small
from tests.oracles.one_process import assert_same, one_process, sharded
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated

SMALL = Small(depth=1, vocab=7)
SGD = sw.optim.sgd(0.1, momentum=0.9)
OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}


def count(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def summed(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    loss = sw.cross_entropy(model(batch["tokens"]), batch["labels"], **OPTIONS)
    return sw.Mean(loss, count(batch))


def of_each(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    """Weighted token by token."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    losses = sw.cross_entropy(logits, labels, reduction="none", **OPTIONS)
    weights = torch.arange(1.0, labels.shape[1] + 1, dtype=losses.dtype)
    return sw.Mean((losses * weights).sum(), count(batch))


def tiled(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    head = model.head
    loss = sw.linear_cross_entropy(
        model(batch["tokens"]), head.weight, batch["labels"], bias=head.bias, chunks=3, **OPTIONS
    )
    return sw.Mean(loss, count(batch))


def compare(small: Small, loss_fn: Any, plan: Any, rows: int = 3, length: int = 4) -> None:
    torch.manual_seed(0)
    model = small.build()
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn_like(parameter)
    data = [small.batch(rows, length, seed) for seed in range(2)]
    want = one_process(model, loss_fn, data, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    assert_same(sharded(model, plan(model), loss_fn, data, SGD), want)


def plan_with(*moves: Any) -> Any:
    return lambda model: sw.plan(model, sw.Mesh(tp=2), *moves)


@pytest.mark.parametrize("loss_fn", [summed, of_each])
@pytest.mark.parametrize("logits", ["gathered", "cut", "auto"])
def test_logits_that_are_gathered_and_logits_that_are_not(logits: str, loss_fn: Any) -> None:
    compare(SMALL, loss_fn, plan_with(sw.tensor_parallel("tp", logits=logits)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("moves", [(), (sw.sequence_parallel("tp"),)], ids=["", "sequence"])
def test_a_head_that_is_whole(moves: tuple[Any, ...], bias: bool) -> None:
    """Nothing moves for the loss; the weight's gradient is that of one process."""
    cut = sw.tensor_parallel("tp", "layers.*")
    small = Small(depth=1, vocab=7, bias=bias, loss="tiled")
    compare(small, tiled, plan_with(cut, *moves))
    compare(Small(depth=1, vocab=7, bias=bias), summed, plan_with(cut, *moves))


@pytest.mark.parametrize("loss_fn", [summed, tiled])
def test_one_token(loss_fn: Any) -> None:
    """Dimensions of one row come and go around the vocabulary, whose blocks are padded."""
    small = Small(depth=1, vocab=7, loss="tiled" if loss_fn is tiled else "cut")
    compare(small, loss_fn, plan_with(sw.tensor_parallel("tp")), rows=1, length=1)


@pytest.mark.parametrize("ranks", [2, 8])
def test_more_ranks_than_rows_of_the_vocabulary(ranks: int) -> None:
    """Five rows on eight ranks: three have padding only."""
    small = Small(heads=8, kv=8, depth=1, vocab=5)
    compare(small, summed, lambda m: sw.plan(m, sw.Mesh(tp=ranks), sw.tensor_parallel("tp")))


class Fused(nn.Module):
    """What it gives is cut in two segments, which are no vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.axes = {"up.weight": "(2 mlp) embed", "up.bias": "(2 mlp)"}

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def test_classes_that_are_cut_in_several_segments_are_refused() -> None:
    plan = plan_with(sw.tensor_parallel("tp"))(Fused())

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return sw.cross_entropy(model(x), torch.zeros(3, dtype=torch.long))

    with pytest.raises(PlanError) as caught:
        sw.lower(plan, loss_fn, SGD, batch=torch.ones(3, 4))
    check(
        caught.value,
        PlanError,
        "cross entropy does not fit the tensor-parallel layouts of its inputs",
        "rows: sharded on dim 1 in segments 2|2, (3, 4) on each rank",
        "a loss needs each row and its weights whole, or the vocabulary cut in one piece",
        "Fix: declare the layout of the weight",
        op="cross entropy",
        axis="tp",
    )


def test_a_stack_that_begins_twice_is_refused() -> None:
    """Its first block runs on a whole sequence, and again on a part of one."""
    small = Small(depth=2, twice=True)
    plan = plan_with(sw.tensor_parallel("tp"), sw.sequence_parallel("tp"))(small.build())
    with pytest.raises(PlanError) as caught:
        sw.lower(plan, small.loss_fn, SGD, batch=small.batch(2, 3, 0))
    check(
        caught.value,
        PlanError,
        "Module 'layers.0' is called with activations of different types.",
        "layers.0 (begin) in0 tp",
        "first call: slice dim 1 over tp",
        "now: as it is",
        "Fix: call it with activations of one kind, or use two modules",
        path="layers.0",
    )
