"""Reading ahead: the system fills its cache with files while a program works out what it needs.

[Note: reading ahead]
Until a manifest is matched with a program's state nothing is known to be needed, but nearly always
nearly everything is. Ranks take turns at the blocks of all files, so that ranks on one host, which
have one cache, share the work. It ends when reading begins: at most what the disk gives in that
time is read in vain.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

_BLOCK_BYTES = 4 << 20
# More at once is cut down by the system to what it reads ahead at most.


class ReadAhead:
    """Reads files into the cache of the system until it is closed; a context manager.

    What cannot be read is left to whoever reads it for real.

    Args:
        directory: of the files.
        names: of the files, in the order in which they will be read.
        turn: of this rank.
        turns: how many ranks share the work.

    References:
        [Note: reading ahead].

    >>> with ReadAhead(Path("nowhere"), ["a"]) as ahead:
    ...     ahead.join()
    >>> ahead.nbytes
    0
    """

    def __init__(
        self, directory: Path, names: Iterable[str], *, turn: int = 0, turns: int = 1
    ) -> None:
        self.nbytes = 0
        self._directory = directory
        self._names = tuple(names)
        self._turn = turn
        self._turns = turns
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        """Start, where the system takes advice."""
        if hasattr(os, "posix_fadvise"):
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop after the block that is being asked for."""
        self._ends.set()
        self.join()

    def join(self) -> None:
        """Wait until everything has been asked for, or it is closed."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        blocks = itertools.islice(self._blocks(), self._turn, None, self._turns)
        for descriptor, start, size in blocks:
            if self._ends.is_set():
                return
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)
            self.nbytes += size

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        for name in self._names:
            if Path(name).name != name:
                continue  # files lie in the directory itself; the reader says so
            try:
                descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                end = os.fstat(descriptor).st_size
                for start in range(0, end, _BLOCK_BYTES):
                    yield descriptor, start, min(_BLOCK_BYTES, end - start)
            finally:
                os.close(descriptor)
