"""Models whose units do not run once each, in order, on every rank: exact results, no hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.sharding.errors import OrderError, ShardwiseError, UnitError
from tests.oracles.one_process import assert_same, one_process, sharded

pytestmark = pytest.mark.simulated

WIDTH = 4
PLANS = {
    "replicated": (sw.Mesh(fsdp=2), [sw.zero(0, "fsdp")]),
    "zero-1": (sw.Mesh(fsdp=2), [sw.zero(1, "fsdp")]),
    "zero-3": (sw.Mesh(fsdp=2), [sw.zero(3, "fsdp")]),
    "zero-3, kept, prefetch": (
        sw.Mesh(fsdp=2),
        [sw.zero(3, "fsdp"), sw.keep_gathered(), sw.prefetch(2)],
    ),
    "hybrid, prefetch": (sw.Mesh(dp=2, fsdp=2), [sw.zero(3, "fsdp"), sw.prefetch(1)]),
}
every_plan = pytest.mark.parametrize("kind", PLANS)

Forward = Callable[["Stack", dict[str, Tensor]], Tensor]


class Block(nn.Module):
    """A unit with an inner function that tests may checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 6)
        self.down = nn.Linear(6, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        x = x + self.inner(x)
        return self(x, depth - 1) if depth else x


class Stack(nn.Module):
    """Three units run by a function that the test gives, and a head."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.run = run

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.run(self, batch))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    out = model(batch)
    return sw.Mean((out - batch["y"]).square().sum(), out.shape[0])


def batches(rows: int = 8, steps: int = 3) -> list[dict[str, Tensor]]:
    """Every rank can be told apart by `rank`, whose values follow the cut into four parts."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rank = torch.arange(rows) * 4 // rows
    return [{"x": normal(rows, WIDTH), "y": normal(rows, 2), "rank": rank} for _ in range(steps)]


def check(run: Forward, kind: str, *, data: Any = None, loss: Any = loss_fn) -> None:
    """Train sharded and in one process, and compare everything."""
    torch.manual_seed(1)
    module = Stack(run).double()
    mesh, transforms = PLANS[kind]
    data = data or batches()
    want = one_process(
        module, loss, data, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1), parts=mesh.size
    )
    plan = sw.plan(module, mesh, *transforms)
    assert_same(sharded(module, plan, loss, data, sw.optim.adamw(1e-2, weight_decay=0.1)), want)


# -- branches ---------------------------------------------------------------------------------


