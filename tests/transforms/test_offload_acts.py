"""Gradients with saved values on tiers are those without, bit for bit; nothing is left behind."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.offload.saved import MIN_BYTES, Group, Saved
from shardwise.offload.store import Store
from shardwise.sharding.errors import OffloadError, PlanError, RankError, RematError
from shardwise.sharding.tiers import PINNED_HOST, Tier
from tests.transforms.rematted import WIDTH, Block, Net, assert_same_bits, mean_square, rows, run
from tests.transforms.test_remat import MODELS, Stack, seeded

pytestmark = pytest.mark.simulated

ALONE, TWO = sw.Mesh(fsdp=1), sw.Mesh(fsdp=2)
ROWS = 128
"""Rows of a batch so that on two ranks a hidden state in float64 has just enough bytes to move."""


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Counter[Tier]:
    """Bytes that were allocated for saved values, by tier."""
    found: Counter[Tier] = Counter()
    empty = Store.empty

    def count(store: Store, tier: Tier, length: int, dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8:
            found[tier] += length
        return empty(store, tier, length, dtype)

    monkeypatch.setattr(Store, "empty", count)
    return found


def host(where: Any = "**", **options: Any) -> sw.Transform:
    return sw.offload("acts", to="pinned_host", where=where, **options)


def live() -> int:
    """Saved values that anything holds."""
    gc.collect()
    return sum(type(one) in (Saved, Group) for one in gc.get_objects())


# -- every level, every place ---------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [ALONE, TWO], ids=repr)
@pytest.mark.parametrize("level", [0, 2, 3])
def test_at_every_level(mesh: sw.Mesh, level: int, put: Counter[Tier], tmp_path: Path) -> None:
    model, zero, batch = seeded(lambda: Net(depth=2)), sw.zero(level, "fsdp"), rows(ROWS)
    want = run(model, mesh, zero, batch=batch)
    assert not put
    for tier in (PINNED_HOST, sw.disk(tmp_path)):
        assert_same_bits(run(model, mesh, zero, sw.offload("acts", tier), batch=batch), want)
        assert put[tier] > 10 * ROWS * 4 * WIDTH * 8
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=8)
@given(
    where=st.lists(
        st.sampled_from(["", "body", "layers.*", "layers.1", "up", "**.drop", "norm", "head"]),
        min_size=1,
        max_size=3,
    ),
    again=st.sampled_from([None, "", "body", "layers.*", "layers.0", "up"]),
    policy=st.sampled_from(
        [
            "everything",
            "dots",
            sw.save("hidden"),
            sw.offload_to("pinned_host", "hidden", "attn_out"),
        ]
    ),
    prefetch=st.integers(0, 3),
    passes=st.sampled_from([1, 2]),
)
def test_any_modules_with_remat_around_and_inside(
    where: list[str], again: str | None, policy: Any, prefetch: int, passes: int
) -> None:
    more = [sw.zero(3, "fsdp"), *([sw.accumulate(passes)] if passes > 1 else [])]
    model, batch = seeded(lambda: Net(depth=2)), rows(passes * ROWS)
    want = run(model, TWO, *more, batch=batch)
    more += [sw.remat(again, policy)] if again is not None else []
    assert_same_bits(run(model, TWO, *more, host(where, prefetch=prefetch), batch=batch), want)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_make_it_hard(name: str) -> None:
    make, _, more = MODELS[name]
    model, more, batch = seeded(make), [sw.zero(3, "fsdp"), *more], rows(2 * ROWS)
    want = run(model, TWO, *more, batch=batch)
    assert_same_bits(run(model, TWO, *more, host(), batch=batch), want)


def test_in_half_precision_with_a_loss_scale(put: Counter[Tier]) -> None:
    model, batch = seeded(Net).float(), rows(8 * ROWS, torch.float32)
    more = [sw.zero(3, "fsdp"), sw.precision(compute="float16"), sw.loss_scale()]
    want = run(model, TWO, *more, batch=batch)
    assert_same_bits(run(model, TWO, *more, host(), batch=batch), want)
    assert put[PINNED_HOST]


# -- what goes, and what stays --------------------------------------------------------------------


class Wide(nn.Module):
    """Weights and a buffer that are larger than its activations."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up = nn.Linear(WIDTH, 1024, bias=False)
        self.register_buffer("mask", torch.ones(4, 1024))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x @ self.up.weight.t()) * self.mask).sum(-1)


