"""What a rank that has failed in a call still joins, in the sizes of its own batch.

[Note: joining in other sizes]
Collectives of activations are as large as the batch, which may be another one than the batch that
was traced; peers along a tensor axis go on with theirs. A rank that cannot go on itself finds the
sizes by tracing the forward pass again: what fails on one rank of an axis alone (memory, a value)
does not fail on fake tensors. Where the trace fails as well, so did all peers with the same batch,
at the same place, and all join in the sizes that they know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardwise.sharding.collectives import Collective
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.order import CROSS, Event, Schedule, make_schedules

Items = tuple[Collective | None, ...]
"""Collectives of a call; None for one that no rank of the axis runs."""

EventsOf = Callable[[Any], Sequence[Event]]
"""Traces a micro-batch."""


def fitted_step(lowering: Lowering, micros: Sequence[Any], events_of: EventsOf) -> Items:
    """`lowering.pass_items` for the micro-batches of this rank; see [Note: joining in other sizes].

    Args:
        lowering: what runs.
        micros: fewer than passes where this rank has fewer.
        events_of: gives the events of a trace of one of them.
    """
    schedules = [
        _fitted(lowering, number, micros[number : number + 1], events_of)
        for number in range(len(lowering.schedules))
    ]
    if lowering.terms and lowering.count_fn is None:
        ((forward, backward),) = schedules
        return (*lowering.row_items, *forward, *lowering.count_items, *backward)
    passes = (item for forward, backward in schedules for item in (*forward, *backward))
    return (*lowering.row_items, *lowering.count_items, *passes)


def fitted_eval(lowering: Lowering, batch: Any, events_of: EventsOf) -> Items:
    """The collectives of an evaluation up to its scalars, for the batch of this rank.

    Args:
        lowering: what runs.
        batch: of this rank; None if it has none.
        events_of: as for `fitted_step`.
    """
    forward, _ = _fitted(lowering, 0, [] if batch is None else [batch], events_of)
    return (*forward, *lowering.count_items)


def _fitted(
    lowering: Lowering, number: int, micros: Sequence[Any], events_of: EventsOf
) -> tuple[Items, Items]:
    """Forward and backward items of one pass."""
    schedule = lowering.schedules[number]
    if not micros:
        return _without(schedule.forward_items), _without(schedule.backward_items)
    try:
        seen = events_of(micros[0])
    except Exception:  # see the note: then all peers are here, and know the traced sizes
        return schedule.forward_items, schedule.backward_items
    events = tuple(sized(lowering.events, seen))
    fitted: Schedule = make_schedules(lowering.plan, lowering.buckets, events)[number]
    return fitted.forward_items, fitted.backward_items


def sized(events: Sequence[Event], seen: Sequence[Event]) -> Iterator[Event]:
    """Events with the sizes of crossings that another trace has seen.

    Args:
        events: that all ranks have agreed on.
        seen: of a trace; they may be fewer.
    """
    numbers: Counter[str] = Counter()
    found: dict[tuple[str, int], Event] = {}
    for event in seen:
        if event.kind == CROSS:
            found[event.unit, numbers[event.unit]] = event
            numbers[event.unit] += 1
    numbers.clear()
    for event in events:
        if event.kind != CROSS:
            yield event
            continue
        other = found.get((event.unit, numbers[event.unit]), event)
        numbers[event.unit] += 1
        yield replace(event, crossed=other.crossed, shape=other.shape)


def _without(items: Sequence[Collective]) -> Items:
    """Without activations: peers have no batch either, and skip them."""
    return tuple(None if item.reason == "activations" else item for item in items)
