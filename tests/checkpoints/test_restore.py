"""From disk to any plan and back: the whole state, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.transforms.carried import FIRST, PLANS, assert_bits, batch, loss_fn, model, whole

pytestmark = pytest.mark.simulated

ONE, THREE = sw.Mesh(fsdp=1), sw.Mesh(fsdp=3)
MORE = {
    **PLANS,
    "alone": lambda m: sw.plan(m, ONE, sw.zero(3, "fsdp")),
    "three": lambda m: sw.plan(m, THREE, sw.zero(2, "fsdp", pad=True, on=0)),
}


@pytest.mark.parametrize("step", [1, 3, 7])
def test_a_walk_through_all_plans_keeps_every_value(step: int, tmp_path: Path) -> None:
    """Each plan is reached from several others, worlds of 1, 3 and 4 ranks among them."""
    module = model()
    names = [list(MORE)[(2 + step * index) % len(MORE)] for index in range(len(MORE) + 1)]
    assert names[0] == names[-1] == "zero 3"
    assert set(names) == MORE.keys()
    lowered = {name: sw.lower(MORE[name](module), loss_fn, sw.optim.adamw(1e-2)) for name in names}
    with sw.simulate(FIRST):
        program = lowered["zero 3"].bind()
        start, _ = program.step(program.init(0), program.shard_batch(batch()))
        program.save(tmp_path / "0", start)
    want = whole(start)
    state: Any = start
    for number, name in enumerate(names[1:]):
        with sw.simulate(lowered[name].plan.mesh):
            program = lowered[name].bind()
            state = program.restore(tmp_path / f"{number}")
            program.save(tmp_path / f"{number + 1}", state)
        got = whole(state)
        assert want.keys() <= got.keys()
        for leaf, value in got.items():
            # A master in its parameter's dtype is equal to it.
            assert torch.equal(value, want[leaf.replace("master", "params")]), (name, leaf)
    assert_bits(state, start)
