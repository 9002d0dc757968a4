"""`python -m shardwise.demo`, and the target of `torchrun -m shardwise.demo`."""

import typer

from shardwise.demo.command import demo

if __name__ == "__main__":
    typer.run(demo)
