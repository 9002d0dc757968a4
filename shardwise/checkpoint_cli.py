"""The `shardwise checkpoint` commands: checkpoints on disk, without a job and without a GPU."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from shardwise.sharding.checkpoint.deepspeed_files import read_deepspeed
from shardwise.sharding.checkpoint.differences import differences, short
from shardwise.sharding.checkpoint.folders import is_hidden, resolve
from shardwise.sharding.checkpoint.foreign import Foreign
from shardwise.sharding.checkpoint.latest import latest, read_manifest, why_incomplete
from shardwise.sharding.checkpoint.manifest import MANIFEST, Manifest
from shardwise.sharding.checkpoint.safetensors_format import INDEX, SINGLE
from shardwise.sharding.checkpoint.state_dicts import read_dcp, read_torch_save
from shardwise.sharding.checkpoint.verify import verify as verified
from shardwise.sharding.describe import format_bytes
from shardwise.sharding.errors import CheckpointError, ShardwiseError, summarise
from shardwise.sharding.plan import Plan
from shardwise.transforms.adopting import foreign_weights, to_checkpoint
from shardwise.transforms.converting import Weights, to_safetensors, to_torch, weights_of
from shardwise.transforms.importing import read_safetensors

checkpoint = typer.Typer(no_args_is_help=True, help="Look at checkpoints, and convert them.")

_WIDE = 1_000_000  # columns; whatever reads a pipe wants whole names
Where = Annotated[Path, typer.Argument(help="Of a checkpoint.")]


class Kind(enum.Enum):
    """What is converted from or to."""

    SHARDWISE = "shardwise"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"


@checkpoint.command()
def ls(directory: Annotated[Path, typer.Argument(help="That holds checkpoints.")]) -> None:
    """List the checkpoints of a directory, complete or not, and mark what is resumed from."""
    with _messages():
        if not directory.is_dir():
            raise _no_directory(directory)
        newest = latest(directory).path
        rows = [_listed(path, newest) for path in _entries(directory)]
        if not rows:
            typer.echo(f"There is no checkpoint in {directory}.")
            return
        _table(("name", "step", "saved", "bytes", "ranks", "state"), rows, right=(1, 3, 4))


@checkpoint.command()
def show(path: Where) -> None:
    """Show the plan of a checkpoint, and its tensors."""
    with _messages():
        folder = resolve(path)
        manifest = read_manifest(folder)
        if manifest.plan:
            typer.echo(f"{Plan.from_json(manifest.plan)}\n")
        rows = [
            (
                stored.name,
                str(stored.shape),
                short(stored.dtype),
                f"{stored.nbytes:,}",
                f"{len(stored.chunks)}",
            )
            for stored in manifest.tensors
        ]
        _table(("tensor", "shape", "dtype", "bytes", "chunks"), rows, right=(3, 4))
        for name, value in manifest.values.items():
            typer.echo(f"{name} = {value}")
        chunks = sum(len(stored.chunks) for stored in manifest.tensors)
        typer.echo(
            f"\nstep {manifest.step}, saved {_date(folder)}: {len(manifest.tensors)} tensors, "
            f"{manifest.nbytes:,} bytes ({format_bytes(manifest.nbytes)}) in {chunks} chunks of "
            f"{len(manifest.files)} files; extra: {'none' if manifest.extra is None else 'yes'}"
        )


@checkpoint.command()
def verify(path: Where) -> None:
    """Read every byte of a checkpoint and compare it with its checksums; 1 on any fault."""
    with _messages():
        report = verified(resolve(path))
        for fault in report.faults:
            typer.echo(fault)
        if report.faults:
            typer.echo(f"{path}: {len(report.faults)} faults", err=True)
            raise typer.Exit(1)
        typer.echo(f"{path}: {report.tensors} tensors, {report.nbytes:,} bytes, no fault")


@checkpoint.command()
def diff(one: Where, other: Where) -> None:
    """Compare two checkpoints tensor by tensor, whatever their plans; 1 if they differ."""
    with _messages():
        found = list(differences(resolve(one), resolve(other)))
        odd = [each for each in found if each.what]
        if odd:
            rows = [(each.name, each.what, _gap(each.differ, each.largest)) for each in odd]
            _table(("name", "what differs", "largest difference"), rows, right=(2,))
            typer.echo(f"{len(odd)} of {len(found)} names differ", err=True)
            raise typer.Exit(1)
        typer.echo(f"{len(found)} names, no difference")


@checkpoint.command()
def convert(  # noqa: PLR0917 - typer reads options from parameters
    source: Annotated[Path, typer.Argument(help="What is converted; it is only read.")],
    target: Annotated[Path, typer.Argument(help="What is made; it must not exist.")],
    to: Annotated[Kind, typer.Option(help="What is made.")],
    source_kind: Annotated[
        Kind | None, typer.Option("--from", help="What the source is; looked at by default.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of floating-point tensors, such as bfloat16; as stored by default.")
    ] = "",
    where: Annotated[
        list[str] | None, typer.Option(help="Pattern of paths; may be given more than once.")
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(help="A checkpoint of step 0 of the program that shall restore the target."),
    ] = None,
    tag: Annotated[
        str, typer.Option(help="Of a DeepSpeed checkpoint; the latest by default.")
    ] = "",
) -> None:
    """Convert a checkpoint to plain files, or the files of others to a checkpoint.

    Plain files, safetensors or one for torch.load, have parameters and buffers by the names of the
    module; those of a shardwise or DeepSpeed checkpoint are the masters. A shardwise checkpoint of
    what others have saved has their optimizer state too; it takes names, seed and all that they
    lack from a --template, a save of program.init(0).
    """
    with _messages():
        kind = source_kind or _kind_of(source)
        weights, foreign = _opened(kind, source, tag)
        if to is Kind.SHARDWISE and foreign is not None and not (where or dtype):
            if template is None:
                raise _template_missing(kind)
            written = to_checkpoint(foreign, target.absolute(), resolve(template))
            for line in summarise(list(written.from_template)):
                typer.echo(f"from the template: {line}")
        elif to in _WRITERS and kind is not to:
            write = _WRITERS[to]
            written = write(weights, target.absolute(), where=where or None, dtype=_dtype(dtype))
        else:
            raise _no_way(kind, to, where, dtype)
        typer.echo(f"{target}: {written.tensors} tensors, {written.nbytes:,} bytes")


_WRITERS: dict[Kind, Callable[..., Any]] = {
    Kind.SAFETENSORS: to_safetensors,
    Kind.TORCH: to_torch,
}


def _opened(kind: Kind, source: Path, tag: str) -> tuple[Weights, Foreign | None]:
    """The weights of a source, and all that it has if it is not our own."""
    path = source.absolute()
    if kind is Kind.SHARDWISE:
        return weights_of(resolve(path)), None
    if kind is Kind.DEEPSPEED:
        foreign = read_deepspeed(path, tag or None)
    elif kind is Kind.DCP:
        foreign = read_dcp(path)
    elif kind is Kind.TORCH:
        foreign = read_torch_save(path)
    else:
        foreign = read_safetensors(path)
    return foreign_weights(foreign), foreign


@contextmanager
def _messages() -> Generator[None]:
    """Errors as messages, and 1."""
    try:
        yield
    except ShardwiseError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"{error.filename}: {error.strerror}", err=True)
        raise typer.Exit(1) from None


def _entries(directory: Path) -> list[Path]:
    """What is, was or will be a checkpoint; the directory itself if it is one."""
    if (directory / MANIFEST).exists():
        return [directory]
    paths = [path for path in directory.iterdir() if path.is_dir()]
    named = [path for path in paths if not is_hidden(path.name) or ".saving-" in path.name]
    # A save that was cut off between two renames has set the one of that name aside.
    aside = {path.name[1:].rpartition(".old-")[0] for path in paths if ".old-" in path.name}
    lost = [directory / name for name in sorted(aside - {path.name for path in named}) if name]
    return sorted([*named, *lost], key=lambda path: path.name.lstrip("."))


def _listed(path: Path, newest: Path | None) -> tuple[str, ...]:
    folder = resolve(path)
    if is_hidden(path.name):
        name = path.name[1:].rpartition(".saving-")[0]
        return name, "", "", f"{_bytes_in(path):,}", "", "a save that is running, or was cut off"
    fault = why_incomplete(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return path.name, "", "", f"{_bytes_in(folder):,}", "", f"incomplete: {fault}"
    state = f"incomplete: {fault}" if fault else "complete"
    state += ", newest" if folder == newest else ""
    return (
        path.name,
        f"{manifest.step}",
        _date(folder),
        f"{manifest.nbytes:,}",
        f"{_ranks(manifest)}",
        state,
    )


def _ranks(manifest: Manifest) -> int:
    """Of the job that saved; as many as there are files, where the plan is not known."""
    return Plan.from_json(manifest.plan).mesh.size if manifest.plan else len(manifest.files)


def _bytes_in(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())


def _date(folder: Path) -> str:
    saved = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime).astimezone()
    return saved.isoformat(" ", "seconds")


def _gap(differ: int, largest: float) -> str:
    return f"{largest:.3g}" if differ else ""


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> None:
    """Print a table; where nobody looks at it, as wide as it is."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(head):
        justify = "right" if index in right else "left"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)


