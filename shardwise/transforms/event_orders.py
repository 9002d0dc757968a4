"""Orders of units that passes have shown: made whole for a plan, and agreed between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.sharding.plan import Plan
from shardwise.transforms.order import CROSS, Event


def complete(events: Sequence[Event], plan: Plan, default: Sequence[Event]) -> tuple[Event, ...]:
    """The traced events with every unit that was not met put where it is registered.

    A unit that this batch does not use may be used by the next one, so all of them have a turn.
    """
    result = list(events)
    left = {e.unit for e in default if e.kind == "leave"}
    open_units = [e.unit for e in _unclosed(result) if e.unit in left]
    result += [Event("leave", unit) for unit in reversed(open_units)]
    rank = {unit.name: index for index, unit in enumerate(plan.units)}
    met = {event.unit for event in result}
    for event in default:
        if event.kind == "enter" and event.unit not in met:
            met.add(event.unit)
            pair = [event]
            if any(e.kind == "leave" and e.unit == event.unit for e in default):
                pair.append(Event("leave", event.unit, event.grad, event.regions))
            place = _place(result, event.unit, rank)
            result[place:place] = pair
    return tuple(result)


def _unclosed(events: Sequence[Event]) -> list[Event]:
    open_events: list[Event] = []
    for event in events:
        if event.kind == "enter":
            open_events.append(event)
        elif event.kind == "leave":
            open_events = [e for e in open_events if e.unit != event.unit]
    return open_events


def _place(events: Sequence[Event], unit: str, rank: Mapping[str, int]) -> int:
    """Inside the enclosing unit if there is one, else before the first unit registered later."""
    for index, event in enumerate(events):
        if event.kind == "leave" and unit.startswith(event.unit + "."):
            return index
    depth = 0
    for index, event in enumerate(events):
        if event.kind == "enter" and depth <= 0 and rank[event.unit] > rank[unit]:
            return index
        if event.kind == CROSS:
            continue
        has_leave = any(e.kind == "leave" and e.unit == event.unit for e in events)
        depth += (1 if event.kind == "enter" else -1) if has_leave else 0
    return len(events)


def merge(orders: Sequence[Sequence[Event]], default: Sequence[Event]) -> tuple[Event, ...] | None:
    """One order that every rank's order is a part of, or None if they contradict each other."""
    if all(tuple(order) == tuple(orders[0]) for order in orders):
        return tuple(orders[0])
    for candidate in (default, *sorted(orders, key=len, reverse=True)):
        if all(_is_part(order, candidate) for order in orders):
            return tuple(candidate)
    return None


def _is_part(order: Sequence[Event], whole: Sequence[Event]) -> bool:
    position = iter((event.kind, event.unit) for event in whole)
    return all((event.kind, event.unit) in position for event in order)
