"""`sw.local`: functions on blocks between declared layouts, against one process and the list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from tests.transforms.cut_models import (
    Block,
    Seen,
    assert_bits,
    check_alone,
    check_evaluation_and_frozen,
    loss_of,
    one_step,
    plan_of,
    run,
    stack,
    tokens_of,
)

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


def of_a_sum(block: Block, x: Tensor) -> Tensor:
    """A summand goes in as what is whole, to be used with a block; as a part; and as it is."""
    part = F.linear(F.relu(block.up(x)), block.down.weight)
    product = sw.local(
        lambda y, w: y @ w.T,
        in_specs=("batch seq embed", "mlp/tp embed"),
        out_specs="batch seq mlp/tp",
    )
    rows = sw.local(torch.tanh, in_specs="batch seq embed/tp", out_specs="batch seq embed/tp")
    whole = sw.constrain(rows(part), "batch seq embed")
    return block.down(F.relu(product(part, block.up.weight))) + whole


def of_gathered(block: Block, x: Tensor) -> Tensor:
    """A block goes in whole, beside one that stays."""

    def mixed(h: Tensor, w: Tensor) -> Tensor:
        return h.softmax(-1).sum(-1, keepdim=True) * h[..., :1].cos() * w.sum(1)

    run_ = sw.local(mixed, in_specs=("batch seq mlp", "mlp/tp embed"), out_specs="batch seq mlp/tp")
    return block.down(run_(block.up(x), block.up.weight))


FORMS: dict[str, Run] = {
    "of a sum": of_a_sum, "of gathered": of_gathered,
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


class Product(nn.Module):
    """Inside of what holds cut parameters the input is replicated: rows of it are just taken."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(F.linear(x, self.up).sin(), self.down)
        rows = sw.constrain(x, "batch/tp seq embed").tanh()
        same = sw.local(torch.cos, in_specs="batch/tp seq embed", out_specs="batch/tp seq embed")
        parts = rows + same(x)
        return sw.constrain(y, "batch seq embed") + sw.constrain(parts, "batch seq embed")


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_what_is_replicated(ranks: int) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.product = nn.LayerNorm(8), Product()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.product(self.norm(x))

    model = stack(Outer(), Outer())
    plan = plan_of(
        model, sw.Mesh(tp=ranks), axes={"product.up": "mlp embed", "product.down": "embed mlp"}
    )
    check_alone(model, plan, tokens_of())
    lowered = sw.lower(plan, loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])
    taken = [name for name, one in lowered.crossings.items() if one.kind == "take"]
    assert len(taken) == 4


def test_an_evaluation_and_frozen_parameters() -> None:
    model = stack(Scaled(with_whole_weight), Block(twice_in), Block(of_a_sum))
    check_evaluation_and_frozen(model)


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


def test_a_cut_parameter_needs_no_spec() -> None:
    def forward(block: Block, x: Tensor) -> Tensor:
        run_ = sw.local(
            torch.mul, in_specs=("batch seq mlp/tp", None), out_specs="batch seq mlp/tp"
        )
        return block.down(run_(block.up(x), block.up.bias))

    model = stack(Block(forward), Block(plain))
    check_alone(model, plan_of(model, MESH), tokens_of())
