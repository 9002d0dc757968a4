"""Law 1: k steps of a program equal k steps of the model it was made from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from shardwise.testing import assert_bitwise, assert_equivalent
from shardwise.testing.models import EXACT, SPLIT
from shardwise.testing.strategies import ELEMENTWISE, Training, make_optimizer, trainings

pytestmark = pytest.mark.simulated


@given(trainings())
def test_a_program_trains_as_the_unsharded_model(training: Training) -> None:
    model = training.model
    assert_equivalent(
        model,
        training.toy.loss_fn,
        training.batches,
        plan=training.plan(model),
        optimizer=make_optimizer(training.optimizer),
        seed=training.seed,
    )


@settings(max_examples=25)
@given(trainings())
def test_losses_and_gradients_agree_to_rounding_in_float32(training: Training) -> None:
    model = training.model
    assert_equivalent(
        model,
        training.toy.loss_fn,
        training.batches,
        plan=training.plan(model),
        optimizer=make_optimizer(training.optimizer),
        dtype=torch.float32,
        seed=training.seed,
    )


ONCE = tuple(feature for feature in (*EXACT, *SPLIT) if feature != "twice")


@given(trainings(features=ONCE, optimizers=ELEMENTWISE).filter(lambda t: t.runs_units_once))
def test_bits_are_those_of_the_split_reference(training: Training) -> None:
    model = training.model
    assert_bitwise(
        model,
        training.toy.loss_fn,
        training.batches,
        plan=training.plan(model),
        optimizer=make_optimizer(training.optimizer),
        seed=training.seed,
    )
