"""`join_job` reads what a launcher left, and says what is wrong with it."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.sharding.errors import LaunchError
from shardwise.sharding.job import Job, group_timeout, join_job

pytestmark = pytest.mark.abstract

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_the_world_is_one_and_has_no_group() -> None:
    assert join_job() == Job(rank=0, world=1, owns_group=False)
    assert not dist.is_initialized()


def test_one_rank_under_a_launcher_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("0", "1", "0", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert join_job() == Job(rank=0, world=1, owns_group=False)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "4"}, "but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"RANK": "0"}, "but WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
        (
            {"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "RANK=4 is not a rank of a job with WORLD_SIZE=4",
        ),
        (
            {"RANK": "one", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "RANK='one' is not a whole number",
        ),
    ],
)
def test_a_broken_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], words: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=words) as caught:
        join_job()
    assert "sw.spawn" in caught.value.fix


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(LaunchError, match="'tpu'") as caught:
        join_job("tpu")
    assert "'cpu', 'cuda'" in caught.value.fix


def test_the_timeout_has_a_default_and_one_variable() -> None:
    assert group_timeout({}) == datetime.timedelta(minutes=10)
    assert group_timeout({"SHARDWISE_TIMEOUT_SECONDS": "2.5"}).total_seconds() == 2.5


@pytest.mark.parametrize("text", ["soon", "-1", "0", "inf", "nan"])
def test_a_timeout_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="SHARDWISE_TIMEOUT_SECONDS"):
        group_timeout({"SHARDWISE_TIMEOUT_SECONDS": text})


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_a_group_is_closed_at_exit(tmp_path: Path) -> None:
    # The exit of a plain process, not of a spawned rank: only there do atexit functions run.
    code = (
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print('open', dist.is_initialized()))\n"
        "from shardwise.sharding import job\n"
        "job._make_group = lambda *a: dist.init_process_group('gloo', rank=0, world_size=1,"
        f" init_method='file://{tmp_path}/store')\n"
        "print(job.join_job())\n"
    )
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout == "Job(rank=1, world=2, owns_group=True)\nopen False\n"
