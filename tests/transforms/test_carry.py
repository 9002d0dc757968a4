"""From plan to plan in the middle of a run: what is carried over, bit for bit, and what is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import DonatedStateError, PlanError, StateError
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

pytestmark = pytest.mark.simulated


class Model(nn.Module):
    """Uneven shapes, a tie, a 0-dim parameter, a buffer that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x) * self.gain)


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    logits = model(batch)
    total = nn.functional.cross_entropy(logits, (batch + 1) % 11, reduction="sum")
    return sw.Mean(total, batch.shape[0])


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(seed))


def model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def leaves(state: Any, rank: int) -> list[Any]:
    """Everything in one rank's state, in order; DTensors as their local tensors."""
    one = state.ranks[rank]
    found = optree.tree_leaves(one, namespace="shardwise")
    return [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in found]


def assert_bits(one: Any, other: Any) -> None:
    for rank in range(len(one.ranks)):
        for a, b in zip(leaves(one, rank), leaves(other, rank), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def whole(state: Any) -> dict[str, Any]:
    """Whole tensors by name: parameters, masters, optimizer state, buffers."""
    found = {
        "params": sw.to_global(state.params),
        "master": sw.to_global(state.master),
        "opt": sw.to_global(state.opt),
        "buffers": sw.to_global(state.buffers),
        "step": sw.to_global(state.step),
        "seed": sw.to_global(state.seed),
    }
    paths, values, _ = optree.tree_flatten_with_path(found)
    return {".".join(map(str, path)): value for path, value in zip(paths, values, strict=True)}


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


@given(changes())
def test_there_and_back_is_the_identity(change: Change) -> None:
    first, second, batches = lowered(change)
    mine, theirs = change.trained(change.training.model)
    if not mine or not theirs:
        return
    with sw.simulate(first.plan.mesh):
        program, state = trained_state(first, batches, change.training.seed)
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
    if mine <= theirs:
        assert_bits(back, state)
    for path, value in sw.to_global(state.params).items():
        assert torch.equal(sw.to_global(there.params)[path], value), path
        assert torch.equal(sw.to_global(back.params)[path], value), path
    # The state that was carried is as it was.
    for a, b in zip(leaves(state, 0), with_values, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert program is not None


@settings(max_examples=15)
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
    for name in ("params", "buffers"):
        expected = sw.to_global(getattr(want, name))
        for path, value in sw.to_global(getattr(state, name)).items():
            torch.testing.assert_close(value, expected[path], rtol=1e-9, atol=1e-11)
    got = optree.tree_leaves(sw.to_global(state.opt))
    for a, b in zip(got, optree.tree_leaves(sw.to_global(want.opt)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert sw.to_global(state.step) == 2 * len(batches)


# -- homes, masters, dtypes, meshes -------------------------------------------------------------

FIRST, SECOND = sw.Mesh(fsdp=4), sw.Mesh(node=2, local=2)
PLANS: dict[str, Callable[[nn.Module], sw.Plan]] = {
    "replicated": lambda m: sw.plan(m, FIRST),
    "zero 1": lambda m: sw.plan(m, FIRST, sw.zero(1, "fsdp")),
    "zero 3": lambda m: sw.plan(m, FIRST, sw.zero(3, "fsdp")),
    "masters": lambda m: sw.plan(m, FIRST, sw.shard_params("fsdp")),
    "other dim": lambda m: sw.plan(
        m, FIRST, sw.zero(3, "fsdp", on=1, pad=True, where="layers.*.weight")
    ),
    "hybrid": lambda m: sw.plan(m, SECOND, sw.zero(3, "local")),
    "inner first": lambda m: sw.plan(m, SECOND, sw.zero(3, ("local", "node"), where="norm")),
    "units": lambda m: sw.plan(m, FIRST, sw.zero(3, "fsdp"), units=["embed", "norm"]),
}


@pytest.mark.parametrize("second", PLANS)
@pytest.mark.parametrize("first", ["zero 3", "masters", "hybrid", "other dim"])
def test_every_pair_of_plans_holds_the_same_values(first: str, second: str) -> None:
    module = model()
    optimizer = sw.optim.adamw(1e-2)
    one, two = (sw.lower(PLANS[name](module), loss_fn, optimizer) for name in (first, second))
    with sw.simulate(one.plan.mesh):
        program = one.bind()
        state, _ = program.step(program.init(0), program.shard_batch(batch()))
    with sw.simulate(two.plan.mesh):
        there = two.bind().init(sw.from_state(state))
    got, want = whole(there), whole(state)
    for name in got.keys() & want.keys():
        assert torch.equal(got[name], want[name]), name
    assert {name for name in want if not name.startswith("master")} <= got.keys()
    assert_new_memory(state, there)


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


# -- optimizers ---------------------------------------------------------------------------------

BASES: dict[str, Any] = {
    "sgd": lambda: sw.optim.sgd(0.1),
    "chain": lambda: sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-2)),
    "masked": lambda: sw.optim.chain(
        sw.optim.masked(sw.optim.clip_by_value(0.1), "*weight"), sw.optim.adamw(1e-2)
    ),
    "partition": lambda: sw.optim.partition(
        {"fast": sw.optim.adamw(1e-2), "slow": sw.optim.sgd(0.01, momentum=0.9)},
        {"fast": "layers.*.weight"},
        otherwise="slow",
    ),
    "inject": lambda: sw.optim.inject(sw.optim.adamw, learning_rate=1e-2),
    "torch": lambda: sw.optim.from_torch(torch.optim.NAdam, lr=1e-2),
    "whole torch": lambda: sw.optim.from_torch(torch.optim.Adafactor, lr=1e-2),
    "adafactor": lambda: sw.optim.adafactor(1e-2),
    "muon": lambda: sw.optim.partition(
        {"muon": sw.optim.muon(1e-2), "adamw": sw.optim.adamw(1e-2)},
        {"muon": "layers.*.weight"},
        otherwise="adamw",
    ),
    "ema": lambda: sw.optim.chain(sw.optim.adamw(1e-2), sw.optim.ema(0.9)),
    "lamb": lambda: sw.optim.lamb(1e-2),
}


@pytest.mark.parametrize("name", BASES)
def test_optimizers_of_every_structure_are_carried(name: str) -> None:
    module = model()
    with sw.simulate(FIRST):
        one = sw.lower(PLANS["zero 3"](module), loss_fn, BASES[name]())
        two = sw.lower(PLANS["zero 1"](module), loss_fn, BASES[name]())
        first, second = one.bind(), two.bind()
        state = first.init(0)
        for seed in range(2):
            state, _ = first.step(state, first.shard_batch(batch(seed)))
        there = second.init(sw.from_state(state))
        assert_bits(first.init(sw.from_state(there)), state)
        want, _ = first.step(state, first.shard_batch(batch(2)))
        got, _ = second.step(there, second.shard_batch(batch(2)))
        expected = whole(want)
        for leaf, value in whole(got).items():
            torch.testing.assert_close(value, expected[leaf], rtol=1e-9, atol=1e-11, msg=leaf)


@pytest.mark.parametrize("name", BASES)
def test_what_begins_to_train_gets_a_fresh_state_and_the_rest_keeps_its_own(name: str) -> None:
    module = model()
    frozen = ("layers.1.*", "gain")
    plan = PLANS["zero 3"](module)
    with sw.simulate(FIRST):
        part = sw.lower(sw.plan(module, FIRST, sw.freeze(frozen)), loss_fn, BASES[name]()).bind()
        full = sw.lower(plan, loss_fn, BASES[name]()).bind()
        state = part.init(0)
        for seed in range(2):
            state, _ = part.step(state, part.shard_batch(batch(seed)))
        there = full.init(sw.from_state(state))
        want, fresh, got = whole(state), whole(full.init(0)), whole(there)
        new = [leaf for leaf in got if leaf.startswith("opt.") and leaf not in want]
        assert all("layers.1." in leaf or "gain" in leaf for leaf in new), new
        for leaf, value in got.items():
            # A number that a group shares goes on counting, also for who joins the group.
            shared = leaf in new and value.ndim == 0 and "gain" not in leaf
            if not shared and not (leaf in new and "steps" in leaf):
                assert torch.equal(value, fresh[leaf] if leaf in new else want[leaf]), leaf
        # And back: what stops training loses its state, the rest is as it was.
        assert_bits(part.init(sw.from_state(there)), state)
        full.step(there, full.shard_batch(batch(3)))


def test_the_report_says_what_is_kept_fresh_and_dropped() -> None:
    module = model()
    optimizer = sw.optim.adamw(1e-2)
    with sw.simulate(FIRST):
        plans = [
            sw.plan(module, FIRST, sw.zero(3, "fsdp"), sw.freeze(where))
            for where in ("layers.0", "layers.1")
        ]
        one, two = (sw.lower(plan, loss_fn, optimizer) for plan in plans)
        state = one.bind().init(0)
        report = sw.from_state(state.ranks[1]).into(two)
    assert report.fresh == ("layers.0.weight", "layers.0.bias")
    assert report.dropped == ("layers.1.weight", "layers.1.bias")
    assert set(report.kept) == {"embed.weight", "norm.weight", "norm.bias", "gain"}
    assert "optimizer state is fresh for 2 parameters:" in str(report)
    assert "optimizer state is dropped for 2 parameters:\n  layers.1.weight" in str(report)


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


UNITS, WIDTH = 8, 128


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def square(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().mean()


def change_on_real_ranks() -> tuple[bool, int, int]:
    """Zero 3 over one axis, then hybrid over another mesh of the same ranks, then back."""
    module = Deep()
    optimizer = sw.optim.adamw(1e-3)
    first = sw.lower(sw.plan(module, sw.Mesh(fsdp=4), sw.zero(3, "fsdp")), square, optimizer)
    mesh = sw.Mesh(node=2, local=2)
    second = sw.lower(sw.plan(module, mesh, sw.zero(1, "local")), square, optimizer)
    one, two = first.bind(), second.bind()
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    state, _ = one.step(one.init(0), one.shard_batch(x))
    there, usage = measure(lambda: two.init(sw.from_state(state)))
    predicted = sw.from_state(state).into(second).items
    assert two.last_collectives == predicted
    back = one.init(sw.from_state(there))
    pairs = zip(
        optree.tree_leaves(state, namespace="shardwise"),
        optree.tree_leaves(back, namespace="shardwise"),
        strict=True,
    )
    same = all(
        torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))
        for a, b in pairs
        if isinstance(a, Tensor)
    )
    two.step(there, two.shard_batch(x))
    return same, usage.peak, rest_bytes(there)


@pytest.mark.gloo
@pytest.mark.timeout(90)
def test_real_ranks_change_their_mesh_and_hold_one_more_buffer_at_most() -> None:
    unit = 4 * WIDTH * WIDTH
    for same, peak, rest in sw.spawn(change_on_real_ranks, ranks=4, timeout=60):
        assert same
        # Beside the new state: what one unit sends and receives.
        assert rest < peak <= rest + 2 * unit + 100_000 < rest + UNITS * unit


# -- the rest of a state, and refusals ----------------------------------------------------------


def pair(**plans: Any) -> tuple[sw.Lowered, sw.Lowered]:
    module = model()
    one, two = (
        sw.lower(plan(module), loss_fn, plans.get(f"opt{i}", sw.optim.adamw(1e-2)))
        for i, plan in enumerate((PLANS["zero 3"], PLANS["zero 1"]))
    )
    return one, two


def test_step_seed_buffers_and_extra_are_carried() -> None:
    one, two = pair()
    with sw.simulate(FIRST):
        program, other = one.bind(), two.bind()
        state, _ = program.step(program.init(7), program.shard_batch(batch()))
        cursor = {"cursor": 12}
        state = sw.Lifted(s.with_extra(cursor) for s in state.ranks)
        there = other.init(sw.from_state(state))
        assert sw.to_global(there.step) == 1
        assert sw.to_global(there.seed) == 7
        assert there.ranks[0].extra is cursor
        assert torch.equal(
            sw.to_global(there.buffers)["norm.running_mean"],
            sw.to_global(state.buffers)["norm.running_mean"],
        )
        assert sw.to_global(other.init(sw.from_state(state), seed=9).seed) == 9
        with pytest.warns(UserWarning, match="init= has no effect"):
            other.init(sw.from_state(state), init=lambda module: None)


def test_a_state_built_leaf_by_leaf_is_carried() -> None:
    one, two = pair()
    with sw.simulate(FIRST):
        program, other = one.bind(), two.bind()
        state = program.init(0)
        built = state.map(
            lambda s: optree.tree_map(
                lambda leaf: leaf + 0 if isinstance(leaf, Tensor) else leaf,
                s,
                namespace="shardwise",
            )
        )
        assert_bits(other.init(sw.from_state(built)), other.init(sw.from_state(state)))


def refusal(run: Callable[[], Any], kind: type[Exception] = StateError) -> Any:
    with warnings.catch_warnings(), pytest.raises(kind) as caught:
        warnings.simplefilter("error")
        run()
    return caught.value


def test_a_dead_state_is_refused() -> None:
    one, two = pair()
    with sw.simulate(FIRST):
        program, other = one.bind(), two.bind()
        state = program.init(0)
        program.step(state, program.shard_batch(batch()))
        refusal(lambda: other.init(sw.from_state(state)), DonatedStateError)


def test_another_optimizer_is_refused_with_what_differs() -> None:
    one, _ = pair()
    _, two = pair(opt1=sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.sgd(0.1)))
    _, three = pair(opt1=sw.optim.sgd(0.1, momentum=0.9))
    with sw.simulate(FIRST):
        state = one.bind().init(0)
        error = refusal(lambda: two.bind().init(sw.from_state(state)))
        assert "The state is of another optimizer: 1 parts of it differ." in str(error)
        assert "opt: was AdamWState, is tuple" in str(error)
        assert "init(from_module(model))" in error.fix
        assert error.numbers == {"count": 1}
        error = refusal(lambda: sw.from_state(state.ranks[0]).into(three))
        assert "opt: was AdamWState, is SGDState" in str(error)


