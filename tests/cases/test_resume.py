"""F16-2, RNG-2, OPT-4, OPT-5, TIE-2, FRZ-1, HYB-1, MEM-1: what a resume must keep."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.errors import CheckpointError
from tests.cases.resumed import PAIR, program_of, tokens, train
from tests.transforms.carried import assert_bits, square

# -- F16-2 -------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("ranks", [1, 2])
def test_f16_2_the_scale_its_counters_and_the_schedule_resume(ranks: int, tmp_path: Path) -> None:
    mesh = sw.Mesh(fsdp=ranks)
    scale = sw.loss_scale(initial_power=16, window=3, hysteresis=1)
    torch.manual_seed(0)
    module = nn.Linear(6, 4).double()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    def batch(step: int) -> Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).double()
        return x * float("inf") if step == 4 else x

    def made() -> sw.Program:
        rate = sw.optim.warmup_cosine(1e-2, warmup=2, steps=20, start=5e-3)
        plan = sw.plan(module, mesh, sw.zero(3, "fsdp"), scale)
        return sw.lower(plan, loss, sw.optim.adamw(rate)).bind()

    def run(program: sw.Program, state: Any, steps: range) -> tuple[Any, list[Any]]:
        seen: list[Any] = []
        for step in steps:
            state, _ = program.step(state, program.shard_batch(batch(step)))
            first = state.ranks[0]
            numbers = [float(one) for one in first.loss_scale]
            seen.append((numbers, int(first.count), float(first.opt.learning_rate)))
        return state, seen

    with sw.simulate(mesh):
        program = made()
        state, straight = run(program, program.init(0), range(10))
        again = made()
        half, before = run(again, again.init(0), range(6))
        again.save(tmp_path / "saved", half)
        resumed, after = run(made(), made().restore(tmp_path / "saved"), range(6, 10))
    assert before + after == straight
    assert straight[4][0][3] == straight[9][0][3] == 1.0  # one skipped
    assert straight[9][1] == 9
    scales = [numbers[0] for numbers, _, _ in straight]
    assert scales[3] > scales[4] < scales[9]  # it fell, and it grew again
    assert_bits(resumed, state)


# -- RNG-2 -------------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 6), drop, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


@pytest.mark.simulated
@pytest.mark.parametrize("kind", [nn.Dropout, sw.Dropout])
def test_rng_2_dropout_resumes_whatever_ranks_have_drawn(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    """Masks follow from the saved seed and step, so generators of ranks are no part of it."""
    module = Dropping(kind(0.5)).double()
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)).double()

    def made(ranks: int) -> sw.Program:
        plan = sw.plan(module, sw.Mesh(fsdp=ranks), sw.zero(3, "fsdp", on=0, pad=True))
        return sw.lower(plan, square, sw.optim.adamw(1e-2)).bind()

    with sw.simulate(PAIR) as world:
        program = made(2)
        straight = train(program, program.init(3), [x] * 6)
        half = train(program, program.init(3), [x] * 3)
        program.save(tmp_path / "saved", half)
    with sw.simulate(PAIR) as world:
        world.run(lambda rank: [torch.manual_seed(90 + rank), torch.rand(7 * rank + 1)])
        again = made(2)
        resumed = train(again, again.restore(tmp_path / "saved"), [x] * 3)
        # Another seed in the program changes nothing, unless it is asked for.
        other = again.init(sw.from_checkpoint(tmp_path / "saved"), seed=4)
        other = train(again, other, [x] * 3)
    assert_bits(resumed, straight)
    assert sw.fingerprint(other) != sw.fingerprint(resumed)
    runs = []
    for _ in range(2):
        with sw.simulate(sw.Mesh(fsdp=3)):
            elsewhere = made(3)
            runs.append(train(elsewhere, elsewhere.restore(tmp_path / "saved"), [x] * 3))
    assert_bits(*runs)
    if kind is sw.Dropout:  # layout independent
        for path, value in sw.to_global(runs[0].params).items():
            want = sw.to_global(straight.params)[path]
            torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-12)


# -- OPT-4, OPT-5 ------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("foreach", [False, True])
def test_opt_4_the_step_of_adam_is_whole_and_goes_on(foreach: bool, tmp_path: Path) -> None:
    """In torch's own Adam run by a program, against torch's Adam on the unsharded model."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    batches = [torch.randn(12, 6).double() for _ in range(5)]

    def made(ranks: int) -> sw.Program:
        optimizer = sw.optim.from_torch(torch.optim.Adam, lr=1e-2, foreach=foreach)
        plan = sw.plan(module, sw.Mesh(fsdp=ranks), sw.zero(3, "fsdp", on=0, pad=True))
        return sw.lower(plan, square, optimizer).bind()

    def steps(state: Any) -> list[Tensor]:
        return list(sw.to_global(state.opt.steps).values())

    with sw.simulate(PAIR):
        program = made(2)
        state = train(program, program.init(sw.from_module(module)), batches[:3])
        program.save(tmp_path / "saved", state)
    kinds = {one.dtype for one in steps(state)}
    for ranks in (1, 2, 3):
        with sw.simulate(sw.Mesh(fsdp=ranks)):
            other = made(ranks)
            there = other.restore(tmp_path / "saved")
            assert {int(one) for one in steps(there)} == {3}
            assert {one.dtype for one in steps(there)} == kinds
            assert {tuple(one.shape) for one in steps(there)} == {()}
            there = train(other, there, batches[3:])
            assert {int(one) for one in steps(there)} == {5}
            params = sw.to_global(there.params)
        plain = torch.optim.Adam(module.parameters(), lr=1e-2)
        start = [p.detach().clone() for p in module.parameters()]
        for one in batches:
            plain.zero_grad()
            square(module, one).backward()
            plain.step()
        for path, value in module.named_parameters():
            torch.testing.assert_close(params[path], value.detach(), rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for p, value in zip(module.parameters(), start, strict=True):
                p.copy_(value)
                p.grad = None


@pytest.mark.simulated
def test_opt_5_rates_are_those_of_the_step_with_and_without_a_saved_schedule(
    tmp_path: Path,
) -> None:
    module = nn.Linear(6, 4).double()
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)).double()
    cosine = sw.optim.warmup_cosine(1e-2, warmup=0, steps=10)

    def made(ranks: int, rate: Any) -> sw.Program:
        moves = [sw.zero(3, "fsdp", on=0, pad=True), sw.accumulate(4)]
        plan = sw.plan(module, sw.Mesh(fsdp=ranks), *moves)
        return sw.lower(plan, square, sw.optim.adamw(rate)).bind()

    def rates(program: sw.Program, state: Any, count: int) -> list[float]:
        seen: list[float] = []
        for _ in range(count):
            state, _ = program.step(state, program.shard_batch(x))
            seen.append(float(state.ranks[0].opt.learning_rate))
        return seen

    want = [float(cosine(torch.tensor(step))) for step in range(10)]
    for name, rate in (("cosine", cosine), ("constant", 3e-4)):
        with sw.simulate(PAIR):
            program = made(2, rate)
            state = train(program, program.init(0), [x] * 6)
            program.save(tmp_path / name, state)
        for ranks in (1, 2, 3):
            with sw.simulate(sw.Mesh(fsdp=ranks)):
                other = made(ranks, cosine)
                there = other.restore(tmp_path / name)
                assert rates(other, there, 4) == pytest.approx(want[6:], rel=1e-12)


