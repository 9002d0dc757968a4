"""From disk to any plan and back: the whole state, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.sharding.errors import CheckpointError, DonatedStateError
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


def test_every_rank_reads_the_copy_that_it_sees(tmp_path: Path) -> None:
    """Paths may differ by rank, and rank 0's manifest is the one that counts."""
    lowered = sw.lower(MORE["zero 3"](model()), loss_fn, sw.optim.adamw(1e-2))
    with sw.simulate(FIRST):
        program = lowered.bind()
        state, _ = program.step(program.init(0), program.shard_batch(batch()))
        program.save(tmp_path / "0", state)
        paths = [tmp_path / f"{rank}" for rank in range(4)]
        for path in paths[1:]:
            shutil.copytree(paths[0], path)
            (path / "shardwise.json").unlink()
        assert_bits(program.restore(sw.Lifted(paths)), state)
        (paths[2] / "__2_0.distcp").unlink()
        with pytest.raises(CheckpointError, match="it cannot be opened") as caught:
            program.restore(sw.Lifted(paths))
        assert str(paths[2] / "__2_0.distcp") in caught.value.where


def test_a_restored_state_is_a_state(tmp_path: Path) -> None:
    """It trains, is donated, carried and saved as any other; the checkpoint stays as it is."""
    with sw.simulate(FIRST):
        program = sw.lower(MORE["zero 1"](model()), loss_fn, sw.optim.adamw(1e-2)).bind()
        state, _ = program.step(program.init(0), program.shard_batch(batch()))
        program.save(tmp_path / "saved", state)
        first, second = (program.restore(tmp_path / "saved") for _ in range(2))
        after, _ = program.step(first, program.shard_batch(batch(1)))
        want, _ = program.step(state, program.shard_batch(batch(1)))
        assert_bits(after, want)
        with pytest.raises(DonatedStateError):
            _ = first.params
        assert program.last_collectives == program.lowered.collectives()
        assert sw.fingerprint(second) == sw.fingerprint(program.restore(tmp_path / "saved"))
        assert sw.fingerprint(program.init(sw.from_state(second))) == sw.fingerprint(second)
