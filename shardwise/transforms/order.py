"""The order in which units are entered and left, and the collectives that follow from it.

[Note: the order is a list]
`Event`s list every enter and leave of one forward pass. Backward meets the same events in reverse:
autograd runs ready nodes latest-created first, so the unit entered last is left first. Hence one
list gives every collective of a step before it runs, and a `Cursor` that walks it lets any rank
join in: a unit that this rank skips is gathered and dropped when its turn comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Collective, gather_items, reduce_items, scatter_items
from shardwise.sharding.plan import Plan


@dataclass(frozen=True, slots=True)
class Event:
    """A unit is entered or left; `grad` tells whether backward passes through this call."""

    kind: str
    unit: str
    grad: bool = True

    @property
    def is_enter(self) -> bool:
        """Whether the unit is entered."""
        return self.kind == "enter"

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or '(root)'}" + ("" if self.grad else " (no grad)")


@dataclass(frozen=True, slots=True)
class Action:
    """What one event does on the wire; `items` holds the collectives of each bucket in turn."""

    event: Event
    kind: str
    items: tuple[tuple[Collective, ...], ...]


def stays_open(plan: Plan, buckets: Mapping[str, Sequence[Bucket]]) -> frozenset[str]:
    """Units that are entered once and stay bound until their backward: nothing would be emptied.

    These are the root and its children, units that the plan keeps gathered, and units whose modules
    read the `params` home itself.
    """
    return frozenset(
        unit.name
        for unit in plan.units
        if unit.kind != "unit"
        or unit.name in plan.keep
        or all(bucket.in_place for bucket in buckets[unit.name])
    )


def registration_order(plan: Plan, buckets: Mapping[str, Sequence[Bucket]]) -> tuple[Event, ...]:
    """Each unit once, in the order in which modules were registered, inner ones inside outer."""
    events: list[Event] = []
    open_units: list[str] = []
    trainable_before = False
    grads: dict[str, bool] = {}
    staying = stays_open(plan, buckets)

    def close(until: str) -> None:
        while open_units and not until.startswith(open_units[-1] + "."):
            unit = open_units.pop()
            events.append(Event("leave", unit, grads[unit]))

    for unit in plan.units:
        trainable_before |= any(bucket.trainable for bucket in buckets[unit.name])
        grads[unit.name] = trainable_before
        close(unit.name)
        events.append(Event("enter", unit.name, trainable_before))
        if unit.name not in staying:
            open_units.append(unit.name)
    close("")
    return tuple(events)


@dataclass(frozen=True)
class Schedule:
    """All actions of a forward and a backward pass, in the order in which they are met."""

    events: tuple[Event, ...]
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    prefetch: int

    @cached_property
    def repeated(self) -> frozenset[str]:
        """Units that are entered more than once."""
        entered = Counter(event.unit for event in self.events if event.is_enter)
        return frozenset(unit for unit, times in entered.items() if times > 1)

    @property
    def items(self) -> tuple[Collective, ...]:
        """Collectives of both passes."""
        return self.forward_items + self.backward_items

    @property
    def forward_items(self) -> tuple[Collective, ...]:
        """Collectives of the forward pass, in the order in which they are issued."""
        return issue_order(self.forward, self.prefetch)

    @property
    def backward_items(self) -> tuple[Collective, ...]:
        """Collectives of the backward pass, in the order in which they are issued."""
        return issue_order(self.backward, self.prefetch)


class Walk:
    """Issues gathers ahead of their turn: at the n-th one, those up to n + prefetch.

    Args:
        actions: a pass of a `Schedule`.
        prefetch: how many gathers may be in flight beyond the one that is needed.
        start: issues the collectives of one gather.
    """

    def __init__(
        self, actions: Sequence[Action], prefetch: int, start: Callable[[Action], None]
    ) -> None:
        self.actions = actions
        self.position = 0
        self._gathers = [action for action in actions if action.kind == "gather"]
        self._prefetch = prefetch
        self._start = start
        self._met = 0
        self._started = 0

    def find(self, kind: str, unit: str) -> int | None:
        """Where the next such event is; nearly always the very next one."""
        for index in range(self.position, len(self.actions)):
            event = self.actions[index].event
            if event.unit == unit and event.kind == kind:
                return index
        return None

    def meet(self, index: int) -> Action:
        """Take one action's turn; for a gather, issue it and those after it within reach."""
        action = self.actions[index]
        self.position = index + 1
        if action.kind == "gather":
            self._met += 1
            while self._started < min(self._met + self._prefetch, len(self._gathers)):
                self._start(self._gathers[self._started])
                self._started += 1
        return action


def issue_order(actions: Sequence[Action], prefetch: int) -> tuple[Collective, ...]:
    """The collectives of a pass in the order in which a `Walk` issues them."""
    issued: list[Collective] = []

    def issue(action: Action) -> None:
        issued.extend(item for bucket in action.items for item in bucket)

    walk = Walk(actions, prefetch, issue)
    for index in range(len(actions)):
        action = walk.meet(index)
        if action.kind == "reduce":
            issue(action)
    return tuple(issued)


def make_schedule(
    plan: Plan, buckets: Mapping[str, Sequence[Bucket]], events: Sequence[Event]
) -> Schedule:
    """Derive what every event moves."""
    forward = tuple(
        Action(event, "gather", gathers(buckets[event.unit], event.unit, "forward"))
        if event.kind == "enter"
        else Action(event, "none", ())
        for event in events
    )
    backward = []
    for event in reversed(events):
        members = buckets[event.unit]
        if event.kind == "enter":
            reduces = reductions(members, plan.mesh, event.unit) if event.grad else ()
            backward.append(Action(event, "reduce", reduces))
        elif event.grad:
            items = gathers(members, event.unit, "backward")
            backward.append(Action(event, "gather", items))
    return Schedule(tuple(events), forward, tuple(backward), plan.prefetch)


def gathers(
    buckets: Sequence[Bucket], unit: str, reason: str
) -> tuple[tuple[Collective, ...], ...]:
    """Collectives home -> compute, per bucket."""
    return tuple(gather_items(b.gather, unit, reason) if b.gather else () for b in buckets)


def reductions(
    buckets: Sequence[Bucket], mesh: Mesh, unit: str
) -> tuple[tuple[Collective, ...], ...]:
    """Collectives compute gradient -> landing, per bucket; none for a frozen one."""
    return tuple(_reduction(b, mesh, unit) for b in buckets)


def _reduction(bucket: Bucket, mesh: Mesh, unit: str) -> tuple[Collective, ...]:
    if bucket.landing is None:
        return ()
    scatters = scatter_items(bucket.reduce, unit, "grads") if bucket.reduce else ()
    sums = reduce_items(bucket.landing, bucket.sum_axes, mesh, unit, "grads")
    return scatters + sums
