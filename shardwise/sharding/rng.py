"""Randomness as a value: streams keyed by what they are for, never by who asks first."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch


def key(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order.

    >>> key(0, "layers.0") == key(0, "layers.0"), key(0, "layers.0") == key(1, "layers.0")
    (True, False)
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def keyed(seed: int, device: torch.device) -> Generator[None]:
    """Run the block with the default generators seeded; the caller's streams are untouched."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for cuda in devices:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield
