"""Offload in plans, budgets, room, moves between tiers, and checkpoints from any tiers to any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.offload.files import Folder
from shardwise.offload.store import Store
from shardwise.sharding.checkpoint.host_copy import HostCopy
from shardwise.sharding.errors import OffloadError, PlanError, StateError
from shardwise.sharding.pytree import tree_leaves

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)
WIDTH = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def loss_fn(model: nn.Module, tokens: Tensor) -> sw.Mean:
    logits = model(tokens).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, tokens.flatten(), reduction="sum")
    return sw.Mean(total, tokens.numel())


BATCH = torch.arange(32).view(4, 8) % 8


def plan_of(*transforms: sw.Transform) -> sw.Plan:
    return sw.plan(Model(), MESH, sw.zero(3, "fsdp"), *transforms)


def program_of(*transforms: sw.Transform, rate: float = 1e-2) -> sw.Program:
    return sw.lower(plan_of(*transforms), loss_fn, sw.optim.adamw(rate)).bind()


def train(program: sw.Program, state: Any, steps: int = 1) -> Any:
    for _ in range(steps):
        state, _ = program.step(state, program.shard_batch(BATCH))
    return state


def values(state: Any) -> list[Tensor]:
    trees = (state.params, state.master, state.opt)
    leaves = tree_leaves([sw.to_global(tree) for tree in trees])
    return [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -- plans ---------------------------------------------------------------------------------------


def test_memory_is_a_field_of_a_spec_and_shows_in_the_table() -> None:
    plan = plan_of(sw.offload("opt", "pinned_host"), sw.offload("params", sw.disk("/x")))
    assert str(plan.opt["head.weight"]).endswith("@pinned_host")
    assert plan.params["head.weight"].memory == "disk"
    assert plan.grads["head.weight"].memory == "device"
    assert "rests head.weight: params on disk:/x, moments on pinned_host" in str(plan)
    assert "offload('opt', to='pinned_host')" in plan.why("head.weight")
    assert sw.Plan.from_json(plan.to_json()) == plan


def test_the_last_word_counts_and_device_takes_it_back() -> None:
    plan = plan_of(
        sw.offload("opt", sw.disk("/x")),
        sw.offload("moments", "pinned_host"),
        sw.offload("opt", "device", where="embed"),
    )
    assert plan.rests["head.weight"].moments == sw.Tier("pinned_host")
    assert plan.rests["head.weight"].masters == sw.disk("/x")
    assert "embed.weight" not in plan.rests
    assert plan_of(sw.offload("opt", "pinned_host"), sw.offload("opt", "device")).rests == {}


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_a_fraction_is_spread_over_the_layers(fraction: float) -> None:
    plan = plan_of(sw.offload("moments", "pinned_host", where="layers.*", fraction=fraction))
    sizes = {info.path: info.shape for info in plan.infos if info.path.startswith("layers")}
    taken = sum(torch.Size(sizes[path]).numel() for path in plan.rests)
    total = sum(torch.Size(shape).numel() for shape in sizes.values())
    assert abs(taken - fraction * total) <= WIDTH * WIDTH
    assert plan.diff(plan_of()) != ()


def test_order_across_phases_does_not_matter() -> None:
    one = sw.plan(Model(), MESH, sw.offload("opt", "pinned_host"), sw.zero(3, "fsdp"))
    assert one == plan_of(sw.offload("opt", "pinned_host"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sw.offload("optimizer", "pinned_host"), "unknown home 'optimizer'"),
        (lambda: sw.offload("opt", "pinned"), "There is no memory 'pinned'"),
        (lambda: sw.offload("opt", "disk"), "names no folder"),
        (lambda: sw.offload("opt", "pinned_host", fraction=0.0), "no possible fraction"),
        (lambda: sw.offload("opt", "pinned_host", fraction=1.5), "allowed: 0 < fraction <= 1"),
        (lambda: sw.offload("opt", "pinned_host", prefetch=-1), "no possible prefetch"),
        (lambda: plan_of(sw.offload("opt", "pinned_host", where="layer.*")), "none of"),
    ],
)
def test_what_cannot_be_asked_for(make: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        make()
    assert "Fix:" in str(caught.value)


# -- memory --------------------------------------------------------------------------------------


def test_bytes_are_told_by_tier() -> None:
    plain = sw.lower(plan_of(), loss_fn, sw.optim.adamw(1e-3)).memory()
    plan = plan_of(sw.offload("moments", "pinned_host"), sw.offload("params", sw.disk("/x")))
    memory = sw.lower(plan, loss_fn, sw.optim.adamw(1e-3)).memory()
    host, disk = memory.tiers[sw.Tier("pinned_host")], memory.tiers[sw.disk("/x")]
    assert disk.params == plain.params
    assert (memory.params, host.opt + memory.opt) == (0, plain.opt)
    assert host.buffers > 0
    assert "pinned_host: rest" in str(memory)


def test_a_budget_is_kept_or_refused_with_numbers() -> None:
    optimizer = sw.optim.adamw(1e-3)
    plan = plan_of(sw.offload("opt", "pinned_host"))
    held = sw.lower(plan, loss_fn, optimizer).memory()
    host = held.tiers[sw.Tier("pinned_host")].peak_bytes
    sw.lower(plan, loss_fn, optimizer, budget={"pinned_host": host, "device": 1 << 30})
    with pytest.raises(PlanError, match="pinned_host: needs") as caught:
        sw.lower(plan, loss_fn, optimizer, budget={"pinned_host": host - 1})
    assert caught.value.numbers["over"] == {"pinned_host": host}
    assert "(1 B too many)" in str(caught.value)
    with pytest.raises(PlanError, match="did you mean 'disk'"):
        sw.lower(plan, loss_fn, optimizer, budget={"disks": 5})


def test_room_is_looked_at_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sw.simulate(MESH):
        program = program_of(sw.offload("opt", sw.disk(tmp_path)))
        need = program.lowered.memory().tiers[sw.disk(tmp_path)].peak_bytes  # type: ignore[attr-defined]
        usage = type("Usage", (), {"free": 2 * need - 1})
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        with pytest.raises(OffloadError, match=f"2 parts need {2 * need:,} bytes") as caught:
            program.init(seed=0)
        assert f"{2 * need - 1:,} are free" in str(caught.value)
        usage.free = 2 * need  # type: ignore[attr-defined]
        train(program, program.init(seed=0))


# -- states --------------------------------------------------------------------------------------


def test_a_state_moves_away_and_back(tmp_path: Path) -> None:
    with sw.simulate(MESH):
        program = program_of(sw.offload("moments", sw.disk(tmp_path)))
        state = train(program, program.init(seed=0))
        before = values(state)
        away = program.move(state, "pinned_host")
        assert same(values(away), before)
        with pytest.raises(StateError, match="moved to pinned_host"):
            train(program, away)
        with pytest.raises(StateError, match="moved to pinned_host"):
            program.eval(away, program.shard_batch(BATCH))
        back = program.move(away)
        assert same(values(back), before)
        after = values(train(program, back))
        again = program_of()
        assert same(after, values(train(again, again.init(seed=0), 2)))


def test_a_move_that_does_not_fit_leaves_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Folder, length: int, dtype: torch.dtype) -> Tensor:
        raise OffloadError("The disk has no room.")

    with sw.simulate(MESH):
        program = program_of()
        state = train(program, program.init(seed=0))
        monkeypatch.setattr(Folder, "empty", full)
        with pytest.raises(OffloadError, match="no room"):
            program.move(state, sw.disk(tmp_path))
        train(program, state)


def test_donate_false_keeps_the_state_on_disk(tmp_path: Path) -> None:
    with sw.simulate(MESH):
        program = program_of(sw.offload("opt", sw.disk(tmp_path)))
        state = program.init(seed=0)
        before = values(state)
        new, _ = program.step(state, program.shard_batch(BATCH), donate=False)
        assert same(values(state), before)
        assert not same(values(new), before)
        assert same(values(train(program, state)), values(new))


TIERS = {
    "device": (),
    "host": (("opt", "pinned_host"), ("params", "pinned_host"), ("grads", "pinned_host")),
    "disk": (("opt", "disk"), ("params", "disk")),
}


def puts(name: str, folder: Path) -> list[sw.Transform]:
    return [sw.offload(home, sw.disk(folder) if to == "disk" else to) for home, to in TIERS[name]]


@pytest.mark.parametrize("target", TIERS)
@pytest.mark.parametrize("source", TIERS)
def test_off_1_any_tiers_to_any_others_on_disk_and_live(
    source: str, target: str, tmp_path: Path
) -> None:
    """Values, counts and settings are those that were saved; the place is that of the new plan."""
    with sw.simulate(MESH):
        old = program_of(*puts(source, tmp_path), rate=0.125)
        state = train(old, old.init(seed=0), 3)
        want = values(state)
        old.save(tmp_path / "saved", state)
        old.save_async(tmp_path / "beside", state).wait()
        new = program_of(*puts(target, tmp_path), rate=0.125)
        for name in ("saved", "beside"):
            assert same(values(new.restore(tmp_path / name)), want)
        carried = new.init(sw.from_state(state))
        assert same(values(carried), want)
        restored = new.restore(tmp_path / "saved")
        assert int(restored.ranks[0].step) == 3
        assert same(values(train(new, restored)), values(train(old, state)))
    assert sorted(os.listdir(tmp_path)) == ["beside", "saved"]


def test_16_bit_masters_and_moments_on_disk_round_as_on_the_device(tmp_path: Path) -> None:
    """Stochastic rounding draws by element, so chunks change nothing."""
    for precision in (
        sw.precision(params="bfloat16", master="float32"),
        sw.precision(params="bfloat16", master="bfloat16", rounding="stochastic"),
    ):
        with sw.simulate(MESH):
            plain = program_of(precision)
            want = values(train(plain, plain.init(seed=0), 2))
            tiered = program_of(precision, sw.offload("opt", sw.disk(tmp_path)))
            assert same(values(train(tiered, tiered.init(seed=0), 2)), want)


def test_optimizers_that_see_whole_tensors_take_them_from_their_tier(tmp_path: Path) -> None:
    for optimizer in (sw.optim.lamb(1e-2), sw.optim.muon(1e-2)):
        with sw.simulate(MESH):
            plans = [plan_of(), plan_of(sw.offload("opt", sw.disk(tmp_path)))]
            programs = [sw.lower(plan, loss_fn, optimizer).bind() for plan in plans]
            one, other = (values(train(p, p.init(seed=0), 2)) for p in programs)
            assert same(one, other)


# -- what the laws do not draw ---------------------------------------------------------------------


class Heads(nn.Module):
    """Two MLPs that a tensor axis cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return x


