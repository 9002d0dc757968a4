"""A step in several passes over micro-batches is the step over the whole batch, and moves less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import PlanError
from shardwise.testing import assert_bitwise, unsharded_run
from shardwise.testing.models import EXACT, Toy
from shardwise.testing.strategies import make_optimizer

pytestmark = pytest.mark.simulated

MESHES = [sw.Mesh(fsdp=1), sw.Mesh(fsdp=2), sw.Mesh(fsdp=3), sw.Mesh(dp=2, fsdp=2)]


@dataclass(frozen=True)
class Setting:
    """A training run in micro-steps."""

    mesh: sw.Mesh
    toy: Toy
    level: int
    hybrid: bool
    prefetch: int
    steps: int
    reduce: str
    gather: str
    rows: tuple[int, ...]  # of each rank's batch; 0: no batch
    optimizer: str
    seed: int

    def plan(self, model: nn.Module) -> sw.Plan:
        axes = self.mesh.names[-1:] if self.hybrid else self.mesh.names
        return sw.plan(
            model,
            self.mesh,
            sw.zero(self.level, axes),
            sw.prefetch(self.prefetch),
            sw.accumulate(self.steps, reduce=self.reduce, gather=self.gather),
        )


@st.composite
def settings_of_runs(draw: st.DrawFn) -> Setting:
    mesh = draw(st.sampled_from(MESHES))
    steps = draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(0, steps + 2), min_size=mesh.size, max_size=mesh.size))
    features = draw(st.sets(st.sampled_from(EXACT), max_size=3).map(sorted).map(tuple))
    return Setting(
        mesh=mesh,
        toy=Toy(
            width=draw(st.sampled_from([3, 4])),
            hidden=5,
            depth=draw(st.integers(0, 3)),
            vocab=draw(st.sampled_from([0, 7])),
            features=features,
        ),
        level=draw(st.integers(0, 3)),
        hybrid=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        steps=steps,
        reduce=draw(st.sampled_from(["auto", "each", "once"])),
        gather=draw(st.sampled_from(["micro", "step"])),
        rows=(rows[0] or 1, *rows[1:]),
        optimizer=draw(st.sampled_from(["momentum", "adamw", "clipped sgd"])),
        seed=draw(st.integers(0, 1000)),
    )


def parts_of(batch: dict[str, Tensor], rows: tuple[int, ...]) -> list[Any]:
    """Each rank's rows of a batch; None for a rank without any."""
    split = {name: value.split(list(rows)) for name, value in batch.items()}
    parts = [{name: split[name][rank] for name in batch} for rank in range(len(rows))]
    return [part if count else None for part, count in zip(parts, rows, strict=True)]


