"""From plan to plan on the same job, with nothing but the state: bytes first, then the move.

[Note: the lower bound]
A rank lacks an element of the new state if neither the part that it had nor another part that it
gets has it. What all ranks lack, each element in the narrower of its two dtypes, must reach them
somehow: that is the bound, counted from rectangles alone. A copy that is rounded from a master is
taken from the rank's own masters where it has them, and counts where it has not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.optim.base import parts_of
from shardwise.sharding.buckets import make_buckets
from shardwise.sharding.checkpoint.records import Box, Record, records_of
from shardwise.sharding.collectives import Collective
from shardwise.sharding.compat import device_mesh_without_backend
from shardwise.sharding.errors import PlanError, StateError
from shardwise.sharding.leaves import Home
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.movement import Mover, Transport
from shardwise.sharding.plan import Plan
from shardwise.sharding.simulation import Simulated
from shardwise.sharding.state import State, adopt
from shardwise.sharding.tiers import NOWHERE
from shardwise.transforms.carry import Carried, FromState, carry_state
from shardwise.transforms.casts import cast_buffers
from shardwise.transforms.desync import watched
from shardwise.transforms.filling import blank_state
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.make_home import home_without_job, make_home
from shardwise.transforms.order import registration_order
from shardwise.transforms.settle import Failure, raise_together


@dataclass(frozen=True, eq=False)
class Origin:
    """What made a state: enough to lay it out by another plan, without the program."""

    lowering: Lowering
    transport: Transport
    device: torch.device

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has no job to move in."""
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> Origin:
        """Copies of a state are of the same job."""
        return self


@dataclass(frozen=True)
class Resharding:
    """What one rank moves to reach another plan, known before anything does.

    Args:
        rank: which rank.
        sent_bytes: that it sends.
        received_bytes: that it receives.
        bound_bytes: that it lacks, so must receive at least; see [Note: the lower bound].
        items: its collectives.
        carried: what becomes of the optimizer state.
    """

    rank: int
    sent_bytes: int
    received_bytes: int
    bound_bytes: int
    items: tuple[Collective, ...]
    carried: Carried

    def __str__(self) -> str:
        ratio = f" ({self.received_bytes / self.bound_bytes:.2f}x)" if self.bound_bytes else ""
        return (
            f"rank {self.rank}: sends {self.sent_bytes:,} bytes and receives "
            f"{self.received_bytes:,}{ratio}; it lacks {self.bound_bytes:,}\n{self.carried}"
        )


def reshard(
    state: Any,
    plan_a: Plan,
    plan_b: Plan,
    *,
    report: Callable[[Resharding], Any] | None = None,
) -> Any:
    """The same state laid out by another plan, on another mesh of the same ranks too.

    Collective. Bit for bit what `init(from_state(state))` of a program of `plan_b` gives, without
    the program: such a program takes it. The state that is passed in stays usable. Each rank holds
    old and new state and messages of at most about 32 MiB; messages carry what a rank lacks.

    Args:
        state: that a program has made.
        plan_a: of that program.
        plan_b: of the same model; the optimizer stays.
        report: is told what this rank is about to move, before it does, such as `print`.

    Raises:
        StateError: the state is not of `plan_a`, or of another model or number of ranks.

    >>> # state = sw.reshard(state, plan, sw.plan(model, mesh, sw.zero(1, "fsdp")), report=print)
    """
    first = state.ranks[0] if isinstance(state, Lifted) else state
    origin = _origin(first, plan_a)
    lowering = relower(origin.lowering, plan_b)
    if isinstance(state, Lifted):
        assert isinstance(origin.transport, Simulated)
        run = origin.transport.world.run
        parts: Sequence[Any] = state.ranks
        return Lifted(run(lambda rank: _reshard(parts[rank], plan_a, lowering, report)))
    with torch.inference_mode(False):
        return _reshard(state, plan_a, lowering, report)


def relower(lowering: Lowering, plan: Plan) -> Lowering:
    """The same loss and optimizer under another plan.

    Args:
        lowering: of a program.
        plan: of the same model.
    """
    shapes = {info.path: info.shape for info in plan.infos if info.trainable}
    buckets = make_buckets(plan, parts_of(lowering.optimizer, shapes))
    return Lowering(
        plan,
        lowering.loss_fn,
        lowering.optimizer,
        plan.module if plan.module is not None else lowering.module,
        buckets,
        registration_order(plan, buckets),
        count_fn=lowering.count_fn,
        grad_norm=lowering.grad_norm,
    )


def resharding(state: State, lowering: Lowering) -> Resharding:
    """What one rank moves to take a state into a program; nothing moves.

    Args:
        state: of one rank.
        lowering: of the program.

    Raises:
        StateError: the program cannot take it.
    """
    state = adopt(state)
    rank = state.home.rank
    carried = FromState(state).into(lowering)
    named = dict(lowering.module.named_buffers())
    buffers = cast_buffers(named, lowering.plan.precision.buffers)
    home = home_without_job(lowering, rank)
    old = records_of(state)
    new = records_of(blank_state(lowering, home, buffers, NOWHERE))
    return Resharding(
        rank=rank,
        sent_bytes=sum(item.nbytes for item in carried.items),
        received_bytes=carried.received_bytes,
        bound_bytes=lacking_bytes(old, new, rank),
        items=carried.items,
        carried=carried,
    )


