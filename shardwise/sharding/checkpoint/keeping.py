"""The checkpoints of a run by name: which there are, which is the newest, which are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.sharding.checkpoint.latest import latest
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


class Found(NamedTuple):
    """What a run can go on from.

    Args:
        path: of the newest complete checkpoint; None: there is none.
        step: of it; -1 for none.
        skipped: what was passed over, and why.
    """

    path: str | None
    step: int
    skipped: tuple[str, ...]


def find(folder: Path) -> Found:
    """The newest complete checkpoint of a run, and what is there besides; local.

    Args:
        folder: of the run; need not exist.
    """
    newest = latest(folder)
    torn = tuple(f"{name}: its save was not completed" for name in _torn(folder))
    path = None if newest.path is None else str(newest.path)
    return Found(path, newest.step, newest.skipped + torn)


def complete_steps(folder: Path) -> list[int]:
    """Steps of all complete checkpoints of a run, in order.

    Args:
        folder: of the run.
    """
    steps = [(step_of(path.name), path) for path in folder.iterdir()]
    return sorted(s for s, path in steps if s is not None and (path / MANIFEST).exists())


def _torn(folder: Path) -> list[str]:
    """Names of saves that have begun and neither ended nor been removed."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    begun = [re.fullmatch(r"\.(.+)\.saving-[^-]+", name) for name in names]
    return sorted({one[1] for one in begun if one and step_of(one[1]) is not None})


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
