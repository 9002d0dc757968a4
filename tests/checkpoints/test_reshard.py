"""From plan to plan by the state alone: bits, bytes against the lower bound, bounded messages."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding import relocate
from shardwise.sharding.errors import PlanError, RankError, StateError
from shardwise.transforms.resharding import _reshard, relower, resharding
from tests.transforms.carried import FIRST, PLANS, assert_bits, batch, loss_fn, model, square, whole

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("small", [False, True])
def test_a_walk_through_all_plans(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With messages of a few rows at most too: the bits are those of `from_state`."""
    if small:
        monkeypatch.setattr(relocate, "MESSAGE_BYTES", 200)
    module = model()
    plans = {name: make(module) for name, make in PLANS.items()}
    names = [*list(PLANS)[2:], *list(PLANS)[:3]]
    optimizer = sw.optim.adamw(1e-2)
    with sw.simulate(FIRST):
        program = sw.lower(plans["zero 3"], loss_fn, optimizer).bind()
        start, _ = program.step(program.init(0), program.shard_batch(batch()))
    want, state = whole(start), start
    for one, other in itertools.pairwise(names):
        reports: list[Any] = []
        there = sw.reshard(state, plans[one], plans[other], report=reports.append)
        assert len(reports) == 4
        assert sum(r.sent_bytes for r in reports) == sum(r.received_bytes for r in reports)
        assert all(r.bound_bytes <= r.received_bytes for r in reports)
        if small:
            sent = [item.nbytes for report in reports for item in report.items]
            assert max(sent, default=0) <= 400  # one row goes to several
        for leaf, value in whole(there).items():
            assert torch.equal(value, want[leaf.replace("master", "params")]), (other, leaf)
        with sw.simulate(plans[other].mesh):
            mine = sw.lower(plans[other], loss_fn, optimizer).bind()
            assert_bits(mine.init(sw.from_state(state)), there)
            mine.step(there, mine.shard_batch(batch()), donate=False)
        state = there
    assert_bits(state, start)


