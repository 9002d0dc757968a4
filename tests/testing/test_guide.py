"""docs/testing.md is true: its blocks run, its messages are printed, failures shrink as it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

import shardwise as sw
from shardwise.sharding.simulation import Simulated
from shardwise.testing import CommsError, EquivalenceError, assert_comms, assert_equivalent
from shardwise.testing.strategies import plans
from shardwise.transforms import initialise
from shardwise.transforms.program import Program

pytestmark = pytest.mark.simulated

GUIDE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
PRINTED = re.findall(r"```text\n(.*?)```", GUIDE, flags=re.DOTALL)


def run(*blocks: int) -> dict[str, Any]:
    """Names after some blocks of the guide."""
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(PYTHON[block], names)
    return names


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text.strip())


def test_ten_lines_test_a_model_under_every_plan() -> None:
    assert len([line for line in PYTHON[1].splitlines() if line]) <= 10
    run(0, 1)["test_tagger_trains_alike_under_every_plan"]()


def test_budgets_hold_before_a_run_and_after_it() -> None:
    assert run(0, 3)["lowered"].plan.mesh.size == 512
    assert run(0, 3, 4)["program"].last_collectives


def test_memory_block_runs() -> None:
    assert run(0, 5)["usage"].peak > 0


def test_the_budget_message_is_the_one_shown() -> None:
    names = run(0)
    plan = sw.plan(names["Tagger"](), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"), sw.keep_gathered())
    lowered = sw.lower(plan, names["loss_fn"], sw.optim.adamw(1e-2))
    with pytest.raises(CommsError) as caught:
        assert_comms(lowered, all_gather=9, max_bytes=2_000)
    lines = [line.rstrip() for line in str(caught.value).splitlines()]
    assert lines == PRINTED[1].splitlines()
    assert caught.value.numbers["all_gather"] == 6


# -- failures shrink, and say which law broke ----------------------------------------------------


def smallest_failure(
    *, loss: str = "loss_fn", optimizer: sw.optim.GradientTransform | None = None
) -> tuple[EquivalenceError, sw.Plan]:
    """Run the guide's property until it fails; the error and the plan that hypothesis ends with."""
    names = run(0, 2)
    batches = [names["make_batch"](0)]
    last: list[sw.Plan] = []

    # The explain phase would run more plans after the smallest one.
    @settings(
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(plan=plans(names["Tagger"]()))
    def holds(plan: sw.Plan) -> None:
        last[:] = [plan]
        chosen = optimizer or sw.optim.adamw(1e-2)
        assert_equivalent(names["Tagger"](), names[loss], batches, plan=plan, optimizer=chosen)

    with pytest.raises(EquivalenceError) as caught:
        holds()
    assert any(repr(last[0]) in note for note in caught.value.__notes__)
    return caught.value, last[0]


def transforms_of(plan: sw.Plan) -> list[str]:
    return list(dict.fromkeys(edit.by for edit in plan.edits))


def test_a_careless_loss_shrinks_to_two_ranks_and_the_message_shown() -> None:
    error, plan = smallest_failure(loss="careless_loss")
    assert (plan.mesh, transforms_of(plan)) == (sw.Mesh(fsdp=2), [])
    assert without_numbers(str(error)) == without_numbers(PRINTED[0])
    assert error.numbers["law"] == 1
    assert error.numbers["difference"] > error.numbers["allowed"]


def test_an_optimizer_that_couples_what_it_does_not_say() -> None:
    """Groups of a program hold several parameters, so one rank is enough to see it."""

    def update(grads: Any, state: Any, params: Any, **_: Any) -> Any:
        return {key: -0.01 * grad / grad.norm() for key, grad in grads.items()}, state

    error, plan = smallest_failure(
        optimizer=sw.optim.GradientTransform(lambda params: sw.optim.EmptyState(), update)
    )
    assert (plan.mesh, transforms_of(plan)) == (sw.Mesh(fsdp=1), [])
    assert "Law 1 is broken at step 0: parameters differ" in str(error)
    assert "Fix: an optimizer of your own says what it couples" in str(error)


def lose_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Simulated.reduce_scatter

    def reduce_scatter(self: Simulated, out: Tensor, whole: Tensor, axis: str) -> None:
        last = self.world.mesh.coords(self.rank)[axis] == self.world.mesh[axis] - 1
        original(self, out, torch.zeros_like(whole) if last else whole, axis)

    monkeypatch.setattr(Simulated, "reduce_scatter", reduce_scatter)


def hide_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = property(lambda program: tuple(program._ranks[0].mover.executed[1:]))
    monkeypatch.setattr(Program, "last_collectives", hidden)


def init_by_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    original = initialise.Shards.put

    def put(self: Any, path: str, whole: Tensor) -> None:
        original(self, path, whole + (0 if self._mesh.size == 1 else 1e-12))

    monkeypatch.setattr(initialise.Shards, "put", put)


@pytest.mark.parametrize(
    ("fault", "law", "text", "num_transforms"),
    [
        (lose_the_last, 1, "gradients differ from the unsharded model", 1),
        (hide_one, 3, "collectives differ", 0),
        (init_by_mesh, 6, "initial weights differ", 0),
    ],
)
def test_a_fault_of_the_engine_shrinks_to_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    law: int,
    text: str,
    num_transforms: int,
) -> None:
    fault(monkeypatch)
    error, plan = smallest_failure()
    assert plan.mesh == sw.Mesh(fsdp=2)
    assert len(transforms_of(plan)) == num_transforms
    assert str(error).startswith(f"Law {law} is broken at step 0: {text}")
    assert "Fix: report this plan" in str(error) or law == 6
    assert error.numbers["law"] == law


def test_plans_are_drawn_for_the_model_and_print_short() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 5))

    @settings(max_examples=30, database=None)
    @given(plan=plans(model, max_ranks=2, units=["*"]))
    def check(plan: sw.Plan) -> None:
        assert plan.module is model
        assert plan.mesh.size <= 2
        assert [unit.name for unit in plan.units if unit.kind == "unit"] == ["0", "1"]
        assert "\n" not in repr(plan)

    check()
