"""Edits: values that compare by meaning, phases, and the replay."""

from __future__ import annotations

import itertools
import random

import pytest

from shardwise.sharding.draft import selected
from shardwise.sharding.edits import (
    PHASES,
    AccumulateEdit,
    Clauses,
    FreezeEdit,
    HomeEdit,
    KeepEdit,
    LossScaleEdit,
    PrefetchEdit,
    RematEdit,
    SequenceEdit,
    TensorEdit,
    TreeAtEdit,
)
from shardwise.sharding.errors import PlanError
from shardwise.sharding.failures import Failure, raise_failures
from shardwise.sharding.offload_edit import OffloadEdit
from shardwise.sharding.plan import plan
from shardwise.sharding.precision import PrecisionEdit
from shardwise.sharding.replay import KINDS
from shardwise.sharding.units import param_infos
from tests.sharding.toys import MESH, Tiny

pytestmark = pytest.mark.abstract

EDITS = [
    HomeEdit(home="params", axis=("fsdp",)),
    HomeEdit(home="opt", axis=("fsdp", "dp"), where=(("layers.*",),)),
    FreezeEdit(where=(("embed",),)),
    TensorEdit(axis="dp", names=("d0",), logits="cut", where=(("embed",),)),
    SequenceEdit(axis="dp", active=False),
    KeepEdit(where=(("layers.0",),)),
    PrefetchEdit(distance=1),
    OffloadEdit(part="moments", tier="disk:/local", fraction=0.5, where=(("layers.*",),)),
    PrecisionEdit(compute="bfloat16", rounding="nearest"),
    LossScaleEdit(window=500),
    AccumulateEdit(steps=4, gather="step"),
    RematEdit(modules=("layers.*",), policy="save", names=("hidden",)),
    TreeAtEdit(home="opt", path="head.weight", spec="d0/dp d1"),
]


def test_every_kind_has_a_row_and_a_known_phase() -> None:
    assert {edit.kind for edit in EDITS} == set(KINDS)
    for edit in EDITS:
        assert KINDS[edit.kind].edit is type(edit)
        assert edit.phase in PHASES


def test_phases_follow_the_design() -> None:
    order = ["mesh", "tensor", "sequence", "params", "grads", "opt", "precision", "memory"]
    order += ["remat", "accumulation", "pipeline", "kernels", "override"]
    assert [phase for phase in PHASES if phase in order] == order
    assert PHASES.index("freeze") < PHASES.index("tensor")


@pytest.mark.parametrize(
    ("where", "same"),
    [
        ((("**",),), ()),
        ((("a",), ("b",)), (("b",), ("a",))),
        ((("a",), ("a",), ("**",)), (("a",),)),
    ],
)
def test_selections_compare_by_meaning(where: Clauses, same: Clauses) -> None:
    assert FreezeEdit(where=where) == FreezeEdit(where=same)
    assert hash(FreezeEdit(where=where)) == hash(FreezeEdit(where=same))
    assert FreezeEdit().within(where) == FreezeEdit(where=same)


def test_edits_of_different_kinds_or_fields_differ() -> None:
    assert len({*EDITS, *EDITS}) == len(EDITS)
    assert KeepEdit() != FreezeEdit()
    assert FreezeEdit(by="freeze('a')") == FreezeEdit(by="freeze('b')")


def test_all_ways_to_clear_a_home_are_one_value() -> None:
    clear = HomeEdit(home="opt", axis=None)
    assert HomeEdit(home="opt", axis=(), on="embed", pad=True) == clear
    assert clear.axis is None


def test_order_of_edits_across_phases_does_not_matter() -> None:
    shuffle = random.Random(0)
    orders = [shuffle.sample(EDITS, len(EDITS)) for _ in range(500)]
    orders += [
        [EDITS[a], EDITS[b], *EDITS] for a, b in itertools.permutations(range(len(EDITS)), 2)
    ]
    plans = {plan(Tiny(), MESH).edit(*order) for order in orders}
    assert len(plans) == 1
    one_by_one = plan(Tiny(), MESH)
    for edit in reversed(EDITS):
        one_by_one = one_by_one.edit(edit)
    assert plans == {one_by_one}


