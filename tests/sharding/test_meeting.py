"""Ranks that are started again agree on a name that no earlier start has used."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from shardwise.sharding.meeting import meet

pytestmark = pytest.mark.abstract


def start(store: dist.Store, world: int, *, late: int | None = None) -> list[str]:
    """All ranks of one start, in threads; one of them may come late."""
    names = [""] * world

    def rank(number: int) -> None:
        if number == late:
            time.sleep(0.1)
        names[number] = meet(store, number, world, seconds=10)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_each_start_has_a_name_of_its_own_whoever_comes_late() -> None:
    store = dist.HashStore()
    names = [start(store, world, late=late) for world, late in [(3, None), (3, 0), (2, 1), (4, 0)]]
    assert all(len(set(of_start)) == 1 for of_start in names)
    assert len({of_start[0] for of_start in names}) == len(names)


def test_a_start_that_died_while_it_met_is_not_joined() -> None:
    """Rank 0 and rank 1 of three have met; rank 2 never came."""
    store = dist.HashStore()
    died = [threading.Thread(target=fails, args=(store, rank), daemon=True) for rank in range(2)]
    for thread in died:
        thread.start()
    for thread in died:
        thread.join()
    stale = store.get("shardwise/start").decode()
    names = start(store, 3, late=0)
    assert len(set(names)) == 1
    assert names[0] != stale


def fails(store: dist.Store, rank: int) -> None:
    if rank == 1:
        assert meet(store, rank, 3, seconds=5)
        return
    with pytest.raises(RuntimeError, match=r"timed out waiting for shardwise/start/.*/2"):
        meet(store, rank, 3, seconds=0.3)
