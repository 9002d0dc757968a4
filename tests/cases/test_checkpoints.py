"""CKP-1 to 4: another number of ranks, another layout, options of groups, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.errors import CheckpointError
from tests.cases.resumed import PAIR, program_of, tokens, train
from tests.transforms.carried import square


def whole(state: Any) -> dict[str, Tensor]:
    """Parameters and moments."""
    parts = {"params": state.params, "mu": state.opt.mu, "nu": state.opt.nu}
    named = {at: sw.to_global(part) for at, part in parts.items()}
    return {f"{at}/{path}": value for at, part in named.items() for path, value in part.items()}


# -- CKP-1 -------------------------------------------------------------------------------------


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.out = nn.Linear(5, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(tokens)))


class Lopsided(nn.Module):
    """One large weight and ten of one to three elements."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(64, 8))
        self.small = nn.ParameterList(nn.Parameter(torch.ones(1 + i % 3)) for i in range(10))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.large)
        for one in self.small:
            nn.init.ones_(one)

    def forward(self, tokens: Tensor) -> Tensor:
        scale = sum(one.sum() for one in self.small)
        return self.large[tokens] * scale


@pytest.mark.simulated
@pytest.mark.parametrize("kind", [Uneven, Lopsided])
def test_ckp_1_another_world_size(kind: type[nn.Module], tmp_path: Path) -> None:
    """Everything is equal, two more steps too, and nothing stored depends on who wrote it."""
    module = kind().double()
    batches = [tokens(seed) for seed in range(5)]
    stored = []
    for ranks in (2, 3):
        place = tmp_path / f"{ranks}"
        with sw.simulate(sw.Mesh(fsdp=ranks)):
            program = program_of(module, ranks)
            state = train(program, program.init(0), batches[:3])
            program.save(place, state)
            saved, want = whole(state), whole(train(program, state, batches[3:]))
        stored.append([(one.name, one.shape, one.dtype) for one in read_manifest(place).tensors])
        for other in (1, 2, 3, 4):
            with sw.simulate(sw.Mesh(fsdp=other)):
                program = program_of(module, other, level=other % 4)
                state = program.restore(place)
                for name, value in whole(state).items():
                    assert torch.equal(value, saved[name]), name
                assert sw.to_global(state.step) == sw.to_global(state.opt.count) == 3
                state = train(program, state, batches[3:])
            for name, value in whole(state).items():
                torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-12)
    assert stored[0] == stored[1]


def save_on_ranks(place: Path) -> str:
    program = program_of(Uneven().double(), 2)
    state = train(program, program.init(0), [tokens(seed)[:12] for seed in range(3)])
    program.save(place, state)
    return sw.fingerprint(state)


def restore_on_ranks(place: Path) -> str:
    program = program_of(Uneven().double(), 3, level=2)
    state = program.restore(place)
    mark = sw.fingerprint(state)
    train(program, state, [tokens(3)])
    return mark


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_ckp_1_real_ranks_two_to_three_to_one(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    marks = sw.spawn(save_on_ranks, ranks=2, args=(place,), timeout=50)
    marks += sw.spawn(restore_on_ranks, ranks=3, args=(place,), timeout=50)
    with sw.simulate(sw.Mesh(fsdp=1)):
        marks.append(sw.fingerprint(program_of(Uneven().double(), 1).restore(place)))
    assert len(set(marks)) == 1


# -- CKP-2, CKP-3 ------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"dp": 2}, {"dp": 2, "fsdp": 2}, {"fsdp": 3}])
def test_ckp_2_another_layout_with_masters(axes: dict[str, int], tmp_path: Path) -> None:
    """Masters, moments and the step come back in bits; nothing starts fresh without a word."""
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    half = sw.precision(params="bfloat16", compute="bfloat16")
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))

    def made(mesh: sw.Mesh) -> sw.Program:
        level = sw.zero(3, mesh.names[-1], on=0, pad=True)
        return sw.lower(sw.plan(module, mesh, level, half), square, sw.optim.adamw(1e-2)).bind()

    first = sw.Mesh(dp=2, fsdp=2)
    with sw.simulate(first):
        program = made(first)
        state = train(program, program.init(0), [x, x + 1, x - 1])
        program.save(tmp_path / "saved", state)
    mesh = sw.Mesh(**axes)
    with sw.simulate(mesh):
        there = made(mesh).restore(tmp_path / "saved")
    for part in ("params", "master"):
        expected = sw.to_global(getattr(state, part))
        got = sw.to_global(getattr(there, part))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[path], value) for path, value in expected.items())
    expected = whole(state)
    assert all(torch.equal(value, expected[name]) for name, value in whole(there).items())
    assert sw.to_global(there.step) == sw.to_global(there.opt.count) == 3
    assert sw.fingerprint(there) == sw.fingerprint(state)


