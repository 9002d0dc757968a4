"""Gradients with remat are those without it, bit for bit, whatever is recomputed and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.transforms.rematted import WIDTH, Block, Net, assert_same_bits, rows, run

pytestmark = pytest.mark.simulated

ALONE, TWO, FOUR = sw.Mesh(fsdp=1), sw.Mesh(fsdp=2), sw.Mesh(dp=2, fsdp=2)
NAMED = sw.save("attn_out", "y")
POLICIES = ["everything", "dots", NAMED]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


# -- every level ----------------------------------------------------------------------------------

INSIDE = [
    sw.remat(["layers.0", "norm"], "everything"),
    sw.remat("layers.1", "dots"),
    sw.remat("layers.1.up", sw.save("hidden")),
    sw.remat("layers.0", sw.save("attn_out", "hidden")),
]
AROUND = [sw.remat(["", "body"]), sw.remat("layers.*", "dots"), sw.remat("layers.1", "nothing")]


LEVELS = [(mesh, level) for mesh in (ALONE, TWO, FOUR) for level in range(4)]


@pytest.mark.parametrize(("mesh", "level"), LEVELS, ids=repr)
def test_at_every_level(mesh: sw.Mesh, level: int) -> None:
    """Units are recomputed under every policy; then modules around them, nested in each other."""
    model, zero = seeded(lambda: Net(depth=2)), sw.zero(level, "fsdp")
    want = run(model, mesh, zero)
    assert_same_bits(run(model, mesh, zero, *AROUND), want)
    if mesh.size <= 2:
        inside = run(model, mesh, zero, *INSIDE)
        assert_same_bits(inside, want)
        moved = inside.program.lowered.collectives()
        assert moved == want.program.lowered.collectives()


@pytest.mark.parametrize("level", [2, 3])
def test_a_module_around_units_costs_one_more_gather_of_each(level: int) -> None:
    model, zero = seeded(Net), sw.zero(level, "fsdp")
    moved = {}
    for name, more in {"plain": (), "body": ("body",), "both": ("body", "")}.items():
        seen = run(model, TWO, zero, *([sw.remat(more)] if more else []))
        moved[name] = seen.program.lowered.collectives()
    again = [item for item in moved["body"] if item.reason == "recompute"]
    units = [f"body.layers.{index}" for index in range(3)]
    assert [item.unit for item in again] == (units if level == 3 else [])
    assert len(moved["body"]) == len(moved["plain"]) + len(again)
    assert len(moved["both"]) == len(moved["plain"]) + 2 * len(again)


@settings(max_examples=6)
@given(
    chosen=st.lists(
        st.tuples(
            st.sampled_from(
                ["", "body", "layers.*", "layers.1", "~layers.*", "up", "**.drop", "norm", "head"]
            ),
            st.sampled_from([*POLICIES, sw.save("hidden"), "nothing"]),
        ),
        min_size=1,
        max_size=4,
    ),
    level=st.integers(0, 3),
    prefetch=st.integers(0, 2),
    passes=st.sampled_from([1, 2]),
    units=st.sampled_from([None, ["body"], ["body", "layers.*"], ["up", "down"]]),
)
def test_any_policies_on_nested_modules(
    chosen: list[tuple[str, Any]],
    level: int,
    prefetch: int,
    passes: int,
    units: list[str] | None,
) -> None:
    more = [sw.zero(level, "fsdp"), sw.prefetch(prefetch)]
    more += [sw.accumulate(passes)] if passes > 1 else []
    model = seeded(lambda: Net(depth=2))
    want = run(model, TWO, *more, units=units)
    remats = [sw.remat(where, policy) for where, policy in chosen]
    assert_same_bits(run(model, TWO, *more, *remats, units=units), want)


# -- models that make it hard ---------------------------------------------------------------------


class Counting(nn.Module):
    """Writes buffers in three ways, reads one of them, and works in place on a named value."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.bn = nn.BatchNorm1d(4)
        self.act = nn.ReLU(inplace=True)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.ema = self.ema * 0.9 + x.detach().mean((0, 1)) * 0.1
        y = self.bn(self.lin(x + self.ema * self.count))
        return x + self.act(sw.name(y, "y"))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Shared(Stack):
    """One unit runs twice, and a weight is tied across the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x))
        return self.last(self.layers[0](self.layers[1](x)))


class Checkpointing(nn.Module):
    """Checkpoints a part of itself, as models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(self.down(torch.tanh(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Checkpointed(Stack):
    """Checkpoints its layers, as models of libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Cut(Stack):
    """A layer without gradients, and one whose output reaches no loss."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
        x = self.layers[1](x)
        return x + self.layers[2](x.detach()).detach()


class Written(nn.Module):
    """Writes what its operations return, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        met: list[Tensor] = [x]
        return self.append(met).mul_(2)

    def append(self, met: list[Tensor]) -> Tensor:
        met.append(self.lin(met[0]))
        return met[0] + met[1].add_(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[list[str]], list[sw.Transform]]] = {
    "buffers": (lambda: Stack(Counting), [["layers.*", "bn"], [""]], []),
    "twice": (Shared, [["layers.*"], ["", "up", "layers.0"]], [sw.prefetch(1)]),
    "frozen unit": (Shared, [["layers.*", ""]], [sw.freeze("layers.1")]),
    "frozen units": (Shared, [["layers.*"], [""]], [sw.freeze("layers.*")]),
    "frozen bias": (Shared, [["layers.*", ""]], [sw.freeze("**.bias")]),
    "own inside": (lambda: Stack(Checkpointing), [["layers.*"], ["", "up"]], []),
    "own outside": (Checkpointed, [["layers.*", "down"], ["", "layers.1"]], []),
    "cut": (Cut, [["layers.*"], [""]], []),
    "written": (lambda: Stack(Written), [["layers.*"], ["", "layers.1"]], []),
    "kept": (lambda: Net(depth=2), [["body", "layers.*"]], [sw.keep_gathered("layers.1")]),
    "gathered once": (lambda: Net(depth=2), [["", "layers.*"]], [sw.accumulate(2, gather="step")]),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_make_it_hard(name: str) -> None:
    """Buffers included: they are written once, and read as forward has read them."""
    make, places, more = MODELS[name]
    model, more = seeded(make), [sw.zero(3, "fsdp"), *more]
    want = run(model, TWO, *more)
    for number, where in enumerate(places):
        for policy in POLICIES if number == 0 else POLICIES[:1]:
            assert_same_bits(run(model, TWO, *more, sw.remat(where, policy)), want)
    if name == "buffers":
        assert want.buffers["layers.1.count"] == 1
        assert want.buffers["layers.1.bn.num_batches_tracked"] == 1


class Branching(Stack):
    """A rank whose part begins with a positive number leaves layers out."""

    left_out = (0, 2)

    def forward(self, x: Tensor) -> Tensor:
        leaves_out = bool(x[0, 0, 0] > 0)
        for index, layer in enumerate(self.layers):
            if not (leaves_out and index in self.left_out):
                x = layer(x)
        return x


@pytest.mark.parametrize("where", ["", "layers.*"])
def test_ranks_that_run_other_units_of_a_recomputed_module(where: str) -> None:
    model, batch, zero = seeded(Branching), rows(4), sw.zero(3, "fsdp")
    batch[:, 0, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    want = run(model, TWO, zero, batch=batch)
    assert_same_bits(run(model, TWO, zero, sw.remat(where), batch=batch), want)


def test_the_module_of_the_user_is_left_alone() -> None:
    model = seeded(Net)
    before = {path: dict(vars(part)) for path, part in model.named_modules()}
    run(model, TWO, sw.zero(3, "fsdp"), sw.remat(["", "layers.*"], "dots"))
    assert {path: dict(vars(part)) for path, part in model.named_modules()} == before
    assert not any("forward" in vars(part) for part in model.modules())


def test_an_evaluation_recomputes_nothing_and_agrees() -> None:
    model, losses = seeded(Net), []
    for remats in ([], [sw.remat(["", "layers.*"], "dots")]):
        seen = run(model, TWO, sw.zero(3, "fsdp"), *remats)
        with sw.simulate(TWO):
            program = seen.program.lowered.bind()
            state = program.init(sw.from_module(model))
            batch = program.shard_batch(torch.ones(4, 4, WIDTH, dtype=torch.float64))
            losses.append(program.eval(state, batch).loss)
            assert tuple(program.last_collectives) == program.lowered.eval_items
    assert torch.equal(*losses)


def test_a_failing_recomputation_leaves_the_program_usable() -> None:
    """The module fails when it runs again; the next step is as if nothing had happened."""

    class Fails(nn.Module):
        runs = 0

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            Fails.runs += 1
            if Fails.runs == Fails.fails_at:
                raise RuntimeError("sample 17 is broken")
            return torch.tanh(self.lin(x))

        fails_at = -1

    model = seeded(lambda: Stack(Fails))
    plan = sw.plan(model, ALONE, sw.zero(3, "fsdp"), sw.remat(["", "layers.*"]))
    program = sw.lower(plan, lambda m, x: m(x).square().mean(), sw.optim.sgd(0.1)).bind()
    state = program.init(sw.from_module(model))
    batch = torch.ones(2, WIDTH, dtype=torch.float64)
    want, _ = program.grads(state, batch)
    Fails.runs, Fails.fails_at = 0, 5
    with pytest.raises(Exception, match="sample 17 is broken"):
        program.grads(state, batch)
    got, _ = program.grads(state, batch)
    same = [torch.equal(got.leaves[p].to_local(), want.leaves[p].to_local()) for p in want.leaves]
    assert all(same)
