"""Norms and clipping of any mix of homes: against torch on the whole model, on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.optim import Norm
from shardwise.sharding.collectives import Collective
from shardwise.sharding.errors import PatternError
from shardwise.transforms.norms import plan_norms

pytestmark = pytest.mark.simulated

ORDS = [1.0, 2.0, math.inf]
ROWS = 16


class Mixed(nn.Module):
    """Rows that no mesh divides, a unit used twice, a scalar and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.wide = nn.Linear(5, 12, bias=False)
        self.head = nn.Linear(12, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(block(x)) + self.frozen
        return self.head(torch.tanh(self.wide(x))) * self.scale


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    out = model(batch)
    return sw.Mean(out.square().sum(), batch.shape[0])


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {path: p for path, p in model.named_parameters() if p.requires_grad}


def unsharded_gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    mean = loss_fn(model, batch)
    (mean.total / mean.count).backward()
    return {p: q.grad.clone() for p, q in trainable(model).items() if q.grad is not None}


def norm_of(grads: Mapping[str, Tensor], ord: float) -> Tensor:
    leaves = [torch.linalg.vector_norm(grad, ord) for grad in grads.values()]
    return torch.linalg.vector_norm(torch.stack(leaves), ord)


MESHES = [
    {"dp": 1},
    {"dp": 3},
    {"dp": 2, "ep": 2},
    {"ep": 2, "dp": 2},
    {"dp": 2, "fsdp": 2, "ep": 2},
]
WHERE = ["**", "blocks.*", "weight", "head", "scale", "~bias"]
ROWS_CUT = ["blocks.*", "weight", "head"]  # what has rows to pad


@st.composite
def mixed_plans(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[Any, ...]]]:
    """A mesh, and homes over no axis, one or several for some parameters each."""
    mesh = draw(st.sampled_from(MESHES))
    axes = st.one_of(
        st.none(),
        st.sampled_from(list(mesh)),
        st.permutations(list(mesh)).map(tuple),
    )
    homes = st.sampled_from(["shard_optimizer", "shard_grads", "shard_params"])
    move = st.one_of(
        st.tuples(homes, axes, st.sampled_from(WHERE), st.just({})),
        # over one axis: chunks of chunks would depend on the order of axes
        st.tuples(
            homes,
            st.sampled_from(list(mesh)),
            st.sampled_from(ROWS_CUT),
            st.just({"on": 0, "pad": True}),
        ),
    )
    return mesh, draw(st.lists(move, max_size=4))


def make_plan(model: nn.Module, mesh: dict[str, Any], moves: list[tuple[Any, ...]]) -> sw.Plan:
    return sw.plan(
        model,
        sw.Mesh(**mesh),
        *(getattr(sw, home)(axes, where=where, **cut) for home, axes, where, cut in moves),
    )


def model_of(seed: int) -> Mixed:
    torch.manual_seed(seed)
    return Mixed().double()


GROUPS: dict[str | tuple[str, ...], float] = {"blocks.*": 0.05, "weight": 0.2, "scale": math.inf}


def grouped(paths: Any) -> Iterator[tuple[str, list[str], float]]:
    """The groups by hand."""
    blocks = [path for path in paths if path.startswith("blocks.")]
    weights = [path for path in paths if path.endswith("weight") and path not in blocks]
    yield "blocks.*", blocks, 0.05
    yield "weight", weights, 0.2
    yield "scale", ["scale"], math.inf


