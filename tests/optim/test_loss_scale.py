"""The loss scale against an oracle that was written from the words of the rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.optim.loss_scale import (
    init_loss_scale,
    nearest_power,
    next_divisor,
    next_loss_scale,
)
from shardwise.sharding.derived import LossScale
from shardwise.sharding.errors import LossScaleError
from tests.transforms.five_parts import check

pytestmark = pytest.mark.abstract


class Oracle:
    """The rule in words: calls are numbered from 0, and the last overflow was call -1.

    In an overflow: if the remaining hysteresis is 1, the scale halves, but not below the minimum
    (at the minimum: an error); else the hysteresis falls by one. In a good call the stable interval
    is `call - last overflow - 1`; if it is positive and a multiple of the window, the scale doubles
    and the hysteresis is restored. Consecutive hysteresis: any good call restores it.
    """

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.scale = settings.initial
        self.remaining = settings.hysteresis
        self.call = 0
        self.last_overflow = -1
        self.overflows = 0

    def see(self, finite: bool) -> None:
        settings = self.settings
        if finite:
            interval = self.call - self.last_overflow - 1
            doubles = interval > 0 and interval % settings.window == 0
            if doubles:
                self.scale = min(2 * self.scale, settings.maximum)
            if doubles or settings.consecutive_hysteresis:
                self.remaining = settings.hysteresis
        else:
            if self.remaining > 1:
                self.remaining -= 1
            elif self.scale == settings.minimum:
                raise LossScaleError("at the minimum")
            else:
                self.scale = max(self.scale / 2, settings.minimum)
            self.last_overflow = self.call
            self.overflows += 1
        self.call += 1


def scales(settings: LossScale, finite: str) -> list[float]:
    """The scale after each step; `.` is a good step and `x` one that overflows."""
    state = init_loss_scale(settings)
    seen = []
    for mark in finite:
        state = next_loss_scale(settings, state, finite=mark == ".")
        seen.append(state.scale.item())
    return seen


TABLE = {
    # settings, steps, the scale after each
    "doubles in calls 2, 4, 6, 8": (
        LossScale(initial=1.0, window=2, hysteresis=1),
        ".........",
        [1, 1, 2, 2, 4, 4, 8, 8, 16],
    ),
    "all overflow, down to the minimum": (
        LossScale(initial=16.0, window=2, hysteresis=1),
        "xxxx",
        [8, 4, 2, 1],
    ),
    "the last halving stops at the minimum": (
        LossScale(initial=16.0, hysteresis=1, minimum=3.0),
        "xxx",
        [8, 4, 3],
    ),
    "an overflow restarts the window": (
        LossScale(initial=256.0, window=2, hysteresis=1),
        "xx...x....",
        [128, 64, 64, 64, 128, 64, 64, 64, 128, 128],
    ),
    "hysteresis absorbs the first overflows only": (
        LossScale(initial=256.0, hysteresis=3),
        "xxxx",
        [256, 256, 128, 64],
    ),
    "good steps do not restore it": (
        LossScale(initial=256.0, hysteresis=2),
        "x.x.x.",
        [256, 256, 128, 128, 64, 64],
    ),
    "growth does": (
        LossScale(initial=256.0, window=1, hysteresis=2),
        "x..x.x",
        [256, 256, 512, 512, 512, 256],
    ),
    "consecutive hysteresis: any good step does": (
        LossScale(initial=256.0, hysteresis=2, consecutive_hysteresis=True),
        "x.x.x.xx",
        [256, 256, 256, 256, 256, 256, 256, 128],
    ),
    "growth stops at the maximum": (
        LossScale(initial=4.0, window=1, maximum=10.0),
        "....",
        [4, 8, 10, 10],
    ),
    "a fixed scale never moves": (LossScale(initial=128.0, dynamic=False), "x.xxxx..", [128] * 8),
}


@pytest.mark.parametrize("case", TABLE)
def test_sequences(case: str) -> None:
    settings, steps, expected = TABLE[case]
    assert scales(settings, steps) == expected


POWERS = st.integers(-2, 6).map(lambda power: 2.0**power)


@given(
    st.builds(
        LossScale,
        initial=st.just(64.0),
        window=st.integers(1, 4),
        hysteresis=st.integers(1, 3),
        minimum=POWERS,
        consecutive_hysteresis=st.booleans(),
        maximum=st.sampled_from([64.0, 256.0, 1e6]),
    ),
    st.lists(st.booleans(), max_size=40),
)
def test_every_sequence_is_that_of_the_rule(settings: LossScale, steps: list[bool]) -> None:
    oracle, state = Oracle(settings), init_loss_scale(settings)
    in_a_row = 0
    for finite in steps:
        try:
            oracle.see(finite)
        except LossScaleError:
            with pytest.raises(LossScaleError):
                next_loss_scale(settings, state, finite=finite)
            return
        before = [leaf.clone() for leaf in state]
        new = next_loss_scale(settings, state, finite=finite)
        assert all(map(torch.equal, state, before))  # a pure function
        state = new
        in_a_row = 0 if finite else in_a_row + 1
        assert state.scale.item() == oracle.scale
        assert state.hysteresis.item() == oracle.remaining
        assert state.good_steps.item() == oracle.call - oracle.last_overflow - 1
        assert state.skipped.item() == oracle.overflows
        assert state.skipped_in_a_row.item() == in_a_row


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 30))
def test_a_state_that_was_saved_and_restored_goes_on_alike(steps: list[bool], at: int) -> None:
    """F16-2, the logic: nothing but the leaves decides what comes next."""
    settings = LossScale(window=3, minimum=2.0**-60)
    straight = resumed = init_loss_scale(settings)
    for index, finite in enumerate(steps):
        if index == at % len(steps):
            resumed = type(resumed)(*(torch.tensor(v.item(), dtype=v.dtype) for v in resumed))
        straight = next_loss_scale(settings, straight, finite=finite)
        resumed = next_loss_scale(settings, resumed, finite=finite)
        assert all(map(torch.equal, straight, resumed))


def test_without_a_loss_scale_only_skipped_steps_are_counted() -> None:
    state = init_loss_scale(None)
    assert next_loss_scale(None, state, finite=True) is state
    for _ in range(3):
        state = next_loss_scale(None, state, finite=False)
    assert (state.skipped, state.skipped_in_a_row, state.scale) == (3, 3, 1.0)
    state = next_loss_scale(None, state, finite=True)
    assert (state.skipped, state.skipped_in_a_row, state.scale) == (3, 0, 1.0)


def test_the_end_of_a_scale_is_an_error() -> None:
    settings = LossScale(initial=2.0, hysteresis=1)
    state = next_loss_scale(settings, init_loss_scale(settings), finite=False)
    with pytest.raises(LossScaleError) as caught:
        next_loss_scale(settings, state, finite=False, reason="non-finite gradient (x)")
    check(
        caught.value,
        LossScaleError,
        "at its minimum, and the gradients still overflow",
        "non-finite gradient (x); scale 1, minimum 1",
        "2 steps in a row were skipped, this one included; 2 in all",
        "Fix: look for NaN in the batch",
        "loss_scale(minimum=0.0625)",
        scale=1.0,
        minimum=1.0,
        skipped=2,
        skipped_in_a_row=2,
    )


@given(st.floats(1e-3, 1e12))
def test_the_divisor_is_the_nearest_power_of_two(count: float) -> None:
    near = nearest_power(count)
    assert count / near * (1 + 1e-12) >= 2**-0.5
    assert count / near * (1 - 1e-12) <= 2**0.5
    assert torch.frexp(torch.tensor(near, dtype=torch.float64)).mantissa == 0.5


def test_the_divisor_follows_the_count_only_in_float16() -> None:
    wide, half = init_loss_scale(None), init_loss_scale(None, half=True)
    assert (wide.divisor, half.divisor) == (1.0, 0.0)
    assert next_divisor(wide, 1000.0, half=False) is wide
    half = next_divisor(half, 1000.0, half=True)
    assert half.divisor == 1024.0
    assert next_divisor(half, 900.0, half=True) is half
    assert next_divisor(half, 300.0, half=True).divisor == 256.0
