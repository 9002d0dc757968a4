"""This process's place in a job: join the group that exists, or make it from the environment.

The only file that reads what a launcher (torchrun, `spawn`) leaves in the environment for a rank.
"""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.sharding.beside import finish_beside
from shardwise.sharding.errors import LaunchError
from shardwise.sharding.meeting import meet

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
_SHARED_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_TIMEOUT_VARIABLE = "SHARDWISE_TIMEOUT_SECONDS"
_DEFAULT_TIMEOUT_SECONDS = 600.0
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's view of its job.

    Args:
        rank: this process, from 0.
        world: number of ranks.
        owns_group: the default process group was made here, so it is closed here, at exit.
    """

    rank: int
    world: int
    owns_group: bool


def join_job(device_type: str = "cpu", *, timeout: float | None = None) -> Job:
    """Join the job this process was started for; costs one rendezvous, or nothing when alone.

    An initialised default group is used and left alone. Else the group is made from the launcher's
    environment and closed at exit. Without a launcher the job is a world of one, without a group.

    Args:
        device_type: `"cpu"` (gloo) or `"cuda"` (nccl, one device per local rank).
        timeout: seconds that a collective of the group made here may wait for the other ranks;
            default SHARDWISE_TIMEOUT_SECONDS, else 600. An initialised group keeps its own.

    Raises:
        LaunchError: an environment with parts missing or malformed, a timeout that is no time, or
            a failed rendezvous.

    >>> join_job()
    Job(rank=0, world=1, owns_group=False)
    """
    if device_type not in _BACKENDS:
        raise LaunchError(
            f"join_job({device_type!r}) has no backend for that device.",
            why="CPU tensors travel over gloo, CUDA tensors over nccl.",
            fix=f"use one of {', '.join(map(repr, _BACKENDS))}",
        )
    waits = group_timeout(os.environ, timeout)
    if dist.is_initialized():
        return Job(dist.get_rank(), dist.get_world_size(), owns_group=False)
    rank, world = _place(os.environ)
    if device_type == "cuda":
        torch.cuda.set_device(_local_rank(os.environ, rank))
    if world == 1:
        return Job(0, 1, owns_group=False)
    _make_group(_BACKENDS[device_type], rank, world, waits)
    atexit.register(close_job)
    return Job(rank, world, owns_group=True)


def launched() -> bool:
    """Whether a launcher started this process as a rank of a job."""
    return "RANK" in os.environ


def close_job() -> None:
    """Close the default process group if there is one; ranks need not call it together.

    Saves that still go on in the background are finished first.
    """
    finish_beside()
    if dist.is_initialized():
        dist.destroy_process_group()


def group_timeout(environ: Mapping[str, str], seconds: float | None = None) -> datetime.timedelta:
    """How long a collective may wait before it fails.

    Args:
        environ: where SHARDWISE_TIMEOUT_SECONDS may be.
        seconds: an argument of the caller, which wins.

    Raises:
        LaunchError: that is no time.

    >>> group_timeout({"SHARDWISE_TIMEOUT_SECONDS": "90"})
    datetime.timedelta(seconds=90)
    >>> group_timeout({"SHARDWISE_TIMEOUT_SECONDS": "90"}, 5)
    datetime.timedelta(seconds=5)
    """
    text = environ.get(_TIMEOUT_VARIABLE, "")
    given = f"{_TIMEOUT_VARIABLE}={text!r}" if seconds is None else f"timeout={seconds!r}"
    try:
        if seconds is None:
            seconds = float(text) if text else _DEFAULT_TIMEOUT_SECONDS
        if not 0 < seconds < float("inf"):
            raise ValueError(given)
    except (ValueError, TypeError):
        raise LaunchError(
            f"{given} is not a time.",
            why="It is the number of seconds a collective may wait for the other ranks.",
            fix=f"leave it out for {_DEFAULT_TIMEOUT_SECONDS:.0f} seconds, or give a number "
            "above 0",
        ) from None
    return datetime.timedelta(seconds=seconds)


def _place(environ: Mapping[str, str]) -> tuple[int, int]:
    """Rank and world size a launcher has left; (0, 1) when there is no launcher."""
    if "RANK" not in environ and environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1
    missing = [name for name in _LAUNCHER_VARIABLES if name not in environ]
    if missing:
        present = [f"{name}={environ[name]}" for name in _LAUNCHER_VARIABLES if name in environ]
        raise LaunchError(
            f"the environment describes a job, but {', '.join(missing)} is not set.",
            facts=f"set: {', '.join(present)}",
            why=f"A launcher sets {', '.join(_LAUNCHER_VARIABLES)} for every rank.",
            fix="start with torchrun or sw.spawn, or unset RANK and WORLD_SIZE for a world of one",
        )
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise LaunchError(
            f"RANK={rank} is not a rank of a job with WORLD_SIZE={world}.",
            where="environment of this process",
            why=f"Ranks run from 0 to {world - 1}.",
            fix="let torchrun or sw.spawn set both",
            rank=rank,
            world=world,
        )
    return rank, world


def _local_rank(environ: Mapping[str, str], rank: int) -> int:
    """Device of a rank; without LOCAL_RANK, ranks are taken to fill one machine after another."""
    if "LOCAL_RANK" in environ:
        return _number(environ, "LOCAL_RANK")
    return rank % torch.cuda.device_count()


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(
            f"{name}={environ[name]!r} is not a whole number.",
            why="A launcher sets it for every rank.",
            fix=f"unset {name}, or start with torchrun or sw.spawn",
        ) from None


def _store_of_this_start(
    environ: Mapping[str, str], rank: int, world: int, timeout: datetime.timedelta
) -> dist.Store | None:
    """Under torchrun: its store, without what earlier starts have left; else torch's own choice."""
    if _AGENT_VARIABLE not in environ or environ.get(_SHARED_VARIABLE) != "True":
        return None
    host, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")
    shared = dist.TCPStore(host, port, world, is_master=False, timeout=timeout)
    return dist.PrefixStore(meet(shared, rank, world, timeout.total_seconds()), shared)


def _make_group(backend: str, rank: int, world: int, timeout: datetime.timedelta) -> None:
    try:
        store = _store_of_this_start(os.environ, rank, world, timeout)
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout, store=store)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LaunchError(
            f"rank {rank} of {world} could not join its {backend} group at {where}.",
            facts=str(error).splitlines()[:3],
            why="All ranks meet at that address before the first collective.",
            fix=f"check that all {world} ranks were started and that the address is reachable",
            rank=rank,
            world=world,
        ) from error
