"""Small modules, meshes and transforms that plans are tested on."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Transform
from shardwise.transforms.compose import chain, masked
from shardwise.transforms.zero import (
    freeze,
    keep_gathered,
    prefetch,
    shard_grads,
    shard_optimizer,
    shard_params,
    zero,
)


class Block(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Tiny(nn.Module):
    """Embedding, blocks, norm and head; `scale` is a scalar held by the root itself."""

    def __init__(self, *, depth: int = 3, width: int = 8, vocab: int = 10, tied: bool = False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


MODELS = {
    "tiny": Tiny(),
    "tied": Tiny(tied=True),
    "odd": Tiny(depth=2, width=7, vocab=5),
    "linear": nn.Linear(6, 4),
    "stack": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
}

MESH = Mesh(dp=2, fsdp=4)

models = st.sampled_from(list(MODELS.values()))
meshes = st.sampled_from(
    [Mesh(dp=1, fsdp=1), Mesh(dp=1, fsdp=2), Mesh(dp=2, fsdp=1), MESH, Mesh(fsdp=3, dp=5)]
)
data_axes = st.sampled_from(["fsdp", "dp", ("fsdp", "dp"), ("dp", "fsdp"), ()])
wheres = st.sampled_from(["**", "weight", "~weight", ("**", "~bias")])

params_homes = st.builds(shard_params, data_axes, where=wheres)
grads_homes = st.builds(shard_grads, data_axes, where=wheres)
opt_homes = st.builds(shard_optimizer, data_axes, where=wheres)
freezes = st.builds(freeze, st.sampled_from(["weight", "~weight"]))
prefetches = st.builds(prefetch, st.integers(0, 2))
zeros = st.builds(
    zero, st.integers(0, 3), st.sampled_from(["fsdp", "dp", ("dp", "fsdp")]), where=wheres
)
singles = st.one_of(zeros, params_homes, grads_homes, opt_homes, freezes)
recipes: st.SearchStrategy[Transform] = st.one_of(
    singles,
    st.lists(singles, max_size=3).map(lambda parts: chain(*parts)),
    st.builds(masked, singles, st.just("**")),
)


def keep_last() -> Transform:
    """Keep the last layer of `Tiny` gathered."""
    return keep_gathered("layers.2")