def first_or_last(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    """A branch on a value: no trace can see it."""
    even = int(batch["rank"][0]) < 2 if model.training else True
    x = model.layers[0 if even else 2](batch["x"])
    return model.layers[1](x) if even else x


def first_or_last_by_rows(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    """A branch on a shape: traced, so every rank has shown its own order."""
    return model.layers[0 if batch["x"].shape[0] % 2 else 2](batch["x"])


def skip_one(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    x = model.layers[0](batch["x"])
    if int(batch["rank"][0]) == 0:
        x = model.layers[1](x)
    return model.layers[2](x)


def skip_all(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"]
    if int(batch["rank"][0]) == 0:
        for layer in model.layers:
            x = layer(x)
    return x


@every_plan
@pytest.mark.parametrize("run", [first_or_last, skip_one, skip_all])
def test_ranks_that_branch_on_a_value(run, kind):
    check(run, kind)


@pytest.mark.parametrize("kind", ["replicated", "zero-1", "zero-3"])
def test_ranks_that_branch_on_a_shape(kind):
    check(first_or_last_by_rows, kind, data=batches(rows=5))


@every_plan
def test_branches_that_change_from_step_to_step(kind):
    data = batches()
    for step, batch in enumerate(data):
        batch["rank"] = (batch["rank"] + step) % 4
    check(first_or_last, kind, data=data)


# -- how often and how a unit is called ---------------------------------------------------------


def twice(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    x = model.layers[0](batch["x"])
    x = model.layers[1](x)
    return model.layers[2](model.layers[0](x))


def twice_in_a_row(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    return model.layers[2](model.layers[1](model.layers[1](model.layers[0](batch["x"]))))


def parallel_calls(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    """Two calls of one unit whose backwards do not depend on each other."""
    x = batch["x"]
    return model.layers[0](x) + model.layers[1](x) + model.layers[0](2 * x) + model.layers[2](x)


def recursive(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    return model.layers[1](model.layers[0](batch["x"], depth=2), depth=1)


def backwards(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    """Against the order of registration."""
    x = batch["x"]
    for layer in reversed(model.layers):
        x = layer(x)
    return x


@every_plan
@pytest.mark.parametrize("run", [twice, twice_in_a_row, parallel_calls, recursive, backwards])
def test_a_unit_used_more_than_once_or_in_another_order(run, kind):
    check(run, kind)


class Around(nn.Module):
    """A unit that runs another unit: its own child or one that lives elsewhere."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner(torch.tanh(self.own(x))))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.layers = nn.ModuleList([Around(Block()), Around(shared), shared])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@every_plan
def test_units_inside_units_and_shared_between_them(kind):
    torch.manual_seed(1)
    module = Nested().double()
    mesh, transforms = PLANS[kind]
    want = one_process(module, loss_fn, batches(), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    plan = sw.plan(module, mesh, *transforms, units=["layers.*", "layers.*.inner"])
    got = sharded(module, plan, loss_fn, batches(), sw.optim.sgd(0.1, momentum=0.9))
    assert_same(got, want)


# -- outputs that go nowhere, and no gradients ---------------------------------------------------


def unused_output(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    model.layers[1](batch["x"])
    return model.layers[0](batch["x"])


def unused_output_on_one_rank(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    x, y = model.layers[0](batch["x"]), model.layers[1](batch["x"])
    return x if int(batch["rank"][0]) == 0 else y


def teacher(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        aim = model.layers[2](batch["x"])
    return model.layers[0](batch["x"]) - aim


def own_teacher(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    """The same unit without and with gradients."""
    with torch.no_grad():
        aim = model.layers[0](batch["x"])
    return model.layers[1](model.layers[0](batch["x"]) - aim)


def inferred_teacher(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        aim = model.layers[0](batch["x"])
    return model.layers[1](model.layers[0](batch["x"]) - aim.clone())


def student_first(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    x = model.layers[0](batch["x"])
    with torch.no_grad():
        aim = model.layers[0](x)
    return model.layers[1](x - aim)


def detached(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    return model.layers[1](model.layers[0](batch["x"]).detach())


@every_plan
@pytest.mark.parametrize(
    "run",
    [
        unused_output,
        unused_output_on_one_rank,
        teacher,
        own_teacher,
        inferred_teacher,
        student_first,
        detached,
    ],
)
def test_outputs_without_a_part_in_the_loss(run, kind):
    check(run, kind)


def test_no_grad_where_the_first_step_had_gradients_is_exact_too():
    def sometimes(model: Stack, batch: dict[str, Tensor]) -> Tensor:
        with torch.set_grad_enabled(int(batch["rank"][0]) < 2):
            x = model.layers[0](batch["x"])
        return model.layers[1](x)

    check(sometimes, "zero-3")


# -- activation checkpoints ----------------------------------------------------------------------


class Checkpointed(Block):
    """Recomputes its own inside."""

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


def around_units(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"]
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


@every_plan
def test_a_checkpoint_inside_a_unit(kind):
    torch.manual_seed(1)
    module = Stack(lambda m, b: m.layers[1](m.layers[0](b["x"])))
    module.layers = nn.ModuleList(Checkpointed() for _ in range(3))
    module = module.double()
    mesh, transforms = PLANS[kind]
    want = one_process(module, loss_fn, batches(), lambda p: torch.optim.SGD(p, 0.1))
    plan = sw.plan(module, mesh, *transforms)
    assert_same(sharded(module, plan, loss_fn, batches(), sw.optim.sgd(0.1)), want)


@every_plan
def test_a_checkpoint_around_the_call_of_a_unit(kind):
    check(around_units, kind)


def refusal(run: Forward) -> ShardwiseError:
    module = Stack(run).double()
    plan = sw.plan(module, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        with pytest.raises(ShardwiseError) as caught:
            program.step(state, program.shard_batch(batches()[0]))
    return caught.value


def test_a_checkpoint_over_several_units_is_refused():
    def two_units(model: Stack, batch: dict[str, Tensor]) -> Tensor:
        both = lambda x: model.layers[1](model.layers[0](x))  # noqa: E731
        return checkpoint(both, batch["x"], use_reentrant=False)

    error = refusal(two_units)
    assert isinstance(error, UnitError)
    assert "run again in backward" in str(error)
    assert error.numbers["unit"] in ("layers.0", "layers.1")


def reentrant_around(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    return checkpoint(model.layers[0], batch["x"].requires_grad_(), use_reentrant=True)


def reentrant_between(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    return checkpoint(model.layers[1], model.layers[0](batch["x"]), use_reentrant=True)


def reentrant_inside(model: Stack, batch: dict[str, Tensor]) -> Tensor:
    block = model.layers[1]
    block.inner = lambda x: checkpoint(Block.inner, block, x, use_reentrant=True)
    return block(model.layers[0](batch["x"]))


@pytest.mark.parametrize("run", [reentrant_around, reentrant_between, reentrant_inside])
def test_a_reentrant_checkpoint_is_refused_by_name(run):
    error = refusal(run)
    assert isinstance(error, UnitError)
    assert "use_reentrant=True" in error.what
    assert "use_reentrant=False" in error.fix


# -- what stays an error -------------------------------------------------------------------------


def test_ranks_whose_orders_contradict_each_other():
    def opposite(model: Stack, batch: dict[str, Tensor]) -> Tensor:
        order = [0, 1] if batch["x"].shape[0] == 3 else [1, 0]
        x = batch["x"]
        for index in order:
            x = model.layers[index](x)
        return x

    module = Stack(opposite).double()
    plan = sw.plan(module, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        with pytest.raises(OrderError, match="orders that contradict each other") as caught:
            program.step(state, program.shard_batch(batches(rows=5)[0]))
    assert caught.value.facts[0].startswith("rank 0: (root) layers.0 layers.1")
    assert caught.value.facts[1].startswith("rank 1: (root) layers.1 layers.0")
