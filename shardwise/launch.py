"""`spawn`: run an importable function in n local processes; the first failure ends them all.

[Note: how ranks are started]
Ranks are forked from a `forkserver`, never from the caller: a caller that has used its thread pool
leaves forked children that hang at their first operation. The server has imported torch and
shardwise, so its start costs seconds once and a rank costs tenths. The caller hosts the rendezvous
store on a port the kernel chose, so there is no race for a free port. A rank that is done keeps its
process alive until every rank is done, because its gloo peers may still be reading from it. If the
others wait in a collective by then, they would wait for ever; see [Note: waiting for ever].
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise._rank import Report, run_rank
from shardwise._waiting import LOOK_SECONDS, Seen, Watch, look
from shardwise.sharding.errors import LaunchError, RankError, strict_keywords
from shardwise.sharding.job import Job, join_job

__all__ = ["Job", "join_job", "spawn"]

R = TypeVar("R")

# The server skips names it cannot import. torch imports its compiler at the first operation on a
# device mesh, which would cost each rank 1.4 s of CPU time.
_PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", "shardwise"]
_GRACE_SECONDS = 3.0
# A rank killed by a signal makes its peers fail within milliseconds, and their reports can come
# first: wait this long after a first failure for the death that may have caused it.
_SETTLE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class _Rank:
    """The caller's side of one rank."""

    rank: int
    process: BaseProcess
    link: Connection
    stack: Path

    @property
    def fds(self) -> tuple[Connection, int]:
        return self.link, self.process.sentinel


@strict_keywords
def spawn(
    main: Callable[..., R],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    timeout: float | None = None,
) -> list[R]:
    """Run `main(*args)` in `ranks` local processes and return the results in rank order.

    Each process finds its place in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as
    under torchrun, and has one thread. Its stdout is the caller's. Arguments and results are
    pickled by value, tensors too. The first call of a process costs seconds, later ones tenths.

    Args:
        main: a function that other processes can import by name.
        ranks: number of processes.
        args: positional arguments, the same for every rank.
        timeout: seconds after which ranks that have not finished are ended.

    Returns:
        What each rank returned, rank 0 first.

    Raises:
        RankError: a rank raised, exited or was killed; carries that rank's traceback, and its
            exception as `__cause__` where that can be pickled. Or ranks wait in a collective that
            a rank has not joined which has returned.
        LaunchError: `main` or `args` cannot be sent, or the time is over.

    >>> import math
    >>> spawn(math.sqrt, ranks=0, args=(4.0,))
    Traceback (most recent call last):
    shardwise.sharding.errors.LaunchError: spawn(sqrt, ranks=0) has no rank to start.
      A job has at least one rank.
      Fix: ranks=1
    """
    call = f"spawn({getattr(main, '__name__', repr(main))}, ranks={ranks})"
    payload = _pack(main, tuple(args), ranks, call)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started: list[_Rank] = []
    clean = False
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        try:
            for rank in range(ranks):
                environ = _environment(rank, ranks, store.port)
                started.append(_start(context, rank, payload, environ, Path(folder)))
            results = _collect(started, call, timeout)
            clean = True
        finally:
            _end(started, kill=not clean)
    return [pickle.loads(results[rank]) for rank in range(ranks)]


