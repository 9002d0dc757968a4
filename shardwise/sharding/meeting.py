"""Ranks that a launcher has started again meet under a name that no earlier start has used.

[Note: one store, several starts]
torchrun keeps one store for all starts of a job (pytorch/pytorch#135712), so the keys under which
the ranks of a start publish their addresses are still there when they are started again, and gloo
connects to ranks that have ended. Nothing that torchrun tells a rank names its start: each agent
counts restarts for itself. So rank 0 draws a name and publishes it; each other rank answers with a
word of its own, under the name that it sees, until rank 0 has confirmed that word; a name of an
earlier start is never confirmed with a new word. Three small messages a rank, once a start.
"""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

_NAME = "shardwise/start"
_LOOK_SECONDS = 0.02


def meet(store: dist.Store, rank: int, world: int, seconds: float) -> str:
    """Agree on a name for this start of a job.

    Args:
        store: that all ranks see; may hold what earlier starts have left.
        rank: this process.
        world: number of ranks.
        seconds: how long ranks may wait for each other.

    Raises:
        RuntimeError: some rank did not come.

    >>> len(meet(dist.HashStore(), 0, 1, seconds=1.0))
    16
    """
    return _lead(store, world, seconds) if rank == 0 else _follow(store, rank, seconds)


def _lead(store: dist.Store, world: int, seconds: float) -> str:
    name = secrets.token_hex(8)
    store.set(_NAME, name)
    deadline = time.monotonic() + seconds
    for rank in range(1, world):
        key = f"{_NAME}/{name}/{rank}"
        _wait(store, key, deadline)
        store.set(f"{key}/{store.get(key).decode()}", "")
    return name


def _follow(store: dist.Store, rank: int, seconds: float) -> str:
    word = secrets.token_hex(8)
    deadline = time.monotonic() + seconds
    answered = ""
    _wait(store, _NAME, deadline)
    while True:
        name = store.get(_NAME).decode()
        key = f"{_NAME}/{name}/{rank}"
        if name != answered:
            store.set(key, word)
            answered = name
        if store.check([f"{key}/{word}"]):
            return name
        _rest("rank 0", deadline)


def _wait(store: dist.Store, key: str, deadline: float) -> None:
    while not store.check([key]):
        _rest(key, deadline)


def _rest(what: str, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"timed out waiting for {what}")
    time.sleep(_LOOK_SECONDS)
