"""What plans say of precision: errors with all their parts, text, JSON and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.sharding.errors import PatternError, PlanError
from tests.oracles.mixed_precision import Net
from tests.transforms.five_parts import check

pytestmark = pytest.mark.abstract


class WithCodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)


def planned(module: nn.Module, *transforms: Any) -> sw.Plan:
    return sw.plan(module, sw.Mesh(fsdp=2), *transforms)


@pytest.mark.parametrize(
    ("given", "texts", "numbers"),
    [
        ({"compute": "bflot16"}, ["unknown dtype 'bflot16'", "'bfloat16'"], {"dtype": "bflot16"}),
        (
            {"gather": torch.float8_e4m3fn},
            ["unsupported dtype 'float8_e4m3fn'", "needs a scale", "'bfloat16' is the narrowest"],
            {"argument": "gather"},
        ),
        ({"params": "int32"}, ["unsupported dtype 'int32'", "floating dtypes"], {"dtype": "int32"}),
        ({"rounding": "up"}, ["rounds in an unknown way", "'stochastic'"], {"rounding": "up"}),
        ({}, ["precision() sets nothing", "precision(compute='bfloat16')"], {}),
    ],
)
def test_bad_arguments(given: dict[str, Any], texts: list[str], numbers: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        sw.precision(**given)
    check(caught.value, PlanError, *texts, **numbers)


def test_stochastic_rounding_of_32_bits_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        planned(Net(), sw.precision(where="head", rounding="stochastic"))
    check(
        caught.value,
        PlanError,
        "rounds 2 of 16 parameters stochastically that have more than 16 bits",
        "head.weight   params float32   master float32",
        "Fix: params='bfloat16'",
        dtype="float32",
        num_params=16,
    )


def test_a_master_that_does_not_hold_its_parameter_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        planned(Net(), sw.precision(where="head", master="bfloat16"))
    check(
        caught.value,
        PlanError,
        "gives 2 of 16 parameters a master that does not hold their values",
        "head.weight   params float32   master bfloat16",
        "Fix: master='float32'",
        params="float32",
        master="bfloat16",
    )


def test_integers_are_passed_over_unless_they_are_named() -> None:
    plan = planned(WithCodes(), sw.precision(params="bfloat16"))
    assert plan.params["codes"].dtype == plan.compute["codes"].dtype == "int32"
    assert plan.params["linear.weight"].dtype == "bfloat16"
    with pytest.raises(PlanError) as caught:
        planned(WithCodes(), sw.precision(where="codes", params="bfloat16"))
    check(
        caught.value,
        PlanError,
        "selects 1 of 3 parameters that are no floating numbers",
        "codes   shape (3,)   dtype int32",
        "Fix: take it out of where=",
        dtype="int32",
    )


def test_patterns_that_select_nothing_are_refused() -> None:
    for settings in ({"compute": "bfloat16"}, {"outputs": "float32"}, {"buffers": "float32"}):
        with pytest.raises(PatternError, match="matches none of"):
            planned(WithCodes(), sw.precision(where="heads", **settings))


def test_plans_travel_and_tell() -> None:
    policy = sw.precision(compute="bfloat16", gather="float32")
    plan = planned(Net(), sw.zero(3, "fsdp"), policy, sw.precision(where="head", outputs="float64"))
    assert sw.Plan.from_json(plan.to_json()) == plan
    assert "cast head: as it comes, returns float64" in str(plan)
    assert "gathers in float32" in plan.why("head.weight")
    assert "precision(compute='bfloat16', gather='float32')" in plan.why("head.weight")
    lines = planned(Net(), sw.zero(3, "fsdp")).diff(plan)
    assert any(line.startswith("now cast (root): bfloat16") for line in lines)
    masked = planned(Net(), sw.masked(sw.precision(compute="bfloat16"), "head"))
    assert [p for p, s in masked.compute.items() if s.dtype == "bfloat16"] == [
        "head.weight",
        "head.bias",
    ]