def _dtype(name: str) -> torch.dtype | None:
    if not name:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CheckpointError(
            f"--dtype {name} is no floating-point dtype.",
            where="shardwise checkpoint convert",
            facts=f"torch has no such dtype: {name}" if found is None else f"it is {found}",
            why="Floating-point tensors are cast to it; others stay as they are.",
            fix="float32, bfloat16 or float16, say",
            dtype=name,
        )
    return found


def _kind_of(source: Path) -> Kind:
    """What a path is, by the names of its files."""
    if (resolve(source) / MANIFEST).exists():
        return Kind.SHARDWISE
    names = (INDEX, SINGLE)
    if source.suffix == ".safetensors" or any((source / name).exists() for name in names):
        return Kind.SAFETENSORS
    if (source / ".metadata").exists():
        return Kind.DCP
    if (source / "latest").is_file() or any(source.glob("*_states.pt")):
        return Kind.DEEPSPEED
    if source.is_file():
        return Kind.TORCH
    found = sorted(os.listdir(source))[:5] if source.is_dir() else ["no such file or directory"]
    raise CheckpointError(
        "It cannot be told what is to be converted.",
        where=str(source),
        facts=", ".join(found) or "an empty directory",
        why=f"A checkpoint has {MANIFEST}, safetensors {INDEX} or {SINGLE}, DCP .metadata.",
        fix="say what it is with --from",
        path=str(source),
    )


