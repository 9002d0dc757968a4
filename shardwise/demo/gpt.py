"""A small GPT over bytes: a plain `nn.Module` that knows nothing about sharding.

Its modules say what the dimensions of their weights are (`axes`), as a comment would.

Shapes: B rows, T positions, C channels, H heads, V byte values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a `GPT`; the default has 1.3 million parameters."""

    layers: int = 4
    width: int = 160
    heads: int = 8
    context: int = 64
    vocab: int = 256


class Attention(nn.Module):
    """Causal self-attention with one fused projection to queries, keys and values."""

    axes: ClassVar[Mapping[str, str]] = {
        "qkv.weight": "(3 heads hd) embed",
        "qkv.bias": "(3 heads hd)",
        "out.weight": "embed (heads hd)",
        "out.bias": "embed",
        "heads": "heads",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix each position with the ones before it."""
        batch, length, _ = x_BTC.shape
        split = (batch, length, 3, self.heads, self.head_width)
        query, key, value = self.qkv(x_BTC).view(split).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """One residual layer: attention, then a feed-forward network."""

    axes: ClassVar[Mapping[str, str]] = {
        "norm*.*": "norm",
        "up.weight": "mlp embed",
        "up.bias": "mlp",
        "down.weight": "embed mlp",
        "down.bias": "embed",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Add what both parts find."""
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC))
        return x_BTC + self.down(functional.gelu(self.up(self.norm2(x_BTC))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    >>> GPT(GPTConfig(layers=1, width=8, heads=2))(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 256])
    """

    axes: ClassVar[Mapping[str, str]] = {
        "embed.weight": "vocab embed",
        "position.weight": "pos embed",
        "norm.*": "norm",
        "head.weight": "vocab embed",
    }

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) for the byte that follows each position."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.embed(tokens_BT) + self.position(positions_T)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        return self.head(self.norm(x_BTC))


@torch.no_grad()
def generate(model: GPT, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
    """Continue a prompt by sampling one byte at a time; costs a whole forward per byte (no cache).

    >>> tiny = GPT(GPTConfig(layers=1, width=8, heads=2, context=4))
    >>> text = generate(tiny, b"def", length=6, temperature=0.8, seed=0)
    >>> text[:3], len(text)
    (b'def', 9)
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(tokens[:, -model.config.context :])[0, -1]
        chances = torch.softmax(logits / temperature, dim=-1)
        token = torch.multinomial(chances, 1, generator=generator)
        tokens = torch.cat([tokens, token[None]], dim=1)
    return bytes(tokens[0].tolist())
