"""A run under torch's own FSDP2, saved by torch's DCP on two ranks, taken up on three."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.fixtures.tied import Tied, batch_of, mean_loss

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

STEPS = 3


def train(directory: Path) -> dict[str, Tensor]:
    """Save after three steps, take one more, and return the weights."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Tied()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(number: int) -> None:
        mean_loss(model, batch_of(number).chunk(ranks)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        step(number)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=directory)
    step(STEPS)
    after = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    dist.destroy_process_group()
    return after


def test_a_run_under_fsdp2(tmp_path: Path) -> None:
    """Moments and counts come along: the next step is FSDP2's own."""
    after = sw.spawn(train, 2, args=(tmp_path / "run",), timeout=100)[0]
    mesh = sw.Mesh(fsdp=3)
    with sw.simulate(mesh):
        plan = sw.plan(Tied(), mesh, sw.zero(3, "fsdp"))
        program = sw.lower(plan, mean_loss, sw.optim.adamw(1e-2)).bind()
        state = program.init(sw.from_dcp(tmp_path / "run"))
        assert int(state.ranks[0].opt.count) == int(state.ranks[0].step) == STEPS
        state, _ = program.step(state, program.shard_batch(batch_of(STEPS)))
        got = sw.to_global(state.params)
    assert got.keys() == after.keys()
    for path, value in after.items():
        torch.testing.assert_close(got[path], value, rtol=1e-5, atol=1e-6)