def _no_way(source: Kind, target: Kind, where: Sequence[str] | None, dtype: str) -> CheckpointError:
    options = " with --where or --dtype" if where or dtype else ""
    return CheckpointError(
        f"There is no conversion from {source.value} to {target.value}{options}.",
        where="shardwise checkpoint convert",
        facts="any to safetensors or torch, but to itself; any but shardwise to shardwise, whole",
        why="A checkpoint is the whole state, as it was saved.",
        fix="--to safetensors or --to torch",
        source=source.value,
        target=target.value,
    )


def _template_missing(source: Kind) -> CheckpointError:
    return CheckpointError(
        "A shardwise checkpoint needs a --template.",
        where="shardwise checkpoint convert",
        facts=f"what {source.value} has saved is to be a checkpoint",
        why="Files of others do not say how a program names its optimizer state, which of their "
        "tensors are buffers, or where it starts.",
        fix="program.save(path, program.init(0)), then --template path",
        source=source.value,
    )


def _no_directory(directory: Path) -> CheckpointError:
    return CheckpointError(
        "There is no such directory.",
        where=str(directory),
        facts="it is a file" if directory.exists() else "nothing is there",
        why="Checkpoints of a job are directories in one directory.",
        fix="pass the directory that sw.Checkpointer was given",
        path=str(directory),
    )
