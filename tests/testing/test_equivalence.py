"""The harness notices: whatever is broken on purpose is found, and the report says what it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.sharding.errors import ShardwiseError
from shardwise.sharding.simulation import Simulated
from shardwise.testing import EquivalenceError, assert_bitwise, assert_equivalent, tolerance
from shardwise.testing.models import Toy
from shardwise.transforms import initialise, rank_program
from shardwise.transforms.program import Program

pytestmark = pytest.mark.simulated

TOY = Toy(width=4, hidden=5, depth=2, vocab=7, features=("attention", "scalar"))
MESH = sw.Mesh(dp=2, fsdp=2)
ADAMW = sw.optim.adamw(1e-2)


def check(
    level: int = 2,
    *,
    by: Callable[..., None] = assert_equivalent,
    optimizer: sw.optim.GradientTransform = ADAMW,
    toy: Toy = TOY,
    **options: Any,
) -> None:
    model = toy.build()
    axes = ("dp", "fsdp") if level == 2 else "fsdp"
    plan = sw.plan(model, MESH, sw.zero(level, axes))
    batches = [toy.batch(11, seed) for seed in range(2)]
    by(model, toy.loss_fn, batches, plan=plan, optimizer=optimizer, **options)


def test_nothing_is_found_where_nothing_is_broken() -> None:
    for level in range(4):
        check(level)
        check(level, dtype=torch.float32)
        check(level, by=assert_bitwise)
    check(seed=None)
    check(mesh=sw.Mesh(dp=1, fsdp=3))


def reduce_without_the_last(self: Simulated, out: Tensor, whole: Tensor, axis: str) -> None:
    if self.world.mesh.coords(self.rank)[axis] == self.world.mesh[axis] - 1:
        whole = torch.zeros_like(whole)
    original_scatter(self, out, whole, axis)


def sum_without_the_last(self: Simulated, whole: Tensor, axis: str) -> None:
    mine = whole.clone()
    if self.world.mesh.coords(self.rank)[axis] == self.world.mesh[axis] - 1:
        mine.zero_()
    original_reduce(self, mine, axis)
    whole.copy_(mine)


def gather_swapped(self: Simulated, out: Tensor, mine: Tensor, axis: str) -> None:
    original_gather(self, out, mine, axis)
    out.copy_(out.view(self.world.mesh[axis], -1).flip(0).reshape(out.shape))


original_scatter = Simulated.reduce_scatter
original_reduce = Simulated.all_reduce
original_gather = Simulated.all_gather


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("level", "name", "broken"),
    [
        (1, "reduce_scatter", reduce_without_the_last),
        (2, "reduce_scatter", reduce_without_the_last),
        (3, "reduce_scatter", reduce_without_the_last),
        (0, "all_reduce", sum_without_the_last),
        (3, "all_reduce", sum_without_the_last),
    ],
)
def test_a_dropped_reduction_is_noticed(
    monkeypatch: pytest.MonkeyPatch, level: int, name: str, broken: Any, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(Simulated, name, broken)
    with pytest.raises(EquivalenceError, match="Law 1 is broken at step 0: gradients differ"):
        check(level, dtype=dtype)


def test_a_gather_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulated, "all_gather", gather_swapped)
    with pytest.raises(EquivalenceError, match="Law 1"):
        check(3)


def test_an_optimizer_whose_two_forms_differ_is_noticed() -> None:
    def apply(params: Any, grads: Any, state: Any, **extra: Any) -> Any:
        assert ADAMW.apply is not None
        return ADAMW.apply(params, {k: g * (1 + 1e-6) for k, g in grads.items()}, state, **extra)

    with pytest.raises(EquivalenceError, match=r"(parameters|optimizer states) differ"):
        check(optimizer=ADAMW._replace(apply=apply))


def test_a_loss_that_is_not_a_mean_over_rows_is_noticed() -> None:
    toy = Toy(width=4, hidden=5, depth=2, features=("batchnorm",))
    with pytest.raises(EquivalenceError, match="losses differ"):
        check(toy=toy)
    check(toy=toy, by=assert_bitwise)


def test_another_order_of_addition_is_noticed_only_by_its_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def backwards(self: Simulated, out: Tensor, whole: Tensor, axis: str) -> None:
        """Sums from the last rank to the first, by reversing what the ranks contribute."""
        size, place = self.world.mesh[axis], self.world.mesh.coords(self.rank)[axis]
        stack = whole.new_empty(size * whole.numel())
        original_gather(self, stack, whole.reshape(-1), axis)
        rows = stack.view(size, size, -1)[:, place].flip(0)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        out.view(-1).copy_(total)

    monkeypatch.setattr(Simulated, "reduce_scatter", backwards)
    options: dict[str, Any] = {"mesh": sw.Mesh(dp=1, fsdp=3)}
    check(2, **options)
    with pytest.raises(EquivalenceError, match="split reference"):
        check(2, by=assert_bitwise, **options)


def test_collectives_that_were_not_predicted_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Program, "last_collectives", property(lambda p: tuple(p._ranks[0].mover.executed[1:]))
    )
    with pytest.raises(EquivalenceError, match="Law 3 is broken at step 0: collectives differ"):
        check(2)


def test_an_init_that_depends_on_the_mesh_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = initialise.Shards.put

    def put(self: Any, path: str, whole: Tensor) -> None:
        original(self, path, whole + (0 if self._mesh.size == 1 else 1e-12))

    monkeypatch.setattr(initialise.Shards, "put", put)
    with pytest.raises(EquivalenceError, match="Law 6 is broken at step 0: initial weights"):
        check(2)


def test_a_step_that_differs_from_grads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rank_program.RankProgram.step

    def step(self: Any, state: Any, batch: Any) -> Any:
        state, metrics = original(self, state, batch)
        return state, replace(metrics, loss=metrics.loss * 1.5)

    monkeypatch.setattr(rank_program.RankProgram, "step", step)
    with pytest.raises(EquivalenceError, match="the loss of step differs from that of grads"):
        check(2)


def test_the_report_names_law_path_difference_mesh_and_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Simulated, "reduce_scatter", reduce_without_the_last)
    with pytest.raises(EquivalenceError) as caught:
        check(2)
    error = caught.value
    assert error.numbers["law"] == 1
    assert error.numbers["step"] == 0
    assert error.numbers["difference"] > error.numbers["allowed"] > 0
    assert error.numbers["path"] in dict(TOY.build().named_parameters())
    text = str(error)
    for part in (error.numbers["path"], "difference:", "Mesh(dp=2, fsdp=2)", "zero(2", "Fix:"):
        assert part in text
    assert isinstance(error, AssertionError)


def test_bits_are_refused_where_they_are_not_promised() -> None:
    clipped = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.sgd(0.1))
    with pytest.raises(ShardwiseError, match="not promised"):
        check(by=assert_bitwise, optimizer=clipped)
    with pytest.raises(ShardwiseError, match="gathered several times"):
        check(3, by=assert_bitwise, toy=Toy(width=4, depth=2, features=("twice",)))
    check(2, by=assert_bitwise, toy=Toy(width=4, depth=2, features=("twice",)))


def test_tolerances_come_from_dtype_and_depth() -> None:
    assert tolerance(torch.float64, 1) == tolerance(torch.float64, 10**9) == 1e-9
    assert tolerance(torch.float32, 1) == pytest.approx(16 * 2**-23)
    assert tolerance(torch.bfloat16, 4) == pytest.approx(2 * tolerance(torch.bfloat16, 1))
