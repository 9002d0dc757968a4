"""`sw.constrain`: what user code declares of activations, against one process and the list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.sharding.errors import BatchError, PlanError, SpecError
from tests.oracles.one_process import assert_same, one_process, sharded
from tests.transforms.cut_models import (
    Attention,
    Block,
    Stack,
    assert_bits,
    check_alone,
    check_evaluation_and_frozen,
    loss_of,
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


def lowered(forward: Run, *transforms: Any, mesh: sw.Mesh = MESH) -> sw.Lowered:
    model = stack(Block(forward), Block(plain))
    plan = plan_of(model, mesh, *transforms)
    return sw.lower(plan, loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])


def refused(forward: Run, *transforms: Any, mesh: sw.Mesh = MESH) -> PlanError:
    with pytest.raises(PlanError) as info:
        lowered(forward, *transforms, mesh=mesh)
    return info.value


def plain(block: Block, x: Tensor) -> Tensor:
    return block.down(F.relu(block.up(x)))


def declared(block: Block, x: Tensor) -> Tensor:
    """Says what is so anyway."""
    x = sw.constrain(x, "batch seq embed")
    h = sw.constrain(block.up(x), "batch seq mlp/tp")
    return sw.constrain(block.down(F.relu(h)), "batch seq embed")


def gathered(block: Block, x: Tensor) -> Tensor:
    """A softmax over hidden units needs them whole; then they are cut again."""
    h = sw.constrain(block.up(x), "batch seq mlp")
    return block.down(sw.constrain(h.softmax(-1), "batch seq mlp/tp"))


def summed(block: Block, x: Tensor) -> Tensor:
    """A product by hand gives a partial sum, which goes three ways."""
    part = F.linear(F.relu(block.up(x)), block.down.weight)
    cut = sw.constrain(part, "batch seq embed/tp")
    whole = sw.constrain(sw.constrain(part, "batch seq embed +tp"), "batch seq embed")
    return whole.sin() + sw.constrain(cut.cos(), "batch seq embed") + block.down.bias


def sliced(block: Block, x: Tensor) -> Tensor:
    """Of what is whole each rank takes rows, which are put together."""
    rows = sw.constrain(x, "batch/tp seq embed")
    return plain(block, x) + sw.constrain(rows.sin(), "batch seq embed")


FORMS: dict[str, Run] = {
    "declared": declared, "gathered": gathered, "summed": summed, "sliced": sliced,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_is_that_of_one_process(name: str, ranks: int) -> None:
    """What is planned runs, in order and with its bytes."""
    model = stack(Block(FORMS[name]), Block(plain), Block(FORMS[name]))
    check_alone(model, plan_of(model, sw.Mesh(tp=ranks)), tokens_of())


@pytest.mark.parametrize("transforms", [
    [sw.remat("layers.*")],
    [sw.zero(3, "fsdp"), sw.accumulate(2)],
    [sw.zero(1, "fsdp"), sw.remat("layers.0", "dots")],
])  # fmt: skip
@pytest.mark.parametrize("sequence", [False, True])
def test_with_other_transforms(transforms: list[Any], *, sequence: bool) -> None:
    model = stack(Block(gathered), Block(summed), Block(plain))
    more = [SEQUENCE] if sequence else []
    if sequence:
        model = stack(Block(gathered), Block(plain))
    mesh = sw.Mesh(fsdp=2, tp=2)
    check_alone(model, plan_of(model, mesh, *transforms, *more), tokens_of(rows=8), parts=2)


def test_a_sequence_that_is_cut_comes_together() -> None:
    """Inside of a stack that cuts an odd sequence."""

    def mixed(block: Block, x: Tensor) -> Tensor:
        whole = sw.constrain(x, "batch seq embed")
        return plain(block, x) + whole.cumsum(1)

    error = refused(mixed, SEQUENCE)
    assert "add does not fit" in str(error)

    model = stack(Block(_attended), Block(plain))
    check_alone(model, plan_of(model, MESH, SEQUENCE), tokens_of(length=7))


def _attended(block: Block, x: Tensor) -> Tensor:
    whole = sw.constrain(x, "batch seq embed")
    return block.down(F.relu(block.up(whole.cumsum(1))))


def test_what_it_moves() -> None:
    items = lowered(gathered).collectives()
    own = [item for item in items if "constrain" in item.unit]
    assert [(item.kind, item.unit, item.nbytes) for item in own] == [
        ("all_gather", "layers.0 constrain 0 (call) in0 tp", 4 * 6 * 8 * 8),
        ("all_gather", "layers.0 constrain 1 (call) in0 tp", 4 * 6 * 8 * 8),
    ]
    assert not [item for item in lowered(declared).collectives() if "constrain" in item.unit]


def test_it_is_the_identity_elsewhere() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert sw.constrain(x, "batch mlp/tp") is x
    assert sw.constrain(x, sw.Spec.parse("batch mlp +tp")) is x
    model, data = stack(Block(gathered), Block(summed)), tokens_of()
    without = run(model, sw.plan(model, sw.Mesh(fsdp=2)), data)
    plain_axes = run(model, plan_of(model, sw.Mesh(fsdp=2, tp=1)), data)
    assert_bits(plain_axes, without)


def test_a_frozen_model_and_an_evaluation() -> None:
    model = stack(Block(gathered), Block(summed))
    check_evaluation_and_frozen(model)


def test_a_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(gathered)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    model = stack(Twice(), Twice())
    check_alone(model, plan_of(model, MESH), tokens_of())


class Rooted(Stack):
    """Declares layouts in the root module too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return sw.constrain(super().forward(tokens), "batch seq vocab/tp").tanh()


