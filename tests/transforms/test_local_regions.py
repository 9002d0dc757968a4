"""`sw.local`: functions on blocks between declared layouts, against one process and the list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.sharding.errors import BatchError, PlanError
from tests.transforms.cut_models import (
    Block,
    Seen,
    assert_bits,
    check_alone,
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

Run = Callable[[Block, Tensor], Tensor]


def plain(block: Block, x: Tensor) -> Tensor:
    return block.down(F.relu(block.up(x)))


def by_hand(block: Block, x: Tensor) -> Tensor:
    """A whole MLP as one function of blocks."""

    def mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return F.relu(x @ up.T + bias) @ down.T

    cut = sw.local(
        mlp,
        in_specs=("batch seq embed", "mlp/tp embed", "mlp/tp", "embed mlp/tp"),
        out_specs="batch seq embed +tp",
    )
    part = cut(x, block.up.weight, block.up.bias, block.down.weight)
    return sw.constrain(part, "batch seq embed") + block.down.bias


def with_whole_weight(block: Any, x: Tensor) -> Tensor:
    """A whole parameter that every rank applies to its own block, and one that all apply alike."""

    def scale(h: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        return h * by.sum(), (by * 2).sin()

    run = sw.local(
        scale, in_specs=("batch seq mlp/tp", "embed"), out_specs=("batch seq mlp/tp", "embed")
    )
    h, again = run(F.relu(block.up(x)), block.scale)
    return block.down(h) + again


class Scaled(Block):
    """With a parameter that nothing else uses."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.scale = nn.Parameter(torch.ones(8))


def to_whole(block: Block, x: Tensor) -> Tensor:
    """A function that needs hidden units whole, and one that gives each rank rows of the batch."""
    softmax = sw.local(
        lambda h: h.softmax(-1), in_specs="batch/tp seq mlp", out_specs="batch/tp seq mlp"
    )
    whole = sw.constrain(block.up(x), "batch seq mlp")
    soft = sw.constrain(softmax(whole), "batch seq mlp")
    return block.down(sw.constrain(soft, "batch seq mlp/tp"))


def twice_in(block: Block, x: Tensor) -> Tensor:
    """An argument that is cut beside one that is whole; the result is whole."""

    def both(h: Tensor, x: Tensor, factor: float) -> Tensor:
        return (x * factor).cos() + 0 * x

    run = sw.local(
        both, in_specs=("batch seq mlp/tp", "batch seq embed", None), out_specs="batch seq embed"
    )
    h = F.relu(block.up(x))
    return block.down(h) + run(h, x, 0.5)


FORMS: dict[str, Run] = {
    "by hand": by_hand, "whole weight": with_whole_weight, "to whole": to_whole,
    "twice in": twice_in,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_is_that_of_one_process(name: str, ranks: int) -> None:
    kind = Scaled if name == "whole weight" else Block
    model = stack(kind(FORMS[name]), Block(plain))
    check_alone(model, plan_of(model, sw.Mesh(tp=ranks)), tokens_of())


@pytest.mark.parametrize("transforms", [
    [sw.remat("layers.*")],
    [sw.zero(3, "fsdp"), sw.accumulate(2)],
    [SEQUENCE, sw.remat("layers.0")],
])  # fmt: skip
def test_with_other_transforms(transforms: list[Any]) -> None:
    forms = [by_hand, twice_in] if SEQUENCE not in transforms else [sequence_gathered, plain]
    model = stack(*(Block(form) for form in forms))
    plan = plan_of(model, sw.Mesh(tp=2, fsdp=2), *transforms)
    check_alone(model, plan, tokens_of(rows=8), parts=2)


def sequence_gathered(block: Block, x: Tensor) -> Tensor:
    """Of a cut sequence: elementwise on the part, and a running sum of the whole."""
    part = sw.local(torch.tanh, in_specs="batch seq/tp embed", out_specs="batch seq/tp embed")(x)
    total = sw.local(
        lambda x, w: x.cumsum(1) @ w.T,
        in_specs=("batch seq embed", "mlp/tp embed"),
        out_specs="batch seq mlp/tp",
    )
    return part + block.down(F.relu(total(x, block.up.weight) + block.up.bias))


def test_two_axes_of_which_one_is_marked() -> None:
    axes = {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}

    def forward(block: Block, x: Tensor) -> Tensor:
        h = sw.local(torch.tanh, in_specs="batch seq mlp/tp", out_specs="batch seq mlp/tp")
        return block.down(h(block.up(x)))

    model = stack(Block(forward), Block(plain))
    plan = sw.plan(
        model,
        sw.Mesh(tp=2, tq=2),
        sw.tensor_parallel("tp", names=["mlp"]),
        sw.tensor_parallel("tq", names=["vocab"]),
        axes={**axes, "embed.weight": "vocab embed", "head.weight": "vocab embed"},
        rules=sw.Rules(mlp="tp", vocab="tq", embed=None, norm=None),
    )
    check_alone(model, plan, tokens_of())


def test_what_it_moves() -> None:
    model = stack(Block(twice_in), Block(plain))
    lowered = sw.lower(plan_of(model, MESH), loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])
    own = [item for item in lowered.collectives() if "local" in item.unit]
    assert [(item.kind, item.unit, item.nbytes) for item in own] == [
        ("all_reduce", "layers.0 local 0 (call) in1 tp", 4 * 6 * 8 * 8),
    ]


