"""From plan to plan in the middle of a run: a state of one program becomes that of another.

[Note: what is carried]
Everything that both programs have, bit for bit: parameters (a master wins over its rounding, and is
rounded anew), the optimizer state of what both train, buffers, seed, step count, loss scale, and
the user's own values. What only the new program trains gets the fresh optimizer state of its
optimizer; what only the old one trained loses its state. Each buffer of the new state is filled by
one exchange among all ranks that carries only what a rank lacks; see [Note: who sends what].
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.loss_scale import init_loss_scale
from shardwise.sharding.buckets import Bucket
from shardwise.sharding.collectives import Collective, payload_bytes
from shardwise.sharding.derived import LossScale
from shardwise.sharding.errors import StateError, summarise
from shardwise.sharding.layout import Layout
from shardwise.sharding.leaves import Flats, Home
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.lying import Grid, grids_of, lying_of
from shardwise.sharding.movement import Mover
from shardwise.sharding.opt_state import groups_of
from shardwise.sharding.pieces import Held
from shardwise.sharding.plan import Plan
from shardwise.sharding.relocate import Exchange, Fill, plan_fill, received_bytes, run_exchange
from shardwise.sharding.scaling import LossScaleState
from shardwise.sharding.state import Life, State, adopt
from shardwise.sharding.tiers import NOWHERE, Memories, Tier
from shardwise.transforms.carry_opt import OptCarry
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.settle import Failure, raise_together
from shardwise.transforms.stepping import init_opt


@dataclass(frozen=True)
class Carried:
    """What becomes of a state in another program, known before anything moves.

    Args:
        kept: parameters that both programs train; their optimizer state is carried.
        fresh: parameters that only the new one trains; they start with fresh optimizer state.
        dropped: parameters that only the old one trained; their optimizer state is left behind.
        items: the collectives of this rank, in order.
        received_bytes: that they bring to this rank.
    """

    kept: tuple[str, ...]
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]
    items: tuple[Collective, ...]
    received_bytes: int = 0

    def __str__(self) -> str:
        lines = [
            f"{len(self.items)} collectives, {payload_bytes(self.items):,} payload bytes",
            f"optimizer state is kept for {len(self.kept)} parameters",
        ]
        for what, paths in (("fresh", self.fresh), ("dropped", self.dropped)):
            if paths:
                lines.append(f"optimizer state is {what} for {len(paths)} parameters:")
                lines += [f"  {line}" for line in summarise(paths)]
        return "\n".join(lines)


@dataclass(frozen=True)
class FromState:
    """Take a state of another program; see `from_state`."""

    state: State

    def into(self, lowered: Lowering) -> Carried:
        """What `init` will carry into a program, and move on this rank; moves nothing.

        Args:
            lowered: of the program that is to take the state.

        Raises:
            StateError: the program cannot take it.
        """
        carry = _plan(self.state, lowered, NOWHERE)
        source, target = _trained(self.state.home.buckets), _trained(lowered.all_buckets)
        return Carried(
            kept=tuple(path for path in target if path in source),
            fresh=tuple(path for path in target if path not in source),
            dropped=tuple(path for path in source if path not in target),
            items=carry.items,
            received_bytes=sum(map(received_bytes, carry.exchanges)),
        )


def from_state(state: Any) -> Any:
    """A source for `program.init`: a state of another program on the same ranks; see the notes.

    For a change of plan in the middle of a run: other frozen parameters, levels, dtypes, or another
    mesh of the same ranks. The state stays usable, and shares no memory with the new one but its
    `extra`. Each rank receives what it lacks and holds at most one more buffer while it does.

    Args:
        state: of a program with the same model and the same kind of optimizer.

    >>> # program = sw.lower(sw.plan(model, mesh, sw.zero(3, "fsdp")), loss_fn, optimizer).bind()
    >>> # print(sw.from_state(state).into(program.lowered))
    >>> # state = program.init(sw.from_state(state))
    """
    if isinstance(state, Lifted):
        return state.map(FromState)
    return FromState(state)


def carry_state(
    source: FromState,
    lowering: Lowering,
    home: Home,
    mover: Mover,
    *,
    buffers: Mapping[str, Tensor],
    device: torch.device,
) -> State:
    """The state of `source` as one of this program; all ranks take part.

    Args:
        source: from `from_state`.
        lowering: of this program.
        home: of this program.
        mover: the choke point.
        buffers: of this program, for their dtypes.
        device: where tensors live.

    Raises:
        StateError: the state does not fit the program, or ranks pass states of different runs.
        RankError: likewise on another rank.
    """
    failure, carry, about = Failure(), None, ""
    try:
        carry = _plan(source.state, lowering, home.memories)
        about = _about(source.state)
    except Exception as error:
        failure = Failure(error)
    told = mover.transport.gather_objects((str(failure), about))
    raise_together([text for text, _ in told], failure, "init")
    _check_one_run([one for _, one in told])
    assert carry is not None
    mover.begin(carry.items)
    for exchange in carry.exchanges:
        run_exchange(exchange, mover)
    mover.end()
    for name in carry.rounded:
        carry.flats[name].copy_(carry.masters[name])
    state = carry.state
    return replace(
        state,
        home=home,
        flats=carry.flats,
        masters=carry.masters,
        opt_flats=carry.opt,
        buffer_values={
            name: value.to(device, buffers[name].dtype, copy=True)
            for name, value in state.buffer_values.items()
        },
        seed=state.seed.clone(),
        count=state.count.clone(),
        scaling=_scaling(state.scaling, state.home, lowering.plan),
        life=Life(),
    )


@dataclass(frozen=True)
class _Carry:
    """A state that is to be carried, the new buffers, and how they are filled."""

    state: State
    flats: Flats
    masters: Flats
    opt: Any
    exchanges: tuple[Exchange, ...]
    rounded: tuple[str, ...]

    @property
    def items(self) -> tuple[Collective, ...]:
        return tuple(exchange.item for exchange in self.exchanges if exchange.item)


def _plan(given: State, lowering: Lowering, memories: Memories) -> _Carry:
    """Make the new buffers and work out what fills them.

    Raises:
        DonatedStateError: the state is dead.
        StateError: other parameters, buffers, numbers of ranks, or another optimizer.
    """
    state = adopt(given)
    _check_model(state, lowering)
    old_grid, new_grid = grids_of(state.home.mesh), grids_of(lowering.plan.mesh)
    # First, as an optimizer's init sees parameters to be thrown away: later they would be a peak.
    place = lowering.plan.mesh.coords(state.home.rank)
    fresh = init_opt(lowering.stepping, place, memories)
    held = _parameters(state, old_grid)
    flats: Flats = {}
    masters: Flats = {}
    fills: list[Fill] = []

    def fill(bucket: Bucket, layout: Layout, tier: Tier) -> Tensor:
        target = memories.zeros(tier, layout.length, layout.dtype)
        sources = {path: held[path] for path in bucket.paths}
        fills.append(Fill(bucket.unit, target, layout, new_grid(layout.axes), sources))
        return target

    rounded: list[str] = []
    for bucket in lowering.all_buckets:
        if bucket.has_master and bucket.opt:
            masters[bucket.name] = fill(bucket, bucket.opt, bucket.rests.masters)
        layout = bucket.params
        if bucket.has_master and bucket.opt and bucket.opt.cast(layout.dtype) == layout:
            # Each rank has the masters of its own rows.
            tier = bucket.rests.params
            flats[bucket.name] = memories.zeros(tier, layout.length, layout.dtype)
            rounded.append(bucket.name)
        else:
            flats[bucket.name] = fill(bucket, layout, bucket.rests.params)
    opt = OptCarry(groups_of(state.home), lowering.stepping.groups, old_grid, new_grid)
    opt_flats = opt.carry(state.opt_flats, fresh)
    if opt.faults:
        raise _other_optimizer(opt.faults)
    planned = (plan_fill(one, state.home.rank) for one in [*fills, *opt.fills])
    exchanges = tuple(itertools.chain.from_iterable(planned))
    return _Carry(state, flats, masters, opt_flats, exchanges, tuple(rounded))


def _parameters(state: State, grid: Callable[[tuple[str, ...]], Grid]) -> dict[str, Held]:
    """Where the true value of every parameter lies: in its master if it has one."""
    found: dict[str, Held] = {}
    for bucket in state.home.buckets:
        layout, flat = bucket.params, state.flats[bucket.name]
        if bucket.has_master and bucket.opt:
            layout, flat = bucket.opt, state.masters[bucket.name]
        for entry in layout.entries:
            found[entry.path] = Held(lying_of(grid, layout, entry), entry.view(flat))
    return found


def _trained(buckets: tuple[Bucket, ...]) -> tuple[str, ...]:
    return tuple(path for bucket in buckets if bucket.opt for path in bucket.paths)


def kept_of_scaling(was: LossScale | None, plan: Plan, *, half: bool) -> tuple[str, ...]:
    """What a program keeps of the loss scale of another one; the rest starts fresh.

    Args:
        was: how the other plan scales the loss.
        plan: of the program.
        half: whether the other plan computes in float16.
    """
    now = plan.loss_scale
    names = ["skipped", "skipped_in_a_row"]
    if was == now or (was and now and was.dynamic and now.dynamic):
        names += ["scale", "good_steps", "hysteresis"]
    if half == plan.uses_half:
        names += ["divisor"]
    return tuple(names)


def _scaling(old: LossScaleState, home: Home, plan: Plan) -> LossScaleState:
    """The loss scale with its counters where both programs scale alike; a fresh one with counts."""
    kept = init_loss_scale(plan.loss_scale, half=plan.uses_half)._asdict()
    names = kept_of_scaling(home.loss_scale, plan, half=home.half)
    return LossScaleState(**kept | {name: getattr(old, name).clone() for name in names})


def _about(state: State) -> str:
    """What must be equal on all ranks: where the state comes from, and how far it is."""
    layouts = [(b.name, b.params, b.opt, b.has_master) for b in state.home.buckets]
    digest = hashlib.sha256(repr((state.home.mesh, layouts)).encode()).hexdigest()[:12]
    return f"step {int(state.count)} of a plan on {state.home.mesh!r} with layouts {digest}"


def _check_one_run(told: list[str]) -> None:
    other = next((rank for rank, one in enumerate(told) if one != told[0]), None)
    if other is None:
        return
    raise StateError(
        "Ranks carry over states of different runs.",
        where="program.init(from_state(state))",
        facts=[f"rank {rank}: {one}" for rank, one in enumerate(told)],
        why="A state is in parts on all ranks; parts of different states make no whole.",
        fix="pass the state of the same step on every rank",
        rank=other,
    )


def _check_model(state: State, lowering: Lowering) -> None:
    plan = lowering.plan
    if state.home.mesh.size != plan.mesh.size:
        raise StateError(
            f"A state on {state.home.mesh.size} ranks cannot be carried to {plan.mesh.size}.",
            where="program.init(from_state(state))",
            facts=f"the state: {state.home.mesh!r}; the program: {plan.mesh!r}",
            why="Every rank has a part of both, in one job.",
            fix="make a mesh of the same number of ranks",
            has=state.home.mesh.size,
            needs=plan.mesh.size,
        )
    old: dict[str, Any] = {e.path: e.whole for b in state.home.buckets for e in b.params.entries}
    new: dict[str, Any] = {info.path: info.shape for info in plan.infos}
    old |= {name: tuple(value.shape) for name, value in state.buffer_values.items()}
    new |= {name: tuple(buffer.shape) for name, buffer in lowering.module.named_buffers()}
    faults = _differing(old, new)
    if faults:
        raise StateError(
            f"The state is of another model: {len(faults)} tensors differ.",
            where="program.init(from_state(state))",
            facts=summarise(faults),
            why="Values are carried by the path of parameters and buffers.",
            fix="lower a plan of the model that the state was trained with",
            count=len(faults),
        )


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: the state has {old.get(name, 'nothing')}, the program {new.get(name, 'nothing')}"
        for name in {**new, **old}
        if old.get(name) != new.get(name)
    ]


def _other_optimizer(faults: list[str]) -> StateError:
    return StateError(
        f"The state is of another optimizer: {len(faults)} parts of it differ.",
        where="program.init(from_state(state)), state.opt",
        facts=summarise(faults),
        why="Optimizer state is carried leaf by leaf, so both optimizers must keep the same.",
        fix="lower with the same kind of optimizer; for another one, start with "
        "init(from_module(model)), which takes parameters only",
        count=len(faults),
    )
