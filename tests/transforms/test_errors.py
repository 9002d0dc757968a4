"""Bad input to lower, bind and step: a five-part error on every rank, with its numbers; no hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.sharding.errors import (
    BatchError,
    InitError,
    LossError,
    LowerError,
    MeshError,
    PatternError,
    PlanError,
    RankError,
    ShardwiseError,
    UnitError,
)
from tests.transforms.five_parts import check, check_all

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)
ZERO = sw.zero(3, "fsdp")


class Block(nn.Module):
    def __init__(self, run: Callable[[Block, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x) if self.run else torch.tanh(self.lin(x))


class Model(nn.Module):
    """Two units and a head; tests give the first unit's forward, or how the units are joined."""

    def __init__(self, block: Any = None, join: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(block), Block()])
        self.head = nn.Linear(4, 2)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        if self.join:
            return self.head(self.join(self, x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    out = model(batch["x"])
    return sw.Mean(out.square().sum(), out.shape[0])


def rows(count: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 4, generator=torch.Generator().manual_seed(0))}


@dataclass
class Job:
    """A bound program on simulated ranks with its first state."""

    program: sw.Program
    world: Any
    state: Any

    def errors(self, batch: Any, call: str = "step") -> list[ShardwiseError]:
        """What the call raises on every rank; one that waits for ever fails the test."""

        def attempt(rank: int) -> BaseException | None:
            try:
                getattr(self.program._ranks[rank], call)(
                    self.state.ranks[rank],
                    batch.ranks[rank] if isinstance(batch, sw.Lifted) else batch,
                )
            except Exception as error:
                return error
            return None

        found = self.world.run(attempt)
        assert all(isinstance(error, ShardwiseError) for error in found), found
        return found


@pytest.fixture
def job():
    """Start a job: `job(model, loss_fn)`; its simulation ends with the test."""
    with sw.simulate(MESH) as world:

        def start(model: nn.Module, loss: Any = loss_fn, *transforms: Any) -> Job:
            plan = sw.plan(model, MESH, *(transforms or (ZERO,)))
            program = sw.lower(plan, loss, sw.optim.sgd(0.1)).bind()
            return Job(program, world, program.init(sw.from_module(model)))

        yield start


# -- plans ------------------------------------------------------------------------------------


def test_a_misspelt_axis():
    with pytest.raises(PlanError) as caught:
        sw.plan(Model(), MESH, sw.zero(3, "fdsp"))
    check(caught.value, PlanError, "'fdsp'", "zero(3, 'fdsp')", "did you mean 'fsdp'?")


def test_a_pattern_that_matches_nothing():
    with pytest.raises(PatternError) as caught:
        sw.plan(Model(), MESH, sw.zero(3, "fsdp", where="layer.*"))
    check(caught.value, PatternError, "zero(3, 'fsdp', where='layer.*')", "did you mean 'layers'?")


def test_a_dimension_that_does_not_divide_without_pad():
    model = nn.Linear(6, 5)
    with pytest.raises(PlanError) as caught:
        sw.plan(model, sw.Mesh(fsdp=4), sw.shard_params("fsdp", on="d0"))
    check(
        caught.value,
        PlanError,
        "shard_params('fsdp', on='d0')",
        "5 % 4 == 1",
        "pad=True",
        "weight   shape (5, 6)",
    )
    plan = sw.plan(model, sw.Mesh(fsdp=4), sw.shard_params("fsdp", on="d0", pad=True))
    assert str(plan.params["weight"]) == "d0/fsdp d1"


def test_a_mesh_that_does_not_multiply_to_the_world():
    with pytest.raises(MeshError) as caught:
        sw.Mesh(dp=3, fsdp=4, world=8)
    check(caught.value, MeshError, "dp=3", "fsdp=4", "12", "8")


# -- lower, bind, init ------------------------------------------------------------------------


def test_an_optimizer_that_is_not_a_gradient_transform():
    model = Model()
    with pytest.raises(LowerError) as caught:
        sw.lower(sw.plan(model, MESH, ZERO), loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    check(caught.value, LowerError, "SGD", "not a gradient transform", "sw.optim")


def test_a_plan_without_its_module():
    plan = sw.Plan.from_json(sw.plan(Model(), MESH, ZERO).to_json())
    with pytest.raises(LowerError) as caught:
        sw.lower(plan, loss_fn, sw.optim.sgd(0.1))
    check(caught.value, LowerError, "no module", "module=model")


def test_bind_on_a_mesh_of_another_size():
    lowered = sw.lower(sw.plan(Model(), sw.Mesh(fsdp=4), ZERO), loss_fn, sw.optim.sgd(0.1))
    with sw.simulate(sw.Mesh(fsdp=3)), pytest.raises(MeshError) as caught:
        lowered.bind()
    check(caught.value, MeshError, "Mesh(fsdp=4)", "Mesh(fsdp=3)", "3 ranks", size=4, world=3)
    with pytest.raises(MeshError) as caught:
        lowered.bind()
    check(caught.value, MeshError, "the job has 1 ranks", size=4, world=1)


def test_init_of_a_module_that_has_no_reset_parameters():
    model = Model()
    model.scale = nn.Parameter(torch.ones(4))
    with sw.simulate(MESH):
        program = sw.lower(sw.plan(model, MESH, ZERO), loss_fn, sw.optim.sgd(0.1)).bind()
        with pytest.raises(InitError) as caught:
            program.init(seed=0)
    check(caught.value, InitError, "scale", "reset_parameters", "sw.from_module(model)", count=1)


# -- the loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "texts", "shape"),
    [
        (lambda out: out, ["Tensor of shape (2, 2)"], (2, 2)),
        (lambda out: 0.5, ["float"], None),
        (lambda out: None, ["NoneType"], None),
        (lambda out: {"loss": out.sum()}, ["dict"], None),
        (lambda out: out.argmax(), ["torch.int64"], ()),
        (lambda out: sw.Mean(out, 4), ["Mean whose total", "shape (2, 2)"], (2, 2)),
        (lambda out: sw.Mean(0.5, 4), ["Mean whose total is a float"], None),
        (lambda out: sw.Mean(out.sum(), out[:, 0]), ["count", "shape (2,)"], (2,)),
        (lambda out: (out.sum(), {"accuracy": 0.5}), ["'accuracy'", "float"], None),
        (lambda out: (out.sum(), {"wide": sw.Mean(out, 1)}), ["'wide' of shape (2, 2)"], (2, 2)),
    ],
)
def test_a_loss_that_is_not_a_scalar(job, result, texts, shape):
    running = job(Model(), lambda model, batch: result(model(batch["x"])))
    errors = running.errors(running.program.shard_batch(rows()))
    check_all(errors, LossError, "loss function returned", "sw.Mean", *texts, shape=shape)


def test_a_loss_without_a_gradient(job):
    running = job(Model(), lambda model, batch: model(batch["x"]).sum().detach())
    errors = running.errors(running.program.shard_batch(rows()))
    check_all(errors, LossError, "0 of 6 trainable parameters", ".detach()", num_trainable=6)


def test_metrics_that_differ_between_ranks(job):
    def loss(model: nn.Module, batch: Any) -> Any:
        name = "even" if batch["x"].shape[0] % 2 == 0 else "odd"
        return loss_fn(model, batch), {name: sw.Mean(torch.ones(()), 1)}

    running = job(Model(), loss)
    errors = running.errors(running.program.shard_batch(rows(3)))
    check_all(errors, LossError, "even", "odd")


def test_a_batch_with_nothing_to_average(job):
    running = job(Model(), lambda model, batch: sw.Mean(model(batch["x"]).sum() * 0, 0))
    errors = running.errors(running.program.shard_batch(rows()))
    check_all(errors, BatchError, "no elements", count=0)


# -- what a unit may not do -------------------------------------------------------------------


def rebind(block: Block, x: Tensor) -> Tensor:
    block.lin._parameters["weight"] = nn.Parameter(block.lin.weight * 2)
    return block.lin(x)


def test_a_module_that_rebinds_a_parameter_in_forward(job):
    running = job(Model(rebind))
    errors = running.errors(running.program.shard_batch(rows()))
    check_all(
        errors,
        UnitError,
        "replaced its parameter 'layers.0.lin.weight'",
        path="layers.0.lin.weight",
        unit="layers.0",
    )


def leave_aux(block: Block, x: Tensor) -> Tensor:
    block.aux = torch.tanh(block.lin(torch.tanh(block.lin(x)))).square()
    return block.lin(x)


def only_aux(model: Model, x: Tensor) -> Tensor:
    model.layers[0](x)
    return model.layers[1](model.layers[0].aux)


def test_a_tensor_that_leaves_a_unit_by_a_side_door(job):
    """Backward never meets the output that the unit returned, so it finds the unit empty."""
    running = job(Model(leave_aux, only_aux))
    errors = running.errors(running.program.shard_batch(rows()))
    check_all(errors, UnitError, "side door", "layers.0", "return the tensor", unit="layers.0")


def test_a_parameter_read_outside_its_unit(job):
    def read(model: Model, x: Tensor) -> Tensor:
        return F.linear(model.layers[0](x), model.layers[1].lin.weight)

    running = job(Model(join=read))
    errors = running.errors(running.program.shard_batch(rows()))
    check_all(
        errors,
        UnitError,
        "'layers.1.lin.weight' is read outside its unit",
        path="layers.1.lin.weight",
        unit="layers.1",
    )


class Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def test_a_container_that_cannot_be_walked(job):
    model = Model(lambda block, x: Opaque(block.lin(x)), lambda m, x: m.layers[0](x).hidden)
    running = job(model)
    errors = running.errors(running.program.shard_batch(rows()))
    check_all(errors, UnitError, "Opaque", "holds tensors", "optree", unit="layers.0")


def test_a_model_called_outside_a_step(job):
    kept = []

    def loss(model: nn.Module, batch: Any) -> sw.Mean:
        kept.append(model)
        return loss_fn(model, batch)

    running = job(Model(), loss)
    running.program.step(running.state, running.program.shard_batch(rows()))
    with pytest.raises(UnitError) as caught:
        kept[-1].layers[0](torch.ones(1, 4))
    check(caught.value, UnitError, "'layers.0' is called outside a step", unit="layers.0")


# -- ranks that differ ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "texts"),
    [
        ({"x": torch.ones(2, 4), "extra": torch.ones(2)}, ["'extra'"]),
        ({"x": torch.ones(2, 4, dtype=torch.float64)}, ["torch.float64", "torch.float32"]),
        ({"x": torch.ones(1, 2, 4)}, ["3 dims", "2 dims"]),
    ],
)
def test_batches_of_different_structure(job, other, texts):
    running = job(Model())
    errors = running.errors(sw.Lifted([{"x": torch.ones(2, 4)}, other]))
    check_all(errors, BatchError, "rank 0:", "rank 1:", *texts, rank=1)


