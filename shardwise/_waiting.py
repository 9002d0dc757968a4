"""Notices that ranks of a `spawn` wait in a collective for one that has returned already.

[Note: waiting for ever]
Once a rank has returned, the others may still have work of their own, or wait for it for ever. The
caller looks at them once a second: the innermost frame of each, which a signal has them write, and
their CPU time. If every one of them sits in a collective, in the same line and without using the
CPU, look after look, then nobody is left who could end the wait: data that is on its way costs CPU
time, and a rank that computes is in another frame. Where CPU times cannot be read, the timeouts of
the collectives decide.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK_SECONDS = 1.0
_LOOKS = 4
_IDLE_TICKS = 3  # of 1/100 s; writing the stack takes some
_WRITE_SECONDS = 0.3
_IN_COLLECTIVE = re.compile(
    r'\s*File "[^"]*(torch/distributed/|shardwise/sharding/(transport|movement))[^"]*", line'
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at a rank has shown.

    Args:
        stack: innermost frame first; empty while the rank starts.
        ticks: CPU time of the process; None where it cannot be read.
    """

    stack: str
    ticks: int | None

    @property
    def in_collective(self) -> bool:
        """Whether the innermost frame is one of torch.distributed or of our choke point."""
        return bool(_IN_COLLECTIVE.match(self.stack))

    def idle_since(self, before: Seen) -> bool:
        """Whether nothing has happened since another look."""
        if self.ticks is None or before.ticks is None:
            return False
        return self.stack == before.stack and self.ticks - before.ticks <= _IDLE_TICKS


class Watch:
    """Looks at ranks time and again; see [Note: waiting for ever]."""

    def __init__(self) -> None:
        self._before: dict[int, Seen] = {}
        self._idle_looks = 0

    def all_wait(self, seen: Mapping[int, Seen]) -> bool:
        """Whether these ranks have waited for long enough to wait for ever.

        Args:
            seen: every rank that has not returned, by number.

        >>> watch = Watch()
        >>> seen = {0: Seen('  File "torch/distributed/x.py", line 3 in all_reduce', 7)}
        >>> [watch.all_wait(seen) for _ in range(5)]
        [False, False, False, False, True]
        """
        before, self._before = self._before, dict(seen)
        idle = before.keys() == seen.keys() and all(
            one.in_collective and one.idle_since(before[rank]) for rank, one in seen.items()
        )
        self._idle_looks = self._idle_looks + 1 if idle else 0
        return self._idle_looks >= _LOOKS


def look(ranks: Sequence[tuple[int, int | None, Path]]) -> dict[int, Seen]:
    """Have ranks write their stacks, and read them.

    Args:
        ranks: number, process id and the file that the rank writes to.
    """
    lengths: dict[int, int] = {}
    for rank, pid, path in ranks:
        if pid is not None and path.exists():
            lengths[rank] = path.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
    if lengths:
        time.sleep(_WRITE_SECONDS)
    return {
        rank: Seen(_stack(path, lengths[rank]) if rank in lengths else "", _ticks(pid))
        for rank, pid, path in ranks
    }


def _stack(path: Path, start: int) -> str:
    """What was written behind `start`, without its headline."""
    text = path.read_text()[start:].strip("\n")
    headline, _, frames = text.partition("\n")
    return frames if "most recent call first" in headline else text


def _ticks(pid: int | None) -> int | None:
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])
    return None