# -- TIE-2 -------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


@pytest.mark.simulated
def test_tie_2_copies_that_differ_are_never_chosen_from_in_silence(tmp_path: Path) -> None:
    def made(module: nn.Module, ranks: int = 2) -> sw.Program:
        plan = sw.plan(module, sw.Mesh(fsdp=ranks), sw.zero(3, "fsdp", on=0, pad=True))
        return sw.lower(plan, square, sw.optim.sgd(0.1)).bind()

    apart = Tied(tie=False)
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    with sw.simulate(PAIR):
        loose = made(apart)
        state = loose.init(sw.from_module(apart))
        loose.save(tmp_path / "equal", state)
        drifted = train(loose, state, [tokens(0)])
        loose.save(tmp_path / "drifted", drifted)
        tied = made(Tied())
        one = tied.restore(tmp_path / "equal")
        assert list(one.ranks[0].params) == ["embed.weight"]
        assert torch.equal(sw.to_global(one.params)["embed.weight"], apart.embed.weight)
        with pytest.raises(CheckpointError, match="1 tensors are stored in copies that") as caught:
            tied.restore(tmp_path / "drifted")
        assert "params/head.weight differs from params/embed.weight" in str(caught.value)
        assert "partial=" in caught.value.fix
        assert caught.value.numbers["count"] == 1
        with pytest.warns(UserWarning, match=r"params/head.weight"):
            chosen = tied.restore(tmp_path / "drifted", partial="head.weight")
        want = sw.to_global(drifted.params)["embed.weight"]
        assert torch.equal(sw.to_global(chosen.params)["embed.weight"], want)
        # From one copy a model that has two gets both.
        tied.save(tmp_path / "tied", chosen)
        both = sw.to_global(loose.restore(tmp_path / "tied").params)
    assert torch.equal(both["head.weight"], want)
    assert torch.equal(both["embed.weight"], want)
    names = read_manifest(tmp_path / "tied").by_name
    assert [name for name in names if name.startswith("params/")] == ["params/embed.weight"]


