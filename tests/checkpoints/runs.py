"""A small training run, simulated, for tests of what saves it and goes on with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.records import records_of
from shardwise.sharding.state import adopt


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 5))


def loss_fn(module: nn.Module, batch: Tensor) -> sw.Mean:
    return sw.Mean(module(batch).pow(2).sum(), batch.shape[0])


def batch(step: int, rows: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, dtype=torch.float64, generator=generator)


def lowered(mesh: sw.Mesh, level: int = 3) -> sw.Lowered:
    plan = sw.plan(model().double(), mesh, sw.zero(level, *mesh.names))
    return sw.lower(plan, loss_fn, sw.optim.adamw(1e-2))


def train(program: sw.Program, state: Any, steps: range) -> Any:
    for step in steps:
        state, _ = program.step(state, program.shard_batch(batch(step)))
    return state


def bits(state: Any) -> dict[str, list[Any]]:
    """Every element of a state by name, whatever the mesh, as numbers."""
    ranks = state.ranks if isinstance(state, sw.Lifted) else (state,)
    wholes: dict[str, Tensor] = {}
    for rank, one in enumerate(ranks):
        for record in records_of(adopt(one)):
            if record.derived:
                continue
            whole = wholes.setdefault(record.name, torch.empty(record.shape, dtype=record.dtype))
            for box, values in record.pieces(rank):
                part = whole
                for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    part = part.narrow(dim, start, size)
                part.copy_(values)
    return {name: whole.contiguous().view(-1).tolist() for name, whole in wholes.items()}
