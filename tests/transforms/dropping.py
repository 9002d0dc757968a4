"""A model whose output is its mask, and a loss that remembers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw


class Plain(nn.Module):
    """Its output is the mask of its input of ones, by the function given; float64."""

    def __init__(self, forward: Callable[[Plain, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.drop = sw.Dropout(0.25)
        self.run = forward

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.weight * x)


class Output:
    """A loss function that remembers what the model returned, per pass."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, model: Any, batch: Tensor) -> Tensor:
        output = model(batch)
        if type(output) is Tensor:
            self.outputs.append(output.detach().clone())
        return output.sum()


def program_of(model: nn.Module, *transforms: Any) -> tuple[sw.Program, Output]:
    seen = Output()
    plan = sw.plan(model, sw.Mesh(fsdp=1), *transforms)
    return sw.lower(plan, seen, sw.optim.sgd(0.0)).bind(), seen


def ones(rows: int = 4, width: int = 6) -> Tensor:
    return torch.ones(rows, width, dtype=torch.float64)
