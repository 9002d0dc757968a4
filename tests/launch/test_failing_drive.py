"""OFF-3: a drive that fails on one rank in the middle of an update is an error on all ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import DonatedStateError, OffloadError, RankError, ShardwiseError

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

WIDTH = 256
"""A rank's moments of one layer are more than a page: they are written by requests."""


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def fail_once(verb: str) -> None:
    """In this process, the next request of a kind meets a broken drive."""
    call = getattr(os, verb)

    def broken(*args: Any) -> int:
        setattr(os, verb, call)
        raise OSError(errno.EIO, "Input/output error")

    setattr(os, verb, broken)


def update(folder: str, verb: str) -> dict[str, Any]:
    """A step, a step in which rank 1's drive fails, and what is left of state and job."""
    plan = sw.plan(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        sw.Mesh(fsdp=2),
        sw.zero(3, "fsdp"),
        sw.offload("opt", sw.disk(folder)),
    )
    program = sw.lower(plan, loss_fn, sw.optim.adamw(0.01)).bind()
    rank = sw.launch.join_job().rank
    batch = program.shard_batch(torch.ones(4, WIDTH))
    state, _ = program.step(program.init(0), batch)
    if rank == 1:
        fail_once(verb)
    found: dict[str, Any] = {"rank": rank}
    try:
        program.step(state, batch)
    except ShardwiseError as error:
        found["error"] = error
    try:
        program.step(state, batch)
    except ShardwiseError as error:
        found["state"] = error
    _, metrics = program.step(program.init(0), batch)
    found["again"] = float(metrics.loss)
    return found


@pytest.mark.parametrize("verb", ["preadv", "pwritev"])
def test_all_ranks_raise_and_the_job_goes_on(verb: str, tmp_path: Path) -> None:
    ranks = sw.spawn(update, 2, args=(str(tmp_path), verb), timeout=90)
    told = {one["rank"]: one for one in ranks}
    mine, other = told[1]["error"], told[0]["error"]
    assert isinstance(mine, OffloadError)
    assert mine.numbers["errno"] == errno.EIO
    assert isinstance(other, RankError)
    assert mine.what in str(other)
    assert "go on from the last checkpoint" in str(other)
    for one in told.values():
        assert isinstance(one["state"], DonatedStateError)
        assert "failed half-way" in str(one["state"])
    assert told[0]["again"] == told[1]["again"]
    assert os.listdir(tmp_path) == []
