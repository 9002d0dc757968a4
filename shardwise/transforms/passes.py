"""The passes of one rank over the model: forward and backward of a step, forward of an eval."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.leaves import Flats
from shardwise.sharding.movement import Mover
from shardwise.sharding.rng import key, keyed
from shardwise.sharding.state import State
from shardwise.transforms.binding import Stage
from shardwise.transforms.buffer_sync import Sites, bind_buffers, check_shapes, read_buffers
from shardwise.transforms.checks import checked, refuse_reentrant
from shardwise.transforms.faults import explained
from shardwise.transforms.loss import Loss, parse_loss
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.runtime import Engine
from shardwise.transforms.settle import Failure


@dataclass(frozen=True)
class Done:
    """What the passes of a step have left on this rank.

    Args:
        loss: None after a failure.
        landed: unnormalised gradients by bucket.
        buffers: the module's buffers after forward.
        failure: empty if there is none.
    """

    loss: Loss | None
    landed: Flats
    buffers: dict[str, Tensor]
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
    ) -> None:
        self._stage = stage
        self._engine = engine
        self._mover = mover
        self._sites = sites
        self._device = device
        self._debug = debug
        self._checked = False

    def train(self, lowering: Lowering, state: State, batch: Any) -> Done:
        """Forward and backward; after a failure here this rank still joins every collective."""
        engine = self._engine
        enabled, self._checked = self._debug or not self._checked, True
        self._stage.set_training(True)
        bind_buffers(self._sites, state.buffer_values, lowering.written_buffers)
        place = [self._mover.coords[axis] for axis in lowering.batch_axes]
        seed = key(int(state.seed), int(state.step), "step", *place)
        checks = checked(engine.units, self._mover, enabled=enabled)
        try:
            with keyed(seed, self._device), checks, torch.enable_grad():
                engine.begin(state.flats, "train")
                loss = self._loss(lowering, batch)
                if enabled:
                    refuse_reentrant(loss.total)
                landed = engine.backward(engine.end_forward(loss.total))
            buffers = read_buffers(self._sites)
            check_shapes(buffers, lowering)
        except Exception as error:
            self._abort()
            failure = Failure(explained(error, lowering.notes))
            return Done(None, {}, state.buffer_values, failure)
        return Done(loss, landed, buffers)

    def evaluate(self, lowering: Lowering, state: State, batch: Any) -> tuple[Loss | None, Failure]:
        """The loss of one forward pass in eval mode; after a failure this rank still joins."""
        self._stage.set_training(False)
        bind_buffers(self._sites, state.buffer_values, tuple(state.buffer_values))
        try:
            with keyed(key(int(state.seed), "eval"), self._device), torch.no_grad():
                self._engine.begin(state.flats, "eval")
                loss = self._loss(lowering, batch)
                self._engine.end_forward(loss.total)
        except Exception as error:
            failure = Failure(explained(error, lowering.notes))
            self._abort()
            return None, failure
        return loss, Failure()

    def _loss(self, lowering: Lowering, batch: Any) -> Loss:
        return parse_loss(lowering.loss_fn(self._stage.template.module, batch), batch)

    def _abort(self) -> None:
        """Forget a pass that has failed here, and take part in what the others still do in it."""
        self._engine.close()
        self._mover.finish_with_zeros(self._device)
