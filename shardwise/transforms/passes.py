"""The passes of one rank over the model: those of a step over its micro-batches, and of an eval."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.compat import storage_key
from shardwise.sharding.leaves import Flats
from shardwise.sharding.movement import Mover, packed_sum
from shardwise.sharding.pytree import tree_leaves
from shardwise.sharding.rng import key, keyed
from shardwise.sharding.state import State
from shardwise.transforms.binding import Stage
from shardwise.transforms.buffer_sync import Sites, bind_buffers, check_shapes, read_buffers
from shardwise.transforms.checks import checked, refuse_reentrant
from shardwise.transforms.draws import Draws, EvalDraws, Rows, drawing, micro_rows
from shardwise.transforms.faults import explained
from shardwise.transforms.loss import Loss, parse_loss
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.micro import MicroBatches, cut_batch, not_for_eval
from shardwise.transforms.outputs import place
from shardwise.transforms.refitting import EventsOf, Items, fitted_eval, fitted_step
from shardwise.transforms.runtime import Engine
from shardwise.transforms.scalars import changed_metrics, changed_terms, other_counts
from shardwise.transforms.settle import Failure
from shardwise.transforms.tensor_context import in_tensor_context

_MISSING = object()
"""The micro-batch of a pass that this rank has none for; None could be a batch of the user's."""


@dataclass(frozen=True)
class Done:
    """What the passes of a step have left on this rank.

    Args:
        loss: of all micro-batches; None after a failure, or if there were none.
        landed: unnormalised gradients by bucket.
        buffers: the module's buffers after forward.
        counts: global counts of the loss terms as `count_fn` told them; None without one.
        num_passes: how many of the passes ran on a micro-batch of this rank.
        failure: empty if there is none.
    """

    loss: Loss | None
    landed: Flats
    buffers: dict[str, Tensor]
    counts: Tensor | None = None
    num_passes: int = 0
    failure: Failure = field(default_factory=Failure)


