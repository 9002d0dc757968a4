"""Random operations where tensor axes cut: apart on blocks, alike on what is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.sharding.errors import PlanError
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

MESH = sw.Mesh(tp=2)
SEQUENCE = sw.sequence_parallel("tp")


def masks(seen: Seen) -> Callable[[Block, Tensor], Tensor]:
    """Dropout of ones: by a function and a module on hidden units, by a module on what is whole."""

    def forward(block: Block, x: Tensor) -> Tensor:
        hidden = F.relu(block.up(x))
        first = F.dropout(torch.ones_like(hidden), 0.25)
        second = block.drop(torch.ones_like(hidden))
        out = block.down(hidden * first * second)
        third = block.again(torch.ones_like(out))
        for label, mask in (("function", first), ("module", second), ("out", third)):
            seen.note(label, mask)
        seen.note("result", out * third)
        return out * third

    return forward


def pairs(seen: Seen, label: str) -> list[bool]:
    """Whether each rank has the same as rank 0."""
    first, *others = seen.ranks(label)
    return [one.equal(first) for one in others]


def test_blocks_draw_apart_and_what_is_whole_alike() -> None:
    seen = Seen()
    one_step(stack(Block(masks(seen))), plan_of(stack(Block(masks(seen))), MESH), tokens_of()[0])
    assert pairs(seen, "function") == pairs(seen, "module") == [False]
    assert pairs(seen, "out") == pairs(seen, "result") == [True]


def test_the_fraction_that_is_dropped() -> None:
    seen = Seen()
    model = stack(Block(masks(seen)))
    one_step(model, plan_of(model, MESH), tokens_of(rows=32, length=32)[0])
    for label, p in (("function", 0.25), ("module", 0.5), ("out", 0.5)):
        both = torch.stack(seen.ranks(label))
        kept = (both > 0).double()
        sigma = (p * (1 - p) / both[0].numel()) ** 0.5
        assert all(abs(one.mean() - (1 - p)) < 5 * sigma for one in kept), label
        assert both.max() == 1 / (1 - p)
    first, second = (one > 0 for one in seen.ranks("module"))
    agree = (first == second).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / first.numel() ** 0.5


def test_parts_of_the_sequence_draw_apart() -> None:
    seen = Seen()
    model = stack(Block(masks(seen)), Block(drop))
    one_step(model, plan_of(model, MESH, SEQUENCE), tokens_of(length=7)[0])
    assert pairs(seen, "function") == pairs(seen, "module") == pairs(seen, "out") == [False]
    assert seen.ranks("out")[0].shape == (4, 4, 8)


def test_data_ranks_draw_apart_in_any_case() -> None:
    seen = Seen()
    model = stack(Block(masks(seen)))
    one_step(model, plan_of(model, sw.Mesh(fsdp=2, tp=2), sw.zero(3, "fsdp")), tokens_of()[0])
    assert pairs(seen, "module") == [False, False, False]
    assert pairs(seen, "out") == [True, False, False]
    third = seen.ranks("out")
    assert third[2].equal(third[3])


def test_two_tensor_axes_each_draw_for_their_own_blocks() -> None:
    seen = Seen()

    def heads(attention: Attention, p: Tensor) -> Tensor:
        seen.note("heads", F.dropout(torch.ones_like(p), 0.5))
        return p

    model = stack(Block(masks(seen)), Attention(heads))
    axes = {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}
    more = {f"{one}.weight": "(heads hd) embed" for one in "qkv"}
    named = {**axes, **more, "o.weight": "embed (heads hd)"}
    plan = sw.plan(
        model,
        sw.Mesh(tp=2, tq=2),
        sw.tensor_parallel("tp", names=["mlp"]),
        sw.tensor_parallel("tq", names=["heads"]),
        axes=named,
        sizes={"hd": 4},
        rules=sw.Rules(mlp="tp", heads="tq", vocab=None, embed=None, norm=None, hd=None),
    )
    one_step(model, plan, tokens_of()[0])
    for label, inner in (("module", True), ("heads", False)):
        a, b, c, d = seen.ranks(label)
        assert a.equal(b) == c.equal(d) == inner
        assert a.equal(c) == b.equal(d) == (not inner)
        assert not a.equal(d)


def drop(block: Block, x: Tensor) -> Tensor:
    """Linear, dropout, linear, dropout."""
    hidden = block.drop(F.relu(block.up(x)))
    return block.again(block.down(F.dropout(hidden, 0.25)))


def attend(attention: Attention, p: Tensor) -> Tensor:
    """Dropout of probabilities, as attentions do."""
    return F.dropout(p, 0.3, training=attention.training)


def model_with_dropout() -> nn.Module:
    return stack(Attention(attend), Block(drop), Attention(attend), Block(drop))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("policy", ["everything", "dots"])
def test_a_recomputation_repeats_bit_for_bit(policy: str, *, sequence: bool) -> None:
    model, data = model_with_dropout(), tokens_of(length=5)
    more = [SEQUENCE] if sequence else []
    plain = run(model, plan_of(model, MESH, *more), data)
    again = run(model, plan_of(model, MESH, sw.remat("layers.*", policy), *more), data)
    assert_bits(again, plain)
    inner = run(model, plan_of(model, MESH, sw.remat("layers.*.drop"), *more), data)
    assert_bits(inner, plain)


def test_a_seed_gives_the_same_again_and_another_one_does_not() -> None:
    model, plan = model_with_dropout(), None
    plan = plan_of(model, sw.Mesh(fsdp=2, tp=2), sw.zero(2, "fsdp"), sw.accumulate(2))
    first, same, other = (
        sw.to_global(one_step(model, plan, tokens_of()[0], seed=seed).params) for seed in (1, 1, 2)
    )
    assert all(first[path].equal(same[path]) for path in first)
    assert not first["head.weight"].equal(other["head.weight"])


def test_a_restored_state_draws_what_the_uninterrupted_one_draws(tmp_path: Any) -> None:
    model, data = model_with_dropout(), tokens_of(3)
    plan = plan_of(model, MESH)
    with sw.simulate(MESH):
        program = sw.lower(plan, loss_of, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        state, _ = program.step(state, program.shard_batch(data[0]))
        program.save(tmp_path / "one", state)
        for tokens in data[1:]:
            state, _ = program.step(state, program.shard_batch(tokens))
        straight = sw.to_global(state.params)
        again = sw.lower(plan, loss_of, sw.optim.sgd(0.1)).bind()
        state = again.restore(tmp_path / "one")
        for tokens in data[1:]:
            state, _ = again.step(state, again.shard_batch(tokens))
        resumed = sw.to_global(state.params)
    assert all(resumed[path].equal(value) for path, value in straight.items())


def test_modules_that_draw_for_no_block_are_left_alone() -> None:
    def whole(block: Block, x: Tensor) -> Tensor:
        return block.again(block.down(F.relu(block.up(block.drop(x)))))

    model = stack(Block(whole))
    lowered = sw.lower(plan_of(model, MESH), loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])
    assert lowered.facts.apart == {}
    cut = sw.lower(plan_of(model_with_dropout(), MESH), loss_of, sw.optim.sgd(0.1),
                   batch=tokens_of()[0])  # fmt: skip
    assert sorted(cut.facts.apart) == [
        "layers.0", "layers.1", "layers.1.drop", "layers.2", "layers.3", "layers.3.drop",
    ]  # fmt: skip


def refused(forward: Callable[[Block, Tensor], Tensor]) -> PlanError:
    model = stack(Block(forward), Block(drop))
    with pytest.raises(PlanError) as info:
        sw.lower(plan_of(model, MESH), loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])
    return info.value


def test_a_dropout_of_a_block_and_of_what_is_whole_is_refused() -> None:
    def both(block: Block, x: Tensor) -> Tensor:
        return block.drop(block.down(block.drop(block.up(x))))

    check(
        refused(both), PlanError, "dropout, call 0 of its name in module layers.0.drop",
        "first: on a block along 'tp'", "then: on what is the same on all ranks",
        "nn.Dropout twice", function="dropout", number=0,
    )  # fmt: skip


def test_a_checkpoint_inside_of_a_module_is_refused() -> None:
    def part(block: Block, x: Tensor) -> Tensor:
        return block.down(checkpoint(lambda y: F.dropout(y, 0.5), block.up(x), use_reentrant=False))

    check(
        refused(part), PlanError, "dropout draws on a block along 'tp'",
        "module layers.0, inside of a checkpoint", "sw.remat instead",
        function="dropout", axes=("tp",),
    )  # fmt: skip


def test_a_generator_of_its_own_is_refused() -> None:
    def own(block: Block, x: Tensor) -> Tensor:
        h = block.up(x)
        keep = torch.empty_like(h).bernoulli_(0.5, generator=torch.Generator())
        return block.down(h * keep)

    check(
        refused(own), PlanError, "bernoulli draws for a block from a generator of its own",
        "module layers.0, axis 'tp'", op="bernoulli", axis="tp",
    )  # fmt: skip


def test_a_dropout_in_the_loss_function_is_refused() -> None:
    model = stack(Block(drop))

    def loss(model: Any, tokens: Tensor) -> Any:
        return sw.cross_entropy(F.dropout(model(tokens), 0.5), tokens, reduction="mean")

    plan = sw.plan(
        model, MESH, sw.tensor_parallel("tp", logits="cut"), axes={"head.weight": "vocab embed"}
    )
    with pytest.raises(PlanError) as info:
        sw.lower(plan, loss, sw.optim.sgd(0.1), batch=tokens_of()[0])
    check(info.value, PlanError, "loss_fn", "call it in a module", function="dropout")
