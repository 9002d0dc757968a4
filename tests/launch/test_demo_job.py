"""The demo as a job: under spawn, under torchrun, in a world of one, and as a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shardwise.demo.gpt import GPT
from shardwise.demo.options import Options, Outcome
from shardwise.demo.run import run
from shardwise.launch import spawn

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def options(folder: Path, **changes: object) -> Options:
    return Options(steps=4, rows=8, out=str(folder), **changes)


def check(outcome: Outcome, ranks: int) -> None:
    assert outcome.ranks == ranks
    assert outcome.measured_bytes == outcome.predicted_bytes
    assert outcome.same_collectives
    assert outcome.executed == outcome.predicted
    assert outcome.largest_difference == 0.0
    GPT().load_state_dict(load_file(outcome.weights))


@pytest.mark.parametrize(
    "changes", [{"zero": 1}, {"zero": 3}, {"zero": 2, "accumulate": 2, "remat": True}], ids=str
)
def test_two_ranks_train_as_the_split_reference_bit_for_bit(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    asked = options(tmp_path, check=True, **changes)
    outcomes = spawn(run, ranks=2, args=(asked,), timeout=200)
    check(outcomes[0], 2)
    own = {"sample": "", "tokens_per_second": 0.0, "largest_difference": None, "measured_step": 0}
    assert outcomes[0]._replace(**own) == outcomes[1]._replace(**own)


def test_layers_cut_over_an_axis_train_as_one_process_does(tmp_path: Path) -> None:
    """What a layer computes is added up in another order, so that float64 tells rounding apart."""
    mesh = (("fsdp", 2), ("tp", 2))
    asked = options(tmp_path, mesh=mesh, sequence=True, accumulate=2, remat=True, check=True)
    outcome = spawn(run, ranks=4, args=(asked,), timeout=200)[0]
    assert outcome.reference == "one process, float64"
    assert outcome.largest_difference is not None
    assert outcome.largest_difference < 1e-11
    check(outcome._replace(largest_difference=0.0), 4)


def test_replicas_of_shards_train_bit_for_bit(tmp_path: Path) -> None:
    asked = options(tmp_path, mesh=(("replica", 2), ("fsdp", 2)), check=True)
    check(spawn(run, ranks=4, args=(asked,), timeout=200)[0], 4)


def test_options_save_the_memory_that_is_predicted(tmp_path: Path) -> None:
    asked = Options(steps=2, rows=32, out=str(tmp_path), precision="bf16", accumulate=4, remat=True)
    one = spawn(run, ranks=2, args=(asked,), timeout=200)[0]
    assert one.same_collectives
    assert one.predicted_step < 0.6 * one.plain_step
    assert 0.7 * one.predicted_step < one.measured_step < 1.05 * one.predicted_step + 2**20


def test_a_world_of_one_needs_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    outcome = run(options(tmp_path, check=True))
    check(outcome, 1)
    assert outcome.executed.payload_bytes == 0


def test_training_lowers_the_loss_below_the_unigram_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    outcome = run(Options(steps=60, rows=16, out=str(tmp_path)))
    assert outcome.eval_loss < outcome.unigram_nats - 0.3


def test_torchrun_runs_the_same_module(tmp_path: Path) -> None:
    environ = {key: v for key, v in os.environ.items() if key not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "shardwise.demo"),
            *("--steps", "2", "--out", str(tmp_path)),
        ],
        cwd=ROOT,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
    assert (tmp_path / "weights.safetensors").exists()


def test_a_failing_demo_ends_with_one_message(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    environ = {key: v for key, v in os.environ.items() if key not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "shardwise.demo", "--ranks", "2", "--steps", "2"),
            *("--out", str(blocked)),
        ],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("RankError: rank 0 of 2 failed with FileExistsError"), json.dumps(
        done.stderr
    )
