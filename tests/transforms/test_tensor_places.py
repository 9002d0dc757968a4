"""Where an inconsistent plan does not fit: the module, the operation, and both types."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.sharding.errors import PlanError
from shardwise.transforms.activation_types import Sharded
from shardwise.transforms.places import Places, placed
from tests.transforms.cut_models import (
    Attention,
    Block,
    check_alone,
    loss_of,
    plan_of,
    stack,
    tokens_of,
)
from tests.transforms.five_parts import check

pytestmark = pytest.mark.abstract

MESH = sw.Mesh(tp=2)


def error_of(model: nn.Module, *transforms: object, axes: dict[str, str]) -> PlanError:
    plan = plan_of(model, MESH, *transforms, axes=axes)
    with pytest.raises(PlanError) as info:
        sw.lower(plan, loss_of, sw.optim.sgd(0.1), batch=tokens_of()[0])
    return info.value


def mlp(block: Block, x: Tensor) -> Tensor:
    return block.down(F.relu(block.up(x)))


HEAD = {"head.weight": "vocab embed"}
UP = {"up.weight": "mlp embed", "up.bias": "mlp"}


def test_a_cut_output_that_a_whole_layer_reads() -> None:
    axes = {**UP, "down.weight": "embed group", "down.bias": "embed"}
    error = error_of(stack(Block(mlp), Block(mlp)), axes=axes)
    check(
        error, PlanError, "linear does not fit", "module layers.0.down, axis 'tp'",
        "input: sharded on dim 2, (4, 6, 8) on each rank",
        "weight: free (layers.0.down.weight), (8, 16) on each rank",
        "sw.constrain",
        op="linear", axis="tp",
    )  # fmt: skip
    assert error.numbers["types"][0] == Sharded(2, (8,))


def test_a_cut_query_and_a_whole_key() -> None:
    axes = {"q.weight": "(heads hd) embed", "o.weight": "embed (heads hd)"}
    error = error_of(stack(Attention()), axes=axes)
    check(
        error, PlanError, "matmul does not fit", "module layers.0, axis 'tp'",
        "input: sharded on dim 1, (4, 2, 6, 4) on each rank", "(4, 4, 4, 6) on each rank",
        op="matmul",
    )  # fmt: skip


@pytest.mark.parametrize("transform", [None, sw.remat("layers.*")])
def test_a_recomputed_module_is_named_too(transform: object) -> None:
    def sum_of_block(block: Block, x: Tensor) -> Tensor:
        return block.down(F.relu(block.up(x))) + block.up(x).softmax(-1).mean()

    model = stack(Block(mlp), Block(sum_of_block))
    axes = {**UP, "down.weight": "embed mlp", "down.bias": "embed"}
    error = error_of(model, *([transform] if transform else []), axes=axes)
    check(error, PlanError, "_softmax", "module layers.1, axis 'tp'", op="_softmax")


def test_the_loss_function_is_named() -> None:
    model = stack(Block(mlp))
    plan = sw.plan(model, MESH, sw.tensor_parallel("tp", logits="cut"), axes=HEAD)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens).softmax(-1).sum()

    with pytest.raises(PlanError) as info:
        sw.lower(plan, loss, sw.optim.sgd(0.1), batch=tokens_of()[0])
    check(info.value, PlanError, "_softmax does not fit", "loss_fn, axis 'tp'")


def test_a_tensor_without_a_type_is_a_plan_error_with_its_module() -> None:
    def hide(block: Block, x: Tensor) -> Tensor:
        return block.down(block.up(x.detach().requires_grad_()))

    axes = {**UP, "down.weight": "embed mlp", "down.bias": "embed"}
    error = error_of(stack(Block(hide)), axes=axes)
    check(error, PlanError, "module layers.0, axis", "has no type, and it needs a gradient")


def test_a_consistent_plan_has_no_trace_left_on_the_module() -> None:
    model = stack(Block(mlp))
    before = {path: dict(vars(one)) for path, one in model.named_modules()}
    check_alone(model, plan_of(model, MESH), tokens_of(1))
    assert all("forward" not in vars(one) for one in model.modules())
    assert {path: dict(vars(one)).keys() for path, one in model.named_modules()} == {
        path: one.keys() for path, one in before.items()
    }


def test_places_count_by_call() -> None:
    places = Places()
    seen: list[tuple[str | None, int]] = []

    def note() -> None:
        seen.append((places.path, places.number("x")))

    def outer() -> None:
        note()
        placed(note, "inner", lambda: places)()
        note()

    placed(outer, "outer", lambda: places)()
    placed(outer, "outer", lambda: None)()
    assert seen == [
        ("outer", 0), ("inner", 0), ("outer", 1), (None, 0), ("inner", 0), (None, 1),
    ]  # fmt: skip


def test_an_error_leaves_no_call_open() -> None:
    places = Places()

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        placed(fail, "a", lambda: places)()
    assert places.path is None
