"""The order in which units are entered and left, and the collectives that follow from it.

[Note: the order is a list]
`Event`s list every enter and leave of one forward pass. Backward meets the same events in reverse:
autograd runs ready nodes latest-created first, so the unit entered last is left first. Hence one
list gives every collective of a step before it runs, and a `Walk` along it lets any rank join in: a
unit that this rank skips is gathered and dropped when its turn comes.

[Note: passes]
A step of n micro-batches meets these events n times: in its first pass, its middle ones and its
last. They differ in what moves. Weights that stay for the whole step are gathered in the first pass
only. A gradient that is cut after every pass is scattered and added to its shard; one that is kept
whole until the end moves in the last pass only. What replicas have is summed in the last pass in
any case, at the last call of each unit, since waiting takes no memory. A rank without a micro-batch
for some pass walks through that pass all the same, with zeros.

[Note: recomputation in the list]
Backward reaches a recomputed module at what it returned, before all units inside of it, and runs
its forward again: units inside that are not open are gathered once more, in the order of forward.
So each event names the calls of recomputed modules around it, outermost first, and backward begins
a call's part with its recomputation. A unit that is recomputed itself needs nothing: its own gather
in backward comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective, gather_items, reduce_items, scatter_items
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.modules import ROOT
from shardwise.sharding.plan import Plan
from shardwise.sharding.tiers import DEVICE
from shardwise.transforms.crossings import Crossed

CROSS, RECROSS = "cross", "cross again"
"""Kinds of events: an activation crosses a boundary, and does so in a recomputation."""


@dataclass(frozen=True, slots=True)
class Event:
    """A unit is entered or left; `grad` tells whether backward passes through this call.

    `regions` are the calls of recomputed modules around it; see [Note: recomputation in the list].
    A crossing is an event too: `unit` is then its place, and `crossed` what it moves for an
    activation of the shape `shape`. Both are this rank's own: batches differ in size.
    """

    kind: str
    unit: str
    grad: bool = True
    regions: tuple[str, ...] = ()
    crossed: Crossed | None = field(default=None, compare=False)
    shape: tuple[int, ...] = field(default=(), compare=False)

    @property
    def is_enter(self) -> bool:
        """Whether the unit is entered."""
        return self.kind == "enter"

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or '(root)'}" + ("" if self.grad else " (no grad)")


@dataclass(frozen=True, slots=True)
class Action:
    """What one event does on the wire; `items` holds the collectives of each bucket in turn.

    `kind` is `gather`, `reduce`, `cross` or `none`. `ends` marks the last reduction of a unit in a
    step.
    """

    event: Event
    kind: str
    items: tuple[tuple[Collective, ...], ...]
    ends: bool = False


def stays_open(plan: Plan, buckets: Mapping[str, Sequence[Bucket]]) -> frozenset[str]:
    """Units that are entered once and stay bound until their backward: nothing would be emptied.

    These are the root and its children, units that the plan keeps gathered, and units whose modules
    read the `params` home itself; all of them if weights stay for the whole step.
    """
    if plan.accumulation.gather == "step":
        return frozenset(unit.name for unit in plan.units)
    return frozenset(
        unit.name
        for unit in plan.units
        if unit.kind != "unit"
        or unit.name in plan.keep
        or all(bucket.in_place for bucket in buckets[unit.name])
    )


def rests_bound(buckets: Sequence[Bucket]) -> bool:
    """Whether a unit's weights are used where they rest, and its gradients stay where they arise.

    Nothing of such a unit is gathered, copied, reduced or freed: its parameters are bound for the
    whole pass, and it has no turns.
    """
    return all(
        bucket.in_place
        and bucket.gather is None
        and bucket.reduce is None
        and not bucket.sum_axes
        and bucket.rests.grads == DEVICE
        and (bucket.sums is None or bucket.sums.dtype == bucket.params.dtype)
        for bucket in buckets
    )


def registration_order(plan: Plan, buckets: Mapping[str, Sequence[Bucket]]) -> tuple[Event, ...]:
    """Each unit once, in the order in which modules were registered, inner ones inside outer."""
    events: list[Event] = []
    open_units: list[str] = []
    trainable_before = False
    grads: dict[str, bool] = {}
    staying = stays_open(plan, buckets)
    regions = {unit.name: _regions_around(plan, unit.name) for unit in plan.units}

    def close(until: str) -> None:
        while open_units and not until.startswith(open_units[-1] + "."):
            unit = open_units.pop()
            events.append(Event("leave", unit, grads[unit], regions[unit]))

    for unit in plan.units:
        trainable_before |= any(bucket.trainable for bucket in buckets[unit.name])
        grads[unit.name] = trainable_before
        close(unit.name)
        events.append(Event("enter", unit.name, trainable_before, regions[unit.name]))
        if unit.name not in staying:
            open_units.append(unit.name)
    close("")
    trained = {region for event in events if event.grad for region in event.regions}
    return tuple(
        replace(event, regions=tuple(region for region in event.regions if region in trained))
        for event in events
    )


def call_of(module: str, number: int = 0) -> str:
    """The name of one call of a recomputed module in a pass.

    >>> call_of("model.layers")
    'model.layers call 0'
    """
    return f"{module} call {number}"


def _regions_around(plan: Plan, unit: str) -> tuple[str, ...]:
    """First calls of the recomputed modules that a unit lies in."""
    inside = [path for path in plan.remat if unit != path and (f"{unit}.").startswith(f"{path}.")]
    root = [ROOT] if ROOT in plan.remat and unit != ROOT else []
    return tuple(call_of(path) for path in [*root, *(path for path in inside if path != ROOT)])


@dataclass(frozen=True)
class Schedule:
    """All actions of a forward and a backward pass, in the order in which they are met.

    `keeps` tells that weights stay full for the next pass; see [Note: passes]. For `fetch_ahead`
    gathers more than are in flight, shards are fetched from their tiers.
    """

    events: tuple[Event, ...]
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    prefetch: int
    keeps: bool = False
    fetch_ahead: int = 0

    @cached_property
    def items(self) -> tuple[Collective, ...]:
        """Collectives of both passes."""
        return self.forward_items + self.backward_items

    @cached_property
    def forward_items(self) -> tuple[Collective, ...]:
        """Collectives of the forward pass, in the order in which they are issued."""
        return issue_order(self.forward, self.prefetch)

    @cached_property
    def backward_items(self) -> tuple[Collective, ...]:
        """Collectives of the backward pass, in the order in which they are issued."""
        return issue_order(self.backward, self.prefetch)


class Walk:
    """Issues gathers ahead of their turn: at the n-th one, those up to n + prefetch.

    Args:
        actions: a pass of a `Schedule`.
        prefetch: how many gathers may be in flight beyond the one that is needed.
        start: issues the collectives of one gather.
        fetch: begins to bring the shards of a later gather from their tier.
        fetch_ahead: how many gathers beyond those that are in flight are fetched.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        prefetch: int,
        start: Callable[[Action], None],
        *,
        fetch: Callable[[Action], None] | None = None,
        fetch_ahead: int = 0,
    ) -> None:
        self.actions = actions
        self.position = 0
        self._gathers = [action for action in actions if action.kind == "gather"]
        self._prefetch = prefetch
        self._start = start
        self._fetch = fetch
        self._fetch_ahead = fetch_ahead
        self._met = 0
        self._started = 0
        self._fetched = 0

    def find(self, kind: str, unit: str) -> int | None:
        """Where the next such event is; nearly always the very next one."""
        actions = self.actions
        for index in range(self.position, len(actions)):
            event = actions[index].event
            if event.unit == unit and event.kind == kind:
                return index
        return None

    def take(self, kind: str, unit: str) -> bool:
        """Take the turn of the very next action, if it is this one and no gather."""
        if self.position == len(self.actions):
            return False
        event = self.actions[self.position].event
        taken = event.kind == kind and event.unit == unit
        self.position += taken
        return taken

    def meet(self, index: int) -> Action:
        """Take one action's turn; for a gather, issue it and those after it within reach."""
        action = self.actions[index]
        self.position = index + 1
        if action.kind == "gather":
            self._met += 1
            while self._started < min(self._met + self._prefetch, len(self._gathers)):
                self._start(self._gathers[self._started])
                self._started += 1
            if self._fetch is not None:
                self._reach(self._fetch)
        return action

    def _reach(self, fetch: Callable[[Action], None]) -> None:
        stop = min(self._started + self._fetch_ahead, len(self._gathers))
        for index in range(max(self._fetched, self._started), stop):
            fetch(self._gathers[index])
        self._fetched = max(self._fetched, stop)