@pytest.mark.parametrize("transforms", [[], [sw.accumulate(2)], [sw.remat("")]])
def test_in_the_root_and_in_the_loss_function(transforms: list[Any]) -> None:
    """Eleven classes on two ranks: blocks are padded, and come together without padding."""

    def loss(model: Any, tokens: Tensor) -> Any:
        logits = sw.constrain(model(tokens), "batch seq vocab")
        total = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
        return sw.Mean(total, tokens.numel())

    torch.manual_seed(0)
    model = Rooted([Block(plain), Block(gathered)]).double()
    data = tokens_of()
    axes = {"head.weight": "vocab embed", "embed.weight": "vocab embed"}
    plan = sw.plan(model, MESH, sw.tensor_parallel("tp", logits="cut"), *transforms, axes=axes)
    got = sharded(model, plan, loss, data, sw.optim.sgd(0.1))
    assert_same(got, one_process(model, loss, data, lambda p: torch.optim.SGD(p, 0.1)))


def test_a_layout_of_heads() -> None:
    """A composite dimension whose first part is cut."""

    def heads(attention: Attention, p: Tensor) -> Tensor:
        return sw.constrain(p, "batch heads/tp query key")

    def merged(attention: Attention, p: Tensor) -> Tensor:
        flat = p.transpose(1, 2).flatten(2)
        flat = sw.constrain(flat, "batch query (heads/tp key)")
        return flat.unflatten(2, (-1, p.shape[-1])).transpose(1, 2)

    model = stack(Attention(heads), Attention(merged))
    check_alone(model, plan_of(model, MESH), tokens_of())


# -- refusals -------------------------------------------------------------------------------


def on_hidden(spec: str) -> Run:
    def forward(block: Block, x: Tensor) -> Tensor:
        return block.down(sw.constrain(block.up(x), spec))

    return forward


def on_input(spec: str) -> Run:
    def forward(block: Block, x: Tensor) -> Tensor:
        return plain(block, sw.constrain(x, spec))

    return forward


