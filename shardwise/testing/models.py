"""Small models with the oddities that sharding must survive, each built from a plain value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.transforms.loss import Mean

EXACT = ("attention", "frozen", "nested", "scalar", "tied", "twice", "unused")
"""Features under which a program equals the unsharded model."""

SPLIT = ("batchnorm", "branch", "dropout")
"""Features that depend on how the batch is cut: a program equals its split reference only."""

_IGNORED = -100
_BRANCH_ROWS = 3


@dataclass(frozen=True)
class Toy:
    """A model as a value: sizes and features; `build` makes the module.

    Args:
        width: channels between blocks.
        hidden: channels inside a block.
        depth: number of blocks; two and more alike make units.
        vocab: number of tokens; 0: the model reads floats and has one output.
        features: any of `EXACT` and `SPLIT`.
            `attention` causal self-attention in each block (with a vocab); `frozen` the first layer
            does not train; `nested` blocks in lists of lists; `scalar` a 0-dim parameter held by
            the root; `tied` the head is the embedding (with a vocab); `twice` the first block runs
            once more at the end; `unused` a layer that never runs; `batchnorm` batch statistics in
            front of the blocks; `branch` a layer that runs only on parts with three rows or more;
            `dropout` in front of the head.

    >>> model = Toy(width=2, depth=2, vocab=5, features=("tied",)).build()
    >>> model.head.weight is model.first.weight
    True
    """

    width: int = 3
    hidden: int = 1
    depth: int = 0
    vocab: int = 0
    features: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """The module, with values from torch's default generator."""
        body = ToyModel(self)
        return Scaled(body) if "scalar" in self.features else body

    def batch(self, rows: int, seed: int) -> dict[str, Tensor]:
        """A random global batch; some labels are to be ignored, so counts are uneven."""
        generator = torch.Generator().manual_seed(seed)
        if not self.vocab:
            shape = (rows, self.width + 1)
            values = torch.randn(shape, generator=generator)
            return {"inputs": values[:, :-1], "labels": values[:, -1]}
        tokens = torch.randint(self.vocab, (rows, 4), generator=generator)
        labels = tokens.roll(1, dims=1)
        labels[torch.rand(rows, 4, generator=generator) < 0.2] = _IGNORED
        labels[0, 0] = 0
        return {"inputs": tokens, "labels": labels}

    def loss_fn(self, model: Any, batch: dict[str, Tensor]) -> Any:
        """A mean over rows as a scalar, or a mean over tokens with an auxiliary metric."""
        outputs, labels = model(batch["inputs"]), batch["labels"]
        if not self.vocab:
            return (outputs.squeeze(-1) - labels).square().mean()
        outputs, labels = outputs.flatten(0, 1), labels.flatten()
        loss = functional.cross_entropy(outputs, labels, ignore_index=_IGNORED, reduction="sum")
        right = (outputs.detach().argmax(-1) == labels).sum()
        count = (labels != _IGNORED).sum()
        return Mean(loss, count), {"accuracy": Mean(right.double(), count)}


class Block(nn.Module):
    """A residual layer; its hidden layer has a bias, the layer back has none."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(toy.width)
        self.mix = None
        if "attention" in toy.features and toy.vocab:
            self.mix = nn.Linear(toy.width, 3 * toy.width)
        self.up = nn.Linear(toy.width, toy.hidden)
        self.down = nn.Linear(toy.hidden, toy.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the hidden layer find."""
        if self.mix is not None:
            query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
            x = x + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class ToyModel(nn.Module):
    """First layer, blocks, norm, head."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        features = toy.features
        width = toy.width
        self.first = nn.Embedding(toy.vocab, width) if toy.vocab else nn.Linear(width, width)
        blocks = [Block(toy) for _ in range(toy.depth)]
        if "nested" in features and toy.depth > 2:
            self.layers = nn.ModuleList([nn.ModuleList(blocks[:-2]), nn.ModuleList(blocks[-2:])])
        else:
            self.layers = nn.ModuleList(blocks)
        self.twice = "twice" in features and toy.depth > 0
        self.spare = nn.Linear(width, 3) if "unused" in features else None
        self.extra = nn.Linear(width, width) if "branch" in features else None
        wants_statistics = "batchnorm" in features and not toy.vocab
        self.statistics = nn.BatchNorm1d(width) if wants_statistics else None
        self.dropout = nn.Dropout(0.3 if "dropout" in features else 0.0)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, toy.vocab or 1, bias=not toy.vocab)
        if "tied" in features and toy.vocab:
            self.head.weight = self.first.weight
        if "frozen" in features:
            self.first.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits per token, or one number per row."""
        x = self.first(inputs)
        if self.statistics is not None:
            x = self.statistics(x)
        if self.extra is not None and len(x) >= _BRANCH_ROWS:
            x = x + self.extra(x)
        blocks = list(_blocks(self.layers))
        for block in blocks + blocks[:1] * self.twice:
            x = block(x)
        return self.head(self.dropout(self.norm(x)))


class Scaled(nn.Module):
    """A model times one number that the root holds itself."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.body = body

    def reset_parameters(self) -> None:
        """Start from a number that is neither 0 nor 1."""
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scale the outputs."""
        return self.body(inputs) * self.scale


def _blocks(layers: nn.ModuleList) -> Iterator[nn.Module]:
    for layer in layers:
        if isinstance(layer, nn.ModuleList):
            yield from _blocks(layer)
        else:
            yield layer
