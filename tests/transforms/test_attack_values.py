"""Attacks on what goes in and out: foreign states, odd counts, hooks, batches, modes, files."""

from __future__ import annotations

import dataclasses
import gc
import io
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import BatchError, LowerError, PlanError, RankError, StateError
from tests.transforms.attacked import ONE, TWO, WIDTH, Stack, batches, bind, loss_fn, started
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated


# -- states of other programs ----------------------------------------------------------------------

OTHERS: dict[str, list[sw.Transform]] = {
    "another level": [sw.zero(0, "fsdp")],
    "another dimension": [
        sw.zero(3, "fsdp", on=1, where="**.weight"),
        sw.zero(3, "fsdp", where="**.bias"),
    ],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_state_or_gradients_of_another_plan_are_refused(other: list[sw.Transform]) -> None:
    module = Stack()
    with started(module) as (program, state):
        parts = program.shard_batch(batches()[0])
        stranger = bind(module, *other, mesh=TWO)
        theirs = stranger.init(sw.from_module(module))
        grads, _ = stranger.grads(theirs, parts)
        for call in (program.step, program.grads, program.eval):
            with pytest.raises(StateError) as caught:
                call(theirs, parts)
            check(caught.value, StateError, "state belongs to another program", "Mesh(fsdp=2)")
        with pytest.raises(StateError) as caught:
            program.update(state, grads)
        check(caught.value, StateError, "gradients belongs to another program")


def test_a_state_may_go_between_programs_of_equal_plans() -> None:
    module = Stack()
    one, other = bind(module), bind(module)
    shared, alone = one.init(0), one.init(0)
    for program, batch in zip((one, other), batches(), strict=True):
        shared, _ = program.step(shared, batch)
        alone, _ = one.step(alone, batch)
    for path, value in alone.params.items():
        assert torch.equal(shared.params[path].to_local(), value.to_local())


# -- losses ----------------------------------------------------------------------------------------


def test_metrics_under_other_names_in_a_later_call_are_refused() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        mean = loss_fn(model, batch)
        return mean, {"late" if model.training else "early": sw.Mean(mean.total.detach(), 1)}

    with started(Stack(), loss=loss) as (program, state):
        parts = program.shard_batch(batches()[0])
        state, _ = program.step(state, parts)
        with pytest.raises((BatchError, RankError)) as caught:
            program.eval(state, parts)
        assert "now: early" in str(caught.value)
        assert "then: late" in str(caught.value)
        program.step(state, parts)


COUNTS = {"nan": math.nan, "inf": math.inf, "negative": -1.0, "zero": 0.0}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_a_count_that_counts_nothing_is_refused(count: float, as_tensor: bool) -> None:
    """Also a negative count of one rank that the other's would outweigh."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
        total = loss_fn(model, batch).total
        odd = count != 0 and len(batch["x"]) == 3
        mine = 9.0 if count and not odd else count
        return sw.Mean(total, torch.tensor(mine) if as_tensor else mine)

    with started(Stack(), loss=loss) as (program, state):
        parts = program.shard_batch(batches(rows=7)[0])
        with pytest.raises(BatchError) as caught:
            program.step(state, parts)
    check(caught.value, BatchError, "to average over", "The counts of all ranks")


def test_a_penalty_in_every_rank_is_weighted_by_its_elements() -> None:
    """What the docstring of `Mean` advises for terms that do not depend on the batch."""

    def penalised(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
        mean = loss_fn(model, batch)
        return sw.Mean(mean.total + mean.count * model.head.weight.square().sum(), mean.count)

    module, batch = Stack(), batches()[0]
    want = penalised(module, batch)
    with started(module, loss=penalised) as (program, state):
        got = program.eval(state, program.shard_batch(batch)).loss
    assert got.item() == pytest.approx((want.total / want.count).item(), rel=1e-12)


# -- modules and batches ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(method: str) -> None:
    module = Stack()
    getattr(module.layers[1].weight, method)(lambda grad: None)
    with pytest.raises(LowerError) as caught:
        bind(module)
    check(caught.value, LowerError, "layers.1.weight", path="layers.1.weight", count=1)


def test_a_lazy_module_is_refused() -> None:
    module = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(PlanError) as caught:
        sw.plan(module, ONE, sw.zero(3, "fsdp"))
    check(caught.value, PlanError, "has no shape yet", path="0.weight")


@dataclasses.dataclass
class Rows:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("batch", [Rows(**batches()[0]), {"step": 3}, "rows"])
def test_a_batch_in_which_nothing_can_be_cut_is_refused(batch: Any) -> None:
    with started(Stack()) as (program, _), pytest.raises(BatchError) as caught:
        program.shard_batch(batch)
    check(caught.value, BatchError, type(batch).__name__, parts=2)
    assert bind(Stack()).shard_batch(batch) == batch


# -- complex parameters ----------------------------------------------------------------------------


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.turn).abs()


def test_complex_parameters_step_as_in_torch() -> None:
    module = Waves()
    weight = module.turn.detach().clone().requires_grad_()
    stepper = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    optimizer = sw.optim.adamw(0.01, weight_decay=0.1)
    with started(module, optimizer=optimizer) as (program, state):
        for batch in batches(3):
            state, _ = program.step(state, program.shard_batch(batch))
            out = (batch["x"].to(torch.complex128) @ weight).abs()
            stepper.zero_grad()
            ((out - batch["y"]).square().sum() / len(out)).backward()
            stepper.step()
        got = sw.to_global(state.params)["turn"]
    torch.testing.assert_close(got, weight.detach(), rtol=1e-10, atol=1e-12)


def test_the_definition_of_adamw_agrees_on_complex_values() -> None:
    optimizer = sw.optim.adamw(0.01, weight_decay=0.1)
    params = {"w": torch.randn(5, dtype=torch.complex128)}
    grads = {"w": torch.randn(5, dtype=torch.complex128)}
    state = optimizer.init(params)
    updates, _ = optimizer.update(grads, state, params)
    want = params["w"] + updates["w"]
    assert optimizer.apply is not None
    optimizer.apply(params, grads, optimizer.init(params))
    torch.testing.assert_close(params["w"], want, rtol=1e-12, atol=1e-14)


# -- modes, files, memory --------------------------------------------------------------------------


@pytest.mark.parametrize("outside", ["bind", "eval", "step"])
def test_inference_mode_around_a_call_does_not_matter(outside: str) -> None:
    def inside(call: str) -> torch.inference_mode:
        return torch.inference_mode(call == outside)

    first, second = batches()
    program = bind(Stack())
    state = program.init(0)
    state, _ = program.step(state, first)
    want = program.step(state, second)[1].loss
    with inside("bind"):
        program = bind(Stack())
        state = program.init(0)
    with inside("eval"):
        program.eval(state, first)
    with inside("step"):
        state, _ = program.step(state, first)
    assert torch.equal(program.step(state, second)[1].loss, want)


def test_leaves_can_be_saved_and_pickled() -> None:
    with started(Stack()) as (program, state):
        state, _ = program.step(state, program.shard_batch(batches()[0]))
        mine = state.ranks[1]
    file = io.BytesIO()
    torch.save(mine.params, file)
    file.seek(0)
    for copied in (
        torch.load(file, weights_only=False),
        pickle.loads(pickle.dumps(mine.params)),
    ):
        assert copied.keys() == mine.params.keys()
        for path, leaf in mine.params.items():
            assert copied[path].placements == leaf.placements
            assert torch.equal(copied[path].to_local(), leaf.to_local())


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("mesh", [ONE, TWO], ids=["1", "2"])
def test_a_program_keeps_no_parameters_alive(level: int, mesh: sw.Mesh) -> None:
    with started(Stack(), sw.zero(level, "fsdp"), mesh=mesh) as (program, state):
        parts = program.shard_batch(batches()[0])
        state, _ = program.step(state, parts)
        program.eval(state, parts)
        flats = [flat for one in state.ranks for flat in one.flats.values()]
        alive = [weakref.ref(flat) for flat in flats]
        del state, flats
        gc.collect()
        assert not any(ref() is not None for ref in alive)
        views = [
            view
            for rank in program._ranks
            for unit in rank.engine.units.values()
            for buffers in unit.buffers
            if buffers.bucket.in_place
            for view in buffers.views
        ]
        assert not views


@pytest.mark.parametrize("call", ["grads", "eval"])
@pytest.mark.parametrize("mesh", [ONE, TWO], ids=["1", "2"])
def test_a_failed_call_keeps_no_activations(mesh: sw.Mesh, call: str) -> None:
    """Without the help of the garbage collector."""
    held: list[weakref.ref[Tensor]] = []
    armed = False

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
        out = model(batch["x"])
        if armed:
            held.append(weakref.ref(out))
            raise ValueError("bad sample")
        return sw.Mean(out.sum(), out.shape[0])

    def attempt(program: sw.Program, state: Any, batch: Any) -> None:
        with pytest.raises((ValueError, RankError), match="bad sample"):
            getattr(program, call)(state, batch)

    with started(Stack(), mesh=mesh, loss=loss) as (program, state):
        parts = program.shard_batch(batches()[0])
        program.grads(state, parts)
        armed = True
        gc.collect()
        gc.disable()
        try:
            attempt(program, state, parts)
            alive = [ref() is not None for ref in held]
        finally:
            gc.enable()
    assert len(held) == mesh.size
    assert not any(alive)