# -- FRZ-1, HYB-1 ------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_frz_1_frozen_weights_are_saved_and_train_later(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    x = torch.randn(12, 6)

    def made(count: int, *moves: sw.Transform) -> sw.Program:
        plan = sw.plan(module, sw.Mesh(fsdp=count), sw.zero(3, "fsdp", on=0, pad=True), *moves)
        return sw.lower(plan, square, sw.optim.adamw(1e-2)).bind()

    with sw.simulate(PAIR):
        program = made(2, sw.freeze("0"))
        state = train(program, program.init(0), [x, x])
        program.save(tmp_path / "saved", state)
        want = sw.to_global(state.params)
    assert not any("opt/mu/0." in name for name in read_manifest(tmp_path / "saved").by_name)
    with sw.simulate(sw.Mesh(fsdp=ranks)):
        other = made(ranks, sw.freeze("0"))
        there = other.restore(tmp_path / "saved")
        assert all(torch.equal(v, want[p]) for p, v in sw.to_global(there.params).items())
        assert set(there.ranks[0].opt.mu) == {"1.weight", "1.bias"}
        assert "0.weight" not in other.lowered.plan.opt
        # What the new plan trains besides starts with fresh moments, and that is said before.
        free = made(ranks)
        report = sw.from_checkpoint(tmp_path / "saved").into(free.lowered)
        assert set(report.fresh) == {
            f"opt/{at}/0.{leaf}" for at in ("mu", "nu") for leaf in ("weight", "bias")
        }
        freed = free.restore(tmp_path / "saved")
        mu = sw.to_global(freed.opt.mu)
        assert not mu["0.weight"].any()
        assert torch.equal(mu["1.weight"], sw.to_global(state.opt.mu)["1.weight"])
        train(free, freed, [x])


@pytest.mark.simulated
def test_hyb_1_replicas_are_equal_after_loading_and_after_training(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    with sw.simulate(sw.Mesh(fsdp=3)):
        program = program_of(module, 3, on=0, pad=True)
        state = train(program, program.init(0), [x])
        program.save(tmp_path / "saved", state)
    mesh = sw.Mesh(replicate=2, shard=2)
    with sw.simulate(mesh) as world:
        world.run(lambda rank: torch.manual_seed(rank))
        plan = sw.plan(module, mesh, sw.zero(3, "shard", on=0, pad=True))
        hybrid = sw.lower(plan, square, sw.optim.adamw(1e-2)).bind()
        there = hybrid.restore(tmp_path / "saved")
        for _ in range(2):
            ranks = there.ranks
            for one, other in ((0, 2), (1, 3)):
                for name, flat in ranks[one].flats.items():
                    assert torch.equal(flat, ranks[other].flats[name])
                    assert torch.equal(
                        ranks[one].opt.mu["0.weight"].to_local(),
                        ranks[other].opt.mu["0.weight"].to_local(),
                    )
            there = train(hybrid, there, [x] * 5)
    with sw.simulate(mesh):
        again = hybrid.restore(tmp_path / "saved")
    want = sw.to_global(state.params)
    assert all(torch.equal(v, want[p]) for p, v in sw.to_global(again.params).items())


# -- MEM-1 -------------------------------------------------------------------------------------

LAYERS, WIDTH = 16, 1024
MIB = 1 << 20


def big() -> nn.Module:
    """64 MiB in weights of 4."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def anonymous_bytes() -> int:
    """Mapped pages of files do not count."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most anonymous memory while a block runs, beyond what was there."""

    def __enter__(self) -> Peak:
        """Start to look."""
        self._start = self.most = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()
        self.grown = self.most - self._start

    def _look(self) -> None:
        while not self._over.is_set():
            self.most = max(self.most, anonymous_bytes())
            time.sleep(0.001)


def load_in_little_memory(place: Path) -> tuple[int, int, str]:
    plan = sw.plan(big(), sw.Mesh(fsdp=4), sw.zero(3, "fsdp"))
    program = sw.lower(plan, square, sw.optim.sgd(0.1)).bind()
    with Peak() as peak:
        state = program.restore(place)
    return peak.grown, state.nbytes, sw.fingerprint(state)


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_mem_1_a_rank_holds_its_shard_and_little_more(tmp_path: Path) -> None:
    with sw.simulate(PAIR):
        plan = sw.plan(big(), PAIR, sw.zero(3, "fsdp", on=1))
        program = sw.lower(plan, square, sw.optim.sgd(0.1)).bind()
        state = program.init(0)
        program.save(tmp_path / "saved", state)
        mark = sw.fingerprint(state)
    results = sw.spawn(load_in_little_memory, ranks=4, args=(tmp_path / "saved",), timeout=60)
    for grown, shard, seen in results:
        assert seen == mark
        assert shard == pytest.approx(LAYERS * WIDTH * WIDTH, rel=0.01)
        assert shard < grown + MIB
        assert grown <= 1.25 * (shard + 4 * WIDTH * WIDTH) + 16 * MIB
