"""The demo loses a rank and goes on: the same losses as a run that lost none."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.demo.options import Options, Outcome
from shardwise.demo.run import run
from shardwise.launch import spawn
from shardwise.sharding.checkpoint.latest import latest, read_manifest
from shardwise.sharding.errors import RankError

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STEPS = 8


def options(folder: Path, **changes: object) -> Options:
    return Options(steps=STEPS, rows=8, out=str(folder / "out"), **changes)


def environ() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return spawn(run, ranks=2, args=(options(tmp_path_factory.mktemp("straight")),), timeout=100)[0]


@pytest.mark.parametrize("peers", [False, True], ids=["disk", "peers"])
def test_a_run_that_lost_a_rank_has_the_losses_of_one_that_did_not(
    peers: bool, tmp_path: Path, straight: Outcome
) -> None:
    saved = options(
        tmp_path,
        checkpoint=str(tmp_path / "saved"),
        every=2,
        peers=str(tmp_path / "memory") if peers else "",
        kill_at=7,
        kill_rank=1,
    )
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        spawn(run, ranks=2, args=(saved,), timeout=100)
    if peers:  # the disk is lost too
        for path in Path(saved.checkpoint).glob("step-*"):
            shutil.rmtree(path)
    outcome = spawn(run, ranks=2, args=(saved,), timeout=100)[0]
    assert outcome.first_step in {4, 6}  # the save at 6 waited for the one at 4
    assert outcome.losses == straight.losses
    assert outcome.eval_loss == straight.eval_loss
    assert outcome.same_collectives
    assert outcome.recovery_seconds is not None
    assert outcome.recovery_seconds < 30


def test_torchrun_restarts_it(tmp_path: Path, straight: Outcome) -> None:
    saved = tmp_path / "saved"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", "-m", "shardwise.demo"),
            *("--steps", str(STEPS), "--out", str(tmp_path), "--checkpoint", str(saved)),
            *("--every", "2", "--kill-at", "7:1"),
        ],
        cwd=ROOT,
        env=environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    line = r"recovered in ([\d.]+) s: rank 1 ended in step 7, .* after step [46] "
    told = re.search(line, done.stdout)
    assert told, done.stdout
    assert float(told[1]) < 60  # about 15 s on two idle cores, most of it the start of processes
    newest = latest(saved)
    assert newest.step == STEPS
    assert newest.path is not None
    extra = json.dumps(read_manifest(newest.path).extra)
    assert len(re.findall(r"\d\.\d{3,}", extra)) == STEPS


def test_a_command_that_gets_sigterm_saves_and_ends_well(tmp_path: Path) -> None:
    asked = subprocess.Popen(
        [
            *(sys.executable, "-m", "shardwise.demo", "--ranks", "1", "--steps", "100000"),
            *("--out", str(tmp_path), "--checkpoint", str(tmp_path / "saved")),
            *("--every", "5"),
        ],
        cwd=ROOT,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while latest(tmp_path / "saved").step < 5 and time.monotonic() < deadline:
        assert asked.poll() is None, asked.stderr.read() if asked.stderr else ""
        time.sleep(0.05)
    asked.send_signal(signal.SIGTERM)
    out, error = asked.communicate(timeout=60)
    assert asked.returncode == 0, error
    told = re.search(r"(\d+) of 100000 steps are taken and saved", out)
    assert told, out
    assert latest(tmp_path / "saved").step == int(told[1])
