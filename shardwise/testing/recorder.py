"""Assertions on what a program's last call moved between ranks, or a lowered step would move."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardwise.sharding.collectives import payload_bytes
from shardwise.sharding.errors import ImplicitCommError
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.program import Program


def assert_comms(
    program: Program | Lowering,
    /,
    *,
    all_gather: int | None = None,
    reduce_scatter: int | None = None,
    all_reduce: int | None = None,
    max_bytes: int | None = None,
) -> None:
    """Check what the last call of a program ran on this rank, or what a lowered step would run.

    Args:
        program: after a `step`, `grads`, `update` or `eval`; or what `lower` returned: a budget for
            any number of ranks needs no job.
        all_gather: how many there must be; None: any number.
        reduce_scatter: likewise.
        all_reduce: likewise.
        max_bytes: the largest payload that may have left this rank.

    Raises:
        CommsError: names every number that is off, and lists what ran.

    >>> import torch, shardwise as sw
    >>> model = torch.nn.Linear(2, 2)
    >>> with sw.simulate(sw.Mesh(fsdp=2)) as world:
    ...     plan = sw.plan(model, world.mesh, sw.zero(2, "fsdp"))
    ...     program = sw.lower(plan, lambda m, x: m(x).mean(), sw.optim.sgd(0.1)).bind()
    ...     batch = program.shard_batch(torch.ones(4, 2))
    ...     grads, metrics = program.grads(program.init(0), batch)
    >>> assert_comms(program, reduce_scatter=1, all_reduce=0, max_bytes=1_000)
    """
    if isinstance(program, Program):
        items, verb = program.last_collectives, "ran"
    else:
        items, verb = program.collectives(), "would run"
    counts = Counter(item.kind for item in items)
    wanted = {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
    }
    faults = [
        f"{kind}: {counts[kind]} {verb}, {number} expected"
        for kind, number in wanted.items()
        if number is not None and counts[kind] != number
    ]
    nbytes = payload_bytes(items)
    if max_bytes is not None and nbytes > max_bytes:
        faults.append(f"payload: {nbytes:,} bytes, at most {max_bytes:,} expected")
    if faults:
        numbers: dict[str, Any] = {**counts, "nbytes": nbytes}
        raise CommsError(
            "Other collectives than expected.",
            facts=[*faults, *map(str, items)],
            why="Collectives are derived from the homes and the compute layouts of the plan.",
            fix="see plan.why(path) for the homes, or correct the expectation",
            **numbers,
        )


class CommsError(ImplicitCommError, AssertionError):
    """Collectives differ from what a test expects; `numbers` has the counts and `nbytes`."""