def grouped(rate: float, other: float) -> Any:
    """Three groups, of which nothing falls into the last one."""
    adamw = sw.optim.adamw
    parts = {
        "decayed": sw.optim.inject(adamw, learning_rate=rate, weight_decay=0.1),
        "plain": sw.optim.inject(adamw, learning_rate=other, weight_decay=0.0),
        "empty": sw.optim.inject(adamw, learning_rate=1.0),
    }
    labels = {"decayed": "*.weight", "plain": "*.bias"}
    return sw.optim.partition(parts, labels, otherwise="empty")


@pytest.mark.simulated
def test_ckp_3_every_group_has_its_saved_options(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)).double()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    plan = sw.plan(module, PAIR, sw.zero(2, "fsdp"))
    with sw.simulate(PAIR):
        program = sw.lower(plan, square, grouped(1e-3, 1e-4)).bind()
        state = train(program, program.init(0), [x])
        program.save(tmp_path / "saved", state)
        want = sw.to_global(train(program, state, [x + 1]).params)
        # Other defaults: those of the state are the ones that count.
        other = sw.lower(plan, square, grouped(0.5, 0.7)).bind()
        there = other.restore(tmp_path / "saved")
        assert sw.fingerprint(there) != sw.fingerprint(other.init(0))
        got = sw.to_global(train(other, there, [x + 1]).params)
    assert all(torch.equal(got[path], value) for path, value in want.items())
    names = read_manifest(tmp_path / "saved").by_name
    rates = [name for name in names if name.endswith("learning_rate") and "hyper" in name]
    assert len(rates) == 3, sorted(names)


# -- CKP-4 -------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_ckp_4_missing_optimizer_state_must_be_named(tmp_path: Path) -> None:
    """Sizes never change, dtypes on request, and a state without moments by name only."""
    plain = nn.Sequential(nn.Linear(3, 4))

    def made(module: nn.Module, optimizer: Any) -> sw.Program:
        plan = sw.plan(module, PAIR, sw.zero(3, "fsdp", on=0, pad=True))
        return sw.lower(plan, square, optimizer).bind()

    adamw, sgd = sw.optim.adamw(1e-2), sw.optim.sgd(1e-2)
    with sw.simulate(PAIR):
        bare = made(plain, sgd)
        bare.save(tmp_path / "bare", bare.init(0))
        with pytest.raises(CheckpointError) as caught:
            made(plain, adamw).restore(tmp_path / "bare")
        assert set(caught.value.numbers["missing"]) == {
            f"opt/{at}/0.{leaf}" for at in ("mu", "nu") for leaf in ("weight", "bias")
        }
        with pytest.warns(UserWarning, match="4 are missing and keep the program's own values"):
            there = made(plain, adamw).restore(tmp_path / "bare", partial="opt/**")
        assert not any(value.any() for value in sw.to_global(there.opt.mu).values())
        wider = nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(CheckpointError, match=r"0.weight: \(4, 3\) saved, \(4, 4\) here"):
            made(wider, sgd).restore(tmp_path / "bare", partial="**", cast=True)