def issue_order(actions: Sequence[Action], prefetch: int) -> tuple[Collective, ...]:
    """The collectives of a pass in the order in which a `Walk` issues them."""
    issued: list[Collective] = []

    def issue(action: Action) -> None:
        issued.extend(item for bucket in action.items for item in bucket)

    walk = Walk(actions, prefetch, issue)
    for index in range(len(actions)):
        action = walk.meet(index)
        if action.kind in ("reduce", "cross"):
            issue(action)
    return tuple(issued)


def make_schedules(
    plan: Plan, buckets: Mapping[str, Sequence[Bucket]], events: Sequence[Event]
) -> tuple[Schedule, ...]:
    """Derive what every event moves, in each pass of a step."""
    steps = plan.accumulation.steps
    if steps == 1:
        return (_schedule(plan, buckets, events, first=True, last=True),)
    first = _schedule(plan, buckets, events, first=True, last=False)
    middle = _schedule(plan, buckets, events, first=False, last=False)
    last = _schedule(plan, buckets, events, first=False, last=True)
    return (first, *[middle] * (steps - 2), last)


def _schedule(
    plan: Plan,
    buckets: Mapping[str, Sequence[Bucket]],
    events: Sequence[Event],
    *,
    first: bool,
    last: bool,
) -> Schedule:
    stay = plan.accumulation.gather == "step"
    quiet = {name for name, members in buckets.items() if rests_bound(members)}
    events = tuple(events)
    turns = [event for event in events if event.kind == CROSS or event.unit not in quiet]
    forward = tuple(
        Action(event, "cross", _crossing(event, backward=False))
        if event.kind == CROSS
        else Action(event, "gather", gathers(buckets[event.unit], event.unit, "forward"))
        if event.kind == "enter" and (first or not stay)
        else Action(event, "none", ())
        for event in turns
        if event.kind != CROSS or _crossing(event, backward=False)
    )
    # Backward goes through events in reverse, so a unit's last reduction is that of its first call.
    firsts: dict[str, int] = {}
    for index, event in enumerate(turns):
        if event.is_enter and event.grad:
            firsts.setdefault(event.unit, index)
    backward: list[Action] = []
    recomputed: set[str] = set()
    for index, event in reversed(list(enumerate(turns))):
        members = buckets.get(event.unit, ())
        for region in event.regions:
            if region not in recomputed:
                recomputed.add(region)
                backward += _recomputation(plan, buckets, turns, region)
        if event.kind == CROSS:
            moved = _crossing(event, backward=True)
            if event.grad and moved:
                backward.append(Action(event, "cross", moved))
        elif event.is_enter:
            ends = last and firsts.get(event.unit) == index
            reduces = reductions(members, plan.mesh, event.unit, ends=ends) if event.grad else ()
            backward.append(Action(event, "reduce", reduces, ends))
        elif event.grad:
            items = gathers(members, event.unit, "backward")
            backward.append(Action(event, "gather", items))
    keeps = stay and not last
    ahead = plan.derived.fetch_ahead
    return Schedule(events, forward, tuple(backward), plan.prefetch, keeps, ahead)


