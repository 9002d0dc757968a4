"""The command line of the demo, shared by `shardwise demo` and `python -m shardwise.demo`."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from shardwise.demo.options import Options
from shardwise.demo.run import run
from shardwise.launch import spawn
from shardwise.sharding.errors import ShardwiseError
from shardwise.sharding.job import launched


class Precision(enum.Enum):
    """Choices of `--precision`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def demo(  # noqa: PLR0917 - typer reads options from parameters
    ranks: Annotated[int, typer.Option(min=1, help="Local processes to start.")] = 4,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO level.")] = 3,
    precision: Annotated[
        Precision, typer.Option(help="Dtype in which modules compute.")
    ] = Precision.FP32,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    remat: Annotated[bool, typer.Option(help="Recompute every layer in backward.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 200,
    check: Annotated[bool, typer.Option(help="Compare with the split reference.")] = False,
    out: Annotated[str, typer.Option(help="Folder for the weights.")] = "runs/demo",
    checkpoint: Annotated[str, typer.Option(help="Folder to save in and to go on from.")] = "",
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 20,
    peers: Annotated[str, typer.Option(help="Folder in memory for copies of them.")] = "",
    kill_at: Annotated[
        str, typer.Option(help="STEP[:RANK]: that rank ends itself in that step, once.")
    ] = "",
) -> None:
    """Train a byte-level GPT on the source of the Python standard library.

    Under torchrun the launcher's ranks are used, and --ranks is not read.
    """
    step, rank = _place(kill_at, checkpoint)
    options = Options(
        zero=zero,
        precision=precision.value,
        accumulate=accumulate,
        remat=remat,
        steps=steps,
        check=check,
        out=out,
        checkpoint=checkpoint,
        every=every,
        peers=peers,
        kill_at=step,
        kill_rank=rank,
    )
    try:
        if launched() or ranks == 1:
            run(options)
        else:
            spawn(run, ranks, args=(options,))
    except ShardwiseError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None


def _place(kill_at: str, checkpoint: str) -> tuple[int, int]:
    """Step and rank of `--kill-at`.

    >>> _place("30:1", "runs/saved"), _place("30", "runs/saved"), _place("", "")
    ((30, 1), (30, 0), (0, 0))
    """
    step, _, rank = kill_at.partition(":")
    if not kill_at:
        return 0, 0
    if not step.isdecimal() or not (rank or "0").isdecimal():
        raise typer.BadParameter(f"{kill_at!r} is not STEP or STEP:RANK", param_hint="--kill-at")
    if not checkpoint:
        raise typer.BadParameter("needs --checkpoint, to go on from", param_hint="--kill-at")
    return int(step), int(rank or 0)