def test_an_axis_that_is_none() -> None:
    error = refused(on_hidden("batch seq mlp/tpp"))
    check(
        error, PlanError, "sw.constrain marks 'tpp' in 'batch seq mlp/tpp'",
        "is no axis of Mesh(tp=2)", "layers.0 constrain 0", "did you mean 'tp'?", axis="tpp",
    )  # fmt: skip


def test_an_axis_that_cuts_no_layers() -> None:
    error = refused(on_hidden("batch/fsdp seq mlp/tp"), mesh=sw.Mesh(fsdp=2, tp=2))
    check(
        error, PlanError, "'fsdp'", "which cuts no layers", "tensor axes of the plan: tp",
        "leave 'fsdp' out", axis="fsdp",
    )  # fmt: skip
    assert lowered(on_hidden("batch/fsdp seq mlp/tp"), mesh=sw.Mesh(fsdp=1, tp=2))


def test_another_number_of_dimensions() -> None:
    with pytest.raises(PlanError) as info:
        sw.constrain(torch.ones(2, 3), "batch seq embed")
    check(
        info.value, PlanError, "names 3 dimensions, and the tensor has 2", "'batch seq embed'",
        "(2, 3)", ndim=3, shape=(2, 3),
    )  # fmt: skip
    with pytest.raises(SpecError, match="does not parse"):
        sw.constrain(torch.ones(2), "batch//tp")


def test_what_is_no_summand() -> None:
    error = refused(on_input("batch seq embed +tp"))
    check(
        error, PlanError, "sw.constrain does not fit", "module layers.0, axis 'tp'",
        "x: invariant, (4, 6, 8) on each rank", "cannot be declared a partial sum",
        op="sw.constrain", axis="tp",
    )  # fmt: skip


def test_a_cut_of_another_dimension() -> None:
    error = refused(on_hidden("batch seq/tp mlp"))
    check(
        error, PlanError, "x: sharded on dim 2, (4, 6, 8)",
        "cannot become cut on dim 1 in one step", "declare it whole before", dims=(2, 1),
    )  # fmt: skip


def test_a_size_that_does_not_divide() -> None:
    error = refused(on_input("batch seq/tp embed"), mesh=sw.Mesh(tp=4))
    check(
        error, PlanError, "dim 1 of 6 rows cannot be cut over 4 ranks: 6 % 4 == 2", size=6, ranks=4
    )


def test_pieces_that_cannot_be_taken() -> None:
    error = refused(on_input("batch seq (2 mlp/tp)"))
    check(error, PlanError, "dim 2 would be cut in several pieces", "it is invariant")


def test_another_length_that_does_not_divide() -> None:
    model = stack(Block(on_rows), Block(plain))
    plan = plan_of(model, MESH)
    with sw.simulate(MESH):
        program = sw.lower(plan, loss_of, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        state, _ = program.step(state, program.shard_batch(tokens_of()[0]))
        with pytest.raises(BatchError) as info:
            program.step(state, program.shard_batch(tokens_of(length=5)[0]))
    check(
        info.value, BatchError, "Dimension 1 of 5 rows cannot be cut over 2 ranks", "5 % 2 == 1",
        "sw.sequence_parallel", size=5, ranks=2,
    )  # fmt: skip


def on_rows(block: Block, x: Tensor) -> Tensor:
    rows = sw.constrain(x, "batch seq/tp embed")
    return plain(block, x) + sw.constrain(rows.sin(), "batch seq embed")


def test_a_module_that_is_called_with_other_layouts() -> None:
    def both(block: Block, x: Tensor) -> Tensor:
        part = F.linear(block.up(x), block.down.weight)
        return block.again(part) + block.down.bias

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sw.constrain(x, "batch seq embed")

    first, second = Block(both), Block(plain)
    shared = Whole()
    first.again = shared  # type: ignore[assignment]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.shared = first, second, shared

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.second(self.first(x)))

    model = stack(Outer())
    with pytest.raises(PlanError) as info:
        sw.lower(plan_of(model, MESH), loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])
    check(info.value, PlanError, "is called with activations of different types", "reduce over tp")