def _recomputation(
    plan: Plan, buckets: Mapping[str, Sequence[Bucket]], events: Sequence[Event], region: str
) -> list[Action]:
    """What the recomputation of one call moves: the units inside that do not stay open."""
    staying = stays_open(plan, buckets)
    actions: list[Action] = []
    for event in events:
        if region not in event.regions or event.unit in staying:
            continue
        if event.kind == CROSS:
            again, moved = replace(event, kind=RECROSS), _crossing(event, backward=False)
            actions += [Action(again, "cross", moved)] if moved else []
        elif event.is_enter:
            items = gathers(buckets[event.unit], event.unit, "recompute")
            actions.append(Action(Event("recompute", event.unit), "gather", items))
        else:
            actions.append(Action(Event("recomputed", event.unit), "none", ()))
    return actions


def _crossing(event: Event, *, backward: bool) -> tuple[tuple[Collective, ...], ...]:
    assert event.crossed is not None
    item = event.crossed.backward if backward else event.crossed.forward
    return ((item,),) if item else ()


def gathers(
    buckets: Sequence[Bucket], unit: str, reason: str
) -> tuple[tuple[Collective, ...], ...]:
    """Collectives home -> compute, per bucket."""
    return tuple(gather_items(b.gather, unit, reason) if b.gather else () for b in buckets)


def reductions(
    buckets: Sequence[Bucket], mesh: Mesh, unit: str, *, ends: bool = True
) -> tuple[tuple[Collective, ...], ...]:
    """Collectives compute gradient -> landing, per bucket; none for a frozen one.

    Args:
        buckets: of the unit.
        mesh: sizes of the axes.
        unit: its name.
        ends: whether this is the unit's last reduction in the step.
    """
    return tuple(_reduction(b, mesh, unit, ends=ends) for b in buckets)


def _reduction(bucket: Bucket, mesh: Mesh, unit: str, *, ends: bool) -> tuple[Collective, ...]:
    if bucket.reduced is None or (bucket.keeps_whole and not ends):
        return ()
    scatters = scatter_items(bucket.reduce, unit, "grads") if bucket.reduce else ()
    if not ends:
        return scatters
    return scatters + reduce_items(bucket.reduced, bucket.sum_axes, mesh, unit, "grads")
