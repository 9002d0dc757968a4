"""Frozen parameters: no gradients, no optimizer state and no bytes of either; and thawing them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing.echo import bind_alone
from shardwise.testing.ledger import measure, rest_bytes
from tests.oracles.one_process import assert_same, one_process, sharded

pytestmark = pytest.mark.simulated

WIDTH, RANK, DEPTH = 32, 8, 2
MESH = sw.Mesh(fsdp=2)
LEVELS = [0, 1, 2, 3]
FROZEN = ("embed", "layers.*.base", "head")


class Adapted(nn.Module):
    """A linear map with a low-rank update of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.a = nn.Linear(WIDTH, RANK, bias=False)
        self.b = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


class Model(nn.Module):
    """Adapters in the unit of their base, and others in units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Adapted() for _ in range(DEPTH))
        self.beside = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, beside in zip(self.layers, self.beside, strict=True):
            x = layer(x) + beside(x)
        return self.head(x)


TRAINABLE = DEPTH * (2 * WIDTH * RANK + WIDTH * WIDTH)
ALL = TRAINABLE + DEPTH * WIDTH * WIDTH + 2 * 16 * WIDTH


def loss_fn(model: nn.Module, tokens: Tensor) -> sw.Mean:
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits, (tokens + 1) % 16, reduction="sum")
    return sw.Mean(loss, tokens.numel())


def batches(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 16, (8,), generator=generator) for _ in range(count)]


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def lowered(level: int, *more: sw.Transform) -> sw.Lowered:
    plan = sw.plan(build(), MESH, sw.zero(level, "fsdp"), *more)
    return sw.lower(plan, loss_fn, sw.optim.adamw(1e-2), batch=batches()[0])


# -- bytes --------------------------------------------------------------------------------------


@pytest.mark.abstract
@pytest.mark.parametrize("level", LEVELS)
def test_frozen_leaves_own_no_bytes_of_gradients_and_optimizer_state(level: int) -> None:
    """No shape here needs padding, so that the numbers are the elements times their bytes."""
    for program, elements in (
        (lowered(level, sw.freeze(FROZEN)), TRAINABLE),
        (lowered(level), ALL),
    ):
        memory = program.memory()
        # Level 1 lands gradients where the optimizer wants them, as nothing reads whole ones.
        shards = 2 if level >= 1 else 1
        assert memory.params == 8 * ALL // (2 if level == 3 else 1)
        assert memory.grads == 8 * elements // shards
        assert memory.opt == 2 * 8 * elements // shards + 16  # the moments; a count and a rate
        assert memory.master == memory.padding == 0


@pytest.mark.abstract
@pytest.mark.parametrize("level", LEVELS)
def test_measured_bytes_are_the_predicted_ones(level: int) -> None:
    part = lowered(level, sw.freeze(FROZEN))
    memory, batch = part.memory(), batches()[0]
    program = bind_alone(part)
    state, _ = program.step(program.init(0, None), batch)
    assert rest_bytes(state) == memory.rest_bytes
    (grads, _), usage = measure(lambda: program.grads(state, batch))
    assert set(grads.leaves) == set(part.plan.grads)
    # Gradients and a handful of numbers are all that is left.
    assert memory.grads <= usage.kept <= memory.grads + 1024
    assert usage.kept < 8 * ALL // (2 if level >= 1 else 1)


@pytest.mark.abstract
@pytest.mark.parametrize("reduce", ["each", "once"])
def test_accumulation_keeps_no_gradients_of_frozen_parameters(reduce: Any) -> None:
    whole = lowered(2, sw.accumulate(2, reduce=reduce)).memory().kept_grads
    part = lowered(2, sw.freeze(FROZEN), sw.accumulate(2, reduce=reduce)).memory().kept_grads
    assert (part, whole) == ((8 * TRAINABLE, 8 * ALL) if reduce == "once" else (0, 0))


@pytest.mark.parametrize("level", LEVELS)
def test_no_gradient_of_a_frozen_parameter_travels(level: int) -> None:
    plan = sw.plan(build(), MESH, sw.zero(level, "fsdp"), sw.freeze(FROZEN))
    items = sw.lower(plan, loss_fn, sw.optim.adamw(1e-2)).collectives()
    reduced = [item for item in items if item.kind in ("reduce_scatter", "all_reduce")]
    # Of two ranks each sends half in a reduce-scatter, and both halves once in an all-reduce.
    assert sum(item.nbytes for item in reduced) == 8 * TRAINABLE // (1 if level < 1 else 2)


# -- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_training_adapters_equals_one_process(level: int) -> None:
    module = build()
    for path, parameter in module.named_parameters():
        parameter.requires_grad_("base" not in path and path.split(".")[0] not in FROZEN)
    plan = sw.plan(module, MESH, sw.zero(level, "fsdp"))
    by_edit = sw.plan(build(), MESH, sw.zero(level, "fsdp"), sw.freeze(FROZEN))
    assert (plan.opt, plan.grads) == (by_edit.opt, by_edit.grads)
    got = sharded(module, plan, loss_fn, batches(3), sw.optim.adamw(1e-2, weight_decay=0.1))
    want = one_process(
        module, loss_fn, batches(3), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)
    )
    assert_same(got, want)
    for path, value in module.named_parameters():
        assert torch.equal(got.params[path], value) == (not value.requires_grad), path


def thawed_in_torch(module: nn.Module, steps: list[Tensor], later: list[Tensor]) -> nn.Module:
    """Adapters first; then the base joins as a group of its own, whose count starts at 0."""
    module = copy.deepcopy(module)
    base = [p for path, p in module.named_parameters() if ".base." in path]
    first = [p for path, p in module.named_parameters() if ".a." in path or ".b." in path]
    optimizer = torch.optim.AdamW(first, 1e-2)
    for number, tokens in enumerate(steps + later):
        if number == len(steps):
            optimizer.add_param_group({"params": base})
        optimizer.zero_grad()
        loss = loss_fn(module, tokens)
        (loss.total / loss.count).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (3, 0)])
def test_thawing_in_the_middle_of_a_run_equals_torch(before: int, after: int) -> None:
    """From one level to another; a part of its own has a count of its own, as torch's has."""
    module, data = build(), batches(6)
    optimizer = sw.optim.partition(
        {"adapters": sw.optim.adamw(1e-2), "rest": sw.optim.adamw(1e-2)},
        {"adapters": ("layers.*.a", "layers.*.b")},
        otherwise="rest",
    )
    rest = ("embed", "beside", "head")
    first = sw.plan(
        module,
        MESH,
        sw.zero(before, "fsdp"),
        sw.freeze((*rest, "layers.*.base")),
        units=["beside.*"],
    )
    second = sw.plan(module, MESH, sw.zero(after, "fsdp"), sw.freeze(rest))
    with sw.simulate(MESH):
        program = sw.lower(first, loss_fn, optimizer).bind()
        state = program.init(sw.from_module(module))
        for tokens in data[:3]:
            state, _ = program.step(state, program.shard_batch(tokens))
        program = sw.lower(second, loss_fn, optimizer).bind()
        state = program.init(sw.from_state(state))
        for tokens in data[3:]:
            state, _ = program.step(state, program.shard_batch(tokens))
        got = sw.to_global(state.params)
        counts = [sw.to_global(state.opt.parts[name].count) for name in ("adapters", "rest")]
    assert counts == [6, 3]
    want = thawed_in_torch(module, data[:3], data[3:])
    for path, value in want.named_parameters():
        torch.testing.assert_close(got[path], value, rtol=1e-9, atol=1e-12, msg=path)


def test_a_thawed_parameter_counts_with_the_others_of_one_optimizer() -> None:
    """Without a part of its own the count goes on, so that Adam's first step is a larger one."""
    module, data = build(), batches(4)
    optimizer = sw.optim.adamw(1e-2, weight_decay=0.0)
    with sw.simulate(MESH):
        plans = [sw.plan(module, MESH, sw.freeze(w)) for w in (FROZEN, ("embed", "head"))]
        first, second = (sw.lower(plan, loss_fn, optimizer).bind() for plan in plans)
        state = first.init(sw.from_module(module))
        for tokens in data[:3]:
            state, _ = first.step(state, first.shard_batch(tokens))
        state = second.init(sw.from_state(state))
        before = sw.to_global(state.params)["layers.0.base.weight"].clone()
        state, _ = second.step(state, second.shard_batch(data[3]))
        moved = (sw.to_global(state.params)["layers.0.base.weight"] - before).abs().max()
    count, (one, two) = 4, (0.9, 0.999)
    # Moments of one gradient, corrected for four.
    ratio = (1 - one) / (1 - one**count) / ((1 - two) / (1 - two**count)) ** 0.5
    assert moved.item() == pytest.approx(1e-2 * ratio, rel=1e-3)
