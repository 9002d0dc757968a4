"""Small transformers with every way to write attention and MLP, for laws of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw

IGNORED = -100


@dataclass(frozen=True)
class Small:
    """A transformer as a value.

    Args:
        rows: of the attention's weights: `apart` for q, k and v in a weight each, else the order
            of rows of a fused one: `blocks` (all q, all k, all v), `heads` (q, k and v of each
            head) or `groups` (the q of a group, its k and its v).
        mlp: `plain`, `gated`, or `fused` for gate and up in one weight.
        norm: `layer` or `rms`.
        loss: `cut` takes logits over a cut vocabulary, `whole` is torch's own, `tiled` never makes
            all logits.
        twice: the block before the last runs twice; it is not the first one if there are three.
    """

    heads: int = 4
    kv: int = 4
    hd: int = 2
    width: int = 8
    hidden: int = 8
    vocab: int = 33
    depth: int = 2
    rows: str = "apart"
    mlp: str = "plain"
    norm: str = "layer"
    loss: str = "cut"
    tied: bool = False
    bias: bool = True
    twice: bool = False

    def build(self) -> nn.Module:
        """The model in float64."""
        return Transformer(self).double()

    def batch(self, rows: int, length: int, seed: int) -> dict[str, Tensor]:
        """Tokens and labels, of which some do not count."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocab, (rows, length), generator=generator)
        labels = torch.randint(self.vocab, (rows, length), generator=generator)
        labels[torch.rand(rows, length, generator=generator) < 0.3] = IGNORED
        labels[0, 0] = self.vocab - 1
        return {"tokens": tokens, "labels": labels}

    def loss_fn(self, model: Any, batch: dict[str, Tensor]) -> Any:
        """A mean over tokens, with a metric beside it."""
        labels, count = batch["labels"], (batch["labels"] != IGNORED).sum()
        out = model(batch["tokens"])
        if self.loss == "tiled":
            weight, bias = model.head.weight, model.head.bias
            loss = sw.linear_cross_entropy(out, weight, labels, bias=bias, chunks=2)
        elif self.loss == "cut":
            loss = sw.cross_entropy(out, labels, label_smoothing=0.1, z_loss=1e-3)
        else:
            loss = functional.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum")
        return sw.Mean(loss, count), {"again": sw.Mean(loss.detach(), count)}


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, small: Small) -> None:
        super().__init__()
        self.heads, self.kv, self.hd = small.heads, small.kv, small.hd
        self.group = small.heads // small.kv
        self.rows = small.rows
        q, k = small.heads * small.hd, small.kv * small.hd
        names: dict[str, Any] = {"heads": "heads", "hd": small.hd}
        if small.rows != "heads":
            names |= {"kv": "kv", "group": "heads // kv"}
        if small.rows == "apart":
            self.q = nn.Linear(small.width, q, bias=small.bias)
            self.k = nn.Linear(small.width, k, bias=small.bias)
            self.v = nn.Linear(small.width, k, bias=small.bias)
            names |= _layer("q", "(heads hd)") | _layer("k", "(kv hd)") | _layer("v", "(kv hd)")
        else:
            self.qkv = nn.Linear(small.width, q + 2 * k, bias=small.bias)
            names |= _layer("qkv", FUSED[small.rows])
        self.o = nn.Linear(q, small.width, bias=small.bias)
        names |= {"o.weight": "embed (heads hd)", "o.bias": "embed"}
        self.axes = _existing(self, names)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the rows of a sequence."""
        batch, length, _ = x.shape
        q, k, v = self._projected(x)
        q, k, v = (one.reshape(batch, length, -1, self.hd).transpose(1, 2) for one in (q, k, v))
        k, v = (one.repeat_interleave(self.group, dim=1) for one in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.hd))

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        if self.rows == "apart":
            return self.q(x), self.k(x), self.v(x)
        fused = self.qkv(x)
        if self.rows == "blocks":
            sizes = [self.heads * self.hd, self.kv * self.hd, self.kv * self.hd]
            return fused.split(sizes, dim=-1)
        if self.rows == "heads":
            return fused.unflatten(-1, (self.heads, 3, self.hd)).unbind(-2)
        parts = fused.unflatten(-1, (self.kv, self.group + 2, self.hd))
        return parts.split([self.group, 1, 1], dim=-2)


FUSED = {
    "blocks": "((heads + kv + kv) hd)",
    "heads": "(heads 3 hd)",
    "groups": "(kv (group + 1 + 1) hd)",
}
"""Axes of the rows of a fused weight, by their order."""


class Mlp(nn.Module):
    """Hidden units with or without a gate."""

    def __init__(self, small: Small) -> None:
        super().__init__()
        self.kind, self.hidden = small.mlp, small.hidden
        width, hidden, bias = small.width, small.hidden, small.bias
        self.up = nn.Linear(width, hidden * (2 if small.mlp == "fused" else 1), bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if small.mlp == "gated" else None
        self.down = nn.Linear(hidden, width, bias=bias)
        names = _layer("up", "(2 mlp)" if small.mlp == "fused" else "mlp") | _layer("gate", "mlp")
        names |= {"down.weight": "embed mlp", "down.bias": "embed", "hidden": "mlp"}
        self.axes = _existing(self, names)

    def forward(self, x: Tensor) -> Tensor:
        """Widen, gate, narrow."""
        up = self.up(x)
        if self.kind == "fused":
            gate, up = up.split(self.hidden, dim=-1)
            return self.down(functional.silu(gate) * up)
        if self.gate is not None:
            return self.down(functional.silu(self.gate(x)) * up)
        return self.down(functional.gelu(up))


class Block(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, small: Small) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(small), _norm(small)
        self.attention, self.mlp = Attention(small), Mlp(small)

    def forward(self, x: Tensor) -> Tensor:
        """Add what both find."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens and positions, blocks, norm, head; gives hidden states if the loss takes those."""

    def __init__(self, small: Small) -> None:
        super().__init__()
        self.embed = nn.Embedding(small.vocab, small.width)
        self.positions = nn.Parameter(torch.empty(16, small.width))
        self.layers = nn.ModuleList(Block(small) for _ in range(small.depth))
        self.norm = _norm(small)
        self.head = nn.Linear(small.width, small.vocab, bias=small.bias)
        if small.tied:
            self.head.weight = self.embed.weight
        self.twice, self.tiled = small.twice, small.loss == "tiled"
        names = {"embed.weight": "vocab embed", "positions": "pos embed"} | _layer("head", "vocab")
        self.axes = _existing(self, names)

    def reset_parameters(self) -> None:
        """Only what this module holds itself."""
        nn.init.normal_(self.positions)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, or what the head makes them of."""
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
            if self.twice and layer is self.layers[-2]:
                x = layer(x)
        x = self.norm(x)
        return x if self.tiled else self.head(x)


def _norm(small: Small) -> nn.Module:
    made: Callable[[int], nn.Module] = nn.LayerNorm if small.norm == "layer" else nn.RMSNorm
    return made(small.width)


def _layer(name: str, rows: str) -> dict[str, Any]:
    return {f"{name}.weight": f"{rows} embed", f"{name}.bias": rows}


def _existing(module: nn.Module, names: dict[str, Any]) -> dict[str, Any]:
    """Without the biases that a layer does not have."""
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {n: a for n, a in names.items() if "." not in n or n in known}