@pytest.mark.parametrize("place", ["forward", "forward of a unit", "loss", "backward"])
def test_an_exception_on_one_rank_only(job, place):
    """Every rank ends with an error that names it; the old state can go on."""

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("sample 17 is broken")

    def burst(x: Tensor, here: str) -> Tensor:
        if (
            place == here
            and not isinstance(x, torch._subclasses.FakeTensor)
            and bool(x.isinf().any())
        ):
            raise ValueError("sample 17 is broken")
        return x

    def block(block: Block, x: Tensor) -> Tensor:
        return torch.tanh(block.lin(burst(x, "forward of a unit")))

    def join(model: Model, x: Tensor) -> Tensor:
        x = model.layers[1](model.layers[0](burst(x, "forward")))
        if (
            place == "backward"
            and not isinstance(x, torch._subclasses.FakeTensor)
            and bool(x.isnan().any())
        ):
            x = Explode.apply(x)
        return x

    def loss(model: nn.Module, batch: Any) -> sw.Mean:
        mean = loss_fn(model, batch)
        burst(batch["x"], "loss")
        return mean

    module = Model(block, join)
    running = job(module, loss)
    bad = rows()
    bad["x"][2:] = torch.inf
    if place == "backward":
        bad["x"][2:] = torch.nan
    errors = running.errors(running.program.shard_batch(bad))
    check_all(
        errors, RankError, "Rank 1 failed", "ValueError: sample 17 is broken", rank=1, failed=1
    )
    assert isinstance(errors[1].__cause__, ValueError)
    before = sw.to_global(running.state.params)
    good = running.program.shard_batch(rows())
    after, metrics = running.program.step(running.state, good)
    want = loss(module, rows())
    want = want.total / want.count
    want.backward()
    torch.testing.assert_close(metrics.loss.float(), want.detach())
    for path, parameter in module.named_parameters():
        moved = before[path] - 0.1 * parameter.grad
        torch.testing.assert_close(sw.to_global(after.params)[path], moved)
