"""`spawn`: results in order, every way to fail, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.launch import join_job, spawn
from shardwise.sharding.errors import LaunchError, PlanError, RankError

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]


def place(word: str) -> tuple[str, int, int, int]:
    return word, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.get_num_threads()


def total_of_ranks() -> torch.Tensor:
    job = join_job()
    assert job.owns_group
    assert not join_job().owns_group
    total = torch.full((3,), float(job.rank + 1))
    dist.all_reduce(total)
    return total


def user_made_group() -> tuple[int, bool]:
    dist.init_process_group("gloo")
    job = join_job()
    return job.rank, job.owns_group


def one_fails(how: str) -> None:
    job = join_job()
    dist.barrier()
    if job.rank == 1:
        if how == "raise":
            raise ValueError("the second rank\nhas had enough")
        if how == "plan":
            raise PlanError("no such plan.", fix="another", size=24)
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.Signals[how])
    dist.barrier()


def one_sleeps(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def leaves() -> None:
    raise SystemExit(0)


def environment_and_folder() -> tuple[str | None, str]:
    return os.environ.get("SHARDWISE_TEST_WORD"), os.getcwd()


def test_results_come_in_rank_order_with_one_thread_each() -> None:
    assert spawn(place, ranks=3, args=("a",)) == [("a", rank, 3, 1) for rank in range(3)]


def test_ranks_make_their_group_from_the_environment() -> None:
    for total in spawn(total_of_ranks, ranks=2):
        assert torch.equal(total, torch.full((3,), 3.0))


def test_a_group_the_user_made_is_left_alone() -> None:
    assert spawn(user_made_group, ranks=2) == [(0, False), (1, False)]


def test_system_exit_without_a_code_is_a_normal_end() -> None:
    assert spawn(leaves, ranks=1) == [None]


def test_ranks_see_the_callers_environment_and_folder_of_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spawn(leaves, ranks=1)
    monkeypatch.setenv("SHARDWISE_TEST_WORD", "fresh")
    monkeypatch.chdir(tmp_path)
    assert spawn(environment_and_folder, ranks=1) == [("fresh", str(tmp_path))]


def test_the_first_failure_ends_all_ranks_with_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        spawn(one_fails, ranks=3, args=("raise",))
    assert time.monotonic() - start < 30
    text = str(caught.value)
    assert text.startswith("rank 1 of 3 failed with ValueError: the second rank")
    assert "in one_fails" in text
    assert "has had enough" in text
    assert caught.value.numbers == {"rank": 1, "ranks": 3, "error": "ValueError"}
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_keeps_its_numbers_as_the_cause() -> None:
    with pytest.raises(RankError) as caught:
        spawn(one_fails, ranks=2, args=("plan",))
    assert isinstance(caught.value.__cause__, PlanError)
    assert caught.value.__cause__.numbers == {"size": 24}


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_rank_killed_by_a_signal_is_named(name: str) -> None:
    with pytest.raises(RankError, match=f"rank 1 of 2 was killed by {name}"):
        spawn(one_fails, ranks=2, args=(name,))


def test_a_rank_that_exits_silently_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 exited with code 7 before main"):
        spawn(one_fails, ranks=2, args=("exit",))


def test_the_timeout_names_the_ranks_that_are_late_and_where() -> None:
    with pytest.raises(LaunchError) as caught:
        spawn(one_sleeps, ranks=3, args=(1,), timeout=8)
    assert caught.value.numbers["unfinished"] == (1,)
    assert "not finished: rank 1 of 3" in str(caught.value)
    assert "in one_sleeps" in str(caught.value)


@pytest.mark.abstract
def test_a_function_no_process_can_import_is_refused() -> None:
    def local() -> None: ...

    for main in (lambda: None, local):
        with pytest.raises(LaunchError, match="cannot import its function") as caught:
            spawn(main, ranks=2)
        assert "top level of a module" in caught.value.fix


@pytest.mark.abstract
def test_arguments_that_do_not_pickle_are_refused() -> None:
    with pytest.raises(LaunchError, match="arguments that cannot be sent"):
        spawn(place, ranks=2, args=(lambda: None,))


# One `write` a line: what two ranks print cannot mix.
SCRIPT = """
    import os, sys, time
    import shardwise.launch

    def main(seconds):
        try:
            os.write(1, f"rank {os.environ['RANK']} {os.getpid()}\\n".encode())
            time.sleep(seconds)
        finally:
            os.write(1, b"left\\n")
        return int(os.environ["RANK"])

    if __name__ == "__main__" or len(sys.argv) > 2:
        print("all", shardwise.launch.spawn(main, ranks=2, args=(float(sys.argv[1]),)))
"""


RunScript = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[RunScript]:
    """Start the script in a session of its own; what still runs at the end is killed."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    root = Path(__file__).parents[2]
    started: list[subprocess.Popen[str]] = []

    def run(*argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(path), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
            start_new_session=True,
            # Jobs that a shell starts in the background ignore it, and so would what they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def test_a_script_can_spawn_its_own_function(run_script: RunScript) -> None:
    out, err = run_script("0").communicate(timeout=100)
    assert "all [0, 1]" in out, err
    assert "rank 0" in out
    assert "rank 1" in out


def test_a_script_without_the_guard_is_told_so(run_script: RunScript) -> None:
    process = run_script("0", "unguarded")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "exited with code 1 while it imported the script" in err
    assert 'under `if __name__ == "__main__":`' in err


@pytest.mark.parametrize(
    ("signum", "everyone"), [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGKILL, False)]
)
def test_ranks_end_with_their_caller(run_script: RunScript, signum: int, everyone: bool) -> None:
    process = run_script("600")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[2]) for _ in range(2)]
    if everyone:
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    if signum == signal.SIGINT:
        assert out.split() == ["left", "left"]
        assert err.count("KeyboardInterrupt") == 1, err


def alive(pid: int) -> bool:
    """Running, and not merely a zombie that its parent has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_ended_while_it_waits(told: str) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(0.5)
        raise ValueError("the first failure")
    before = os.fstat(2)
    try:
        time.sleep(60)
    finally:
        python, other = os.fstat(sys.stderr.fileno()), os.readlink("/proc/self/fd/2")
        Path(told).write_text(f"{(python.st_dev, python.st_ino) == (before.st_dev, before.st_ino)}")
        Path(told).with_suffix(".other").write_text(other)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks the system for open files")
def test_only_python_speaks_in_a_rank_that_is_being_ended(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankError, match="rank 0 of 2 failed with ValueError"):
        spawn(is_ended_while_it_waits, ranks=2, args=(str(told),), timeout=60)
    assert told.read_text() == "True"
    assert told.with_suffix(".other").read_text() == os.devnull