def lacking_bytes(old: Sequence[Record], new: Sequence[Record], rank: int) -> int:
    """Bytes of the new state that a rank does not have; see [Note: the lower bound].

    Args:
        old: records of the state it has.
        new: records of the state it is to have.
        rank: which rank.
    """
    held = {record.name: record for record in old if not record.derived}
    true = {record.name: record for record in new if not record.derived}
    total = 0
    for record in new:
        source = held.get(record.name)
        if source is None:
            continue
        sides = [source, true[record.name]] if record.derived else [source]
        have = [side.boxes(side.part_of(rank)) for side in sides]
        size = min(record.dtype.itemsize, source.dtype.itemsize)
        for need in record.boxes(record.part_of(rank)):
            total += size * (need.numel - _covered(need, have))
    return total


def _covered(need: Box, have: Sequence[Sequence[Box]]) -> int:
    """Elements of a rectangle that are in one or two groups of others, disjoint in each."""
    inside = [[_common(need, box) for box in boxes] for boxes in have]
    covered = sum(box.numel for boxes in inside for box in boxes)
    if len(inside) == 2:
        covered -= sum(_common(one, two).numel for one in inside[0] for two in inside[1])
    return covered


def _common(one: Box, other: Box) -> Box:
    starts = tuple(map(max, one.offsets, other.offsets))
    stops = [
        min(a + m, b + n)
        for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    ]
    return Box(starts, tuple(max(0, stop - a) for a, stop in zip(starts, stops, strict=True)))


def _reshard(
    state: State,
    plan: Plan,
    lowering: Lowering,
    report: Callable[[Resharding], Any] | None,
) -> State:
    origin = _origin(state, plan)
    mesh = lowering.plan.mesh
    mover = Mover(mesh, state.home.rank, origin.transport)

    def run() -> State:
        _agree(state, lowering, origin.transport, report)
        device_mesh = _device_mesh(state.home, lowering.plan, origin)
        home = replace(
            make_home(lowering, state.home.rank, device_mesh),
            origin=replace(origin, lowering=lowering),
        )
        named: Mapping[str, Any] = dict(lowering.module.named_buffers())
        buffers = cast_buffers(named, lowering.plan.precision.buffers)
        return carry_state(
            FromState(state), lowering, home, mover, buffers=buffers, device=origin.device
        )

    if mesh.size != state.home.mesh.size:
        FromState(state).into(lowering)  # says so
    return watched(mover, "reshard", int(state.count), run)


def _agree(
    state: State,
    lowering: Lowering,
    transport: Transport,
    report: Callable[[Resharding], Any] | None,
) -> None:
    """Tell the user what will move, on ranks that want to know; fail on all ranks or on none."""
    failure = Failure()
    try:
        if report is not None:
            report(resharding(state, lowering))
    except Exception as error:
        failure = Failure(error)
    layouts = [(b.name, b.params, b.opt, b.has_master) for b in lowering.all_buckets]
    digest = hashlib.sha256(repr((lowering.plan.mesh, layouts)).encode()).hexdigest()[:12]
    told = transport.gather_objects((str(failure), f"{lowering.plan!r} with layouts {digest}"))
    raise_together([text for text, _ in told], failure, "reshard")
    plans = [plan for _, plan in told]
    if len(set(plans)) > 1:
        raise PlanError(
            "Ranks reshard to different plans.",
            where="reshard(state, plan_a, plan_b)",
            facts=[f"rank {rank}: {plan}" for rank, plan in enumerate(plans)],
            why="What a rank sends follows from where all others want it.",
            fix="pass the same plan_b on every rank",
            plans=len(set(plans)),
        )


def _device_mesh(home: Home, plan: Plan, origin: Origin) -> DeviceMesh:
    """Torch's view of the new mesh; where there is a job, its groups are made by all ranks."""
    if plan.mesh == home.mesh:
        return home.device_mesh
    kind = origin.device.type
    if isinstance(origin.transport, Simulated) or not dist.is_initialized():
        return device_mesh_without_backend(plan.mesh, home.rank, kind)
    return init_device_mesh(kind, plan.mesh.sizes, mesh_dim_names=plan.mesh.names)


def _origin(state: State, plan: Plan) -> Origin:
    origin = state.home.origin
    if not isinstance(origin, Origin):
        raise StateError(
            "This state does not know the program that made it.",
            where="reshard(state, plan_a, plan_b)",
            why="The optimizer says what its state is over, and the job moves it; a state that was "
            "copied to another process has neither.",
            fix="program.init(from_state(state)) with a program of plan_b",
        )
    made = origin.lowering.plan
    if plan != made and not made.same_layout(plan):
        raise PlanError(
            "plan_a is not the plan that the state lies by.",
            where="reshard(state, plan_a, plan_b)",
            facts=[f"the state is of {made!r}", f"plan_a is {plan!r}", *made.diff(plan)[:3]],
            why="Which bytes are whose follows from the plan.",
            fix="pass the plan of the program that made the state",
        )
    return origin