def test_state_that_has_moved_to_another_part_is_refused() -> None:
    module = model()

    def split(fast: str) -> Any:
        return sw.optim.partition(
            {"fast": sw.optim.sgd(0.1, momentum=0.9), "slow": sw.optim.sgd(0.01, momentum=0.9)},
            {"fast": fast},
            otherwise="slow",
        )

    plan = PLANS["zero 3"](module)
    one, two = (sw.lower(plan, loss_fn, split(fast)) for fast in ("layers.0", "layers"))
    with sw.simulate(FIRST):
        state = one.bind().init(0)
        error = refusal(lambda: two.bind().init(sw.from_state(state)))
    assert ".parts['fast'].mu['layers.1.weight']: has no float64 like the parameter" in str(error)
    assert ".parts['slow'].mu['layers.1.bias']: is gone" in str(error)
    assert error.numbers == {"count": 4}


def test_counts_that_differ_cannot_become_one() -> None:
    """In a program, torch's step counts are one per group; groups with two histories cannot join."""
    module = model()
    optimizer = sw.optim.from_torch(torch.optim.NAdam, lr=1e-2)
    with sw.simulate(FIRST):
        apart = sw.plan(
            module,
            FIRST,
            sw.zero(3, "fsdp", where="layers.*.weight"),
            units=["layers.0", "layers.1", "norm"],
        )
        together = sw.plan(
            module,
            FIRST,
            sw.zero(3, "fsdp"),
            units=["layers.0", "layers.1", "norm"],
        )
        one, two = (sw.lower(plan, loss_fn, optimizer) for plan in (apart, together))
        state = one.bind().init(0)
        for rank in state.ranks:
            key = next(key for key in rank.opt_flats.steps if key.startswith("layers.0"))
            rank.opt_flats.steps[key].add_(5)
        error = refusal(lambda: two.bind().init(sw.from_state(state)))
    assert "one number of 0, 5" in str(error)


