"""The program of one rank: plain-tensor code between the predicted collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.offload.store import Store
from shardwise.optim.loss_scale import next_divisor, next_loss_scale
from shardwise.optim.norms import Norm
from shardwise.sharding.collectives import packed_items
from shardwise.sharding.functional import Template, make_template
from shardwise.sharding.gradients import Grads, rest_gradients
from shardwise.sharding.movement import Mover, Transport, packed_sum
from shardwise.sharding.state import Life, State, adopt
from shardwise.transforms.acts import keep_saved_values
from shardwise.transforms.background import Background
from shardwise.transforms.binding import Stage
from shardwise.transforms.buffer_sync import Sites, average_buffers, find_buffers, read_buffers
from shardwise.transforms.call_facts import prepare_calls
from shardwise.transforms.carry import FromState
from shardwise.transforms.finite import (
    agree_on_fault,
    agree_on_range,
    checked_grads,
    nonfinite_flag,
)
from shardwise.transforms.importing import FromFiles
from shardwise.transforms.initialise import FromModule
from shardwise.transforms.loss import Loss, Mean, bad_count, no_gradient
from shardwise.transforms.lowering import FIXED_SCALARS, Lowering
from shardwise.transforms.make_home import make_home
from shardwise.transforms.memory import first_backward_bytes, predict_memory
from shardwise.transforms.metrics import Metrics, read_metrics
from shardwise.transforms.module_init import InitModule
from shardwise.transforms.moving import check_in_place
from shardwise.transforms.norms import group_norms, whole_norm
from shardwise.transforms.order import Event
from shardwise.transforms.passes import Passes, loss_multiplier
from shardwise.transforms.resharding import Origin
from shardwise.transforms.restoring import FromCheckpoint
from shardwise.transforms.room import check_room
from shardwise.transforms.runtime import Engine
from shardwise.transforms.saving import Saver
from shardwise.transforms.scalars import changed_metrics, check_counts, other_metrics, pack_scalars
from shardwise.transforms.settle import Failure, agree_on_batch, raise_failure, settle
from shardwise.transforms.starting import Starter
from shardwise.transforms.tensor_sums import run_sums
from shardwise.transforms.trace import trace
from shardwise.transforms.trace_stage import stage_for_trace
from shardwise.transforms.unit_runtime import UnitRuntime
from shardwise.transforms.update import run_update


class RankProgram:
    """Init, gradients, update and evaluation on one rank.

    Args:
        lowering: what was lowered; replaced once, when the first step has shown the order of units.
        rank: this rank.
        transport: what moves bytes.
        device_mesh: torch's view of the mesh, for DTensor leaves.
        device: where tensors live.
        debug: repeat the checks of the first step in every step.
    """

    def __init__(
        self,
        lowering: Lowering,
        rank: int,
        transport: Transport,
        *,
        device_mesh: DeviceMesh,
        device: torch.device,
        debug: bool,
    ) -> None:
        plan = lowering.plan
        self.lowering = lowering
        self.device = device
        self.mover = Mover(plan.mesh, rank, transport)
        self.template = make_template(lowering.module, plan.infos, device)
        self.buffer_sites = find_buffers(self.template.module)
        self._buffers = read_buffers(self.buffer_sites)
        self.store = Store(device, rank=rank, debug=debug)
        units = _make_units(lowering, self.template, self.mover, self.store)
        self.engine = Engine(units, self.mover)
        casts = plan.precision.casts
        self.stage = Stage(
            self.template,
            plan.units,
            self.engine,
            plan.remat,
            casts,
            plan=plan,
            bound={name for name, unit in units.items() if unit.rests_bound},
        )
        keep_saved_values(plan.acts, self.engine, self.stage, self.store)
        origin = Origin(lowering, transport, device)
        home = make_home(lowering, rank, device_mesh)
        self.home = replace(home, origin=origin, memories=self.store)
        self.saver = Saver(plan, self.home, self.mover, device)
        self.background = Background(self.saver, self.mover, self.store)
        self.starter = Starter(
            self.template,
            self.home,
            self.mover,
            self.background,
            sites=self.buffer_sites,
            buffers=self._buffers,
            device=device,
        )
        self._settled = False
        self.debug = debug
        self.passes = Passes(
            self.stage,
            self.engine,
            self.mover,
            self.buffer_sites,
            device=device,
            debug=debug,
            events_of=self._events_of,
        )

    # -- init -------------------------------------------------------------------------------

    def init(
        self,
        source: int | FromModule | FromState | FromCheckpoint | FromFiles,
        seed: int | None = None,
        init: InitModule | None = None,
    ) -> State:
        """A fresh state from a seed or a module's values, or one of another program or of a file.

        Raises:
            InitError: some value is missing; every rank raises.
            StateError: the state that is carried does not fit; every rank raises.
            RankError: an init failed on another rank.
            OffloadError: a tier cannot hold the state; every rank raises.
        """
        check_room(predict_memory(self.lowering), self.store, self.mover.transport)
        return self.starter.init(self.lowering, source, seed, init)

    # -- step -------------------------------------------------------------------------------

    def grads(self, state: State, batch: Any) -> tuple[Grads, Metrics]:
        """Normalised gradients, the buffers after forward, and metrics."""
        self.home.check(state.home, "state")
        state = check_in_place(adopt(state))
        self._settle(batch, steps=self.lowering.plan.accumulation.steps)
        self.mover.begin(self.lowering.pass_items)
        done = self.passes.train(self.lowering, state, batch)
        landed = done.landed
        self.mover.expect([one.item for one in self.lowering.tensor_sums])
        if landed:
            run_sums(self.mover, self.lowering.tensor_sums, landed)
        else:
            self.mover.finish_with_zeros(self.device)
        self.mover.expect(self.lowering.buffer_items)
        ran = done.num_passes > 0
        buffers = average_buffers(self.mover, self.lowering, done.buffers, ran=ran)
        flag = nonfinite_flag(landed.values(), self.device)
        trainable = self.lowering.trainable
        values, numbers = self._reduce_scalars(done.loss, done.failure, trainable, flag)
        flags = numbers[FIXED_SCALARS : FIXED_SCALARS + len(trainable)]
        used = frozenset([p for p, f in zip(trainable, flags, strict=True) if f > 0])
        if flags and not used:
            raise no_gradient(len(flags))
        total, count, _, nonfinite = numbers[:FIXED_SCALARS]
        fault = ""
        if nonfinite or not math.isfinite(total):
            fault = agree_on_fault(self.mover, self.lowering, landed, done.loss)
        offset = FIXED_SCALARS + len(flags)
        if done.counts is not None:
            check_counts(self.lowering, done.counts.tolist(), numbers[offset:])
        # A loss of several terms was divided by their counts before backward.
        elements = 1.0 if self.lowering.terms else values[1]
        factor = 1.0 / (elements * loss_multiplier(self.lowering, state))
        rest_gradients(self.lowering.all_buckets, landed, factor, self.store)
        fault = agree_on_range(self.mover, self.lowering, landed, self.device, fault)
        metrics = read_metrics(
            self.lowering,
            values,
            offset,
            applied=not fault,
            reason=fault,
            skipped_steps=int(state.loss_scale.skipped) + bool(fault),
            scale=state.scale,
        )
        return Grads(self.home, landed, used, buffers, fault, count), metrics

    def update(
        self, state: State, grads: Grads, *, reuse_grads: bool = False
    ) -> tuple[State, dict[Norm, Tensor], str]:
        """One optimizer step in place, unless some gradient is not finite.

        Args:
            state: written to.
            grads: from `grads`.
            reuse_grads: let the update write to them.

        Returns:
            The new state, the norms that were needed, and why the step was skipped.

        Raises:
            LossScaleError: the step would be skipped at the minimum of the loss scale.
        """
        self.home.check(state.home, "state")
        state = check_in_place(adopt(state))
        self.home.check(grads.home, "set of gradients")
        self.mover.begin(())
        grads = checked_grads(self.mover, self.lowering, grads, self.device)
        plan, fault = self.lowering.plan, grads.fault or ""
        scaling = next_loss_scale(plan.loss_scale, state.loss_scale, finite=not fault, reason=fault)
        scaling = next_divisor(scaling, grads.count, half=plan.uses_half)
        if fault:
            self.mover.end()
            return replace(state, scaling=scaling, life=Life()), {}, fault
        self.mover.expect(self.lowering.update_items)
        try:
            opt_flats, norms = run_update(
                self.mover,
                self.lowering,
                state,
                grads,
                store=self.store,
                reuse_grads=reuse_grads,
            )
            self.mover.end()
        except BaseException:
            # Some buckets may hold new values and some old ones.
            state.consume(f"update {int(state.count)}, which failed half-way")
            raise
        new = replace(
            state,
            opt_flats=opt_flats,
            buffer_values=grads.buffers,
            count=state.step + 1,
            scaling=scaling,
            life=Life(),
        )
        return new, norms, ""

    def step(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """`update` of `grads`."""
        grads, metrics = self.grads(state, batch)
        ran = self.mover.executed
        state, norms, _ = self.update(state, grads, reuse_grads=True)
        self.mover.executed = [*ran, *self.mover.executed]
        groups = group_norms(norms)
        return state, replace(metrics, grad_norm=whole_norm(norms), group_norms=groups)

    def evaluate(self, state: State, batch: Any) -> Metrics:
        """The loss without gradients, in eval mode."""
        self.home.check(state.home, "state")
        state = check_in_place(adopt(state))
        self._settle(batch, steps=1)
        self.mover.begin(self.lowering.schedule.forward_items + self.lowering.count_items)
        loss, failure = self.passes.evaluate(self.lowering, state, batch)
        values, _ = self._reduce_scalars(loss, failure, ())
        return read_metrics(self.lowering, values, FIXED_SCALARS)

    def agree(self, value: bool) -> bool:
        """Whether every rank says so."""
        mesh = self.mover.mesh
        items = packed_items(1, [axis for axis in mesh.names if mesh[axis] > 1], mesh, "agree")
        self.mover.begin(items)
        noes = torch.tensor([0.0 if value else 1.0], dtype=torch.float64, device=self.device)
        noes = packed_sum(self.mover, noes, items)
        self.mover.end()
        return not noes.item()

    def _settle(self, batch: Any, *, steps: int) -> None:
        """Once: agree with the other ranks, and lower in the order that a trace has shown."""
        if self._settled:
            if self.debug:
                agree_on_batch(batch, self.mover.transport, self.lowering.plan)
            return
        stage, sites = self._stage_for_trace()
        self.lowering = settle(
            self.lowering,
            stage,
            batch,
            steps=steps,
            sites=sites,
            transport=self.mover.transport,
            device=self.device,
            call=self.mover.call,
        )
        self.engine.crosser.take(self.lowering.crossings)
        self.engine.crosser.calls.lengths = self.lowering.lengths
        self.engine.crosser.calls.facts = self.lowering.facts
        self.engine.crosser.calls.room = first_backward_bytes(self.lowering)
        prepare_calls(self.stage, self.lowering.facts, self.mover.mesh, self.mover.coords)
        if self.lowering.locates:
            self.stage.locate_all()
        self._settled = True

    def _stage_for_trace(self) -> tuple[Stage, Sites]:
        return stage_for_trace(self.lowering, self.engine, self.buffer_sites, self.device)

    def _events_of(self, micro: Any) -> Sequence[Event]:
        """The events of a micro-batch of any size."""
        stage, sites = self._stage_for_trace()
        lowering = self.lowering
        return trace(
            lowering.plan,
            stage,
            lowering.loss_fn,
            micro,
            buffers=sites,
            device=self.device,
            staying=lowering.staying,
        ).events

    # -- scalars ----------------------------------------------------------------------------

    def _reduce_scalars(
        self,
        loss: Loss | None,
        failure: Failure,
        flags: tuple[str, ...],
        nonfinite: Tensor | None = None,
    ) -> tuple[Tensor, list[float]]:
        """ONE packed reduction of loss, count, failure, used flags and auxiliary metrics.

        Returns:
            The sums, and the same on the host.

        Raises:
            RankError: some rank has failed; on every rank.
            BatchError: there is nothing to average, or counts are no numbers of elements.
        """
        if self.lowering.aux is None:
            self._learn_aux(loss, failure)
        elif loss and tuple(loss.aux) != self.lowering.aux:
            loss, failure = None, Failure(changed_metrics(tuple(loss.aux), self.lowering.aux))
        used = self.engine.used
        failed = bool(str(failure))  # a rank without a batch has no loss, and has not failed
        plain = [float(failed), 0.0, *[float(path in used) for path in flags]]
        means = [Mean(loss.total, loss.count), *loss.aux.values()] if loss else []
        values = pack_scalars(means, 1 + len(self.lowering.aux or ()), plain, self.device)
        if not self._counts_here:
            # Its tensor peers tell the same of the same batch; only flags are its own.
            values[:2] = 0.0
            values[FIXED_SCALARS + len(flags) :] = 0.0
        if nonfinite is not None:
            values[FIXED_SCALARS - 1] = nonfinite
        items = self.lowering.scalar_items if flags else self.lowering.eval_scalar_items
        self.mover.expect(items)
        values = packed_sum(self.mover, values, items)
        self.mover.end()
        numbers = values.tolist()
        _, count, failed = numbers[:3]
        if failed:
            raise_failure(self.mover, failure, "the step")
        if not 0 < count < math.inf:
            raise bad_count(count)
        return values, numbers

    @property
    def _counts_here(self) -> bool:
        """Whether this rank speaks for its batch: the first of the tensor ranks that share it."""
        axes = self.lowering.plan.tensor.axes.values()
        return not any(self.mover.coords[part] for axis in axes for part in axis.parts)

    def _learn_aux(self, loss: Loss | None, failure: Failure) -> None:
        """Agree on the names of metrics that no trace could show."""
        names = tuple(loss.aux) if loss else None
        told = self.mover.transport.gather_objects(names)
        known = [one for one in told if one is not None]
        if not known or any(one != known[0] for one in known):
            raise_failure(
                self.mover, failure if str(failure) else Failure(other_metrics(told)), "the step"
            )
        self.lowering = replace(self.lowering, aux=known[0])


def _make_units(
    lowering: Lowering, template: Template, mover: Mover, store: Store
) -> dict[str, UnitRuntime]:
    return {
        unit.name: UnitRuntime(
            unit.name,
            stays=unit.name in lowering.staying,
            buckets=lowering.buckets[unit.name],
            template=template,
            mover=mover,
            device=store.device,
            store=store,
        )
        for unit in lowering.plan.units
    }