@pytest.mark.parametrize("level", [0, 3])
def test_weights_and_buffers_stay(level: int, put: Counter[Tier]) -> None:
    model, batch = seeded(Wide), rows(2)
    want = run(model, TWO, sw.zero(level, "fsdp"), batch=batch)
    assert_same_bits(run(model, TWO, sw.zero(level, "fsdp"), host(), batch=batch), want)
    assert Wide().mask.nbytes >= MIN_BYTES
    assert not put


def test_a_recomputed_module_puts_its_inputs_away(put: Counter[Tier]) -> None:
    model, batch = seeded(lambda: Stack(Block)), rows(ROWS)
    run(model, ALONE, sw.remat("layers.*"), host("layers.*"), batch=batch)
    assert put[PINNED_HOST] == 2 * 2 * batch.nbytes  # two passes; the first input is the batch


def test_a_module_inside_of_a_recomputed_one_puts_nothing_away(put: Counter[Tier]) -> None:
    """What it saves is thrown away, and made again in backward."""
    model, batch = seeded(lambda: Stack(Block)), rows(ROWS)
    run(model, ALONE, sw.remat("layers.*"), host("up"), batch=batch)
    assert not put


def test_named_values_go_to_the_tier_and_come_back(put: Counter[Tier], tmp_path: Path) -> None:
    model, batch, zero = seeded(lambda: Net(depth=2)), rows(ROWS), sw.zero(3, "fsdp")
    want = run(model, TWO, zero, batch=batch)
    for tier in (PINNED_HOST, sw.disk(tmp_path)):
        policy = sw.offload_to(tier, "hidden")
        seen = run(model, TWO, zero, sw.remat("layers.*", policy), batch=batch)
        assert_same_bits(seen, want)
        hidden = ROWS * 4 * 2 * WIDTH * 8
        assert put[tier] == 2 * 2 * hidden  # two passes over two layers, over all ranks


def test_what_a_trace_predicts_of_named_values_is_what_goes(put: Counter[Tier]) -> None:
    model, batch = seeded(lambda: Net(depth=2)), rows(ROWS)
    remat = sw.remat("layers.*", sw.offload_to("pinned_host", "hidden", "attn_out"))
    run(model, ALONE, remat, batch=batch)
    plan = sw.plan(model, ALONE, remat)
    lowered = sw.lower(plan, mean_square, sw.optim.sgd(0.1), batch=batch)
    held = lowered.memory().tiers[PINNED_HOST]
    assert held.acts == put[PINNED_HOST] / 2


@pytest.mark.parametrize(
    "more",
    [
        [],
        [sw.remat("layers.*")],
        [sw.remat("layers.*", sw.offload_to("pinned_host", "hidden"))],
        [sw.remat("up")],
    ],
    ids=["plain", "remat", "named", "one"],
)
@pytest.mark.parametrize("where", ["layers.*", "**", ""])
def test_what_a_trace_predicts_of_modules_is_what_goes(
    where: str, more: list[sw.Transform], put: Counter[Tier]
) -> None:
    """To the last byte, up to the lines of 512 bytes that values are copied at."""
    model, batch = seeded(lambda: Net(depth=2)), rows(ROWS)
    run(model, ALONE, *more, host(where), batch=batch)
    plan = sw.plan(model, ALONE, *more, host(where))
    lowered = sw.lower(plan, mean_square, sw.optim.sgd(0.1), batch=batch)
    assert put[PINNED_HOST]
    assert lowered.memory().tiers[PINNED_HOST].acts == put[PINNED_HOST] / 2


# -- nothing is left behind -----------------------------------------------------------------------