def _pack(main: Callable[..., Any], args: tuple[Any, ...], ranks: int, call: str) -> bytes:
    """Everything that can be refused before a process starts is refused here."""
    if ranks < 1:
        raise LaunchError(
            f"{call} has no rank to start.", why="A job has at least one rank.", fix="ranks=1"
        )
    module = getattr(main, "__module__", None)
    if module == "__mp_main__":
        raise LaunchError(
            f"{call} runs while a rank of another spawn imports the script.",
            why="Ranks import the script that holds main(), and so run its top level again.",
            fix='put the call of spawn under `if __name__ == "__main__":`',
        )
    top = sys.modules.get("__main__")
    if module == "__main__" and not getattr(top, "__file__", None):
        raise _not_importable(call, "it is defined in a notebook or an interactive session")
    try:
        pickle.dumps(main)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(call, str(error)) from None
    try:
        return pickle.dumps((main, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{call} has arguments that cannot be sent to another process.",
            facts=f"{type(error).__name__}: {error}",
            why="Arguments are pickled by value.",
            fix="pass plain data and build the rest inside main()",
        ) from error


def _not_importable(call: str, reason: str) -> LaunchError:
    return LaunchError(
        f"{call} cannot import its function in another process.",
        facts=reason,
        why="Every rank is a new process and finds main() by module and name.",
        fix="define main() at the top level of a module file, and pass values by args=",
    )


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The caller's environment as it is now (the fork server has an older one), plus the place."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # torchrun's own sign that the launcher hosts the store, so that rank 0 does not try to.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _start(
    context: ForkServerContext,
    rank: int,
    payload: bytes,
    environ: Mapping[str, str],
    folder: Path,
) -> _Rank:
    ours, theirs = context.Pipe()
    stack = folder / f"rank{rank}.txt"
    process = context.Process(
        target=run_rank,
        args=(payload, environ, os.getcwd(), theirs, str(stack)),
        name=f"shardwise-rank{rank}",
    )
    process.start()
    theirs.close()
    return _Rank(rank, process, ours, stack)


def _collect(started: Sequence[_Rank], call: str, timeout: float | None) -> dict[int, bytes]:
    """Pickled results by rank; raises at the first failure or when the time is over."""
    deadline = None if timeout is None else time.monotonic() + timeout
    results: dict[int, bytes] = {}
    pending = list(started)
    watch = Watch()
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        # Only a rank that has returned can leave the others in a wait without end.
        pause = left if not results else min(LOOK_SECONDS, left or LOOK_SECONDS)
        if not wait([fd for one in pending for fd in one.fds], pause):
            if deadline is not None and time.monotonic() >= deadline:
                raise _too_late(pending, len(started), call, timeout)
            if results and watch.all_wait(seen := _look(pending)):
                raise _left_behind(seen, sorted(results), call)
            continue
        failed: list[tuple[_Rank, Report | None]] = []
        for one in _ready(pending):
            report = _read(one)
            if report is not None and report.result is not None:
                results[one.rank] = report.result
                pending.remove(one)
            else:
                failed.append((one, report))
        if failed:
            raise _failure(failed, pending, len(started), call)
    return results


def _ready(pending: Sequence[_Rank]) -> list[_Rank]:
    ready = set(wait([fd for one in pending for fd in one.fds], 0))
    return [one for one in pending if ready.intersection(one.fds)]


def _read(one: _Rank) -> Report | None:
    """What a rank has to say, or None when it ended without a word."""
    with suppress(EOFError, OSError):
        if one.link.poll():
            return pickle.loads(one.link.recv_bytes())
    return None


def _failure(
    failed: list[tuple[_Rank, Report | None]], pending: Sequence[_Rank], ranks: int, call: str
) -> RankError:
    """The failure to report: a death without a word first, else the earliest exception."""
    if all(report is not None for _, report in failed):
        time.sleep(_SETTLE_SECONDS)
        seen = [one for one, _ in failed]
        later = [(one, _read(one)) for one in _ready([p for p in pending if p not in seen])]
        failed = [*failed, *(item for item in later if not item[1] or item[1].result is None)]
    for one, report in failed:
        if report is None:
            return _death(one, ranks, call)
    one, report = min(
        ((one, report) for one, report in failed if report is not None),
        key=lambda item: item[1].seconds,
    )
    error = RankError(
        f"rank {one.rank} of {ranks} failed with {report.kind}: {report.words}",
        where=call,
        facts=report.trace,
        why="A job is one program: the first failure ends all ranks.",
        fix=f"the traceback above is rank {one.rank}'s own; start there",
        rank=one.rank,
        ranks=ranks,
        error=report.kind,
    )
    error.__cause__ = report.cause()
    return error


def _death(one: _Rank, ranks: int, call: str) -> RankError:
    one.process.join(_GRACE_SECONDS)
    code = one.process.exitcode or 0
    fix = "look at the rank's own output above"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            fix = "the kernel kills with SIGKILL when memory runs out: lower the batch or the ranks"
        if -code == signal.SIGABRT:
            fix += "; gloo aborts a rank that receives another size than it expects, so ranks may "
            fix += "run different collectives: bind(debug=True) names the first that differs"
    elif one.stack.exists():
        how = f"exited with code {code} before main() returned"
    else:
        how = f"exited with code {code} while it imported the script"
        fix += '; is the call of spawn under `if __name__ == "__main__":`?'
    return RankError(
        f"rank {one.rank} of {ranks} {how}.",
        where=call,
        why="A job is one program: the first failure ends all ranks.",
        fix=fix,
        rank=one.rank,
        ranks=ranks,
        exitcode=code,
    )


def _look(pending: Sequence[_Rank]) -> dict[int, Seen]:
    return look([(one.rank, one.process.pid, one.stack) for one in pending])


def _stacks(seen: Mapping[int, Seen]) -> list[str]:
    return [
        f"rank {rank}, innermost call first:\n{one.stack}"
        if one.stack
        else f"rank {rank}: starting"
        for rank, one in seen.items()
    ]


def _left_behind(seen: Mapping[int, Seen], returned: list[int], call: str) -> RankError:
    gone, here = (", ".join(map(str, ranks)) for ranks in (returned, sorted(seen)))
    return RankError(
        f"rank {gone} of {len(seen) + len(returned)} returned while rank {here} waits in a "
        "collective.",
        where=call,
        facts=_stacks(seen),
        why="A collective ends when all of its ranks have joined it; a rank that has returned from "
        "main() joins nothing more.",
        fix="have every rank make the same calls; ranks that run out of batches stop together: "
        "while program.agree((batch := next(batches, None)) is not None)",
        returned=tuple(returned),
        waiting=tuple(sorted(seen)),
    )


def _too_late(
    pending: Sequence[_Rank], ranks: int, call: str, timeout: float | None
) -> LaunchError:
    stacks = _stacks(_look(pending))
    unfinished = [one.rank for one in pending]
    return LaunchError(
        f"{call} was not done after timeout={timeout} seconds.",
        where=f"not finished: {', '.join(f'rank {rank}' for rank in unfinished)} of {ranks}",
        facts=stacks,
        why="A rank waits for ever when its peers do not join the collective it is in.",
        fix="compare the stacks above: they show where each rank waits",
        unfinished=tuple(unfinished),
        timeout=timeout,
    )


def _end(started: Sequence[_Rank], *, kill: bool) -> None:
    """Release ranks that are done, or end them: SIGTERM, and SIGKILL after the grace time."""
    for one in started:
        if kill and one.process.is_alive():
            one.process.terminate()
        one.link.close()
    deadline = time.monotonic() + _GRACE_SECONDS
    for one in started:
        one.process.join(max(0.0, deadline - time.monotonic()))
        if one.process.is_alive():
            one.process.kill()
            one.process.join()
        one.process.close()
