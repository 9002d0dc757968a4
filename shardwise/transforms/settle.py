"""Before the first step all ranks agree: on the structure of the batch and the order of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.loss_scale import nearest_power
from shardwise.sharding.errors import BatchError, LossError, OrderError, RankError, ShardwiseError
from shardwise.sharding.movement import Mover, Transport
from shardwise.sharding.plan import Plan
from shardwise.sharding.pytree import tree_leaves
from shardwise.transforms.binding import Stage
from shardwise.transforms.buffer_sync import Sites
from shardwise.transforms.desync import check_calls
from shardwise.transforms.event_orders import merge
from shardwise.transforms.loss import bad_count
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.micro import MicroBatches, cut_batch, structure_of
from shardwise.transforms.order import registration_order
from shardwise.transforms.shared_batch import check_shared, digest_of
from shardwise.transforms.trace import Trace, trace


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
    """What one rank tells the others; `counted` are the names of `count_fn`."""

    call: str
    structure: str | None = None
    seen: Trace | None = None
    failure: str = ""
    elements: int = 0
    counted: tuple[str, ...] | None = None
    digest: str | None = None


def settle(
    lowering: Lowering,
    stage: Stage,
    batch: Any,
    *,
    steps: int,
    sites: Sites,
    transport: Transport,
    device: torch.device,
    call: str,
) -> Lowering:
    """Trace the forward pass on this rank, compare with the others, and lower again.

    Raises:
        BatchError: batches differ in structure or dtype, ranks along a tensor axis have different
            ones, or no rank has one.
        OrderError: ranks run units in orders that contradict each other.
        RankError: the trace failed on another rank, or ranks make different calls.
    """
    report = _Report(call)
    failure = Failure()
    try:
        micros = cut_batch(batch, steps)
        if lowering.plan.tensor.axes:
            report = replace(report, digest=digest_of(micros))
        if micros:
            seen = trace(
                lowering.plan,
                stage,
                lowering.loss_fn,
                micros[0],
                buffers=sites,
                device=device,
                staying=lowering.staying,
            )
            report = _told(report, lowering, micros, seen)
    except Exception as error:  # also the user's own, from count_fn: peers wait for this rank
        failure = Failure(error)
        report = replace(report, failure=str(failure))
    reports: list[_Report] = transport.gather_objects(report)
    check_calls([report.call for report in reports])
    check_shared([report.digest for report in reports], lowering.plan)
    raise_together([r.failure for r in reports], failure, "the first pass over the model")
    _check_structures([report.structure for report in reports])
    traces = [report.seen for report in reports if report.seen is not None]
    if not traces:
        raise bad_count(0.0)
    parts = lowering.plan.mesh.product(lowering.batch_axes)
    elements = parts * sum(report.elements for report in reports) / len(reports)
    counted = next((r.counted for r in reports if r.counted is not None), ())
    lowered = _combine(lowering, traces, counted)
    return replace(lowered, first_divisor=nearest_power(max(elements, 1.0)))


def _told(report: _Report, lowering: Lowering, micros: Sequence[Any], seen: Trace) -> _Report:
    counted = None
    if seen.note and lowering.count_fn is not None:
        names = tuple(sorted(lowering.count_fn(micros[0])))
        counted = names if len(names) > 1 else ()  # a single term is a mean and needs no counts
    elements = sum(_elements(micro) for micro in micros)
    structure = structure_of(micros[0])
    return replace(report, structure=structure, seen=seen, elements=elements, counted=counted)


def agree_on_batch(batch: Any, transport: Transport, plan: Plan) -> None:
    """Compare the structure of this rank's batch with the others'; one exchange of objects.

    Of micro-batches the first is compared; a rank without a batch agrees with all. Ranks along a
    tensor axis must have the same batch to the last bit.

    Args:
        batch: of this rank.
        transport: reaches all ranks.
        plan: says which axes are tensor axes.

    Raises:
        BatchError: batches differ in structure or dtype, or along a tensor axis.
    """
    micros = [batch] if batch is not None and not isinstance(batch, MicroBatches) else batch
    mine = next((structure_of(one) for one in micros or ()), None)
    digest = digest_of(list(micros or ())) if plan.tensor.axes else None
    told: list[tuple[str | None, str | None]] = transport.gather_objects((mine, digest))
    check_shared([one[1] for one in told], plan)
    _check_structures([one[0] for one in told])


def _combine(lowering: Lowering, traces: list[Trace], counted: tuple[str, ...]) -> Lowering:
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
    terms = next((trace.terms for trace in traces if trace.aux is not None), ()) or counted
    note = notes[0] if notes else ""
    calls = any(trace.calls_dropout for trace in traces)
    first = replace(
        traces[0], aux=aux, written=written, note=note, terms=terms, calls_dropout=calls
    )
    return lowering.with_trace(first, order)


def _check_structures(structures: list[str | None]) -> None:
    known = [one for one in structures if one is not None]
    ranks = (rank for rank, one in enumerate(structures) if one is not None and one != known[0])
    other = next(ranks, None)
    if other is None:
        return
    raise BatchError(
        "The batches of the ranks differ in structure.",
        where="program.step(state, batch)",
        facts=[f"rank {rank}: {one or 'no batch'}" for rank, one in enumerate(structures)],
        why="Ranks run one program; sizes may differ, keys, dtypes and dimensions may not.",
        fix="make the same keys with the same dtypes on every rank",
        rank=other,
    )


def _elements(batch: Any) -> int:
    """A guess at what the loss of a batch counts: tokens or labels if it has any, else rows.

    Only the divisor of the first step depends on it.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    whole = [t.numel() for t in tensors if not (t.is_floating_point() or t.is_complex())]
    rows = [tensor.shape[0] for tensor in tensors[:1]]
    return max([1, *whole, *rows])


UNCHANGED = "The state that was passed in is unchanged."


def raise_together(failures: list[str], mine: Failure, doing: str, left: str = UNCHANGED) -> None:
    """Raise on every rank if any rank has failed; each names the rank and its words.

    Args:
        failures: per rank the text of its failure, "" for none.
        mine: this rank's own failure.
        doing: what was going on.
        left: what has become of the state.
    """
    failed = [rank for rank, text in enumerate(failures) if text]
    if not failed:
        return
    error = mine.take()
    try:
        if error is not None and (isinstance(error, ShardwiseError) or len(failures) == 1):
            raise error
        raise _rank_failed(failures, failed, doing, left) from error
    finally:
        del error


def raise_failure(mover: Mover, mine: Failure, doing: str, left: str = UNCHANGED) -> None:
    """`raise_together` after all ranks have told each other.

    Args:
        mover: the choke point.
        mine: this rank's own failure.
        doing: what was going on.
        left: what has become of the state.
    """
    try:
        raise_together(mover.transport.gather_objects(str(mine)), mine, doing, left)
    finally:
        mine.take()  # also where a simulated peer has ended this rank


def _rank_failed(failures: list[str], failed: list[int], doing: str, left: str) -> RankError:
    first = failed[0]
    return RankError(
        f"Rank {first} failed in {doing}"
        + (f", and {len(failed) - 1} more." if len(failed) > 1 else "."),
        where=f"rank {first} of {len(failures)}",
        facts=failures[first].splitlines(),
        why=f"A step is one program on all ranks: it succeeds on all of them or on none. {left}",
        fix="see the failure of that rank above",
        rank=first,
        failed=len(failed),
    )
