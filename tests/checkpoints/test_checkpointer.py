"""When a run is saved, what is kept of it, what it goes on from, and how it is asked to stop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.sharding.checkpoint.manifest import MANIFEST
from shardwise.sharding.errors import CheckpointError
from tests.checkpoints.runs import batch, bits, lowered, train

pytestmark = pytest.mark.simulated


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run(
    checkpointer: sw.Checkpointer, program: sw.Program, state: Any, steps: int, **events: int
) -> Any:
    """Train up to a step; events are steps by the name of a signal."""
    while checkpointer.step < steps and not checkpointer.stopping:
        state, _ = program.step(state, program.shard_batch(batch(checkpointer.step)))
        for name, step in events.items():
            if step == checkpointer.step + 1:
                signal.raise_signal(signal.Signals[name])
        checkpointer.after_step(state)
    return state


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 1), (1, 4)])
def test_a_run_goes_on_from_its_newest_checkpoint_on_any_mesh(
    first: int, second: int, tmp_path: Path
) -> None:
    with sw.simulate(sw.Mesh(fsdp=first)):
        program = lowered(sw.Mesh(fsdp=first)).bind()
        with sw.Checkpointer(program, tmp_path, every=2) as checkpointer:
            state = checkpointer.resume_or_init(7)
            assert checkpointer.resumed_from is None
            assert bits(state) == bits(program.init(7))
            run(checkpointer, program, state, 5)
        at_four = bits(train(program, program.init(7), range(4)))
    with sw.simulate(sw.Mesh(fsdp=second)):
        program = lowered(sw.Mesh(fsdp=second)).bind()
        with sw.Checkpointer(program, tmp_path, every=2) as checkpointer:
            state = checkpointer.resume_or_init(0)
            assert checkpointer.step == 4
            assert checkpointer.resumed_from == str(tmp_path / "step-00000004")
            assert bits(state) == at_four
            assert run(checkpointer, program, state, 8) is not None
    assert names(tmp_path) == ["step-00000004", "step-00000006", "step-00000008"]


@pytest.mark.parametrize("async_", [True, False])
def test_a_run_that_was_interrupted_ends_like_one_that_was_not(
    async_: bool, tmp_path: Path
) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        straight = bits(train(lowered(mesh).bind(), lowered(mesh).bind().init(3), range(7)))
        for stop in (3, 5, 7):
            program = lowered(mesh).bind()
            with sw.Checkpointer(program, tmp_path, every=1, async_=async_) as checkpointer:
                state = checkpointer.resume_or_init(3)
                state = run(checkpointer, program, state, stop)
    assert bits(state) == straight


def test_the_newest_and_every_so_many_are_kept(tmp_path: Path) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        with sw.Checkpointer(program, tmp_path, every=1, keep=2, keep_every=3) as checkpointer:
            run(checkpointer, program, checkpointer.resume_or_init(0), 8)
    kept = [3, 6, 7, 8]
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]


def test_what_was_being_removed_when_a_job_died_is_no_checkpoint(tmp_path: Path) -> None:
    """The name goes first, and the next removal takes the rest."""
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        with sw.Checkpointer(program, tmp_path, every=1, keep=2) as checkpointer:
            state = run(checkpointer, program, checkpointer.resume_or_init(0), 2)
            (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.removed-77")
            other = sw.Checkpointer(program, tmp_path, every=1, keep=1)
            other.resume_or_init(0)
            assert other.step == 1
            assert other.skipped == ()
            state = train(program, state, range(2, 3))
            other.after_step(state)
    assert names(tmp_path) == ["step-00000003"]


def test_a_save_that_fails_costs_no_older_one_and_training_goes_on(tmp_path: Path) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        with sw.Checkpointer(program, tmp_path, every=1, keep=1) as checkpointer:
            state = run(checkpointer, program, checkpointer.resume_or_init(0), 1)
            (tmp_path / "step-00000002").mkdir()
            (tmp_path / "step-00000002" / "thesis.txt").write_text("not yours")
            with pytest.raises(CheckpointError, match="it holds 1 files of others"):
                run(checkpointer, program, state, 2)
            assert (tmp_path / "step-00000001" / MANIFEST).exists()
    assert (tmp_path / "step-00000002" / "thesis.txt").read_text() == "not yours"


def test_what_is_passed_over_is_said(tmp_path: Path) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        with sw.Checkpointer(program, tmp_path, every=1) as checkpointer:
            run(checkpointer, program, checkpointer.resume_or_init(0), 3)
        (tmp_path / "step-00000003" / "__1_0.distcp").unlink()
        (tmp_path / ".step-00000004.saving-ab.1").mkdir()
        checkpointer = sw.Checkpointer(program, tmp_path, every=1)
        with pytest.warns(RuntimeWarning, match=r"goes on from step 2 \(.*; passed over: "):
            checkpointer.resume_or_init(0)
        assert checkpointer.step == 2
        torn, short = sorted(checkpointer.skipped)
        assert torn == ".step-00000004.saving-ab.1: this save was not completed"
        assert short == "step-00000003: __1_0.distcp is missing"


def test_a_signal_saves_and_stops_and_leaves_its_handler_as_it_was(tmp_path: Path) -> None:
    mesh = sw.Mesh(fsdp=2)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        stop_on = (signal.SIGTERM, signal.SIGUSR1)
        with sw.Checkpointer(program, tmp_path, every=100, stop_on=stop_on) as checkpointer:
            state = run(checkpointer, program, checkpointer.resume_or_init(0), 9, SIGUSR1=4)
            assert checkpointer.stopping
            assert checkpointer.step == 4
            saved = bits(program.restore(tmp_path / "step-00000004"))
            assert saved == bits(state)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert names(tmp_path) == ["step-00000004"]


def test_ranks_agree_to_stop_at_multiples_only(tmp_path: Path) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        with sw.Checkpointer(program, tmp_path, every=2, agree_every=4) as checkpointer:
            state = checkpointer.resume_or_init(0)
            run(checkpointer, program, state, 9, SIGTERM=2)
            assert checkpointer.step == 4
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def breaks_off(checkpointer: sw.Checkpointer, program: sw.Program) -> None:
    with checkpointer:
        run(checkpointer, program, checkpointer.resume_or_init(0), 3)
        _ = 1 / 0


def test_an_exception_in_the_loop_is_the_one_that_is_seen(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        with pytest.raises(ZeroDivisionError):
            breaks_off(sw.Checkpointer(program, tmp_path, every=2), program)
    assert signal.getsignal(signal.SIGTERM) is before
    assert names(tmp_path) == ["step-00000002"]


def test_the_place_in_the_data_and_a_generator_come_back(tmp_path: Path) -> None:
    """What a loader has given and what it would give next, on another number of ranks too."""

    def drawn(generator: torch.Generator) -> list[float]:
        return torch.randn(3, generator=generator).tolist()

    generator = torch.Generator().manual_seed(5)
    with sw.simulate(sw.Mesh(fsdp=2)):
        program = lowered(sw.Mesh(fsdp=2)).bind()
        checkpointer = sw.Checkpointer(program, tmp_path, every=1)
        state = checkpointer.resume_or_init(0)
        for step in range(3):
            drawn(generator)
            state, _ = program.step(state, program.shard_batch(batch(step)))
            extra = {"cursor": {"epoch": 1, "row": 12 * step}, "rng": generator.get_state()}
            state = state.with_extra(extra)
            checkpointer.after_step(state)
    expected = drawn(generator)
    with sw.simulate(sw.Mesh(fsdp=3)):
        program = lowered(sw.Mesh(fsdp=3)).bind()
        state = sw.Checkpointer(program, tmp_path, every=1).resume_or_init(0)
        for extra in state.extra.ranks:
            assert extra["cursor"] == {"epoch": 1, "row": 24}
            other = torch.Generator()
            other.set_state(extra["rng"])
            assert drawn(other) == expected


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = lowered(mesh).bind()
        checkpointer = sw.Checkpointer(program, tmp_path, every=1)
        state = run(checkpointer, program, checkpointer.resume_or_init(0), 1)
        made = (tmp_path / "step-00000001" / MANIFEST).stat().st_mtime_ns
        checkpointer.after_step(state)  # a step that was skipped has the same count
        checkpointer.save(state)
    assert (tmp_path / "step-00000001" / MANIFEST).stat().st_mtime_ns == made


@pytest.mark.parametrize("name", ["every", "keep", "keep_every", "agree_every", "peer_every"])
def test_numbers_that_are_none(name: str, tmp_path: Path) -> None:
    program = lowered(sw.Mesh(fsdp=1)).bind()
    with pytest.raises(CheckpointError) as caught:
        sw.Checkpointer(program, tmp_path, **{"every": 1, name: 0})
    assert f"Checkpointer({name}=0) is not a number of steps." in str(caught.value)
    assert f"Fix: {name}=1 or more" in str(caught.value)
    assert caught.value.numbers["value"] == 0
