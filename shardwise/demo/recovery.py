"""`--checkpoint`: training that is saved, goes on where it was, and on request loses a rank.

The losses so far travel in the state, so the curve of a run that was interrupted is whole.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

import shardwise as sw
from shardwise.demo import engine
from shardwise.demo.options import Options
from shardwise.sharding.job import join_job

_MARK = "killed.json"
"""What a rank that ends itself leaves, for the run that goes on."""


class Death(NamedTuple):
    """When a rank ended itself, in seconds since 1970, and in which step."""

    seconds: float
    step: int
    rank: int


class Recovery(NamedTuple):
    """How long it took from the end of a rank to the end of the first step after it."""

    death: Death
    step: int
    process_seconds: float
    resume_seconds: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.process_seconds + self.resume_seconds

    def __str__(self) -> str:
        return (
            f"recovered in {self.seconds:.1f} s: rank {self.death.rank} ended in step "
            f"{self.death.step}, the run went on after step {self.step} "
            f"({self.process_seconds:.1f} s until processes ran, {self.resume_seconds:.1f} s to "
            "load and take a step)"
        )


class Curve:
    """What is told of a saved run: losses of all steps, those before it went on too."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.first = 0
        self.stopped = False
        self.recovery: Recovery | None = None


def train(
    setup: engine.Setup, text: Tensor, options: Options, curve: Curve, *, started: float
) -> Iterator[engine.Step]:
    """Take the steps that are left, and save every few of them.

    Args:
        setup: the program.
        text: to train on.
        options: of the run.
        curve: is filled.
        started: when this process began, in seconds since 1970.
    """
    folder = Path(options.checkpoint)
    death = _last_death(folder)
    kill = _armed(options) if death is None else _never
    with sw.Checkpointer(
        setup.program, folder, every=options.every, peer_dir=options.peers or None
    ) as checkpointer:
        state = checkpointer.resume_or_init(options.seed)
        curve.losses = list((state.extra or {"losses": []})["losses"])
        curve.first = checkpointer.step
        for batch in engine.batches(text, options, first=curve.first):
            state, metrics = setup.program.step(state, setup.program.shard_batch(batch))
            curve.losses.append(float(metrics.loss))
            state = state.with_extra({"losses": curve.losses})
            kill(len(curve.losses))
            if death is not None:
                curve.recovery = _recovered(death, curve.first, started)
                if join_job().rank == 0:
                    (folder / _MARK).unlink(missing_ok=True)
                death = None
            yield engine.Step(state, curve.losses[-1])
            checkpointer.after_step(state)
            if checkpointer.stopping:
                curve.stopped = True
                return


def _last_death(folder: Path) -> Death | None:
    try:
        return Death(**json.loads((folder / _MARK).read_text()))
    except FileNotFoundError:
        return None


def _recovered(death: Death, step: int, started: float) -> Recovery:
    return Recovery(death, step, started - death.seconds, time.time() - started)


def _armed(options: Options) -> Callable[[int], None]:
    """Ends one rank in one step, before the step is saved."""
    rank = join_job().rank

    def kill(step: int) -> None:
        if (step, rank) == (options.kill_at, options.kill_rank):
            mark = json.dumps(Death(time.time(), step, rank)._asdict())
            (Path(options.checkpoint) / _MARK).write_text(mark)
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def _never(step: int) -> None:
    """A run that has lost a rank loses no other."""
