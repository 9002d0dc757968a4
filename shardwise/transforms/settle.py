"""Before the first step all ranks agree: on the structure of the batch and the order of units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import BatchError, LossError, OrderError, RankError, ShardwiseError
from shardwise.sharding.movement import Transport
from shardwise.sharding.pytree import tree_flatten
from shardwise.transforms.binding import Stage
from shardwise.transforms.buffer_sync import Sites
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.order import registration_order
from shardwise.transforms.trace import Trace, merge, trace


class Failure:
    """Carries an exception to where all ranks raise; empty if there is none.

    An exception holds the frames that it has passed. With it in a variable of one of them, the
    activations of the failed step would live until the next garbage collection.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def __str__(self) -> str:
        return f"{type(self._error).__name__}: {self._error}" if self._error is not None else ""

    def take(self) -> BaseException | None:
        """The exception, which this no longer holds."""
        error, self._error = self._error, None
        return error


@dataclass(frozen=True)
class _Report:
    """What one rank tells the others."""

    structure: str
    seen: Trace | None
    failure: str


def settle(
    lowering: Lowering,
    stage: Stage,
    batch: Any,
    *,
    sites: Sites,
    transport: Transport,
    device: torch.device,
) -> Lowering:
    """Trace the forward pass on this rank, compare with the others, and lower again.

    Raises:
        BatchError: batches differ in structure or dtype.
        OrderError: ranks run units in orders that contradict each other.
        RankError: the trace failed on another rank.
    """
    seen: Trace | None = None
    failure = Failure()
    try:
        seen = trace(
            lowering.plan,
            stage,
            lowering.loss_fn,
            batch,
            buffers=sites,
            device=device,
            staying=lowering.staying,
        )
    except ShardwiseError as error:
        failure = Failure(error)
    report = _Report(_structure(batch), seen, str(failure))
    reports: list[_Report] = transport.gather_objects(report)
    raise_together([r.failure for r in reports], failure, "the first pass over the model")
    _check_structures([report.structure for report in reports])
    traces = [report.seen for report in reports if report.seen is not None]
    return _combine(lowering, traces)


def agree_on_batch(batch: Any, transport: Transport) -> None:
    """Compare the structure of this rank's batch with the others'; one exchange of objects.

    Raises:
        BatchError: batches differ in structure or dtype.
    """
    _check_structures(transport.gather_objects(_structure(batch)))


def _combine(lowering: Lowering, traces: list[Trace]) -> Lowering:
    known = {trace.aux for trace in traces if trace.aux is not None}
    if len(known) > 1:
        raise LossError(
            "Ranks return different auxiliary metrics.",
            facts=[", ".join(names) or "(none)" for names in sorted(known)],
            why="Metrics are reduced together, so every rank returns the same names.",
            fix="return every metric on every rank, with count 0 where there is nothing",
        )
    default = registration_order(lowering.plan, lowering.buckets)
    order = merge([trace.events for trace in traces], default)
    if order is None:
        raise OrderError(
            "Ranks run the units of the model in orders that contradict each other.",
            facts=[
                f"rank {rank}: {' '.join(e.unit or '(root)' for e in trace.events if e.is_enter)}"
                for rank, trace in enumerate(traces)
            ],
            why="All ranks walk one list of collectives, so some order must contain all of theirs.",
            fix="run the modules in the same relative order on every rank",
        )
    written = tuple(sorted({name for trace in traces for name in trace.written}))
    notes = [trace.note for trace in traces if trace.note]
    aux = next(iter(known)) if known and not notes else None
    first = replace(traces[0], aux=aux, written=written, note=notes[0] if notes else "")
    return lowering.with_trace(first, order)


def _structure(batch: Any) -> str:
    leaves, structure = tree_flatten(batch, none_is_leaf=True)
    kinds = [
        f"{leaf.dtype} of {leaf.ndim} dims" if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in leaves
    ]
    return f"{structure} with {', '.join(kinds)}"


def _check_structures(structures: list[str]) -> None:
    other = next((rank for rank, one in enumerate(structures) if one != structures[0]), None)
    if other is None:
        return
    raise BatchError(
        "The batches of the ranks differ in structure.",
        where="program.step(state, batch)",
        facts=[f"rank {rank}: {structure}" for rank, structure in enumerate(structures)],
        why="Ranks run one program; sizes may differ, keys, dtypes and dimensions may not.",
        fix="make the same keys with the same dtypes on every rank",
        rank=other,
    )


def raise_together(failures: list[str], mine: Failure, doing: str) -> None:
    """Raise on every rank if any rank has failed; each names the rank and its words.

    Args:
        failures: per rank the text of its failure, "" for none.
        mine: this rank's own failure.
        doing: what was going on.
    """
    failed = [rank for rank, text in enumerate(failures) if text]
    if not failed:
        return
    error = mine.take()
    try:
        if error is not None and (isinstance(error, ShardwiseError) or len(failures) == 1):
            raise error
        raise _rank_failed(failures, failed, doing) from error
    finally:
        del error


def _rank_failed(failures: list[str], failed: list[int], doing: str) -> RankError:
    first = failed[0]
    return RankError(
        f"Rank {first} failed in {doing}"
        + (f", and {len(failed) - 1} more." if len(failed) > 1 else "."),
        where=f"rank {first} of {len(failures)}",
        facts=failures[first].splitlines(),
        why="A step is one program on all ranks: it succeeds on all of them or on none. "
        "The state that was passed in is unchanged.",
        fix="see the failure of that rank above",
        rank=first,
        failed=len(failed),
    )