@settings(max_examples=12)
@given(mixed_plans(), st.sampled_from(ORDS), st.integers(0, 99), st.sampled_from([0.05, 1e9]))
def test_the_norm_and_the_step_are_those_of_the_whole_model(
    drawn: tuple[dict[str, int], list[tuple[Any, ...]]], ord: float, seed: int, limit: float
) -> None:
    model = model_of(seed)
    plan = make_plan(model, *drawn)
    batch = torch.randn(ROWS, 3, dtype=torch.float64)
    optimizer = sw.optim.chain(
        sw.optim.clip_by_global_norm(limit, ord),
        sw.optim.clip_by_group_norm(GROUPS, ord),
        sw.optim.sgd(1.0),
    )
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_fn, optimizer, grad_norm=True).bind(debug=True)
        state = program.init(sw.from_module(model))
        state, metrics = program.step(state, program.shard_batch(batch))
        assert program.last_collectives == program.lowered.collectives()
        after = {path: sw.to_global(state.params)[path] for path in trainable(model)}
    grads = unsharded_gradients(model, batch)
    torch.testing.assert_close(metrics.grad_norm, norm_of(grads, 2.0), rtol=1e-12, atol=0.0)
    for name, paths, _ in grouped(grads):
        norm = norm_of({path: grads[path] for path in paths}, ord)
        torch.testing.assert_close(metrics.group_norms[name], norm, rtol=1e-12, atol=0.0)
    leaves = trainable(model)
    nn.utils.clip_grad_norm_(leaves.values(), limit, ord)
    for _, paths, largest in grouped(grads):
        nn.utils.clip_grad_norm_([leaves[path] for path in paths], largest, ord)
    for path, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(after[path], leaf.detach() - leaf.grad, rtol=1e-11, atol=1e-14)


MIX = [
    sw.shard_params(("ep", "dp"), where="wide"),
    sw.shard_grads(("ep", "dp"), where="wide"),
    sw.shard_optimizer(("ep", "dp"), where="wide"),
    sw.shard_optimizer("ep", where="blocks.0"),
    sw.shard_optimizer("dp", where="blocks.1"),
]


def items_of(*norms: Norm, mesh: sw.Mesh | None = None) -> tuple[Collective, ...]:
    plan = sw.plan(model_of(0), mesh or sw.Mesh(dp=2, ep=3), *MIX)
    lowered = sw.lower(plan, loss_fn, sw.optim.sgd(0.1))
    return plan_norms(norms, plan, lowered.all_buckets).items


def test_as_few_bytes_as_there_are_sets_of_axes() -> None:
    """Over ep: sums that go on over dp, and those that do not; over dp: one, of both kinds."""
    told = [(item.kind, item.axis, item.nbytes) for item in items_of(Norm())]
    assert told == [("all_gather", "ep", 2 * 8 * 2), ("all_gather", "dp", 1 * 8 * 1)]
    both = [(item.axis, item.nbytes) for item in items_of(Norm(), Norm(math.inf))]
    assert both == [("ep", 2 * 8 * 4), ("dp", 1 * 8 * 2)]
    wide = [(item.axis, item.nbytes) for item in items_of(Norm(where=("wide",)))]
    assert wide == [("ep", 2 * 8), ("dp", 8)]
    assert items_of() == items_of(Norm(where=("scale",))) == ()
    assert items_of(Norm(), mesh=sw.Mesh(dp=1, ep=1)) == ()


def test_without_axes_nothing_moves() -> None:
    plan = sw.plan(model_of(0), sw.Mesh(dp=4))
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.sgd(0.1))
    lowered = sw.lower(plan, loss_fn, optimizer)
    assert lowered.norm_items == ()
    assert lowered.norms.norms == (Norm(),)


@pytest.mark.parametrize("zero", [0, 3])
def test_every_rank_has_the_same_bits(zero: int) -> None:
    """Each rank's own program, so that nothing is taken from rank 0."""
    model = model_of(1)
    plan = sw.plan(model, sw.Mesh(dp=3, ep=2), sw.zero(zero, ("dp", "ep")), *MIX)
    optimizer = sw.optim.chain(
        sw.optim.clip_by_global_norm(1e-2), sw.optim.clip_by_group_norm(GROUPS), sw.optim.sgd(0.1)
    )
    with sw.simulate(plan.mesh):
        # debug: ranks compare every digit of what they report, norms included
        program = sw.lower(plan, loss_fn, optimizer).bind(debug=True)
        state = program.init(sw.from_module(model))
        batch = program.shard_batch(torch.randn(18, 3, dtype=torch.float64))
        state, _ = program.step(state, batch)
        _, metrics = program.step(state, batch)
    assert set(metrics.group_norms) == {"blocks.*", "weight", "scale"}


