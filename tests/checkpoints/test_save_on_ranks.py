"""Saves of real processes: full disks, killed ranks, ranks that stay away, two jobs at once."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint import writing
from shardwise.sharding.checkpoint.disk import write_durably
from shardwise.sharding.checkpoint.latest import latest, read_manifest, why_incomplete
from shardwise.sharding.checkpoint.verify import verify
from shardwise.sharding.errors import CheckpointError, RankError, ShardwiseError
from tests.checkpoints import killing, racing

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

MESH = sw.Mesh(fsdp=2)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def start(**options: Any) -> tuple[sw.Program, Any, Any, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 500), nn.Linear(500, 300))
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.adamw(0.01)).bind(**options)
    batch = program.shard_batch(torch.ones(4, 64))
    state, _ = program.step(program.init(0), batch)
    return program, state, batch, sw.launch.join_job().rank


def bits(state: Any) -> list[Tensor]:
    trees = state.flats, state.opt_flats.mu, state.opt_flats.nu
    return [flat.clone() for tree in trees for flat in tree.values()]


def slowly(path: Path, data: bytes) -> None:
    """What rank 0 alone writes, late."""
    time.sleep(0.3)
    write_durably(path, data)


# -- one job that meets one trouble after the other ---------------------------------------------


def troubles(directory: Path) -> dict[str, Any]:
    program, state, batch, rank = start()
    found: dict[str, Any] = {}
    before = bits(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "write_durably", slowly)
        program.save(directory / "good", state)
        found["complete on return"] = why_incomplete(directory / "good") == ""

    def attempt(name: str, path: Path | str, **options: Any) -> None:
        try:
            program.save(path, state, **options)
        except ShardwiseError as error:
            same = all(map(torch.equal, bits(state), before))
            found[name] = (error, same, sorted(os.listdir(directory)))
        program.agree(True)  # no rank begins the next save before all have looked

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    attempt("full", directory / "full")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    attempt("exists", directory / "good")
    attempt("other path", directory / f"rank-{rank}")
    attempt("read-only", "/proc/self/nothing/here")
    program.save(directory / "full", state)
    state, _ = program.step(state, batch)
    program.save(directory / "good", state, overwrite=True)
    whole = {path: sw.to_global(leaf) for path, leaf in state.params.items()}
    read = {"params": {path: torch.zeros_like(one) for path, one in whole.items()}}
    dcp.load(read, checkpoint_id=str(directory / "good"))
    found["dcp"] = all(torch.equal(read["params"][path], one) for path, one in whole.items())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("runs")
    return directory, sw.spawn(troubles, ranks=2, args=(directory,), timeout=90)


def test_a_full_disk_on_one_rank_is_an_error_on_all(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    """CKP-8: path and cause on all ranks, nothing left behind, the next save works."""
    directory, found = ranks
    for rank, one in enumerate(found):
        error, same, left = one["full"]
        assert isinstance(error, CheckpointError)
        assert same
        assert left == ["good"]
        assert "failed with EFBIG" in str(error)
        assert "File too large" in str(error)
        assert "__1_0.distcp" in str(error)
        assert error.numbers["cause"] == "EFBIG"
        if rank == 0:
            assert error.what == "Rank 1 of 2 failed to save, so no rank has."
            assert error.fix == "see the failure of that rank above; then save again"
        else:
            assert error.fix.startswith("raise the limit on the size of files (ulimit -f)")
    assert verify(directory / "full").faults == ()
    assert read_manifest(directory / "full").step == 1


def test_refusals_are_the_same_on_all_ranks(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """CKP-7a and a directory that nobody may write."""
    directory, found = ranks
    for one in found:
        assert "There is a complete checkpoint of that name." in str(one["exists"][0])
        assert one["exists"][0].numbers["files"] == 4
        assert "Ranks do not save the same checkpoint." in str(one["other path"][0])
        assert one["other path"][0].numbers["rank"] == 1
        assert "create of 0 bytes failed with ENOENT" in str(one["read-only"][0])
        assert all(one[name][2] == ["good"] for name in ("exists", "other path", "read-only"))
    assert sorted(os.listdir(directory)) == ["full", "good"]


def test_no_rank_returns_before_the_checkpoint_is_complete(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    """CKP-7c: rank 0 is slow."""
    assert all(one["complete on return"] for one in ranks[1])


def test_dcp_of_the_same_job_reads_what_two_ranks_wrote(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    directory, found = ranks
    assert all(one["dcp"] for one in found)
    assert verify(directory / "good").faults == ()
    assert read_manifest(directory / "good").step == 2


# -- memory -------------------------------------------------------------------------------------


def peak_of_a_save(directory: Path) -> tuple[int, int]:
    """Bytes of the state, and how far resident memory rises above it while it is saved."""
    plan = sw.plan(nn.Linear(4096, 6000), sw.Mesh(fsdp=1), sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.adamw(0.01)).bind()
    state = program.init(0)
    program.save(directory / "first", state)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    program.save(directory / "second", state)
    return state.nbytes, status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_a_save_holds_its_two_blocks_and_no_copy_of_the_state(tmp_path: Path) -> None:
    [(state, peak)] = sw.spawn(peak_of_a_save, ranks=1, args=(tmp_path,), timeout=60)
    assert state > 280 << 20
    assert peak <= 20 << 20, peak


# -- ranks that are not there -------------------------------------------------------------------


def alone(directory: Path) -> Any:
    program, state, batch, rank = start(timeout=3)
    program.save(directory / "good", state)
    began = time.monotonic()
    try:
        if rank == 0:
            program.save(directory / "one", state)  # the line that the error names
        else:
            program.step(state, batch)
    except ShardwiseError as error:
        return error, time.monotonic() - began
    return None


def test_a_save_on_one_rank_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    """CKP-11: the other rank goes on to a step."""
    (error, seconds), other = sw.spawn(alone, ranks=2, args=(tmp_path,), timeout=60)
    assert isinstance(error, CheckpointError)
    assert seconds < 20
    assert "program.save was not joined by all ranks" in error.what
    assert "test_save_on_ranks.py" in error.where
    assert "in alone" in error.where
    assert "have not called it: rank 1" in error.facts
    assert error.numbers["absent"] == (1,)
    assert error.fix.startswith("call save on every rank, not under `if rank == 0`")
    assert isinstance(other[0], RankError)
    assert os.listdir(tmp_path) == ["good"]


def killed(directory: Path) -> None:
    program, state, _, rank = start(timeout=20)
    program.save(directory / "good", state)
    if rank == 1:
        calls = iter(range(400))

        def kill(*_: object) -> None:
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        killing.profile(kill)
    program.save(directory / "one", state)


def test_a_rank_that_is_killed_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        sw.spawn(killed, ranks=2, args=(tmp_path,), timeout=60)
    assert not (tmp_path / "one").exists()
    assert latest(tmp_path).path == tmp_path / "good"
    assert verify(tmp_path / "good").faults == ()


# -- scripts of their own, as they fork ---------------------------------------------------------


def run(module: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_saves_killed_anywhere_leave_complete_checkpoints() -> None:
    """CKP-6: twelve here; two hundred by `python -m tests.checkpoints.killing 200`."""
    assert run(killing.__name__, "12", "3").endswith("none torn\n")


def test_two_jobs_that_save_one_path_at_once(tmp_path: Path) -> None:
    report = run(racing.__name__, str(tmp_path), "8")
    assert report == "first: 1 saved, 1 refused; overwritten 16 times, whole\n"
