"""Arguments and results of a program's calls, of one rank or of all simulated ones."""

from __future__ import annotations

from typing import Any

from shardwise.sharding.errors import SimulationError
from shardwise.sharding.lifted import Lifted
from shardwise.transforms.micro import MicroBatches


def unzip(pair: Any) -> tuple[Any, Any]:
    """Both members, lifted or not."""
    return (pair[0], pair[1])


def same(result: Any) -> Any:
    """What is equal on all ranks, once."""
    return result.ranks[0] if isinstance(result, Lifted) else result


def lifted(arg: Any, ranks: int) -> Lifted:
    """Each rank's part of an argument; of micro-batches that are lifted, each rank's own ones."""
    if isinstance(arg, Lifted):
        if len(arg.ranks) != ranks:
            raise _other_size(arg, ranks)
        return arg
    if isinstance(arg, MicroBatches):
        parts = [lifted(one, ranks).ranks for one in arg]
        own = ([part[rank] for part in parts if part[rank] is not None] for rank in range(ranks))
        return Lifted([MicroBatches(batches) for batches in own])
    return Lifted([arg] * ranks)


def _other_size(arg: Lifted, ranks: int) -> SimulationError:
    return SimulationError(
        f"A lifted value of {len(arg.ranks)} ranks was passed to a program on {ranks}.",
        where=f"the argument {arg!r}",
        why="A lifted value has one part for every rank of the mesh that made it.",
        fix="pass what this program, or one on a mesh of as many ranks, has returned",
        has=len(arg.ranks),
        needs=ranks,
    )
