"""A model, its plans and what a state holds: for tests that carry a state from plan to plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

import shardwise as sw

FIRST, SECOND = sw.Mesh(fsdp=4), sw.Mesh(node=2, local=2)
PLANS: dict[str, Callable[[nn.Module], sw.Plan]] = {
    "replicated": lambda m: sw.plan(m, FIRST),
    "zero 1": lambda m: sw.plan(m, FIRST, sw.zero(1, "fsdp")),
    "zero 3": lambda m: sw.plan(m, FIRST, sw.zero(3, "fsdp")),
    "masters": lambda m: sw.plan(m, FIRST, sw.shard_params("fsdp")),
    "other dim": lambda m: sw.plan(
        m, FIRST, sw.zero(3, "fsdp", on=1, pad=True, where="layers.*.weight")
    ),
    "hybrid": lambda m: sw.plan(m, SECOND, sw.zero(3, "local")),
    "inner first": lambda m: sw.plan(m, SECOND, sw.zero(3, ("local", "node"), where="norm")),
    "units": lambda m: sw.plan(m, FIRST, sw.zero(3, "fsdp"), units=["embed", "norm"]),
}
PAIR = sw.Mesh(fsdp=2)


class Model(nn.Module):
    """Uneven shapes, a tie, a 0-dim parameter, a buffer that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x) * self.gain)


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    logits = model(batch)
    total = nn.functional.cross_entropy(logits, (batch + 1) % 11, reduction="sum")
    return sw.Mean(total, batch.shape[0])


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(seed))


def model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def leaves(state: Any, rank: int) -> list[Any]:
    """Everything in one rank's state, in order; DTensors as their local tensors."""
    one = state.ranks[rank]
    found = optree.tree_leaves(one, namespace="shardwise")
    return [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in found]


def assert_bits(one: Any, other: Any) -> None:
    for rank in range(len(one.ranks)):
        for a, b in zip(leaves(one, rank), leaves(other, rank), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def whole(state: Any) -> dict[str, Any]:
    """Whole tensors by name: parameters, masters, optimizer state, buffers."""
    found = {
        "params": sw.to_global(state.params),
        "master": sw.to_global(state.master),
        "opt": sw.to_global(state.opt),
        "buffers": sw.to_global(state.buffers),
        "step": sw.to_global(state.step),
        "seed": sw.to_global(state.seed),
    }
    paths, values, _ = optree.tree_flatten_with_path(found)
    return {".".join(map(str, path)): value for path, value in zip(paths, values, strict=True)}


def assert_close(got: Any, want: Any) -> None:
    """Two states of any plans, to law 1; masters are left out, as not every plan has them."""
    ours, theirs = (
        {name: value for name, value in whole(state).items() if not name.startswith("master.")}
        for state in (got, want)
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=name)


def square(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().mean()
