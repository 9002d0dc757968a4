"""TIE-1: a weight with two users that fall into different units."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.oracles.one_process import assert_same, one_process, sharded

pytestmark = pytest.mark.simulated


class TiedModel(nn.Module):
    """Embedding(11, 8), two blocks, a norm, and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    logits = model(batch["tokens"]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    return sw.Mean(loss, batch["labels"].numel())


def batches(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def tokens() -> Tensor:
        return torch.randint(0, 11, (4, 5), generator=generator)

    return [{"tokens": tokens(), "labels": tokens()} for _ in range(steps)]


GROUPS = {
    "by rule": None,
    "uses in two units": ["embed", "blocks.*", "norm", "head"],
    "one use in the root": ["embed", "blocks.*", "norm"],
}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("groups", GROUPS)
def test_tie_1_trains_as_one_process(groups, level):
    torch.manual_seed(0)
    module = TiedModel().double()
    plan = sw.plan(module, sw.Mesh(fsdp=2), sw.zero(level, "fsdp"), units=GROUPS[groups])
    want = one_process(module, loss_fn, batches(2), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    got = sharded(module, plan, loss_fn, batches(2), sw.optim.sgd(0.1, momentum=0.9))
    assert_same(got, want)


@pytest.mark.parametrize("groups", GROUPS)
def test_tie_1_is_stored_updated_and_gathered_once(groups):
    module = TiedModel()
    plan = sw.plan(module, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"), units=GROUPS[groups])
    lowered = sw.lower(plan, loss_fn, sw.optim.adamw(1e-2))
    with sw.simulate(plan.mesh):
        program = lowered.bind()
        state = program.init(sw.from_module(module))
        state, _ = program.step(state, program.shard_batch(batches(1)[0]))
    one = state.ranks[0]
    paths = [path for path, _ in module.named_parameters()]
    assert sorted(one.params) == sorted(paths)
    assert sorted(one.opt.mu) == sorted(paths)
    assert "head.weight" not in paths
    embed, head = (
        sw.to_global(state.params["embed.weight"]),
        sw.to_global(state.params["head.weight"]),
    )
    assert torch.equal(embed, head)
    assert one.params["embed.weight"].to_local().data_ptr() == (
        one.params["head.weight"].to_local().data_ptr()
    )
    gathers = [i for i in program.last_collectives if i.unit == "" and i.kind == "all_gather"]
    assert [item.reason for item in gathers if item.reason != "scalars"] == ["forward"]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "fsdp": 2}], ids=str)
def test_tie_1_over_a_cut_vocabulary(sizes):
    """Eleven rows over two ranks; the sum of both uses, whatever the head's logits become."""
    torch.manual_seed(0)
    module = TiedModel().double()
    moves = [sw.zero(3, "fsdp")] if "fsdp" in sizes else []
    axes = {"embed.weight": "vocab embed"}
    plan = sw.plan(module, sw.Mesh(**sizes), sw.tensor_parallel("tp"), *moves, axes=axes)
    assert plan.tensor.frames["embed.weight"].block == (6, 8)
    want = one_process(module, loss_fn, batches(2), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    for loss in (loss_fn, cut_loss):
        got = sharded(module, plan, loss, batches(2), sw.optim.sgd(0.1, momentum=0.9))
        assert_same(got, want)
        assert sorted(got.params) == [path for path, _ in sorted(module.named_parameters())]


def cut_loss(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    return sw.Mean(
        sw.cross_entropy(model(batch["tokens"]), batch["labels"]), batch["labels"].numel()
    )
