"""The `shardwise` command."""

from __future__ import annotations

import importlib.metadata

import typer

from shardwise.checkpoint_cli import checkpoint
from shardwise.demo.command import demo

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(demo)
app.add_typer(checkpoint, name="checkpoint")


@app.command()
def version() -> None:
    """Print the installed version."""
    typer.echo(importlib.metadata.version("shardwise"))
