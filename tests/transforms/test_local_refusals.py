"""What `sw.local` refuses, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise.sharding.errors import BatchError, PlanError
from tests.transforms.cut_models import Block, loss_of, plan_of, stack, tokens_of
from tests.transforms.five_parts import check

pytestmark = pytest.mark.abstract

MESH = sw.Mesh(tp=2)
SEQUENCE = sw.sequence_parallel("tp")

Run = Callable[[Block, Tensor], Tensor]


def plain(block: Block, x: Tensor) -> Tensor:
    return block.down(F.relu(block.up(x)))


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


def test_a_whole_parameter_that_is_an_argument_without_a_spec() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        run_ = sw.local(
            lambda h, bias: h * bias.sum(),
            in_specs=("batch seq mlp/tp", None),
            out_specs="batch seq mlp/tp",
        )
        return block.down(run_(block.up(x), block.down.bias))

    error = refused(forward)
    path = "layers.0.down.bias"
    check(error, PlanError, "depends on 1 parameters", path, path=path)


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


OTHERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, str, str]] = {
    "partial as whole": (
        lambda h, w: h @ w.T, "batch seq embed", "it is partial sum, and out_specs says that it is "
        "whole", "mark it with +tp",
    ),
    "partial as cut": (
        lambda h, w: h @ w.T, "batch seq embed/tp", "says that it is cut on dim 2", "+tp",
    ),
    "cut as whole": (
        lambda h, w: h.tanh(), "batch seq mlp", "it is sharded on dim 2, and out_specs says that "
        "it is whole", "declare it as it is",
    ),
    "cut elsewhere": (
        lambda h, w: h.transpose(1, 2), "batch seq mlp/tp", "it is sharded on dim 1",
        "cut on dim 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_result_that_is_another_one_than_declared(name: str) -> None:
    fn, spec, fact, fix = OTHERS[name]

    def forward(block: Block, x: Tensor) -> Tensor:
        run_ = sw.local(fn, in_specs=("batch seq mlp/tp", "embed mlp/tp"), out_specs=spec)
        return run_(block.up(x), block.down.weight).sum() + x

    error = refused(forward)
    check(
        error, PlanError, "Result 0 of the function of sw.local is another one than declared",
        "layers.0 local 0", fact, fix, result=0, axis="tp",
    )  # fmt: skip


def test_a_whole_result_is_no_summand() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        run_ = sw.local(
            lambda x, w: x.tanh(),
            in_specs=("batch seq embed", "mlp/tp embed"),
            out_specs="batch seq embed +tp",
        )
        return sw.constrain(run_(x, block.up.weight), "batch seq embed")

    check(
        refused(forward), PlanError, "it is replicated", "says that it is a partial sum", result=0
    )


def test_what_no_rule_can_type_is_taken_as_declared() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        run_ = sw.local(
            lambda h: h.reshape(4, -1).view(h.shape).softmax(-1),
            in_specs="batch seq mlp/tp",
            out_specs="batch seq mlp/tp",
        )
        return block.down(run_(block.up(x)))

    model = stack(Block(forward), Block(plain))
    assert sw.lower(plan_of(model, MESH), loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])


def test_a_partial_sum_stays_one_until_it_is_summed() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        part = F.linear(F.relu(block.up(x)), block.down.weight)
        run_ = sw.local(torch.neg, in_specs="batch seq embed +tp", out_specs="batch seq embed +tp")
        return run_(part).relu() + block.down.bias

    check(refused(forward), PlanError, "relu of a partial sum", "module layers.0, axis 'tp'")


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
