"""Whether tiers have room for a plan: a budget of the user's, and what is free before init."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardwise.offload.store import Store
from shardwise.sharding.errors import OffloadError, PlanError, nearest, summarise
from shardwise.sharding.movement import Transport
from shardwise.sharding.spec import MEMORIES
from shardwise.sharding.tiers import Tier
from shardwise.transforms.memory import Memory

_MEMINFO = Path("/proc/meminfo")


class Room(NamedTuple):
    """What one rank tells the others of one tier.

    Attributes:
        host: its machine.
        place: what ranks of one machine share: a file system, or the memory.
        tier: as text.
        needed: bytes.
        free: bytes; None where nobody can tell.
        fault: why it cannot be used at all; "" if it can.
    """

    host: str
    place: str
    tier: str
    needed: int
    free: int | None
    fault: str


def check_budget(memory: Memory, budget: Mapping[str, int] | None) -> None:
    """Refuse a plan that needs more than the user allows one rank.

    Args:
        memory: of the plan.
        budget: bytes of one rank by kind of memory; kinds that are left out have no limit.

    Raises:
        PlanError: an unknown kind, no number of bytes, or too little, in one error for all kinds.
    """
    if not budget:
        return
    for kind, limit in budget.items():
        if kind not in MEMORIES or type(limit) is not int or limit < 0:
            known = "" if kind in MEMORIES else f"; {nearest(str(kind), MEMORIES)}"
            raise PlanError(
                "The budget is no number of bytes by kind of memory.",
                where="argument budget of lower()",
                facts=f"{kind!r}: {limit!r}{known}",
                why=f"Kinds of memory are {', '.join(MEMORIES)}; budgets are whole numbers.",
                fix="budget={'device': 80 << 30, 'pinned_host': 200 << 30}",
                kind=kind,
                limit=limit,
            )
    needed = {"device": memory.peak_bytes + (memory.activations or 0)}
    for tier, held in memory.tiers.items():
        needed[tier.memory] = needed.get(tier.memory, 0) + held.peak_bytes
    over = {k: needed.get(k, 0) for k in budget if needed.get(k, 0) > budget[k]}
    if over:
        raise PlanError(
            f"The plan needs more than the budget of {', '.join(over)}.",
            where="argument budget of lower()",
            facts=[
                f"{kind}: needs {nbytes:,} B a rank, has {budget[kind]:,} B "
                f"({nbytes - budget[kind]:,} B too many)"
                for kind, nbytes in over.items()
            ]
            + str(memory).splitlines(),
            why="It counts what rests, what a step takes beside it, and known activations.",
            fix="offload more of it, shard over more ranks, or recompute activations",
            over=over,
        )


def check_room(memory: Memory, store: Store, transport: Transport) -> None:
    """Before the first state is made, refuse tiers that cannot hold it; alike on all ranks.

    Args:
        memory: of the plan.
        store: of this rank.
        transport: to the other ranks; used only if something rests off the device.

    Raises:
        OffloadError: folders are missing, or there is too little room; all of them in one error.
    """
    if not memory.tiers:
        return
    mine = [_look(store, tier, held.peak_bytes) for tier, held in memory.tiers.items()]
    told: list[Room] = [room for rooms in transport.gather_objects(mine) for room in rooms]
    faults = [f"{room.tier} on {room.host}: {room.fault}" for room in told if room.fault]
    shared: dict[tuple[str, str], list[Room]] = {}
    for room in told:
        shared.setdefault((room.host, room.place), []).append(room)
    for (host, _), rooms in shared.items():
        needed = sum(room.needed for room in rooms)
        free = min((room.free for room in rooms if room.free is not None), default=needed)
        if needed > free:
            faults.append(
                f"{rooms[0].tier} on {host}: {len(rooms)} parts need {needed:,} bytes, "
                f"{free:,} are free"
            )
    faults = list(dict.fromkeys(faults))  # ranks of one machine say the same
    if faults:
        raise OffloadError(
            f"Tiers cannot hold what the plan puts there ({len(faults)} faults); nothing was made.",
            where="program.init(...)",
            facts=summarise(faults),
            why="Room on every rank's machine is checked before anything is allocated.",
            fix="free some room, name another folder, or offload a smaller fraction",
            faults=len(faults),
        )


def _look(store: Store, tier: Tier, needed: int) -> Room:
    host = socket.gethostname()
    if tier.memory != "disk":
        return Room(host, tier.memory, str(tier), needed, _free_memory(), "")
    try:
        path = store.folder(tier.path).path
    except OffloadError as error:
        return Room(host, tier.path, str(tier), needed, None, error.what)
    return Room(
        host, f"device {os.stat(path).st_dev}", str(tier), needed, shutil.disk_usage(path).free, ""
    )


def _free_memory() -> int | None:
    """Bytes of host memory that can be had without swapping."""
    if not _MEMINFO.exists():
        return None
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
    return found.get("MemAvailable:")
