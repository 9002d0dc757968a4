"""Small programs that are saved, and trained on after a restore."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from tests.transforms.carried import square

PAIR = sw.Mesh(fsdp=2)


def train(program: sw.Program, state: Any, batches: list[Tensor]) -> Any:
    for one in batches:
        state, _ = program.step(state, program.shard_batch(one))
    return state


def tokens(seed: int, high: int = 11) -> Tensor:
    return torch.randint(0, high, (12,), generator=torch.Generator().manual_seed(seed))


def program_of(module: nn.Module, ranks: int, level: int = 3, **options: Any) -> sw.Program:
    plan = sw.plan(module, sw.Mesh(fsdp=ranks), sw.zero(level, "fsdp", **options))
    return sw.lower(plan, square, sw.optim.adamw(1e-2)).bind()