def test_it_is_the_function_itself_elsewhere() -> None:
    run_ = sw.local(torch.mul, in_specs=("batch mlp/tp", None), out_specs="batch mlp/tp")
    assert run_(torch.ones(2, 3), 4.0).equal(torch.full((2, 3), 4.0))
    model, data = stack(Block(by_hand), Scaled(with_whole_weight)), tokens_of()
    alone = run(model, sw.plan(model, sw.Mesh(fsdp=2)), data)
    assert_bits(run(model, plan_of(model, sw.Mesh(fsdp=2, tp=1)), data), alone)


def test_random_numbers_apart_and_alike() -> None:
    seen = Seen()

    def dropped(block: Block, x: Tensor) -> Tensor:
        for label in ("apart", "alike"):
            drop = sw.local(
                lambda h: F.dropout(h, 0.5),
                in_specs="batch seq mlp/tp",
                out_specs="batch seq mlp/tp",
                random=label,
            )
            seen.note(label, drop(torch.ones_like(block.up(x))))
        return plain(block, x)

    model = stack(Block(dropped))
    one_step(model, plan_of(model, MESH), tokens_of()[0])
    assert not torch.equal(*seen.ranks("apart"))
    assert torch.equal(*seen.ranks("alike"))
    assert not seen.ranks("apart")[0].equal(seen.ranks("alike")[0])


def test_random_numbers_are_drawn_again_in_a_recomputation() -> None:
    def dropped(block: Block, x: Tensor) -> Tensor:
        drop = sw.local(
            lambda h: F.dropout(h, 0.5),
            in_specs="batch seq mlp/tp",
            out_specs="batch seq mlp/tp",
            random="apart",
        )
        return block.down(drop(F.relu(block.up(x))))

    model, data = stack(Block(dropped), Block(dropped)), tokens_of()
    plain_run = run(model, plan_of(model, MESH), data)
    assert_bits(run(model, plan_of(model, MESH, sw.remat("layers.*")), data), plain_run)


# -- refusals -------------------------------------------------------------------------------


def refused(forward: Run, *transforms: Any, length: int = 6) -> PlanError:
    model = stack(Block(forward), Block(plain))
    plan = plan_of(model, MESH, *transforms)
    with pytest.raises(PlanError) as info:
        sw.lower(plan, loss_of, sw.optim.sgd(0.1), batch=tokens_of(length=length)[0])
    return info.value


def on_hidden(fn: Callable[..., Any], **specs: Any) -> Run:
    def forward(block: Block, x: Tensor) -> Tensor:
        given = {"in_specs": "batch seq mlp/tp", "out_specs": "batch seq mlp/tp", **specs}
        return block.down(sw.local(lambda h: fn(block, h), **given)(F.relu(block.up(x))))

    return forward


def test_a_parameter_that_is_no_argument() -> None:
    error = refused(on_hidden(lambda block, h: h * block.norm.weight.sum()))
    check(
        error, PlanError, "depends on 1 parameters otherwise than by its arguments",
        "layers.0 local 0", "layers.0.norm.weight", "as an argument with a spec",
        path="layers.0.norm.weight", count=1,
    )  # fmt: skip


