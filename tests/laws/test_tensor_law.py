"""Law 1 under tensor parallelism: small transformers, whatever the mesh and the plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.laws.tensor_draws import Training, check, trainings

pytestmark = pytest.mark.simulated


# Many more by hand: `python -m tests.laws.tensor_draws 500`.
@settings(max_examples=15)
@given(trainings())
def test_a_cut_transformer_trains_as_the_whole_one(training: Training) -> None:
    check(training)
