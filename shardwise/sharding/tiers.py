"""Tiers: the kinds of memory that a tensor can rest in, as plain values, and what allocates there.

[Note: one kind of tensor]
Whatever its tier, a buffer of a state is an ordinary flat tensor: on the device, in host memory, or
in host memory that a file lies behind. So whatever reads a state (leaves, checkpoints, resharding)
need not know of tiers; only what allocates a state asks for them, and only the step, which must be
fast, looks at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.spec import MEMORIES


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of memory; on disk also the folder of the files. Text form: `disk:/local/scratch`.

    Args:
        memory: `device`, `pinned_host` or `disk`.
        path: a folder on every rank's machine; only for `disk`.

    >>> Tier("disk", "/local/scratch")
    Tier('disk:/local/scratch')
    >>> Tier.parse("pinned_host").memory
    'pinned_host'
    """

    memory: str
    path: str = ""

    def __post_init__(self) -> None:
        if self.memory not in MEMORIES:
            raise PlanError(
                f"There is no memory {self.memory!r}.",
                facts=f"memories: {', '.join(MEMORIES)}",
                why="A tensor rests on the device, in pinned host memory, or in files.",
                fix=nearest(self.memory, MEMORIES),
                memory=self.memory,
            )
        if bool(self.path) != (self.memory == "disk"):
            raise PlanError(
                f"The memory {self.memory!r} has the path {self.path!r}.",
                why="Files need a folder, and nothing else has one.",
                fix="sw.disk('/local/scratch')" if self.memory == "disk" else "leave the path out",
                path=self.path,
            )

    @staticmethod
    def parse(text: str) -> Tier:
        """Read the text form; the inverse of `str`."""
        memory, _, path = text.partition(":")
        return Tier(memory, path)

    def __str__(self) -> str:
        return f"{self.memory}:{self.path}" if self.path else self.memory

    def __repr__(self) -> str:
        return f"Tier({str(self)!r})"


DEVICE = Tier("device")
PINNED_HOST = Tier("pinned_host")


def disk(path: str | Path) -> Tier:
    """Files in a folder, on every rank's own machine; fast local drives are meant.

    Nothing is left behind: files have no name from the moment they are made.

    Args:
        path: an existing folder.

    >>> disk("/local/scratch").memory
    'disk'
    """
    return Tier("disk", str(path))


class Memories:
    """Allocates buffers of a state; this one has a device only, and puts everything there.

    Args:
        device: `meta` for states that are only looked at.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, tier: Tier, length: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer on a tier, of any values."""
        del tier
        return torch.empty(length, dtype=dtype, device=self.device)

    def zeros(self, tier: Tier, length: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer on a tier."""
        return self.empty(tier, length, dtype).zero_()

    def put(self, tier: Tier, values: Tensor) -> Tensor:
        """Values that nobody else holds, on a tier; copied if they are not there already."""
        if tier == DEVICE:
            return values
        return self.empty(tier, values.numel(), values.dtype).copy_(values.reshape(-1))

    def clone(self, tensor: Tensor) -> Tensor:
        """A copy on the same tier."""
        return tensor.clone()

    def beside(self, tensor: Tensor) -> Tensor | None:
        """Room of its shape in the folder of a tensor on disk, or of a part of one; else None."""
        del tensor

    def host(self, tier: Tier) -> torch.device:
        """Where a buffer of that tier is, to torch."""
        return self.device if tier == DEVICE or self.device.type == "meta" else torch.device("cpu")


NOWHERE = Memories(torch.device("meta"))
"""For states that are only looked at."""
