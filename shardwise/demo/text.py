"""Real text that every machine has: the source of the Python standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.sharding.errors import ShardwiseError

# Installed packages differ between machines; test suites hold tables and odd encodings.
_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled", "__pycache__"}
_HOLD_OUT_EVERY = 20
_ENOUGH_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on and bytes of other files to evaluate on.

    Args:
        train: uint8, the training files one after another.
        held_out: uint8, every 20th file.
        num_files: number of files in both.
    """

    train: Tensor
    held_out: Tensor
    num_files: int


class TextError(ShardwiseError):
    """A machine without the source of its standard library."""


def standard_library(root: Path | None = None) -> Corpus:
    """Read the source of the standard library, in an order that does not depend on the machine.

    Args:
        root: folder to read instead; default is where this Python keeps its library.

    Raises:
        TextError: there are too few source files (a Python stripped of its source).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if not _SKIP.intersection(name.split("/"))]
    texts = [(root / name).read_bytes() for name in names]
    held_out = b"".join(texts[_HOLD_OUT_EVERY - 1 :: _HOLD_OUT_EVERY])
    train = b"".join(t for i, t in enumerate(texts, 1) if i % _HOLD_OUT_EVERY)
    if min(len(train), len(held_out) * _HOLD_OUT_EVERY) < _ENOUGH_BYTES:
        raise TextError(
            f"{root} has {len(names)} source files with {len(train) + len(held_out)} bytes.",
            where="the library folder of this Python",
            why=f"The demo trains on the standard library and needs {_ENOUGH_BYTES} bytes of it.",
            fix="use a Python that was installed with its .py files",
            num_files=len(names),
            num_bytes=len(train) + len(held_out),
        )
    return Corpus(_as_tensor(train), _as_tensor(held_out), len(texts))


def draw_batch(data: Tensor, *, rows: int, context: int, seed: int) -> dict[str, Tensor]:
    """Random windows of a text and the bytes that follow: the same batch on every rank.

    >>> batch = draw_batch(torch.arange(100, dtype=torch.uint8), rows=2, context=3, seed=0)
    >>> bool((batch["targets"] == batch["tokens"] + 1).all()), batch["tokens"].shape
    (True, torch.Size([2, 3]))
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - context, (rows, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long()
    return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def unigram_entropy(data: Tensor) -> float:
    """Entropy of single bytes in nats: the loss of a model that only knows how often each occurs.

    >>> round(unigram_entropy(torch.tensor([0, 1, 2, 3], dtype=torch.uint8)), 4)
    1.3863
    """
    counts = torch.bincount(data, minlength=256).double()
    chances = counts[counts > 0] / counts.sum()
    return float(-(chances * chances.log()).sum())


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
