"""From plan to plan in the middle of a run: what is carried over, bit for bit, and its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import PlanError
from shardwise.testing.echo import bind_alone
from shardwise.testing.ledger import measure, rest_bytes
from shardwise.testing.strategies import (
    OPTIMIZERS,
    Move,
    Training,
    make_optimizer,
    meshes,
    moves,
    trainings,
)
from tests.transforms.carried import (
    FIRST,
    PLANS,
    assert_bits,
    assert_close,
    batch,
    leaves,
    loss_fn,
    model,
    square,
    whole,
)

pytestmark = pytest.mark.simulated

# -- properties ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A training run under one plan, and another plan on a mesh of as many ranks."""

    training: Training
    mesh: sw.Mesh
    moves: tuple[Move, ...]
    dtype: torch.dtype

    def plan(self, module: nn.Module) -> sw.Plan:
        steps = (move.transform() for move in self.moves)
        return sw.plan(module, self.mesh, *steps, units=self.training.units)

    def trained(self, module: nn.Module) -> tuple[set[str], set[str]]:
        plans = (self.training.plan(module), self.plan(module))
        first, second = ({i.path for i in plan.infos if i.trainable} for plan in plans)
        return first, second


@st.composite
def changes(draw: st.DrawFn, *, optimizers: tuple[str, ...] = OPTIMIZERS) -> Change:
    training = draw(trainings(optimizers=optimizers))
    module = training.model
    mesh = draw(meshes(max_ranks=4).filter(lambda m: m.size == training.mesh.size))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    change = Change(training, mesh, draw(moves(mesh, module, training.units)), dtype)
    try:
        change.plan(module)
    except PlanError:
        # An uneven cut over several axes: the same mesh and plan, which is a case too.
        return Change(training, training.mesh, training.moves, dtype)
    return change


def lowered(change: Change) -> tuple[sw.Lowered, sw.Lowered, list[Any]]:
    module = change.training.model.to(change.dtype)
    batches = [
        optree.tree_map(
            lambda leaf: leaf.to(change.dtype) if leaf.is_floating_point() else leaf, one
        )
        for one in change.training.batches
    ]
    optimizer = make_optimizer(change.training.optimizer)
    plans = (change.training.plan(module), change.plan(module))
    first, second = (sw.lower(plan, change.training.toy.loss_fn, optimizer) for plan in plans)
    return first, second, batches


def trained_state(lowered: sw.Lowered, batches: list[Any], seed: int) -> tuple[sw.Program, Any]:
    program = lowered.bind()
    state = program.init(seed)
    for one in batches:
        state, _ = program.step(state, program.shard_batch(one))
    return program, state


def loses_scale(first: sw.Plan, second: sw.Plan) -> bool:
    """Whether a loss scale that moves is followed by none, or by one that does not."""
    moved, then = first.loss_scale, second.loss_scale
    return bool(moved and moved.dynamic) and not (then and then.dynamic)