def test_an_activation_that_is_no_argument() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        run_ = sw.local(
            lambda h: h + x.sum(), in_specs="batch seq mlp/tp", out_specs="batch seq mlp/tp"
        )
        return block.down(run_(block.up(x)))

    error = refused(forward)
    assert error.numbers["count"] >= 2
    assert "embed.weight" in str(error)


def test_random_numbers_that_are_not_declared() -> None:
    error = refused(on_hidden(lambda block, h: F.dropout(h, 0.5)))
    check(error, PlanError, "draws random numbers", "layers.0 local 0", "random='apart'")
    with pytest.raises(PlanError) as info:
        sw.local(torch.tanh, in_specs="a", out_specs="a", random="often")
    check(info.value, PlanError, "random='often'", "'alike', 'apart'", random="often")


@pytest.mark.parametrize("call", ["constrain", "dropout", "module"])
def test_what_needs_types_inside(call: str) -> None:
    def inside(block: Block, h: Tensor) -> Tensor:
        if call == "constrain":
            return sw.constrain(h, "batch seq mlp/tp")
        if call == "dropout":
            return sw.dropout(h, 0.5)
        return block.up(block.down(h))

    error = refused(on_hidden(inside))
    named = "Module 'layers.0.down'" if call == "module" else f"sw.{call} is called inside"
    check(error, PlanError, named, "layers.0 local 0", region="layers.0 local 0")


def test_axes_and_dimensions_that_do_not_fit() -> None:
    error = refused(on_hidden(lambda block, h: h, out_specs="batch seq mlp/tpp"))
    check(error, PlanError, "sw.local marks 'tpp'", "did you mean 'tp'?", axis="tpp")
    error = refused(on_hidden(lambda block, h: h, in_specs="batch mlp/tp"))
    check(error, PlanError, "sw.local(fn, in_specs=) names 2 dimensions", ndim=2)
    error = refused(on_hidden(lambda block, h: h.sum(-1)))
    check(error, PlanError, "sw.local(fn, out_specs=) names 3 dimensions", ndim=3, shape=(4, 6))


def test_arguments_and_results_that_are_others() -> None:
    run_ = sw.local(torch.mul, in_specs=("a", "a"), out_specs="a")
    with pytest.raises(PlanError) as info:
        run_(torch.ones(2))
    check(
        info.value, PlanError, "called with other arguments", "in_specs has 2, the call 1",
        count=2, given=1,
    )  # fmt: skip
    with pytest.raises(PlanError, match="argument 1 is float"):
        run_(torch.ones(2), 3.0)
    pair = sw.local(lambda x: x, in_specs="a", out_specs=("a", "a"))
    with pytest.raises(PlanError) as info:
        pair(torch.ones(2))
    check(info.value, PlanError, "returns something else", "out_specs has 2", count=2)
    with pytest.raises(PlanError, match="it returned tuple of 1"):
        sw.local(lambda x: (x,), in_specs="a", out_specs="a")(torch.ones(2))


def test_a_partial_sum_has_to_be_declared() -> None:
    """Else it would be taken for a value that is whole; the next layer says that it is none."""

    def forward(block: Block, x: Tensor) -> Tensor:
        part = F.linear(F.relu(block.up(x)), block.down.weight)
        run_ = sw.local(torch.neg, in_specs="batch seq embed +tp", out_specs="batch seq embed +tp")
        return run_(part).relu() + block.down.bias

    error = refused(forward)
    check(error, PlanError, "relu of a partial sum", "module layers.0, axis 'tp'")


def test_blocks_with_padding() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        run_ = sw.local(torch.exp, in_specs="batch seq/tp embed", out_specs="batch seq/tp embed")
        return plain(block, x) + run_(x)

    error = refused(forward, SEQUENCE, length=7)
    check(
        error, PlanError, "Argument 0 of sw.local has blocks with padding", "7 % 2 == 1",
        argument=0, rows=7, ranks=2,
    )  # fmt: skip
    model = stack(Block(forward), Block(plain))
    plan = plan_of(model, MESH, SEQUENCE)
    with sw.simulate(MESH):
        program = sw.lower(plan, loss_of, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        state, _ = program.step(state, program.shard_batch(tokens_of()[0]))
        with pytest.raises(BatchError) as info:
            program.step(state, program.shard_batch(tokens_of(length=7)[0]))
    check(
        info.value, BatchError, "A sequence of 7 cannot be cut over 2 ranks", "7 % 2 == 1",
        length=7, ranks=2,
    )  # fmt: skip
