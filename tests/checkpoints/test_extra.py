"""What users keep in `extra` comes back, on the same ranks and on others, and runs no code."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.extra import INLINE_BYTES, pack_value, unpack_value
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.errors import CheckpointError
from tests.transforms.carried import square

pytestmark = pytest.mark.simulated

PAIR = sw.Mesh(fsdp=2)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "a"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    text = json.dumps(pack_value(value, "extra"))
    # Not ==: 1 is True, and nan is not nan.
    assert repr(unpack_value(json.loads(text))) == repr(value)


class Named(NamedTuple):
    """A tuple that would come back as another type."""

    a: int


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"when": [datetime.date(2026, 1, 1)]}, r"extra/when/0 .* a datetime.date"),
        ({"a/b": Named(1)}, r"extra/a%2Fb .*Named"),
        ({"f": print}, r"extra/f .*builtin_function"),
        ({1: {2, 3}}, r"extra/1 .*set"),
        ({"t": torch.ones(1)}, r"extra/t .* a Tensor is no value"),
    ],
)
def test_what_cannot_be_written_is_named(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{kind}") as caught:
        pack_value(value, "extra")
    assert "runs no code" in caught.value.why
    assert caught.value.numbers["place"].startswith("extra/")
    assert "keep dicts, lists, tuples" in caught.value.fix


def program(mesh: sw.Mesh, level: int = 3) -> sw.Program:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    plan = sw.plan(module, mesh, sw.zero(level, "fsdp", pad=True, on=0))
    return sw.lower(plan, square, sw.optim.sgd(0.1)).bind()


def bits(value: Tensor) -> list[int]:
    return value.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_values_tensors_and_averages_on_any_ranks(tmp_path: Path) -> None:
    """An average that lies like the parameters is a global tensor, cut anew by each plan."""
    large = torch.arange(INLINE_BYTES, dtype=torch.int16)
    with sw.simulate(PAIR):
        made = program(PAIR)
        state = made.init(0)

        def extra(one: Any) -> Any:
            return {
                "epoch": 3,
                "rate": (0.1, float("nan")),
                "order": large,
                "small": torch.tensor([[1.5, -0.0]], dtype=torch.bfloat16),
                "average": {path: leaf * 2 for path, leaf in one.params.items()},
            }

        state = state.map(lambda one: one.with_extra(extra(one)))
        made.save(tmp_path / "saved", state)
    names = [name for name in read_manifest(tmp_path / "saved").by_name if "extra" in name]
    assert names.count("extra/order") == 1
    assert "extra/average/0.weight" in names
    for ranks in (1, 2, 3):
        for level in (0, 3):
            mesh = sw.Mesh(fsdp=ranks)
            with sw.simulate(mesh):
                there = program(mesh, level).restore(tmp_path / "saved")
            for one in there.ranks:
                assert one.extra["epoch"] == 3
                assert repr(one.extra["rate"]) == "(0.1, nan)"
                assert torch.equal(one.extra["order"], large)
                assert bits(one.extra["small"]) == [0xC0, 0x3F, 0, 0x80]
                for path, leaf in one.params.items():
                    average = one.extra["average"][path]
                    assert average.placements == leaf.placements
                    assert average.shape == leaf.shape
                    assert torch.equal(average.to_local(), leaf.to_local() * 2)


def test_what_differs_by_rank_goes_back_to_its_rank(tmp_path: Path) -> None:
    with sw.simulate(PAIR):
        made = program(PAIR)
        state = made.init(0)
        own = [
            {"cursor": rank, "rng": torch.full((16,), rank, dtype=torch.uint8)} for rank in (0, 1)
        ]
        state = sw.Lifted(
            one.with_extra(extra) for one, extra in zip(state.ranks, own, strict=True)
        )
        made.save(tmp_path / "saved", state)
        again = made.restore(tmp_path / "saved")
        assert [one.extra["cursor"] for one in again.ranks] == [0, 1]
        assert [one.extra["rng"].tolist() for one in again.ranks] == [[0] * 16, [1] * 16]
        left = made.restore(tmp_path / "saved", partial="extra")
        assert [one.extra for one in left.ranks] == [None, None]
    three = sw.Mesh(fsdp=3)
    with sw.simulate(three):
        other = program(three).restore(tmp_path / "saved")
    assert [one.extra["cursor"] for one in other.ranks] == [0, 1, 0]


def test_a_large_tensor_that_differs_by_rank_is_refused(tmp_path: Path) -> None:
    with sw.simulate(PAIR):
        made = program(PAIR)
        state = made.init(0)
        state = sw.Lifted(
            one.with_extra({"x": torch.full((INLINE_BYTES,), float(rank))})
            for rank, one in enumerate(state.ranks)
        )
        with pytest.raises(CheckpointError, match="extra/x differs between ranks 0 and 1"):
            made.save(tmp_path / "saved", state)
    assert not (tmp_path / "saved").exists()


def test_tensors_that_do_not_lie_like_their_parameter_are_refused(tmp_path: Path) -> None:
    with sw.simulate(PAIR):
        made = program(PAIR)
        state = made.init(0)
        wrong = state.map(lambda one: one.with_extra({"x": {"0.bias": one.params["0.weight"]}}))
        with pytest.raises(CheckpointError, match=r"extra/x/0.bias cannot be saved: it lies as"):
            made.save(tmp_path / "saved", wrong)
        astray = state.map(lambda one: one.with_extra({"x": one.params["0.weight"]}))
        with pytest.raises(CheckpointError, match="under the path of a parameter only"):
            made.save(tmp_path / "saved", astray)


def test_an_average_of_a_parameter_that_is_gone_is_told(tmp_path: Path) -> None:
    with sw.simulate(PAIR):
        made = program(PAIR)
        state = made.init(0)
        state = state.map(lambda one: one.with_extra({"x": dict(one.params)}))
        made.save(tmp_path / "saved", state)
        plan = sw.plan(nn.Sequential(nn.Linear(6, 5)), PAIR, sw.zero(3, "fsdp", pad=True, on=0))
        small = sw.lower(plan, square, sw.optim.sgd(0.1)).bind()
        with pytest.raises(CheckpointError, match=r"no parameter '1.weight' of shape") as caught:
            small.restore(tmp_path / "saved", partial="1")
        assert "partial='extra'" in caught.value.fix
        with pytest.warns(UserWarning, match="restored in part"):
            small.restore(tmp_path / "saved", partial=("1", "extra"))