class Deep(nn.Module):
    """Layers of different sizes, the largest beyond any message of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


LEVELS = {
    "ddp": lambda m: sw.plan(m, FIRST),
    "zero 1": lambda m: sw.plan(m, FIRST, sw.zero(1, "fsdp")),
    "zero 3": lambda m: sw.plan(m, FIRST, sw.zero(3, "fsdp")),
    "hybrid": lambda m: sw.plan(m, sw.Mesh(node=2, local=2), sw.zero(3, "local")),
    "columns": lambda m: sw.plan(
        m,
        FIRST,
        sw.zero(3, "fsdp", on=1, where="layers.*.weight"),
        sw.zero(3, "fsdp", where="embed"),
    ),
}
HALF = sw.precision(params="bfloat16", compute="bfloat16")


@pytest.mark.parametrize("half", [False, True])
def test_bytes_are_near_the_lower_bound_and_messages_bounded(
    half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relocate, "MESSAGE_BYTES", 1 << 14)
    module = Deep()
    plans = {name: make(module) for name, make in LEVELS.items()}
    if half:
        plans = {name: HALF(plan) for name, plan in plans.items()}
    lowered = {name: sw.lower(plan, square, sw.optim.adamw(1e-2)) for name, plan in plans.items()}
    moved = 0
    for one, first in lowered.items():
        with sw.simulate(first.plan.mesh):
            state = first.bind().init(0)
        for other, second in lowered.items():
            told = [resharding(part, second) for part in state.ranks]
            bound = sum(report.bound_bytes for report in told)
            received = sum(report.received_bytes for report in told)
            assert bound <= received <= 1.2 * bound, (one, other, received, bound)
            assert sum(report.sent_bytes for report in told) == received
            sizes = [item.nbytes for report in told for item in report.items]
            assert max(sizes, default=0) <= 1 << 14
            moved += received
    assert moved > 0


def test_the_report_says_the_bytes() -> None:
    plan, other = LEVELS["zero 3"](Deep()), LEVELS["hybrid"](Deep())
    lines: list[str] = []
    with sw.simulate(plan.mesh):
        state = sw.lower(plan, square, sw.optim.sgd(0.1, momentum=0.9)).bind().init(0)
        sw.reshard(state, plan, other, report=lambda one: lines.append(str(one)))
    assert len(lines) == 4
    numel = sum(p.numel() for p in Deep().parameters())
    lacking = [int(line.split("it lacks ")[1].split("\n")[0].replace(",", "")) for line in lines]
    # Ranks have the quarters 0, 1, 2, 3 and want the halves 0, 1, 0, 1 of parameters and momentum.
    assert lacking == [2 * numel, 4 * numel, 4 * numel, 2 * numel]
    assert [line.split(" bytes and receives ")[1].split(" ")[0] for line in lines] == [
        f"{nbytes:,}" for nbytes in lacking
    ]
    assert "(1.00x)" in lines[0]
    assert "optimizer state is kept for 9 parameters" in lines[0]


def test_another_plan_and_a_copied_state_are_refused() -> None:
    plan, other = LEVELS["zero 3"](Deep()), LEVELS["ddp"](Deep())
    with sw.simulate(plan.mesh):
        state = sw.lower(plan, square, sw.optim.sgd(0.1)).bind().init(0)
    with pytest.raises(PlanError, match="plan_a is not the plan that the state lies by") as caught:
        sw.reshard(state, other, plan)
    assert "pass the plan of the program" in caught.value.fix
    smaller = sw.plan(Deep(), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    with pytest.raises(StateError, match="A state on 4 ranks cannot be carried to 2"):
        sw.reshard(state, plan, smaller)
    first = state.ranks[0]
    object.__setattr__(first.home, "origin", None)
    with pytest.raises(StateError, match="does not know the program") as told:
        sw.reshard(first, plan, other)
    assert "from_state" in told.value.fix


def test_a_failure_or_another_plan_on_one_rank_is_told_on_all() -> None:
    module = Deep()
    plan, other, third = (LEVELS[name](module) for name in ("zero 3", "ddp", "zero 1"))

    def fail(report: Any) -> None:
        if report.rank == 2:
            raise ValueError("no paper")

    with sw.simulate(plan.mesh) as world:
        state = sw.lower(plan, square, sw.optim.sgd(0.1)).bind().init(0)
        with pytest.raises(RankError, match=r"Rank 2 failed in reshard(.*\n)*.*no paper"):
            sw.reshard(state, plan, other, report=fail)

        def differ(rank: int) -> str:
            one = state.ranks[rank]
            lowered = relower(one.home.origin.lowering, third if rank == 1 else other)
            with pytest.raises(PlanError, match="Ranks reshard to different plans") as caught:
                _reshard(one, plan, lowered, None)
            return str(caught.value)

        texts = world.run(differ)
    assert len(set(texts)) == 1
    assert "rank 1: Plan" in texts[0]
    assert "pass the same plan_b" in texts[0]
    sw.reshard(state, plan, other)  # it is unchanged, and usable


def test_a_copy_of_a_state_knows_its_job_and_a_pickle_does_not() -> None:
    plan = LEVELS["zero 3"](Deep())
    with sw.simulate(plan.mesh):
        state = sw.lower(plan, square, sw.optim.sgd(0.1)).bind().init(0)
    origin = state.ranks[0].home.origin
    assert copy.deepcopy(origin) is origin
    kind, args = origin.__reduce__()
    assert kind(*args) is None


def change_on_real_ranks() -> tuple[bool, int, int]:
    """To another mesh and back; a program of the other plan trains on."""
    module = Deep()
    plans = [LEVELS["zero 3"](module), LEVELS["hybrid"](module)]
    optimizer = sw.optim.adamw(1e-2)
    one, two = (sw.lower(plan, square, optimizer).bind() for plan in plans)
    x = torch.arange(16) % 512
    state, _ = one.step(one.init(0), one.shard_batch(x))
    reports: list[Any] = []
    before = sw.fingerprint(state)
    there = sw.reshard(state, *plans, report=reports.append)
    same = sw.fingerprint(there) == before
    back = sw.reshard(there, *reversed(plans))
    same = same and sw.fingerprint(back) == before
    same = same and all(torch.equal(state.flats[n], back.flats[n]) for n in state.flats)
    two.step(there, two.shard_batch(x))
    return same, reports[0].received_bytes, reports[0].bound_bytes


@pytest.mark.gloo
@pytest.mark.timeout(90)
def test_real_ranks_reshard_and_back() -> None:
    results = sw.spawn(change_on_real_ranks, ranks=4, timeout=60)
    assert all(same for same, _, _ in results)
    assert all(0 < bound <= received <= 1.2 * bound for _, received, bound in results)