@settings(max_examples=10)
@given(changes())
def test_there_and_back_is_the_identity(change: Change) -> None:
    first, second, batches = lowered(change)
    mine, theirs = change.trained(change.training.model)
    if not mine or not theirs:
        return
    with sw.simulate(first.plan.mesh):
        _, state = trained_state(first, batches, change.training.seed)
        before = optree.tree_map(lambda leaf: leaf, [leaves(state, r) for r in range(1)])
        with_values = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in before[0]]
    with sw.simulate(second.plan.mesh):
        other = second.bind()
        there = other.init(sw.from_state(state))
        assert list(other.last_collectives) == list(
            sw.from_state(state.ranks[0]).into(second).items
        )
    with sw.simulate(first.plan.mesh):
        back = first.bind().init(sw.from_state(there))
    if mine <= theirs and not loses_scale(first.plan, second.plan):
        assert_bits(back, state)
    for path, value in sw.to_global(state.params).items():
        assert torch.equal(sw.to_global(there.params)[path], value), path
        assert torch.equal(sw.to_global(back.params)[path], value), path
    # The state that was carried is as it was.
    for a, b in zip(leaves(state, 0), with_values, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@settings(max_examples=8)
@given(changes())
def test_a_change_of_plan_is_invisible_to_the_training(change: Change) -> None:
    change = Change(change.training, change.mesh, change.moves, torch.float64)
    first, second, batches = lowered(change)
    mine, theirs = change.trained(change.training.model)
    if mine != theirs or not mine:
        return
    with sw.simulate(first.plan.mesh):
        _, want = trained_state(first, batches * 2, change.training.seed)
        _, state = trained_state(first, batches, change.training.seed)
    with sw.simulate(second.plan.mesh):
        program = second.bind()
        state = program.init(sw.from_state(state))
        for one in batches:
            state, _ = program.step(state, program.shard_batch(one))
    assert_close(state, want)
    assert sw.to_global(state.step) == 2 * len(batches)


# -- homes, masters, dtypes, meshes -------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3])
def test_a_walk_through_all_plans_keeps_every_value(step: int) -> None:
    """Two walks, so that each plan is reached from two others."""
    module = model()
    names = [list(PLANS)[(2 + step * index) % len(PLANS)] for index in range(len(PLANS) + 1)]
    assert names[0] == names[-1] == "zero 3"
    assert set(names) == PLANS.keys()
    programs = {
        name: sw.lower(PLANS[name](module), loss_fn, sw.optim.adamw(1e-2)) for name in names
    }
    with sw.simulate(FIRST):
        program = programs["zero 3"].bind()
        start, _ = program.step(program.init(0), program.shard_batch(batch()))
    state: Any = start
    want = whole(start)
    for name in names[1:]:
        with sw.simulate(programs[name].plan.mesh):
            there = programs[name].bind().init(sw.from_state(state))
        got = whole(there)
        for leaf, value in got.items():
            # A master in its parameter's dtype is equal to it.
            assert torch.equal(value, want[leaf.replace("master", "params")]), (name, leaf)
        assert want.keys() <= got.keys()
        assert_new_memory(state, there)
        state = there
    assert_bits(state, start)


def assert_new_memory(state: Any, there: Any) -> None:
    for rank in range(len(state.ranks)):
        places = [
            {t.untyped_storage().data_ptr() for t in leaves(s, rank) if t is not None and t.numel()}
            for s in (state, there)
        ]
        assert not places[0] & places[1]


def test_a_master_wins_over_its_rounding() -> None:
    """A float64 master of float32 parameters becomes the parameter where the plan has no master."""
    module = nn.Linear(8, 8, bias=False)
    mesh = sw.Mesh(fsdp=2)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    exact = sw.plan(module, mesh, sw.tree_at("opt", "weight", "d0/fsdp d1 :float64"))
    wide = sw.plan(module.double(), mesh, sw.zero(3, "fsdp"))
    with sw.simulate(mesh):
        program = sw.lower(exact, loss, sw.optim.sgd(0.1, momentum=0.9)).bind()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        state, _ = program.step(program.init(0), program.shard_batch(x))
        master = sw.to_global(state.master)["weight"]
        assert master.dtype == torch.float64
        assert not torch.equal(master, sw.to_global(state.params)["weight"].double())
        other = sw.lower(wide, loss, sw.optim.sgd(0.1, momentum=0.9)).bind()
        there = other.init(sw.from_state(state))
        assert torch.equal(sw.to_global(there.params)["weight"], master)
        back = program.init(sw.from_state(there))
        assert_bits(back, state)


# -- bytes and memory ---------------------------------------------------------------------------


def test_a_finer_plan_moves_nothing_and_replicas_get_what_they_lack() -> None:
    module = nn.Linear(8, 8, bias=False)
    mesh = sw.Mesh(fsdp=4)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    plans = [sw.plan(module, mesh, sw.zero(level, "fsdp")) for level in (0, 3)]
    whole_, cut = (sw.lower(plan, loss, sw.optim.sgd(0.1, momentum=0.9)) for plan in plans)
    with sw.simulate(mesh):
        state = whole_.bind().init(0)
        assert sw.from_state(state.ranks[0]).into(cut).items == ()
        program = cut.bind()
        state = program.init(sw.from_state(state))
        assert program.last_collectives == ()
        items = sw.from_state(state.ranks[0]).into(whole_).items
        # This rank's quarter of parameter and momentum goes to each of three others.
        assert [item.nbytes for item in items] == [3 * 64, 3 * 64]
        assert {item.kind for item in items} == {"all_to_all"}


HALF = {
    "masters": sw.precision(params="bfloat16", compute="bfloat16"),
    "wide params": sw.precision(compute="bfloat16"),
    "rounded at random": sw.precision(params="bfloat16", rounding="stochastic"),
    "float16": sw.precision(compute="float16", buffers="float16"),
    "none": sw.chain(),
}


PAIRS = [
    ("masters", "wide params"),
    ("masters", "masters"),
    ("wide params", "none"),
    ("rounded at random", "masters"),
    ("float16", "masters"),
    ("none", "float16"),
]


class Shifted(nn.Linear):
    """With a buffer that stays as it is."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("shift", torch.arange(8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) + self.shift.to(x.dtype))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_exact_values_are_carried_between_precisions(first: str, second: str) -> None:
    """Masters and wide parameters are one truth in two places; narrow ones are its rounding."""
    module = nn.Sequential(Shifted(), Shifted())
    optimizer = sw.optim.adamw(1e-2)
    mesh = sw.Mesh(fsdp=2)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with sw.simulate(mesh):
        one, two = (
            sw.lower(sw.plan(module, mesh, sw.zero(3, "fsdp"), HALF[name]), square, optimizer)
            for name in (first, second)
        )
        a, b = one.bind(), two.bind()
        state, _ = a.step(a.init(sw.from_module(module)), a.shard_batch(x))
        there = b.init(sw.from_state(state))
        want, got = truth(state), truth(there)
        assert want.keys() == got.keys()
        for path, value in want.items():
            assert torch.equal(got[path], value.to(got[path].dtype)), path
        for path, value in sw.to_global(there.params).items():
            assert torch.equal(value, want[f"params.{path}"].to(value.dtype)), path
        dtypes = {value.dtype for value in there.ranks[0].buffers.values()}
        assert dtypes == {torch.float16 if second == "float16" else torch.float32}
        if "float16" not in (first, second):  # it rounds a buffer, and scales the loss
            assert_bits(a.init(sw.from_state(there)), state)
        after, metrics = b.step(there, b.shard_batch(x))
        assert metrics.applied
        assert sw.to_global(after.step) == 2


def truth(state: Any) -> dict[str, Tensor]:
    """Parameters, from their masters where there are some, and the moments."""
    params = sw.to_global(state.params) | sw.to_global(state.master)
    opt = {"mu": sw.to_global(state.opt.mu), "nu": sw.to_global(state.opt.nu)}
    parts = {"params": params, **opt}
    return {
        f"{name}.{path}": value.clone()
        for name, part in parts.items()
        for path, value in part.items()
    }


UNITS, WIDTH = 8, 128


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def two_meshes() -> tuple[sw.Lowered, sw.Lowered]:
    """Zero 3 over one axis, and hybrid over another mesh of the same ranks."""
    module = Deep()
    optimizer = sw.optim.adamw(1e-3)
    first = sw.lower(sw.plan(module, sw.Mesh(fsdp=4), sw.zero(3, "fsdp")), square, optimizer)
    mesh = sw.Mesh(node=2, local=2)
    return first, sw.lower(sw.plan(module, mesh, sw.zero(1, "local")), square, optimizer)


@pytest.mark.abstract
@pytest.mark.parametrize("back", [False, True])
def test_one_more_buffer_is_held_at_most(back: bool) -> None:
    """Measured on one rank alone, as gloo frees what it has sent on threads of its own."""
    unit = 4 * WIDTH * WIDTH
    one, two = (bind_alone(lowered) for lowered in two_meshes())
    state = one.init(0)
    if back:
        one, two, state = two, one, two.init(sw.from_state(state))
    there, usage = measure(lambda: two.init(sw.from_state(state)))
    rest = rest_bytes(there)
    # Beside the new state: what one unit sends and receives.
    assert rest < usage.peak <= rest + 2 * unit + 8192 < rest + UNITS * unit
    assert rest <= usage.kept <= rest + 8192


def change_on_real_ranks() -> bool:
    """There and back."""
    first, second = two_meshes()
    one, two = first.bind(), second.bind()
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    state, _ = one.step(one.init(0), one.shard_batch(x))
    there = two.init(sw.from_state(state))
    assert two.last_collectives == sw.from_state(state).into(second).items
    back = one.init(sw.from_state(there))
    pairs = zip(
        optree.tree_leaves(state, namespace="shardwise"),
        optree.tree_leaves(back, namespace="shardwise"),
        strict=True,
    )
    two.step(there, two.shard_batch(x))
    return all(
        torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))
        for a, b in pairs
        if isinstance(a, Tensor)
    )


@pytest.mark.gloo
@pytest.mark.timeout(90)
def test_real_ranks_change_their_mesh_and_back() -> None:
    assert sw.spawn(change_on_real_ranks, ranks=4, timeout=60) == [True] * 4
