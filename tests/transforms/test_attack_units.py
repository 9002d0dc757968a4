"""Attacks on the brackets of a unit: aliases, side doors, inner passes, caches, other programs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.sharding.errors import OrderError, SimulationError, UnitError
from tests.transforms.attacked import (
    TWO,
    WIDTH,
    Stack,
    assert_right,
    batches,
    bind,
    linear,
    loss_fn,
    right_or_refused,
    started,
)
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated

REFUSED = "is a view and "  # torch: ... is being modified inplace, or its base is


class Inner(nn.Module):
    """A unit around one linear layer, with what it returns given by `make(layer, x)`."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = linear()
        self.make = make

    def forward(self, *args: Any) -> Any:
        return self.make(self.linear, *args)


def stack(make: Any, call: Any = None) -> Stack:
    return Stack(lambda: Inner(make), call)


# -- outputs that share memory ---------------------------------------------------------------------


def value_and_view(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = layer(x)
    return y, y[:, :2]


def twice(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = layer(x)
    return y, y


def the_input(layer: nn.Module, x: Tensor, skip: bool = True) -> Tensor:
    return x if skip else layer(x)


def writes_value(unit: nn.Module, x: Tensor) -> Tensor:
    value, view = unit(x)
    value.mul_(2)
    return value + torch.cat([view, view], -1) if view.shape[1] < WIDTH else value + view


def writes_view(unit: nn.Module, x: Tensor) -> Tensor:
    value, view = unit(x)
    view.mul_(2)
    return value


def writes_output(unit: nn.Module, x: Tensor) -> Tensor:
    y = unit(x)
    y.mul_(2)
    return x + unit(y, False)


def writes_input(unit: nn.Module, x: Tensor) -> Tensor:
    y = unit(x)
    x.mul_(2)
    return x + y + unit(y, False)


def writes_nothing(unit: nn.Module, x: Tensor) -> Tensor:
    y = unit(x)
    return x * y + unit(y, False)


SHARING = {
    "the same tensor twice, one written": (twice, writes_value, True),
    "a view and its base, base written": (value_and_view, writes_value, False),
    "a view and its base, view written": (value_and_view, writes_view, False),
    "its input, output written": (the_input, writes_output, False),
    "its input, input written": (the_input, writes_input, False),
    "its input, nothing written": (the_input, writes_nothing, True),
}


@pytest.mark.parametrize(("make", "call", "right"), SHARING.values(), ids=SHARING)
def test_outputs_that_share_memory_are_right_or_refused(make: Any, call: Any, right: bool) -> None:
    assert right_or_refused(stack(make, call), REFUSED) is right


def writes_its_input(layer: nn.Module, x: Tensor) -> Tensor:
    x += 1
    return layer(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_unit_that_writes_its_input_beside_a_residual(frozen: bool) -> None:
    """A frozen unit sees stand-ins of its inputs, so a write would not reach the residual."""
    module = stack(writes_its_input, lambda unit, x: x + unit(x))
    module.layers[1:].requires_grad_(not frozen)
    assert right_or_refused(module, REFUSED) is not frozen


def test_a_unit_may_return_a_sparse_tensor() -> None:
    assert_right(stack(lambda layer, x: layer(x).to_sparse(), lambda unit, x: unit(x).to_dense()))


# -- parameters and side doors ---------------------------------------------------------------------


def clamped(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)
    return layer(x)


def clamped_by_data(layer: nn.Linear, x: Tensor) -> Tensor:
    layer.weight.data.clamp_(-0.1, 0.1)
    return layer(x)


@pytest.mark.parametrize("make", [clamped, clamped_by_data])
@pytest.mark.parametrize("level", [0, 3])
def test_a_forward_that_writes_a_parameter_is_refused(make: Any, level: int) -> None:
    with (
        started(stack(make), sw.zero(level, "fsdp")) as (program, state),
        pytest.raises(UnitError) as caught,
    ):
        program.step(state, program.shard_batch(batches()[0]))
    path = "layers.0.linear.weight"
    check(caught.value, UnitError, "writes its parameter", path=path, unit="layers.0")


def test_a_side_door_of_a_later_step_points_to_the_debug_mode() -> None:
    open_door = False

    def unit(layer: nn.Module, box: dict[str, Tensor]) -> Tensor | None:
        if not open_door:
            return layer(box["x"])
        box["x"] = layer(torch.tanh(layer(box["x"])))
        return None

    def through(unit: nn.Module, x: Tensor) -> Tensor:
        box = {"x": x}
        out = unit(box)
        return box["x"] if out is None else out

    module = stack(unit, through)
    with sw.simulate(TWO):
        program = bind(module, mesh=TWO)
        state = program.init(sw.from_module(module))
        batch = program.shard_batch(batches()[0])
        state, _ = program.step(state, batch)
        open_door = True
        with pytest.raises(UnitError) as caught:
            program.step(state, batch)
    check(caught.value, UnitError, "side door", "bind(debug=True)")


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


CONTAINERS = {
    "set": (lambda layer, x: {layer(x)}, lambda out: next(iter(out)), "builtins.set"),
    "slots": (lambda layer, x: Slots(layer(x)), lambda out: out.value, "Slots"),
    "two levels": (
        lambda layer, x: Opaque(Opaque(layer(x))),
        lambda out: out.value.value,
        "Opaque",
    ),
}


@pytest.mark.parametrize(("make", "read", "kind"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_that_cannot_be_walked_is_named(make: Any, read: Any, kind: str) -> None:
    module = stack(make, lambda unit, x: read(unit(x)))
    with started(module) as (program, state), pytest.raises(UnitError) as caught:
        program.step(state, program.shard_batch(batches()[0]))
    check(caught.value, UnitError, kind, "holds tensors", unit="layers.0")


# -- inner passes ----------------------------------------------------------------------------------


def penalty(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return sw.Mean((out - batch["y"]).square().sum() + slope.square().sum(), out.shape[0])


def own_backward(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    mean = loss_fn(model, batch)
    mean.total.backward(retain_graph=True)
    return mean


def curved() -> Stack:
    return Stack(call=lambda unit, x: torch.tanh(unit(x)))


@pytest.mark.parametrize("loss", [penalty, own_backward])
def test_an_inner_backward_through_units_is_refused(loss: Any) -> None:
    with started(curved(), loss=loss) as (program, state), pytest.raises(UnitError) as caught:
        program.step(state, program.shard_batch(batches()[0]))
    check(caught.value, UnitError, "backward pass inside loss_fn", "keep_gathered")


def test_a_gradient_penalty_is_right_through_gathered_units() -> None:
    assert_right(curved(), sw.zero(3, "fsdp"), sw.keep_gathered(), loss=penalty)


# -- caches and other programs ---------------------------------------------------------------------


class Lazy(nn.Module):
    """Makes its table in the first forward, which is a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=x.dtype)[:, None]
        return self.linear(x) + self.table[: len(x)]


def test_a_module_that_caches_in_its_first_forward() -> None:
    module = Stack(Lazy)
    assert_right(module)
    assert module.layers[0].table is None


def test_a_cache_outside_of_the_module_is_refused_with_the_cure() -> None:
    @functools.cache
    def table(rows: int) -> Tensor:
        return torch.arange(rows, dtype=torch.float64)[:, None]

    module = stack(lambda layer, x: layer(x) + table(len(x)))
    program = bind(module)
    state = program.init(sw.from_module(module))
    batch = batches()[0]
    with pytest.raises(UnitError) as caught:
        program.step(state, batch)
    check(caught.value, UnitError, "without values", "cache_clear()")
    table.cache_clear()
    table(len(batch["x"]))
    program.step(state, batch)


@pytest.mark.timeout(30)
def test_a_program_inside_the_loss_of_another() -> None:
    module, teacher = Stack(), Stack()
    with sw.simulate(TWO):
        other = bind(teacher, mesh=TWO)
        known = other.init(sw.from_module(teacher))

        def distilled(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
            other.eval(known, batch)
            return loss_fn(model, batch)

        program = bind(module, mesh=TWO, loss=distilled)
        state = program.init(sw.from_module(module))
        with pytest.raises(SimulationError) as caught:
            program.step(state, program.shard_batch(batches()[0]))
    check(caught.value, SimulationError, "another call on the same ranks")


# -- order -----------------------------------------------------------------------------------------


class Backwards(Stack):
    """Runs its units in the other order when it does not train."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if self.training else reversed(self.layers):
            x = torch.tanh(layer(x))
        return self.head(x)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_eval_in_another_order_where_nothing_is_gathered(level: int) -> None:
    module = Backwards()
    batch = batches()[0]
    with started(module, sw.zero(level, "fsdp")) as (program, state):
        parts = program.shard_batch(batch)
        before = program.eval(state, parts).loss.item()
        program.step(state, parts)
    module.eval()
    want = loss_fn(module, batch)
    assert before == pytest.approx((want.total / want.count).item(), rel=1e-12)


def test_an_order_error_says_where_the_trace_ended() -> None:
    class Branch(Stack):
        def forward(self, x: Tensor) -> Tensor:
            layers = self.layers if x.mean().item() > 100 else reversed(self.layers)
            for layer in layers:
                x = layer(x)
            return self.head(x)

    with started(Branch()) as (program, state), pytest.raises(OrderError) as caught:
        program.step(state, program.shard_batch(batches()[0]))
    check(caught.value, OrderError, "the trace ended at", "x.mean().item()")


def test_a_sparse_embedding_has_the_gradient_of_a_dense_one() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH, sparse=True, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    tokens = torch.tensor([[0], [1], [1], [4]])
    batch = {"x": tokens, "y": torch.zeros(4, 1, WIDTH, dtype=torch.float64)}
    module = Embedded()
    weight = module.table.weight.detach().clone().requires_grad_()
    out = F.embedding(tokens, weight)
    (want,) = torch.autograd.grad(out.square().sum() / len(out), weight)
    with started(module) as (program, state):
        grads, _ = program.grads(state, program.shard_batch(batch))
        got = sw.to_global(grads.leaves)["table.weight"]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
