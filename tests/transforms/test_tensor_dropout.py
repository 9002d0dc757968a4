"""`sw.dropout` where tensor axes cut: masks of one process, bit for bit, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.sharding.errors import PlanError, RandomError
from tests.oracles.one_process import assert_same
from tests.transforms.cut_models import (
    Attention,
    Block,
    Seen,
    assert_bits,
    loss_of,
    one_step,
    plan_of,
    run,
    stack,
    tokens_of,
)
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated

ALONE = sw.Mesh(fsdp=1)
SEQUENCE = sw.sequence_parallel("tp")


def probabilities(attention: Attention, p: Tensor) -> Tensor:
    """On heads, by a function and by a module."""
    return attention.sw_drop(sw.dropout(p, 0.25, training=attention.training))


def hidden(block: Block, x: Tensor) -> Tensor:
    """On hidden units."""
    return block.down(block.sw_drop(F.relu(block.up(x))))


def between(block: Block, x: Tensor) -> Tensor:
    """On what a part of the sequence may be cut of, and twice by one module."""
    return block.sw_again(block.down(F.relu(block.up(block.sw_again(x)))))


def merged(block: Block, x: Tensor) -> Tensor:
    """On `(batch seq) mlp`, by name."""
    h = F.relu(block.up(x))
    h = sw.dropout(h.flatten(0, 1), 0.5, name="hidden").view(h.shape)
    return block.down(h)


def of_a_weight(block: Block, x: Tensor) -> Tensor:
    """On a cut parameter, which is no part of the batch."""
    weight = sw.dropout(block.up.weight, 0.5, name="weight", batch_dim=None)
    return block.down(F.relu(block.up(x) + weight.sum(1)))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "heads": lambda: Attention(probabilities),
    "hidden": lambda: Block(hidden),
    "between": lambda: Block(between),
    "merged": lambda: Block(merged),
}


@st.composite
def plans(draw: st.DrawFn) -> tuple[nn.Module, sw.Mesh, list[Any], int]:
    names = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=2, max_size=3))
    tp = draw(st.sampled_from([1, 2, 4]))
    fsdp = draw(st.sampled_from([1, 2]))
    first = draw(st.booleans())
    mesh = sw.Mesh(tp=tp, fsdp=fsdp) if first else sw.Mesh(fsdp=fsdp, tp=tp)
    transforms: list[Any] = [sw.zero(draw(st.sampled_from([0, 3])), "fsdp")]
    transforms += [SEQUENCE] if draw(st.booleans()) else []
    transforms += [sw.remat("layers.0")] if draw(st.booleans()) else []
    transforms += [sw.accumulate(2)] if fsdp == 1 and draw(st.booleans()) else []
    return stack(*(BLOCKS[name]() for name in names)), mesh, transforms, draw(st.integers(4, 7))


@settings(max_examples=10)
@given(plans())
def test_training_is_that_of_one_process(
    drawn: tuple[nn.Module, sw.Mesh, list[Any], int],
) -> None:
    model, mesh, transforms, length = drawn
    data = tokens_of(length=length)
    want = run(model, sw.plan(model, ALONE), data)
    assert_same(run(model, plan_of(model, mesh, *transforms), data), want)


@pytest.mark.parametrize("sequence", [False, True])
def test_every_kind_of_cut(*, sequence: bool) -> None:
    model, data = stack(*(make() for make in BLOCKS.values())), tokens_of(length=7)
    want = run(model, sw.plan(model, ALONE), data)
    plan = plan_of(model, sw.Mesh(tp=4), *([SEQUENCE] if sequence else []))
    assert_same(run(model, plan, data), want)


def test_a_weight_is_dropped_as_in_one_process() -> None:
    model, data = stack(Block(of_a_weight)), tokens_of()
    want = run(model, sw.plan(model, ALONE), data)
    assert_same(run(model, plan_of(model, sw.Mesh(tp=2)), data), want)


def test_masks_are_parts_of_one_mask() -> None:
    seen, whole = Seen(), Seen()

    def forward(noted: Seen) -> Callable[[Block, Tensor], Tensor]:
        def noting(block: Block, x: Tensor) -> Tensor:
            h = block.up(x)
            noted.note("mask", block.sw_drop(torch.ones_like(h)))
            return block.down(h)

        return noting

    cut, alone = (stack(Block(forward(one))) for one in (seen, whole))
    one_step(cut, plan_of(cut, sw.Mesh(tp=4)), tokens_of()[0])
    one_step(alone, sw.plan(alone, ALONE), tokens_of()[0])
    parts = torch.cat(seen.ranks("mask"), -1)
    assert parts.equal(whole.ranks("mask")[0])
    assert 0.3 < (parts == 0).double().mean() < 0.7


def test_other_lengths_than_those_of_the_first_batch() -> None:
    """The sequence is padded in one step and not in another; the batch is merged with it."""
    model = stack(*(make() for make in BLOCKS.values()))
    data = [*tokens_of(1, length=8), *tokens_of(1, length=5), *tokens_of(1, rows=2, length=7)]
    found = []
    for plan in (sw.plan(model, ALONE), plan_of(model, sw.Mesh(tp=2), SEQUENCE)):
        with sw.simulate(plan.mesh):
            program = sw.lower(plan, loss_of, sw.optim.sgd(0.1)).bind()
            state = program.init(sw.from_module(model))
            for tokens in data:
                state, _ = program.step(state, program.shard_batch(tokens))
            found.append(sw.to_global(state.params))
    for path, value in found[0].items():
        torch.testing.assert_close(found[1][path], value, rtol=1e-9, atol=1e-11)


def test_copies_of_heads_have_one_mask() -> None:
    """Two heads of keys on four ranks."""

    class Grouped(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            q = self.q(y).unflatten(-1, (-1, 4)).transpose(1, 2)
            k, v = (
                self.sw_drop(one(y).unflatten(-1, (-1, 4)).transpose(1, 2))
                for one in (self.k, self.v)
            )
            groups = q.shape[1] // k.shape[1]
            k, v = (one.repeat_interleave(groups, 1) for one in (k, v))
            return x + self.o(
                ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)
            )

    model, data = stack(Grouped()), tokens_of()
    axes = {
        "q.weight": "(heads hd) embed", "k.weight": "(kv hd) embed", "v.weight": "(kv hd) embed",
        "o.weight": "embed (heads hd)",
    }  # fmt: skip
    want = run(model, sw.plan(model, ALONE), data)
    assert_same(run(model, plan_of(model, sw.Mesh(tp=4), axes=axes), data), want)


class Fused(nn.Module):
    """q, k and v in one matrix, four heads and two of keys; dropped before and after the split."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.heads, self.groups = 4, 2
        self.qkv, self.o = nn.Linear(8, 32, bias=False), nn.Linear(16, 8, bias=False)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        both = self.drop(self.qkv(self.norm(x)))
        parts = both.split([4 * self.heads, 4 * self.groups, 4 * self.groups], -1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        k, v = (sw.dropout(one, 0.25, name="kv") for one in (k, v))
        k, v = (one.repeat_interleave(self.heads // self.groups, 1) for one in (k, v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.o((scores @ v).transpose(1, 2).flatten(2))


def fused(drop: Callable[[Tensor], Tensor]) -> tuple[nn.Module, sw.Plan]:
    """On four ranks, so that each head of keys is on two of them."""
    model = stack(Fused(drop))
    path, axes = "layers.0", {"qkv.weight": "((heads + kv + kv) hd) embed",
                              "o.weight": "embed (heads hd)"}  # fmt: skip
    plan = sw.plan(
        model,
        sw.Mesh(tp=4),
        sw.tensor_parallel("tp"),
        axes={**axes, f"{path}.heads": "heads", f"{path}.groups": "kv"},
        sizes={"hd": 4, "heads": 4, "kv": 2},
    )
    return model, plan


def test_copies_inside_of_a_fused_projection() -> None:
    model, plan = fused(lambda x: sw.dropout(x, 0.5, name="qkv"))
    data = tokens_of()
    assert_same(run(model, plan, data), run(model, sw.plan(model, ALONE), data))
    model, plan = fused(F.dropout)
    with pytest.raises(PlanError) as info:
        sw.lower(plan, loss_of, sw.optim.sgd(0.1), batch=data[0])
    check(
        info.value, PlanError, "ranks share some segments and not others", "module layers.0",
        "in segments 4|4|4, 1|2|2 copies of its segments", op="bernoulli",
    )  # fmt: skip


def test_remat_changes_no_bit() -> None:
    model, data = stack(Block(hidden), Attention(probabilities)), tokens_of()
    plain = run(model, plan_of(model, sw.Mesh(tp=2)), data)
    assert_bits(run(model, plan_of(model, sw.Mesh(tp=2), sw.remat("layers.*")), data), plain)


def test_rows_of_the_batch_merged_with_what_is_cut() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        h = block.up(x).permute(2, 0, 1).flatten(0, 1)
        h = sw.dropout(h, 0.5)
        return block.down(h.unflatten(0, (-1, x.shape[0])).permute(1, 2, 0))

    model = stack(Block(forward))
    with pytest.raises(RandomError) as info:
        sw.lower(plan_of(model, sw.Mesh(tp=2)), loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])
    check(
        info.value, RandomError, "Dimension 0", "module layers.0", "(32, 6) on this rank",
        shape=(32, 6), batch_dim=0,
    )  # fmt: skip


def test_a_dimension_that_two_axes_cut() -> None:
    model = stack(Block(hidden))
    axes = {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}
    plan = sw.plan(
        model,
        sw.Mesh(tp=2, tq=2),
        sw.tensor_parallel("tp", names=["mlp"]),
        sw.tensor_parallel("tq", names=["mlp"]),
        axes=axes,
        rules=sw.Rules(mlp=("tp", "tq"), vocab=None, embed=None, norm=None),
    )
    if not any(len(frame.axes) > 1 for frame in plan.tensor.frames.values()):
        pytest.fail("the plan cuts over one axis only")
    with pytest.raises(PlanError) as info:
        sw.lower(plan, loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])
    check(
        info.value, PlanError, "'tp' and 'tq' cut the same dimension", "module layers.0.sw_drop",
        "dim 2 of shape (4, 6, 4)", axes=("tp", "tq"), dim=2,
    )  # fmt: skip


def test_a_call_that_the_first_pass_has_not_met() -> None:
    """A branch on the batch calls another dropout, in a later step only."""

    def forward(block: Block, x: Tensor) -> Tensor:
        h = F.relu(block.up(x))
        h = sw.dropout(h, 0.5, name="short" if x.shape[1] < 6 else "long")
        return block.down(h)

    model = stack(Block(forward))
    plan = plan_of(model, sw.Mesh(tp=2))
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_of, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        state, _ = program.step(state, program.shard_batch(tokens_of(1, length=6)[0]))
        with pytest.raises(RandomError) as info:
            program.step(state, program.shard_batch(tokens_of(1, length=5)[0]))
    check(
        info.value, RandomError, "met no such call", "module layers.0, name 'short', call 0",
        number=0,
    )  # fmt: skip
