"""What goes on beside training: one thread, with collectives of its own.

[Note: beside training]
A thread may not use the groups of training: gloo and NCCL pair what meets in order, and the order
of two threads is nobody's. So the first call makes one gloo group more, of all ranks and on the
host; after that nothing that goes on beside training has a collective on a group of training.
The thread is no daemon: Python waits for it at exit, and `close_job` before it closes the groups.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable


class Beside(threading.Thread):
    """One piece of work in a thread of its own; `join` or `result` wait for it.

    Args:
        work: what to do.
        what: its name, for errors, such as `save_async 120`.
    """

    def __init__(self, work: Callable[[], None], what: str) -> None:
        super().__init__(name=f"shardwise {what}")
        self._work = work
        self._what = what
        self._error: BaseException | None = None
        self._told = False

    def run(self) -> None:
        """The body of the thread."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = _nothing  # it holds a copy of the state

    def result(self) -> None:
        """Wait, and raise what the work has raised."""
        self.join()
        self._told = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait, and raise what the work has raised unless `result` did so before."""
        self.join()
        if not self._told:
            self.result()

    def __del__(self) -> None:
        if self._error is not None and not self._told:
            print(f"shardwise: {self._what} failed, and nothing waited for it:", file=sys.stderr)
            traceback.print_exception(self._error)


def _nothing() -> None:
    """What is left to do."""


def finish_beside() -> None:
    """Wait for everything of this process that goes on beside training."""
    for thread in threading.enumerate():
        if isinstance(thread, Beside):
            thread.join()
