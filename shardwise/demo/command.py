"""The command line of the demo, shared by `shardwise demo` and `python -m shardwise.demo`."""

from __future__ import annotations

import enum
import math
from typing import Annotated

import typer

from shardwise.demo.options import Options
from shardwise.demo.run import run
from shardwise.launch import spawn
from shardwise.sharding.errors import ShardwiseError
from shardwise.sharding.job import launched
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import MEMORIES

_ELSEWHERE = ("pp", "cp", "ep", "world", "links")
_RANKS = 4


class Precision(enum.Enum):
    """Choices of `--precision`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def demo(  # noqa: PLR0917 - typer reads options from parameters
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Local processes to start.", show_default="of the mesh, or 4"),
    ] = None,
    mesh: Annotated[
        str, typer.Option(help="Axes: replica=2,fsdp=2 or fsdp=2,tp=2; tp cuts layers.")
    ] = "fsdp=-1",
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO level.")] = 3,
    sequence: Annotated[bool, typer.Option(help="Cut the sequence over tp too.")] = False,
    precision: Annotated[
        Precision, typer.Option(help="Dtype in which modules compute.")
    ] = Precision.FP32,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    remat: Annotated[bool, typer.Option(help="Recompute every layer in backward.")] = False,
    offload: Annotated[
        str, typer.Option(help="HOME=MEMORY: opt=disk or params=pinned_host,acts=pinned_host.")
    ] = "",
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = 200,
    check: Annotated[bool, typer.Option(help="Compare with one process.")] = False,
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
    axes = _axes(mesh, sequence=sequence)
    options = Options(
        mesh=tuple(axes.items()),
        zero=zero,
        sequence=sequence,
        precision=precision.value,
        accumulate=accumulate,
        remat=remat,
        offload=_tiers(offload),
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
        if launched():
            run(options)
            return
        ranks = ranks or _num_ranks(axes)
        Mesh(
            world=ranks, links=None, **axes
        )  # a mesh that does not fit fails before any process starts
        if ranks == 1:
            run(options)
        else:
            spawn(run, ranks, args=(options,))
    except ShardwiseError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None


def _axes(mesh: str, *, sequence: bool) -> dict[str, int]:
    """Axes of `--mesh`.

    >>> _axes("fsdp=2, tp=-1", sequence=True)
    {'fsdp': 2, 'tp': -1}
    """
    axes: dict[str, int] = {}
    for part in mesh.split(","):
        name, _, size = (text.strip() for text in part.partition("="))
        if not name.isidentifier() or not size.removeprefix("-").isdecimal() or name in axes:
            raise typer.BadParameter(
                f"{part.strip()!r} is not AXIS=SIZE, each axis once", param_hint="--mesh"
            )
        if name in _ELSEWHERE:
            raise typer.BadParameter(
                f"{name!r} is no axis of the demo: tp cuts layers, others split the batch",
                param_hint="--mesh",
            )
        axes[name] = int(size)
    if sequence and "tp" not in axes:
        raise typer.BadParameter(f"needs an axis tp; --mesh is {mesh}", param_hint="--sequence")
    return axes


def _tiers(offload: str) -> tuple[tuple[str, str], ...]:
    """Pairs of `--offload`.

    >>> _tiers("params=pinned_host, opt=disk"), _tiers("")
    ((('params', 'pinned_host'), ('opt', 'disk')), ())
    """
    found: list[tuple[str, str]] = []
    for part in offload.split(",") if offload else ():
        home, equals, memory = (text.strip() for text in part.partition("="))
        if not equals or memory not in MEMORIES:
            raise typer.BadParameter(
                f"{part.strip()!r} is not HOME=MEMORY, with one of {', '.join(MEMORIES)}",
                param_hint="--offload",
            )
        found.append((home, memory))
    return tuple(found)


def _num_ranks(axes: dict[str, int]) -> int:
    """As many as the mesh has, else the smallest number from 4 on that its sizes divide.

    >>> _num_ranks({"fsdp": 2, "tp": 4}), _num_ranks({"fsdp": -1, "tp": 3})
    (8, 6)
    """
    fixed = math.prod(size for size in axes.values() if size != -1)
    return -(-_RANKS // fixed) * fixed if -1 in axes.values() and fixed > 0 else max(fixed, 1)


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
