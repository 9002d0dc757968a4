"""Run the laws on many more draws by hand: `python -m tests.laws.draws 500`.

Each draw is one small mesh, plan, model and seed; laws 1, 3 and 6 are checked in float64 against
the unsharded model, and law 1 bit for bit against the split reference where bits are promised.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from shardwise.testing import assert_bitwise, assert_equivalent
from shardwise.testing.models import EXACT, SPLIT
from shardwise.testing.strategies import ELEMENTWISE, Training, make_optimizer, trainings

ONCE = tuple(feature for feature in (*EXACT, *SPLIT) if feature != "twice")


def run(training: Training, law: Any) -> None:
    """Check one draw."""
    model = training.model
    law(
        model,
        training.toy.loss_fn,
        training.batches,
        plan=training.plan(model),
        optimizer=make_optimizer(training.optimizer),
        seed=training.seed,
    )


def draw(count: int, first_seed: int) -> Counter[str]:
    """Check `count` draws of each kind and count what they covered."""
    covered: Counter[str] = Counter()

    def many(test: Any) -> Any:
        profile = settings(
            max_examples=count,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            database=None,
        )
        return seed(first_seed)(profile(test))

    def note(training: Training) -> None:
        covered[f"{training.mesh.size} ranks"] += 1
        covered[f"{len(training.moves)} transforms"] += 1
        covered.update(training.toy.features)
        covered[training.optimizer] += 1

    @many
    @given(st.one_of(trainings(max_ranks=4), trainings(max_ranks=8)))
    def equivalent(training: Training) -> None:
        note(training)
        run(training, assert_equivalent)

    @many
    @given(
        trainings(features=ONCE, optimizers=ELEMENTWISE, max_ranks=8).filter(
            lambda training: training.runs_units_once
        )
    )
    def bitwise(training: Training) -> None:
        note(training)
        run(training, assert_bitwise)

    equivalent()
    bitwise()
    return covered


def main() -> None:
    """Read the number of draws, and optionally a seed, from the command line."""
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    first_seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start = time.perf_counter()
    covered = draw(count, first_seed)
    seconds = time.perf_counter() - start
    print(f"{count} draws of each kind, seed {first_seed}: no law is broken ({seconds:.0f} s).")
    for what, number in sorted(covered.items()):
        print(f"  {number:6}  {what}")


if __name__ == "__main__":
    main()