AXES = {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}


@pytest.mark.parametrize("level", [0, 1, 3])
def test_tiers_beside_tensor_axes_change_no_bit(level: int, tmp_path: Path) -> None:
    on_disk = sw.disk(tmp_path)
    mixtures = (
        [sw.offload("opt", on_disk), sw.offload("acts", "pinned_host", where="layers.*.up")],
        [sw.offload("params", on_disk), sw.offload("grads", "pinned_host")],
    )
    mesh, batch = sw.Mesh(fsdp=2, tp=2), torch.randn(64, WIDTH)
    found: list[list[Tensor]] = []
    with sw.simulate(mesh):
        for puts in ([], *mixtures):
            transforms = (sw.tensor_parallel("tp"), sw.zero(level, "fsdp"), *puts)
            plan = sw.plan(Heads(), mesh, *transforms, axes=AXES)
            optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(0.1), sw.optim.adamw(1e-2))
            program = sw.lower(plan, lambda m, x: m(x).square().mean(), optimizer).bind()
            state = program.init(seed=0)
            for _ in range(2):
                state, _ = program.step(state, program.shard_batch(batch))
            found.append(values(state))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


class Spare(Model):
    """A parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


def test_what_no_step_uses_raises_no_alarm_in_debug_mode(tmp_path: Path) -> None:
    """Its old values are written back past the engine, which sums up what it has written."""
    with sw.simulate(MESH):
        put = sw.offload("opt", sw.disk(tmp_path))
        plan = sw.plan(Spare(), MESH, sw.zero(3, "fsdp"), put)
        program = sw.lower(plan, loss_fn, sw.optim.adamw(1e-2)).bind(debug=True)
        state = program.init(seed=0)
        before = sw.to_global(state.params)["spare.weight"].clone()
        state = train(program, state, 3)
        assert torch.equal(sw.to_global(state.params)["spare.weight"], before)


def test_a_copy_for_a_background_save_lies_on_disk_beside_what_it_copies(tmp_path: Path) -> None:
    store = Store(torch.device("cpu"))
    resting = store.zeros(sw.disk(tmp_path), 1000, torch.float32)
    resting.copy_(torch.arange(1000))
    here = torch.arange(10.0)
    chunks: list[Any] = [("a", resting[100:900].view(20, 40).t()), ("b", here)]
    copy = HostCopy(store)
    taken = [values for _, values in copy.take(chunks)]
    folder = store.folder(tmp_path)
    assert [folder.holds(one) for one in taken] == [True, False]
    assert copy.nbytes < 2 * 64
    resting.zero_()
    here.zero_()
    assert torch.equal(taken[0], torch.arange(1000.0)[100:900].view(20, 40).t())
    assert torch.equal(taken[1], torch.arange(10.0))


def test_nothing_is_fetched_ahead_where_nothing_is_away() -> None:
    back = plan_of(sw.offload("params", "pinned_host"), sw.offload("params", "device"))
    assert back.same_layout(plan_of())
