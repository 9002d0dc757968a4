"""A signal that asks the job to stop, kept until all ranks have agreed on the step to stop at."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any


class StopRequest:
    """Notes signals while the `with` block lasts; what handled them before does so again after it.

    Signals reach the main thread of a process only, so a block in another thread notes none.

    Args:
        signals: to be noted.

    >>> with StopRequest([signal.SIGUSR2]) as request:
    ...     signal.raise_signal(signal.SIGUSR2)
    >>> request.noted
    <Signals.SIGUSR2: 12>
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.noted: signal.Signals | None = None
        self._signals = tuple(signals)
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # None: a handler that Python did not install and cannot install again.
            self._before = [
                (number, signal.signal(number, self._note))
                for number in self._signals
                if signal.getsignal(number) is not None
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)
        self._before = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = signal.Signals(number)