def test_order_of_edits_within_a_phase_does() -> None:
    a = HomeEdit(home="params", axis=("fsdp",))
    b = HomeEdit(home="params", axis=("dp",))
    base = plan(Tiny(), MESH)
    assert base.edit(a, b).params["head.weight"].mesh_axes == ("dp",)
    assert base.edit(b, a).params["head.weight"].mesh_axes == ("fsdp",)


def test_of_equal_edits_the_last_counts() -> None:
    a = HomeEdit(home="params", axis=("fsdp",))
    b = HomeEdit(home="params", axis=("dp",), where=(("head",),))
    base = plan(Tiny(), MESH)
    assert base.edit(a).edit(b).edit(a) == base.edit(b, a)
    assert base.edit(a).edit(b).edit(a).params["head.weight"].mesh_axes == ("fsdp",)
    assert len(base.edit(a).edit(a).log) == 1


def test_selection_needs_every_clause_and_knows_aliases() -> None:
    infos = param_infos(Tiny(tied=True))
    assert selected(infos, (("head",),)) == ("embed.weight",)
    assert selected(infos, (("layers.*",), ("~norm", "~up"), ("~layers.1",))) == (
        "layers.0.down.weight",
        "layers.2.down.weight",
    )
    assert len(selected(infos, ())) == len(infos)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HomeEdit(home="moments", axis=None), "unknown home 'moments'"),
        (lambda: HomeEdit(home="opt", axis=("a", "a")), "axis=('a',)"),
        (lambda: PrefetchEdit(distance=True), "prefetch(True)"),
        (lambda: PrefetchEdit(distance=1, where=(("a",),)), "cannot be masked"),
        (lambda: LossScaleEdit(where=(("a",),)), "loss_scale cannot be masked"),
        (lambda: RematEdit(modules=("a",), policy="dot"), "the unknown policy 'dot'"),
        (lambda: RematEdit(modules=("a",), policy="save"), "keeps 0 names under the policy 'save'"),
        (lambda: RematEdit(modules=("a",), policy="dots", names=("b",)), "names: b"),
        (lambda: LossScaleEdit(value=-1.0), "value is -1.0"),
        (lambda: LossScaleEdit(value=float("nan")), "value is nan"),
        (lambda: LossScaleEdit(value="dynamic"), "value is 'dynamic'"),  # type: ignore[arg-type]
        (lambda: LossScaleEdit(initial_power=127), "a whole number, at most 126"),
        (lambda: LossScaleEdit(window=0), "window is 0, initial_power is 16"),
        (lambda: LossScaleEdit(hysteresis=1.5), "hysteresis is 1.5"),  # type: ignore[arg-type]
        (lambda: LossScaleEdit(minimum=0.0), "allowed: 0 < minimum <= 2**initial_power"),
        (lambda: LossScaleEdit(minimum=2.0**17), "minimum is 131072.0"),
        (lambda: LossScaleEdit(initial_power=33), "maximum is 4294967296.0, initial_power is 33"),
    ],
)
def test_impossible_edits_cannot_be_made(make: object, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()  # type: ignore[operator]
    assert words in str(caught.value)


def test_no_failures_raise_nothing() -> None:
    raise_failures([], 3)


def test_failures_count_parameters_not_homes() -> None:
    failure = Failure("zero(3, 'x')", "fails for {count}", "w", "shape (1,)", "why", "fix", "fact")
    with pytest.raises(PlanError) as caught:
        raise_failures([failure, failure], 7)
    assert str(caught.value).splitlines() == [
        "zero(3, 'x') fails for 1 of 7 parameters.",
        "  w   shape (1,)",
        "  fact",
        "  why",
        "  Fix: fix",
    ]