def test_another_model_or_number_of_ranks_is_refused() -> None:
    one, two = pair()
    small = sw.plan(nn.Linear(6, 6), FIRST)
    fewer = sw.plan(model(), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    with sw.simulate(FIRST):
        state = one.bind().init(0)
        other = sw.lower(small, square, sw.optim.adamw(1e-2))
        error = refusal(lambda: other.bind().init(sw.from_state(state)))
    assert "The state is of another model" in str(error)
    assert "weight: the state has nothing, the program (6, 6)" in str(error)
    error = refusal(
        lambda: sw.from_state(state.ranks[0]).into(sw.lower(fewer, loss_fn, sw.optim.adamw(1e-2)))
    )
    assert "A state on 4 ranks cannot be carried to 2." in str(error)
    assert error.numbers == {"has": 4, "needs": 2}
    assert "same number of ranks" in error.fix


def test_ranks_with_states_of_different_steps_are_refused() -> None:
    one, two = pair()
    with sw.simulate(FIRST):
        program, other = one.bind(), two.bind()
        old = program.init(0)
        new, _ = program.step(old, program.shard_batch(batch()), donate=False)
        mixed = sw.Lifted([old.ranks[0], old.ranks[1], new.ranks[2], old.ranks[3]])
        error = refusal(lambda: other.init(sw.from_state(mixed)))
    assert "Ranks carry over states of different runs." in str(error)
    assert "rank 2: step 1 of a plan on Mesh(fsdp=4)" in str(error)
    assert error.numbers == {"rank": 2}
