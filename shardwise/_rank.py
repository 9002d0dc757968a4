"""The child's side of `spawn`: prepare the process, run main, report once, wait to be released."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType

import torch

from shardwise.sharding.job import close_job

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Report:
    """The one message of a rank: a pickled result, or an exception in words.

    Args:
        seconds: when, on the clock that all processes of a machine share.
        result: pickled result, None for a failure.
        kind: name of the exception type.
        words: first line of the exception's text.
        trace: traceback, starting in main.
        exception: the pickled exception, None where it does not pickle.
    """

    seconds: float
    result: bytes | None = None
    kind: str = ""
    words: str = ""
    trace: str = ""
    exception: bytes | None = None

    def cause(self) -> BaseException | None:
        """The exception itself, where it could be pickled and rebuilt."""
        if self.exception is not None:
            # An exception's constructor is a user's code and may raise anything.
            with suppress(Exception):
                return pickle.loads(self.exception)
        return None


def run_rank(
    payload: bytes, environ: Mapping[str, str], folder: str, link: Connection, stack: str
) -> None:
    """Body of a spawned process."""
    # Ctrl-C reaches the whole terminal; only the caller answers it, by ending the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    _keep_freed_memory()
    with open(stack, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        report = _attempt(payload)
        with suppress(OSError, EOFError):
            link.send_bytes(pickle.dumps(report))
            # Returns (by end of file) when the caller closes its side: see the note in launch.py.
            link.poll(None)
        faulthandler.unregister(signal.SIGUSR1)
    if report.result is not None:
        close_job()


def _keep_freed_memory() -> None:
    """Have malloc keep large freed blocks, as a caching allocator does.

    A step takes and gives back the same buffers for every unit. Returned to the system, each comes
    back as fresh pages: two copies of 21 MB took 21 ms that way and 1.8 ms in kept memory.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _attempt(payload: bytes) -> Report:
    try:
        main, args = pickle.loads(payload)
        try:
            result = main(*args)
        except SystemExit as error:
            if error.code not in {None, 0}:
                raise
            result = None
        return Report(time.monotonic(), result=pickle.dumps(result))
    except BaseException as error:
        return _describe(error)


def _describe(error: BaseException) -> Report:
    # The first frame is `_attempt`, which says nothing to a user.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    trace = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    try:
        exception = pickle.dumps(error)
    except Exception:
        exception = None
    words = (str(error).splitlines() or [""])[0]
    return Report(time.monotonic(), None, type(error).__name__, words, trace, exception)


def _leave(signum: int, frame: FrameType | None) -> None:
    """Let `finally` blocks of main run; the caller kills what is still there after its grace.

    The exception may come up in Python that torch calls from C++ that must not throw (a fake tensor
    asked for its sizes). The process aborts then, and the C++ runtime's last words would stand
    above the caller's message; what Python writes is still seen.
    """
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr.flush()
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
    raise SystemExit(128 + signum)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
