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

from shardwise.sharding.errors import RankError
from shardwise.sharding.lost import is_lost, lost_peers


class Beside(threading.Thread):
    """One piece of work in a thread of its own; `join` or `result` wait for it.

    Args:
        work: what to do.
        what: its name, for errors, such as `save_async 120`.
        place: rank and number of ranks.
    """

    def __init__(self, work: Callable[[], None], what: str, place: tuple[int, int]) -> None:
        super().__init__(name=f"shardwise {what}")
        self._work = work
        self._what = what
        self._place = place
        self._error: BaseException | None = None
        self._told = False

    def run(self) -> None:
        """The body of the thread."""
        try:
            self._work()
        except BaseException as error:
            self._error = self._explained(error)
        finally:
            del self._work  # it holds a copy of the state

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

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, RuntimeError) or not is_lost(error):
            return error
        rank, ranks = self._place
        lost: RankError = lost_peers(
            str(error),
            rank=rank,
            peers=[other for other in range(ranks) if other != rank],
            call=self._what,
            place="in the background",
            expected="the vote of all ranks",
        )
        lost.__cause__ = error
        return lost


def finish_beside() -> None:
    """Wait for everything of this process that goes on beside training."""
    for thread in threading.enumerate():
        if isinstance(thread, Beside):
            thread.join()
