"""The checkpoints of a run by name: which there are, and which are kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shardwise.sharding.checkpoint.manifest import MANIFEST

_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The directory of a step.

    >>> name_of(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a directory; None for any other name.

    >>> step_of("step-00000120"), step_of(".step-00000120.tmp"), step_of("weights")
    (120, None, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def complete_steps(folder: Path) -> list[int]:
    """Steps of all complete checkpoints of a run, in order.

    Args:
        folder: of the run.
    """
    steps = [(step_of(path.name), path) for path in folder.iterdir()]
    return sorted(s for s, path in steps if s is not None and (path / MANIFEST).exists())


def superseded(steps: Sequence[int], *, keep: int, keep_every: int | None = None) -> list[int]:
    """The complete checkpoints that may go, oldest first.

    Args:
        steps: of all complete ones.
        keep: how many of the newest stay; at least one.
        keep_every: what is a multiple of it stays as well.

    >>> superseded([10, 20, 30, 40, 50], keep=2, keep_every=20)
    [10, 30]
    """
    old = sorted(steps)[: -max(keep, 1)]
    return [step for step in old if keep_every is None or step % keep_every]
