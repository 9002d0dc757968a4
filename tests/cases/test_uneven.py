"""UNE-1 and UNE-2: sizes that the ranks do not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import PlanError
from tests.oracles.one_process import assert_same, one_process, sharded

pytestmark = pytest.mark.simulated


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


ADAMW = sw.optim.adamw(1e-2, weight_decay=0.1)


class Uneven(nn.Module):
    """33 rows, 3 rows, one element and no dimension, for four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 4)
        self.few = nn.Linear(4, 3)
        self.one = nn.Linear(3, 1)
        self.head = nn.Linear(4, 33)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x) * self.scale + self.one(torch.tanh(self.few(x)))


def cross_entropy(model: nn.Module, tokens: Tensor) -> sw.Mean:
    logits = model(tokens).flatten(0, -2)
    loss = nn.functional.cross_entropy(logits, tokens.roll(1, 1).flatten(), reduction="sum")
    return sw.Mean(loss, tokens.numel())


def tokens(steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 33, (4, 6), generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_une_1_trains_as_one_process(level):
    torch.manual_seed(0)
    module = Uneven().double()
    plan = sw.plan(module, sw.Mesh(fsdp=4), sw.zero(level, "fsdp", on=0, pad=True, where="~scale"))
    want = one_process(module, cross_entropy, tokens(), adamw)
    got = sharded(module, plan, cross_entropy, tokens(), ADAMW)
    assert_same(got, want)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    assert {name: value.shape for name, value in got.params.items()} == shapes


def test_une_1_padding_is_in_no_rank_and_no_norm():
    torch.manual_seed(0)
    module = Uneven().double()
    plan = sw.plan(module, sw.Mesh(fsdp=4), sw.zero(3, "fsdp"))
    with sw.simulate(plan.mesh):
        optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(0.1), sw.optim.sgd(0.1))
        program = sw.lower(plan, cross_entropy, optimizer).bind()
        state = program.init(sw.from_module(module))
        rows = [one.params["few.weight"].to_local().shape[0] for one in state.ranks]
        state, metrics = program.step(state, program.shard_batch(tokens(1)[0]))
    mean = cross_entropy(module, tokens(1)[0])
    (mean.total / mean.count).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    torch.optim.SGD(module.parameters(), 0.1).step()
    torch.testing.assert_close(metrics.grad_norm, norm, rtol=1e-12, atol=0.0)
    after = sw.to_global(state.params)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-6, atol=1e-9)
    cut_dim = 0 if plan.params["few.weight"].dim_axes(0) else 1
    assert sum(rows) == 3 if cut_dim == 0 else rows == [3, 3, 3, 3]


class Wide(nn.Module):
    """One parameter of shape (2, `columns`)."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, columns))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def squares(model: nn.Module, x: Tensor) -> sw.Mean:
    out = model(x)
    return sw.Mean(out.square().sum(), out.shape[0])


@pytest.mark.parametrize(("columns", "pad"), [(12, False), (10, True), (3, True)])
def test_une_1_on_dim_1(columns, pad):
    torch.manual_seed(0)
    module = Wide(columns).double()
    plan = sw.plan(module, sw.Mesh(fsdp=4), sw.zero(3, "fsdp", on=1, pad=pad))
    assert plan.params["weight"].dim_axes(1) == ("fsdp",)
    data = [torch.randn(8, 2, dtype=torch.float64) for _ in range(3)]
    assert_same(
        sharded(module, plan, squares, data, ADAMW), one_process(module, squares, data, adamw)
    )


def test_une_1_on_dim_1_that_does_not_divide_is_refused():
    with pytest.raises(PlanError) as caught:
        sw.plan(Wide(10), sw.Mesh(fsdp=4), sw.zero(3, "fsdp", on=1))
    text = str(caught.value)
    assert all(part in text for part in ("weight", "(2, 10)", "10 % 4 == 2", "Mesh(fsdp=4)"))


class Composed(nn.Module):
    """Rows of 10, 5 and 7, a transposed parameter and a frozen one, for two by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.five = nn.Linear(10, 5)
        self.seven = nn.Linear(5, 7)
        self.transposed = nn.Parameter(torch.randn(7, 5).t())
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.seven(torch.tanh(self.five(torch.tanh(self.up(x))))) * self.frozen
        return x @ self.transposed.t()


MESH = sw.Mesh(dp=2, fsdp=2)
COMPOSED = {
    "both axes": [sw.zero(3, ("dp", "fsdp"))],
    "both axes, minor first": [sw.zero(3, ("fsdp", "dp"))],
    "hybrid": [sw.zero(3, "fsdp")],
    "optimizer over both": [sw.shard_params("fsdp"), sw.shard_optimizer(("fsdp", "dp"))],
    "padded rows": [sw.zero(3, "fsdp", on=0, pad=True)],
}


@pytest.mark.parametrize("kind", COMPOSED)
def test_une_2_trains_as_one_process(kind):
    torch.manual_seed(0)
    module = Composed().double()
    plan = sw.plan(module, MESH, *COMPOSED[kind])
    data = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    got = sharded(module, plan, squares, data, ADAMW)
    assert_same(got, one_process(module, squares, data, adamw))
    assert "frozen" not in got.moments["mu"]
    assert torch.equal(got.params["frozen"], module.frozen)


@pytest.mark.parametrize("kind", COMPOSED)
def test_une_2_shapes_and_strides_are_those_of_the_whole(kind):
    module = Composed().double()
    plan = sw.plan(module, MESH, *COMPOSED[kind])
    with sw.simulate(MESH):
        program = sw.lower(plan, squares, ADAMW).bind()
        state = program.init(sw.from_module(module))
        for _ in range(2):
            for one in state.ranks:
                for leaves in (one.params, one.opt.mu, one.opt.nu):
                    for path, leaf in leaves.items():
                        whole = torch.empty(module.get_parameter(path).shape)
                        assert leaf.shape == whole.shape
                        assert leaf.stride() == whole.stride()
            data = torch.randn(8, 6, dtype=torch.float64)
            state, _ = program.step(state, program.shard_batch(data))
