"""Models for tests of remat, and how to run them with and without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw

WIDTH = 8


class Block(nn.Module):
    """Attention and a hidden layer, dropout, keyword arguments, and two named values."""

    def __init__(self, width: int = WIDTH, drop: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width, bias=False)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, *, scale: float = 1.0, state: dict[str, Any] | None = None) -> Any:
        """A pair, if it was given a pair."""
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(sw.name(mixed, "attn_out")))
        hidden = sw.name(self.up(x), "hidden")
        x = x + scale * self.drop(self.down(self.act(hidden)))
        if state is None:
            return x
        return x, {"shift": state["shift"] + x.mean(), "note": "a string"}


class Net(nn.Module):
    """Two lists of blocks inside of a body, so that modules hold units."""

    def __init__(self, depth: int = 3, drop: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = Body(depth, drop)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        """One number for each of five classes."""
        return self.head(self.norm(self.body(self.first(x))))


class Body(nn.Module):
    """Blocks that pass a structure on."""

    def __init__(self, depth: int, drop: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(drop=drop) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Every block but the first gets keyword arguments and a structure."""
        state: dict[str, Any] = {"shift": x.sum() * 0}
        for index, layer in enumerate(self.layers):
            if index == 0:
                x = layer(x)
            else:
                x, state = layer(x, scale=0.5, state=state)
        return x * 1.5 + state["shift"]


def mean_square(model: Any, batch: Any) -> Tensor:
    """The loss of all these models."""
    return model(batch).square().mean()


def rows(count: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    """A batch of short sequences."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, WIDTH, generator=generator, dtype=dtype)


class Seen(NamedTuple):
    """What one call of `program.grads` has given."""

    loss: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    program: sw.Program


def run(
    module: nn.Module,
    mesh: sw.Mesh,
    *transforms: sw.Transform,
    batch: Any = None,
    loss_fn: Callable[..., Any] = mean_square,
    units: Sequence[str] | None = None,
) -> Seen:
    """Gradients on simulated ranks; what ran is what was predicted."""
    with sw.simulate(mesh):
        plan = sw.plan(module, mesh, *transforms, units=units)
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        part = program.shard_batch(rows() if batch is None else batch)
        grads, metrics = program.grads(state, part)
        assert tuple(program.last_collectives) == tuple(program.lowered.grads_items)
        after, _ = program.step(state, part)
        assert tuple(program.last_collectives) == program.lowered.collectives()
        buffers = dict(sw.to_global(after.buffers))
        return Seen(metrics.loss, dict(sw.to_global(grads.leaves)), buffers, program)


def assert_same_bits(got: Seen, want: Seen) -> None:
    """Loss, gradients and buffers are equal bit for bit."""
    assert torch.equal(got.loss, want.loss)
    assert got.grads.keys() == want.grads.keys()
    differ = [path for path in want.grads if not torch.equal(got.grads[path], want.grads[path])]
    assert not differ
    assert got.buffers.keys() == want.buffers.keys()
    assert not [n for n in want.buffers if not torch.equal(got.buffers[n], want.buffers[n])]