def close(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for path, value in theirs.items():
        torch.testing.assert_close(mine[path], value, rtol=1e-9, atol=1e-11)


@given(settings_of_runs())
def test_micro_steps_are_one_big_batch(run: Setting) -> None:
    model = run.toy.build().double()
    batches = [run.toy.batch(sum(run.rows), run.seed + step) for step in range(2)]
    batches = [
        {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        for batch in batches
    ]
    frozen = [path for path, p in model.named_parameters() if not p.requires_grad]
    optimizer = make_optimizer(run.optimizer)
    with sw.simulate(run.mesh):
        program = sw.lower(run.plan(model), run.toy.loss_fn, optimizer).bind()
        state: Any = program.init(sw.from_module(model))
        steps = unsharded_run(model, run.toy.loss_fn, batches, optimizer, frozen=frozen)
        for batch, theirs in zip(batches, steps, strict=True):
            mine = sw.Lifted(parts_of(batch, run.rows))
            grads, metrics = program.grads(state, mine)
            assert program.last_collectives == program.lowered.grads_items
            torch.testing.assert_close(metrics.loss, theirs.loss, rtol=1e-9, atol=0.0)
            assert metrics.tokens == theirs.count
            for name, value in theirs.aux.items():
                torch.testing.assert_close(metrics.aux[name], value, rtol=1e-9, atol=1e-12)
            close(sw.to_global(grads.leaves), theirs.grads)
            state, _ = program.step(state, mine)
            assert program.last_collectives == program.lowered.collectives()
            close(sw.to_global(state.params), theirs.params)
            moments = [sw.to_global(getattr(state.opt, n)) for n in ("mu", "nu") if has(state, n)]
            oracle = [getattr(theirs.opt, n) for n in ("mu", "nu") if hasattr(theirs.opt, n)]
            assert len(moments) == len(oracle)
            for ours, his in zip(moments, oracle, strict=True):
                close(ours, his)


def has(state: Any, name: str) -> bool:
    return hasattr(state.ranks[0].opt, name)


class Even(nn.Module):
    """Four units of one size that divides by four, and nothing beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def even_loss(model: nn.Module, x: Tensor) -> sw.Mean:
    return sw.Mean(model(x).square().sum(), x.numel())


# -- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["auto", "each", "once"])
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("mesh", [sw.Mesh(fsdp=1), sw.Mesh(dp=2, fsdp=2)], ids=repr)
def test_gradients_are_added_in_the_order_that_the_plan_names(
    mesh: sw.Mesh, level: int, reduce: str
) -> None:
    toy = Toy(width=5, hidden=7, depth=2, features=("batchnorm", "dropout"))
    model = toy.build()
    gather = "step" if level == 3 and reduce == "once" else "micro"
    assert_bitwise(
        model,
        toy.loss_fn,
        [toy.batch(6 * mesh.size + 1, seed) for seed in range(2)],
        plan=sw.plan(
            model, mesh, sw.zero(level, "fsdp"), sw.accumulate(3, reduce=reduce, gather=gather)
        ),
        optimizer=sw.optim.adamw(1e-2),
    )


# -- buffers and randomness ---------------------------------------------------------------------


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def square(model: nn.Module, x: Tensor) -> sw.Mean:
    return sw.Mean(model(x).square().sum(), x.shape[0])


def running(passes: list[Tensor]) -> dict[str, Tensor]:
    """The buffers of a plain module after these forward passes."""
    model = Statistics().double()
    for x in passes:
        model(x)
    return {name: value.clone() for name, value in model.norm.named_buffers()}


@pytest.mark.parametrize("mesh", [sw.Mesh(fsdp=2), sw.Mesh(dp=2, fsdp=2)], ids=repr)
def test_buffers_pass_through_micro_steps_and_idle_ranks_do_not_count(mesh: sw.Mesh) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(4)]
    model = Statistics().double()
    with sw.simulate(mesh):
        plan = sw.plan(model, mesh, sw.zero(2, "fsdp"), sw.accumulate(2))
        program = sw.lower(plan, square, sw.optim.sgd(0.1)).bind()
        start = program.init(sw.from_module(model))
        idle = [None] * (mesh.size - 1)
        for parts in ([*rows[: mesh.size]], [rows[0], *idle], [*idle, rows[1]]):
            state, _ = program.step(start, sw.Lifted(parts), donate=False)
            ran = [running([x[:2], x[2:]]) for x in parts if x is not None]
            found = {k.removeprefix("norm."): v for k, v in sw.to_global(state.buffers).items()}
            for name in ("running_mean", "running_var"):
                mean = torch.stack([one[name] for one in ran]).mean(0)
                torch.testing.assert_close(found[name], mean, rtol=1e-14, atol=1e-16)
                if len(ran) == 1:
                    assert torch.equal(found[name], ran[0][name])
            assert found["num_batches_tracked"] == 2


def test_dropout_draws_anew_for_each_micro_batch_and_rank() -> None:
    masks: list[Tensor] = []

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            out = self.drop(self.layer(x))
            if type(out) is Tensor:
                masks.append(out.detach() == 0)
            return out

    mesh = sw.Mesh(fsdp=2)

    def draw(steps: int) -> list[Tensor]:
        masks.clear()
        with sw.simulate(mesh):
            plan = sw.plan(Dropping(), mesh, sw.zero(3, "fsdp"), sw.accumulate(steps))
            program = sw.lower(plan, square, sw.optim.sgd(0.1)).bind()
            program.step(program.init(5), program.shard_batch(torch.ones(2 * steps, 64)))
        return list(masks)

    first, again = draw(3), draw(3)
    assert len(first) == 6
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])


# -- the plan -----------------------------------------------------------------------------------


def test_the_plan_says_how_it_accumulates() -> None:
    model, mesh = Even(), sw.Mesh(fsdp=2)
    plain = sw.plan(model, mesh)
    plan = sw.plan(model, mesh, sw.accumulate(4, reduce="once", gather="step"))
    assert (plan.accumulation.steps, plan.accumulation.reduce) == (4, "once")
    assert "accumulate 4 (reduce once, gather step)" in str(plan)
    assert "accumulate" not in str(plain)
    (line,) = plain.diff(plan)
    assert line.startswith("accumulation: ")
    assert sw.Plan.from_json(plan.to_json()) == plan
    assert "no edit touches it" in plan.why("layers.0.weight")
    last = sw.plan(model, mesh, sw.accumulate(4), sw.accumulate(2))
    assert last.accumulation.steps == 2


@pytest.mark.parametrize(
    ("make", "text", "fix"),
    [
        (lambda: sw.accumulate(0), "n is 0; allowed: a whole number, at least 1", "accumulate(4)"),
        (lambda: sw.accumulate(2.0), "n is 2.0", "accumulate(4)"),  # pyright: ignore[reportArgumentType]
        (lambda: sw.accumulate(True), "n is True", "accumulate(4)"),
        (
            lambda: sw.accumulate(2, reduce="one"),
            "reduce is 'one'; allowed: 'auto', 'each', 'once'",
            "once",
        ),
        (
            lambda: sw.accumulate(2, gather="steps"),
            "gather is 'steps'; allowed: 'micro', 'step'",
            "step",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Any, text: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert text in str(caught.value)
    assert fix in caught.value.fix


def test_accumulate_cannot_be_masked() -> None:
    with pytest.raises(PlanError, match="cannot be masked"):
        sw.plan(Even(), sw.Mesh(fsdp=2), sw.masked(sw.accumulate(2), "layers.0"))
