"""Small models for tests of misuse, and the two ways to run them: trained like plain torch, or not.

`right_or_refused` is the law of these tests: a program does what plain torch does, or it says why
not; it is never silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import ShardwiseError
from tests.oracles.one_process import assert_same, one_process, sharded

WIDTH = 4
ONE = sw.Mesh(fsdp=1)
TWO = sw.Mesh(fsdp=2)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """Three units of one kind, each called by `call(unit, x)`, and a head."""

    def __init__(self, unit: Callable[[], nn.Module] = linear, call: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(unit() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.call = call or (lambda unit, x: unit(x))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    out = model(batch["x"])
    return sw.Mean((out - batch["y"]).square().sum(), out.shape[0])


def batches(steps: int = 2, rows: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)

    return [{"x": normal(), "y": normal()} for _ in range(steps)]


def bind(
    module: nn.Module,
    *transforms: sw.Transform,
    mesh: sw.Mesh = ONE,
    loss: Any = loss_fn,
    optimizer: Any = None,
) -> sw.Program:
    """A program over ZeRO-3, unless other transforms are given."""
    plan = sw.plan(module, mesh, *(transforms or [sw.zero(3, "fsdp")]))
    return sw.lower(plan, loss, optimizer or sw.optim.sgd(0.1)).bind()


@contextmanager
def started(
    module: nn.Module, *transforms: sw.Transform, mesh: sw.Mesh = TWO, **how: Any
) -> Iterator[tuple[sw.Program, Any]]:
    """A program on simulated ranks and its state, with the values of the module."""
    with sw.simulate(mesh):
        program = bind(module, *transforms, mesh=mesh, **how)
        yield program, program.init(sw.from_module(module))


def assert_right(
    module: nn.Module, *transforms: sw.Transform, loss: Any = loss_fn, data: Any = None
) -> None:
    """Training on two simulated ranks is that of plain torch."""
    data = data or batches()
    plan = sw.plan(module, TWO, *(transforms or [sw.zero(3, "fsdp")]))
    want = one_process(module, loss, data, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), parts=2)
    assert_same(sharded(module, plan, loss, data, sw.optim.sgd(0.1, momentum=0.9)), want)


def right_or_refused(module: nn.Module, *texts: str) -> bool:
    """Whether it was right; if not, the text of the error must hold one of `texts`."""
    try:
        assert_right(module)
    except (RuntimeError, ShardwiseError) as error:
        if not any(text in str(error) for text in texts):
            raise
        return False
    return True