def test_norms_are_reported_only_when_something_asks() -> None:
    model = model_of(0)
    plan = sw.plan(model, sw.Mesh(dp=2), sw.zero(1, "dp"))
    batch = torch.randn(4, 3, dtype=torch.float64)
    grads = unsharded_gradients(model, batch)
    asked: dict[str, tuple[sw.optim.GradientTransform, bool, Tensor | None]] = {
        "nobody": (sw.optim.sgd(0.1), False, None),
        "user": (sw.optim.sgd(0.1), True, norm_of(grads, 2.0)),
        "clip": (
            sw.optim.chain(sw.optim.clip_by_global_norm(1.0, math.inf), sw.optim.sgd(0.1)),
            False,
            norm_of(grads, math.inf),
        ),
        "groups": (
            sw.optim.chain(sw.optim.clip_by_group_norm({"head": 1.0}), sw.optim.sgd(0.1)),
            False,
            None,
        ),
    }
    for optimizer, grad_norm, expected in asked.values():
        with sw.simulate(plan.mesh):
            lowered = sw.lower(plan, loss_fn, optimizer, grad_norm=grad_norm)
            program = lowered.bind()
            state = program.init(sw.from_module(model))
            _, metrics = program.step(state, program.shard_batch(batch))
            assert program.last_collectives == program.lowered.collectives()
        if expected is None:
            assert metrics.grad_norm is None
        else:
            torch.testing.assert_close(metrics.grad_norm, expected, rtol=1e-12, atol=0.0)
        assert bool(metrics.group_norms) == bool([norm for norm in optimizer.needs if norm.where])


def test_a_step_that_is_not_finite_is_skipped_and_reports_no_norm() -> None:
    model = model_of(0)
    plan = sw.plan(model, sw.Mesh(dp=2), sw.zero(3, "dp"))
    optimizer = sw.optim.chain(sw.optim.clip_by_group_norm({"**": 1.0}), sw.optim.sgd(0.1))
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_fn, optimizer, grad_norm=True).bind()
        state = program.init(sw.from_module(model))
        batch = torch.full((4, 3), math.nan, dtype=torch.float64)
        state, metrics = program.step(state, program.shard_batch(batch))
        after = {path: sw.to_global(state.params)[path] for path in trainable(model)}
    assert not metrics.applied
    assert metrics.grad_norm is None
    assert metrics.group_norms == {}
    assert all(torch.equal(after[path], leaf) for path, leaf in trainable(model).items())


def test_a_group_that_selects_nothing_is_refused_when_lowered() -> None:
    plan = sw.plan(model_of(0), sw.Mesh(dp=2), sw.freeze("head"))
    optimizer = sw.optim.chain(sw.optim.clip_by_group_norm({"head": 1.0}), sw.optim.sgd(0.1))
    with pytest.raises(PatternError, match="pattern 'head' matches none of 8 paths"):
        sw.lower(plan, loss_fn, optimizer)


@pytest.mark.parametrize("optimizer", [sw.optim.adamw(0.01), sw.optim.sgd(0.1, momentum=0.9)])
def test_a_step_clips_bit_for_bit_as_an_update_that_only_reads(
    optimizer: sw.optim.GradientTransform,
) -> None:
    mesh = sw.Mesh(fsdp=2)
    clipped = sw.optim.chain(sw.optim.clip_by_global_norm(1e-3), optimizer)
    model = model_of(3).float()
    batch = torch.randn(8, 3)
    with sw.simulate(mesh):
        program = sw.lower(sw.plan(model, mesh, sw.zero(2, "fsdp")), loss_fn, clipped).bind()
        state, other = (program.init(sw.from_module(model)) for _ in range(2))
        parts = program.shard_batch(batch)
        grads, _ = program.grads(state, parts)
        before = [{k: v.clone() for k, v in one.flats.items()} for one in grads.ranks]
        state = program.update(state, grads)
        other, metrics = program.step(other, parts)
        values, others = (sw.to_global(one.params) for one in (state, other))
    assert metrics.grad_norm is not None
    assert metrics.grad_norm > 1e-2
    for path, value in values.items():
        assert torch.equal(value, others[path])
    for one, flats in zip(grads.ranks, before, strict=True):
        assert all(torch.equal(one.flats[key], flat) for key, flat in flats.items())
