"""Real processes under a limit of memory, over many steps, and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
LIMIT_MB = 780
"""Parameters and gradients of the large model take 403 MB, its moments 403 more; threads and what a
step takes beside them are the rest."""


MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""What is freed goes back to the system at once, so that limits do not meet fragments."""


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.launch.limited", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **MALLOC},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
def test_state_beyond_a_limit_trains_on_disk_and_fails_without(tmp_path: Path) -> None:
    without = run("plain", tmp_path, 3, LIMIT_MB)
    assert without.returncode != 0
    assert "memory" in without.stderr.lower()
    found = told(run("disk", tmp_path, 3, LIMIT_MB))
    assert len(found["losses"]) == 3
    assert max(found["anonymous"]) > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(300)
def test_200_steps_do_not_grow(tmp_path: Path) -> None:
    """OFF-4: less than 2 MB between step 10 and step 200, and losses as without offload."""
    found = told(run("all", tmp_path, 200, 0))
    held = found["anonymous"]
    assert max(held[-20:]) - max(held[:10]) < 2 << 20, held[::20]
    assert found["losses"] == told(run("plain", tmp_path, 200, 0))["losses"]
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    done = run("all", tmp_path, 5, 0, "--kill")
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
