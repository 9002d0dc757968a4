"""What ranks of tests of background saves share; a rank is a process that ends with its test."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import Tensor

from shardwise.sharding.checkpoint import writing


def slow_disk(seconds: float) -> None:
    """Have this process take that long for every file."""
    write_file = writing.write_file

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return write_file(*args, **kwargs)

    writing.write_file = slow


def place(folder: str, name: str, *, ranks: int | None = None) -> str:
    """One path a test and a number of ranks."""
    return os.path.join(folder, f"{name}-on-{ranks or os.environ['WORLD_SIZE']}")


def local(state: Any) -> list[Tensor]:
    """Copies of this rank's parts of the parameters."""
    return [state.params[path].to_local().clone() for path in state.params]
