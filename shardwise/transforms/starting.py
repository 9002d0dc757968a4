"""First states of one rank: from a seed, a module's values, another state or a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.functional import Template
from shardwise.sharding.leaves import Home
from shardwise.sharding.movement import Mover
from shardwise.sharding.state import State
from shardwise.transforms.background import Background
from shardwise.transforms.buffer_sync import Sites, bind_buffers, read_buffers
from shardwise.transforms.carry import FromState, carry_state
from shardwise.transforms.casts import cast_buffers
from shardwise.transforms.filling import first_state
from shardwise.transforms.importing import FromFiles, import_state
from shardwise.transforms.initialise import FromModule, Shards, check_source, take_module
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.module_init import InitModule, init_from_seed
from shardwise.transforms.restoring import FromCheckpoint, restore_state
from shardwise.transforms.settle import Failure, raise_failure
from shardwise.transforms.stepping import init_opt


class Starter:
    """Makes states of one program on one rank.

    Args:
        template: the private copy, for initialisers.
        home: of the states.
        mover: the choke point.
        background: saves in flight, which a restore waits for.
        sites: where the template holds its buffers.
        buffers: as the module came with them.
        device: where tensors live.
    """

    def __init__(
        self,
        template: Template,
        home: Home,
        mover: Mover,
        background: Background,
        *,
        sites: Sites,
        buffers: dict[str, Tensor],
        device: torch.device,
    ) -> None:
        self._template = template
        self._home = home
        self._mover = mover
        self._background = background
        self._sites = sites
        self._buffers = buffers
        self._device = device

    def init(
        self,
        lowering: Lowering,
        source: int | FromModule | FromState | FromCheckpoint | FromFiles,
        seed: int | None,
        init: InitModule | None,
    ) -> State:
        """See `RankProgram.init`."""
        if isinstance(source, FromState | FromCheckpoint | FromFiles):
            return self._taken(lowering, source, seed, init)
        plan = lowering.plan
        shards = Shards(lowering.all_buckets, plan.mesh, self._mover.coords, self._home.memories)
        seed = self._agree_seed(seed if seed is not None else source)
        bind_buffers(self._sites, self._buffers, tuple(self._buffers))
        failure = Failure()
        try:
            if isinstance(source, FromModule):
                check_source(source, plan.infos, self._buffers)
            else:
                names = {unit.name for unit in plan.units}
                init_from_seed(
                    self._template, shards, seed, device=self._device, init=init, units=names
                )
        except Exception as error:
            failure = Failure(error)
        raise_failure(self._mover, failure, "init")
        buffers = read_buffers(self._sites)
        if isinstance(source, FromModule):
            take_module(source, plan.infos, shards, self._mover.transport, self._device)
            buffers = {name: source.tensors[name].to(self._device) for name in buffers}
        return self._first_state(lowering, shards, buffers, seed)

    def _taken(
        self,
        lowering: Lowering,
        source: FromState | FromCheckpoint | FromFiles,
        seed: int | None,
        init: InitModule | None,
    ) -> State:
        """A state that is somewhere else, as one of this program."""
        place = (lowering, self._home, self._mover)
        buffers = cast_buffers(self._buffers, lowering.plan.precision.buffers)
        about: dict[str, Any] = {"buffers": buffers, "device": self._device}
        if isinstance(source, FromState):
            state = carry_state(source, *place, **about)
        elif isinstance(source, FromCheckpoint):
            self._background.settle()
            about |= {"initial": lambda seed: self.init(lowering, seed, None, init), "seed": seed}
            state = restore_state(source, *place, **about)
        else:
            about["initial"] = lambda: self.init(lowering, seed or 0, None, init)
            state = import_state(source, *place, **about)
        if seed is None:
            return state
        return replace(state, seed=torch.tensor(self._agree_seed(seed), dtype=torch.int64))

    def _first_state(
        self, lowering: Lowering, shards: Shards, buffers: dict[str, Tensor], seed: int
    ) -> State:
        buffers = cast_buffers(buffers, lowering.plan.precision.buffers)
        buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        for buffer in buffers.values():
            self._mover.transport.broadcast(buffer)
        return first_state(
            lowering,
            self._home,
            flats=shards.flats,
            masters=shards.masters,
            opt=init_opt(lowering.stepping, self._mover.coords, self._home.memories),
            buffers=buffers,
            seed=seed,
        )

    def _agree_seed(self, given: int | FromModule) -> int:
        """Rank 0's seed counts, so that replicas start equal whatever the ranks pass."""
        seed = given if isinstance(given, int) else 0
        value = torch.tensor([seed], dtype=torch.int64, device=self._device)
        self._mover.transport.broadcast(value)
        return int(value.item())
