"""`sw.dropout` of what tensor axes have cut: ranks cut one mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sharding.bits import squares_key
from shardwise.sharding.errors import RandomError
from shardwise.sharding.frames import Run
from shardwise.transforms.draws import Draw, Draws, Rows
from shardwise.transforms.dropout import masked
from shardwise.transforms.tensor_context import Cut, DropoutCall, in_tensor_context
from tests.transforms.five_parts import check

pytestmark = pytest.mark.abstract

KEY = squares_key(7)


@st.composite
def cuts(draw: st.DrawFn, dim: int, size: int) -> tuple[Cut, list[int]]:
    """Runs of a dimension in their order, with padding between them, and their indices."""
    marks = sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=6)))
    runs, at = [], 0
    for start, stop in zip(marks[::2], marks[1::2], strict=False):
        at += draw(st.integers(0, 1))
        runs.append(Run(start, stop, at))
        at += stop - start
    block = [-1] * (at + draw(st.integers(0, 2)))
    for run in runs:
        block[run.at : run.at + run.count] = range(run.start, run.stop)
    return Cut(dim, tuple(runs), size), block


@given(st.data())
def test_a_block_has_its_part_of_the_mask(data: st.DataObject) -> None:
    rows, per_row = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    rows_dim = data.draw(st.integers(0, 2))
    shape = [data.draw(st.integers(2, 7)) for _ in range(3)]
    shape[rows_dim] = rows * per_row
    cut_dims = data.draw(st.sets(st.sampled_from([d for d in range(3) if d != rows_dim])))
    whole = masked(torch.ones(shape), Draw(KEY, rows, 5), 0.5, rows_dim)
    made, expected, valid = [], whole, torch.ones(shape, dtype=torch.bool)
    for dim in cut_dims:
        cut, block = data.draw(cuts(dim, shape[dim]))
        index = torch.tensor(block)
        made.append(cut)
        expected = expected.index_select(dim, index.clamp(0))
        view = [1, 1, 1]
        view[dim] = len(block)
        valid = valid.index_select(dim, index.clamp(0)) & (index >= 0).view(view)
    named = rows_dim - data.draw(st.sampled_from([0, 3]))
    got = masked(torch.ones(expected.shape), Draw(KEY, rows, 5, tuple(made)), 0.5, named)
    assert got[valid].equal(expected[valid])


@pytest.mark.parametrize("size", [1, 5, 1 << 15])
def test_blocks_of_elements_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = masked(torch.ones(3, 4, 6), Draw(KEY, 3, 0), 0.5)
    monkeypatch.setattr("shardwise.transforms.dropout.block_elements", lambda device: size)
    cut = Cut(2, (Run(1, 3, 0), Run(5, 6, 2)), 6)
    got = masked(torch.ones(3, 4, 3), Draw(KEY, 3, 0, (cut,)), 0.5)
    assert got.equal(whole[:, :, [1, 2, 5]])


def test_a_weight_is_cut_in_its_first_dimension() -> None:
    whole = masked(torch.ones(6, 5), Draw(KEY, 1, 0), 0.5)
    got = masked(torch.ones(3, 5), Draw(KEY, 1, 0, (Cut(0, (Run(3, 6, 0),), 6),)), 0.5)
    assert got.equal(whole[3:])


class _Cutting:
    """A context that says that every tensor is cut in one way."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.calls: list[DropoutCall] = []

    def cuts_of(self, tensor: Any, call: DropoutCall) -> tuple[Cut, ...]:
        self.calls.append(call)
        return (self.cut,)


def test_a_call_asks_the_context_of_the_pass() -> None:
    draws = Draws(0, 1, Rows(2, 0), located=True)
    cut = Cut(1, (Run(2, 4, 0),), 4)
    x = torch.ones(2, 2, 3)
    context: Any = _Cutting(cut)
    with in_tensor_context(context):
        assert draws.draw(x, "", 0).cuts == (cut,)
        assert draws.draw(x, "", None).cuts == (cut,)
        with pytest.raises(RandomError) as info:
            draws.draw(x.transpose(0, 1), "merged", -2)
    check(
        info.value, RandomError, "Dimension -2", "(2, 2, 3)", "name 'merged'", "'batch seq ...'",
        shape=(2, 2, 3), batch_dim=-2,
    )  # fmt: skip
    assert draws.draw(x, "", 0).cuts == ()
    assert context.calls == [
        ("loss_fn", "", 0), ("loss_fn", "", 1), ("loss_fn", "merged", 0),
    ]  # fmt: skip
