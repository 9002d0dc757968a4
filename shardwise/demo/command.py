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
) -> None:
    """Train a byte-level GPT on the source of the Python standard library.

    Under torchrun the launcher's ranks are used, and --ranks is not read.
    """
    options = Options(
        zero=zero,
        precision=precision.value,
        accumulate=accumulate,
        remat=remat,
        steps=steps,
        check=check,
        out=out,
    )
    try:
        if launched() or ranks == 1:
            run(options)
        else:
            spawn(run, ranks, args=(options,))
    except ShardwiseError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