class Passes:
    """Runs the user's loss function on the template, between the collectives of the schedule.

    Args:
        stage: the template with its hooks.
        engine: the guide of the hooks.
        mover: the choke point.
        sites: where the template holds its buffers.
        device: where tensors live.
        debug: repeat the checks of the first step in every step.
        events_of: traces a micro-batch, after a failure.
    """

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        mover: Mover,
        sites: Sites,
        *,
        device: torch.device,
        debug: bool,
        events_of: EventsOf,
    ) -> None:
        self._stage = stage
        self._engine = engine
        self._mover = mover
        self._sites = sites
        self._device = device
        self._debug = debug
        self._checked = False
        self._events_of = events_of

    def train(self, lowering: Lowering, state: State, batch: Any) -> Done:
        """All passes of a step; after a failure here this rank still joins every collective.

        Args:
            lowering: what runs.
            state: read.
            batch: of this rank: to be cut, `MicroBatches`, or None.
        """
        engine = self._engine
        enabled, self._checked = self._debug or not self._checked, True
        self._stage.set_training(True)
        bind_buffers(self._sites, state.buffer_values, lowering.written_buffers)
        self._stage.set_written(lowering.written_buffers)
        micros: tuple[Any, ...] = ()
        try:
            micros = cut_batch(batch, len(lowering.schedules))
            rows = self._rows(lowering, micros)
            counts = self._early_counts(lowering, micros)
            losses: list[Loss] = []
            engine.open()
            for number, schedule in enumerate(lowering.schedules):
                micro = micros[number] if number < len(micros) else _MISSING
                checks = checked(engine.units, self._mover, enabled=enabled)
                draws = Draws(
                    int(state.seed),
                    int(state.step),
                    rows[number] if number < len(rows) else None,
                    located=lowering.locates,
                )
                streams = self._keyed(lowering, state, number)
                engine.crosser.calls.places.restart()
                context = in_tensor_context(engine.crosser.calls)
                with streams, drawing(draws), context, checks, torch.enable_grad():
                    engine.begin(state.flats, "train", schedule)
                    loss = self._pass(lowering, state, micro, counts, draws, enabled=enabled)
                losses += [loss] if loss is not None else []
            total = summed(losses)
            landed = engine.take_landed()
            buffers = read_buffers(self._sites)
            check_shapes(buffers, lowering)
        except Exception as error:
            self._abort(lowering, lambda: fitted_step(lowering, micros, self._events_of))
            failure = Failure(explained(error, lowering.notes))
            return Done(None, {}, state.buffer_values, failure=failure)
        return Done(total, landed, buffers, counts=counts, num_passes=len(micros))

    def _pass(
        self,
        lowering: Lowering,
        state: State,
        micro: Any,
        counts: Tensor | None,
        draws: Draws,
        *,
        enabled: bool,
    ) -> Loss | None:
        """Forward and backward over one micro-batch, or over nothing where there is none."""
        loss = None if micro is _MISSING else self._loss(lowering, micro)
        if loss is not None and enabled:
            refuse_reentrant([mean.total for mean in loss.terms.values()] or [loss.total])
        if lowering.terms and counts is None:
            self._engine.drain_forward()
            counts = self._counts(lowering, [loss.counts] if loss is not None else [])
        if loss is None:
            total = torch.zeros((), device=self._device)
        else:
            loss = loss if counts is None else loss.joined(counts)
            total = _times(loss.total, loss_multiplier(lowering, state))
        draws.turn()
        self._engine.backward(self._engine.end_forward(total))
        return loss if loss is None or len(lowering.schedules) == 1 else loss.detached()

    def _keyed(
        self, lowering: Lowering, state: State, number: int
    ) -> contextlib.AbstractContextManager[None]:
        """The streams of one pass: other ones on every data rank and for every micro-batch."""
        place = [self._mover.coords[axis] for axis in lowering.batch_axes]
        micro = [number] if len(lowering.schedules) > 1 else []
        return keyed(key(int(state.seed), int(state.step), "step", *place, *micro), self._device)

    def _rows(self, lowering: Lowering, micros: Sequence[Any]) -> list[Rows]:
        """Where the rows of each micro-batch are in the global batch, if masks depend on it."""
        if not lowering.draws:
            return []
        return micro_rows(self._mover, micros, lowering.row_items, self._device)

    def _early_counts(self, lowering: Lowering, micros: Sequence[Any]) -> Tensor | None:
        """Global counts of the loss terms before the first pass, if `count_fn` tells them."""
        if not lowering.terms or lowering.count_fn is None:
            return None
        found = [lowering.count_fn(micro) for micro in micros]
        for one in found:
            if tuple(sorted(one)) != lowering.terms:
                raise other_counts(tuple(sorted(one)), lowering.terms)
        return self._counts(lowering, found)

    def _counts(self, lowering: Lowering, found: Sequence[Mapping[str, Any]]) -> Tensor:
        """The counts of the terms over all ranks and micro-batches, from those of this rank's."""
        values = torch.zeros(len(lowering.terms), dtype=torch.float64, device=self._device)
        for counts in found:
            parts = [torch.as_tensor(counts[n], device=self._device) for n in lowering.terms]
            values += torch.stack([part.detach().double().reshape(()) for part in parts])
        return packed_sum(self._mover, values, lowering.count_items)

    def evaluate(self, lowering: Lowering, state: State, batch: Any) -> tuple[Loss | None, Failure]:
        """The loss of one forward pass in eval mode; after a failure this rank still joins.

        Without a batch on this rank there is no loss, and no failure.
        """
        self._stage.set_training(False)
        bind_buffers(self._sites, state.buffer_values, tuple(state.buffer_values))
        try:
            if isinstance(batch, MicroBatches):
                raise not_for_eval(len(batch))
            streams = keyed(key(int(state.seed), "eval"), self._device)
            self._engine.crosser.calls.places.restart()
            with (
                streams,
                drawing(EvalDraws()),
                in_tensor_context(self._engine.crosser.calls),
                torch.no_grad(),
            ):
                self._engine.open()
                self._engine.begin(state.flats, "eval", lowering.schedule)
                loss = None if batch is None else self._loss(lowering, batch)
                self._engine.end_forward(torch.zeros(()))
            if lowering.terms:
                counts = self._counts(lowering, [loss.counts] if loss is not None else [])
                loss = loss.joined(counts) if loss is not None else None
        except Exception as error:
            failure = Failure(explained(error, lowering.notes))
            self._abort(lowering, lambda: fitted_eval(lowering, batch, self._events_of))
            return None, failure
        return loss, Failure()

    def _loss(self, lowering: Lowering, batch: Any) -> Loss:
        leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        self._engine.given = frozenset(storage_key(leaf) for leaf in leaves if place(leaf))
        loss = parse_loss(lowering.loss_fn(self._stage.template.module, batch), batch)
        if tuple(loss.terms) != lowering.terms:
            raise changed_terms(tuple(loss.terms), lowering.terms, lowering.notes)
        if lowering.aux is not None and tuple(loss.aux) != lowering.aux:
            raise changed_metrics(tuple(loss.aux), lowering.aux)
        return loss

    def _abort(self, lowering: Lowering, fitted: Callable[[], Items]) -> None:
        """Forget a pass that has failed here, and take part in what the others still do in it."""
        self._engine.close()
        self._mover.finish_with_zeros(self._device, fitted() if lowering.crossings else ())


def loss_multiplier(lowering: Lowering, state: State) -> float:
    """What the summed loss is multiplied by before backward, the same number on every rank.

    Gradients are divided by it and by the count of elements; see [Note: loss scale]. A loss of
    several terms is a mean before backward, so that it has no divisor.
    """
    scaling = state.loss_scale
    if lowering.terms:
        return scaling.scale.item()
    divisor = scaling.divisor.item() or lowering.first_divisor
    return scaling.scale.item() / divisor


def summed(losses: Sequence[Loss]) -> Loss | None:
    """The numbers of all micro-batches added up; None without any.

    Raises:
        BatchError: they have different auxiliary metrics.
    """
    for loss in losses:
        if tuple(loss.aux) != tuple(losses[0].aux):
            raise changed_metrics(tuple(loss.aux), tuple(losses[0].aux))
    return reduce(Loss.plus, losses) if losses else None


def _times(total: Tensor, multiplier: float) -> Tensor:
    """In float32 at least: the scale itself is no number of float16."""
    if multiplier == 1.0:
        return total
    return (total.float() if total.dtype.itemsize < 4 else total) * multiplier