class Failing(Stack):
    """Raises in its second layer when it meets a large number."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and bool(x.abs().max() > 1e6):
                raise FloatingPointError("a large number")
        return x


@pytest.mark.parametrize("mesh", [ALONE, TWO], ids=repr)
@pytest.mark.parametrize("policy", ["everything", sw.offload_to("pinned_host", "hidden")], ids=str)
def test_off_2_passes_without_backward_leave_nothing(mesh: sw.Mesh, policy: Any) -> None:
    """A step, an evaluation, a forward that raises, and a step."""
    model, batch = seeded(lambda: Failing(Block)), rows(ROWS)
    more = [sw.zero(3, "fsdp"), sw.remat("layers.1", policy)]
    found = []
    for offload in ([], [host()]):
        with sw.simulate(mesh):
            plan = sw.plan(model, mesh, *more, *offload)
            program = sw.lower(plan, mean_square, sw.optim.sgd(0.1)).bind()
            state = program.init(sw.from_module(model))
            part = program.shard_batch(batch)
            state, first = program.step(state, part)
            assert live() == 0
            program.eval(state, part)
            assert live() == 0
            with pytest.raises(
                FloatingPointError if mesh is ALONE else RankError, match="a large number"
            ):
                program.step(state, program.shard_batch(batch * 1e9))
            assert live() == 0
            state, second = program.step(state, part)
            assert live() == 0
            weights = {k: v.clone() for k, v in sw.to_global(state.params).items()}
            found.append((float(first.loss), float(second.loss), weights))
    (*plain, want), (*tiered, got) = found
    assert tiered == plain
    assert all(torch.equal(got[path], want[path]) for path in want)


def test_off_4_steps_do_not_add_up() -> None:
    model, batch = seeded(lambda: Net(depth=2)), rows(ROWS)
    remat = sw.remat("layers.1", sw.offload_to("pinned_host", "hidden"))
    everything = [sw.offload(home, to="pinned_host") for home in ("params", "grads", "opt", "acts")]
    with sw.simulate(ALONE):
        plan = sw.plan(model, ALONE, sw.zero(3, "fsdp"), remat, *everything)
        program = sw.lower(plan, mean_square, sw.optim.adamw(1e-3)).bind()
        state, counts = program.init(sw.from_module(model)), []
        for _ in range(12):
            state, _ = program.step(state, program.shard_batch(batch))
            gc.collect()
            counts.append(sum(type(one) is Tensor for one in gc.get_objects()))
    assert counts[3:] == [counts[3]] * 9


# -- errors ---------------------------------------------------------------------------------------


class Late(nn.Module):
    """Writes in place what its layer has saved for backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = Halves()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        grown = x * self.scale
        out = self.layer(grown)
        with torch.no_grad():
            grown.add_(1)
        return out


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def error_of(model: nn.Module, batch: Tensor, *transforms: sw.Transform, steps: int) -> str:
    """What the last of some steps raises."""
    program = sw.lower(sw.plan(model, ALONE, *transforms), mean_square, sw.optim.sgd(0.1)).bind()
    state = program.init(sw.from_module(model))
    for _ in range(steps - 1):
        state, _ = program.step(state, batch)
    with pytest.raises((OffloadError, RematError, RuntimeError)) as caught:
        program.step(state, batch)
    return str(caught.value)


@pytest.mark.parametrize("width", [8, 4096], ids=["stays", "goes"])
def test_a_write_after_saving_is_refused_as_autograd_does(width: int) -> None:
    model, batch = Late(width), torch.ones(4, width)
    # The checks of the first step are hooks too, and hide the write from autograd.
    assert "modified by an inplace operation" in error_of(model, batch, steps=2)
    text = error_of(model, batch, host("layer"), steps=1)
    assert "'layer' saved for backward was written in place afterwards" in text
    assert f"shape (4, {width}) saved in module 'layer'" in text
    assert f"torch.float32, {16 * width:,} bytes, written 1 times" in text
    assert "Fix: use the operation that is not in place" in text


class Grown(nn.Module):
    """Returns a value that it names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        grown = sw.name(x * self.scale, "grown")
        return grown, grown.sin()


class WritesKept(nn.Module):
    """Writes in place what its inner module keeps for its recomputation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Grown(width)

    def forward(self, x: Tensor) -> Tensor:
        grown, sine = self.inner(x)
        with torch.no_grad():
            grown.detach().add_(1)
        return sine


@pytest.mark.parametrize("width", [8, 4096], ids=["stays", "goes"])
def test_a_named_value_that_is_written_later_is_refused(width: int) -> None:
    remat = sw.remat("inner", sw.offload_to("pinned_host", "grown"))
    text = error_of(WritesKept(width), torch.ones(4, width), remat, steps=1)
    assert "A value that remat keeps of 'inner' was written in place" in text
    assert f"shape (4, {width}), {16 * width:,} bytes, written 1 times" in text


@pytest.mark.parametrize(
    ("to", "names", "words"),
    [
        ("pinned_hots", ("a",), "There is no memory 'pinned_hots'"),
        ("disk", ("a",), "The memory 'disk' has the path ''"),
        ("pinned_host", (), "names no value"),
        ("pinned_host", ("a", 3), "one of them 3"),
    ],
)
def test_policies_that_cannot_be(to: str, names: tuple[Any, ...], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        sw.offload_to(to, *names)
    assert words in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_a_policy_travels_as_text(tmp_path: Path) -> None:
    remat = sw.remat("layers.*", sw.offload_to(sw.disk(tmp_path), "hidden"))
    plan = sw.plan(seeded(Net), TWO, remat, host("up", prefetch=2))
    again = type(plan).from_json(plan.to_json())
    assert again == plan
    assert (again.remat, again.acts) == (plan.remat, plan.acts)
    assert str(plan.acts["body.layers.0.up"]) == "on pinned_host, prefetch 2"
