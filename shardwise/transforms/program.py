"""A program: pure functions over states, for one real rank or for all simulated ones."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from shardwise.sharding.beside import Beside
from shardwise.sharding.collectives import Collective
from shardwise.sharding.errors import strict_keywords
from shardwise.sharding.gradients import Grads
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.scope import call_site
from shardwise.sharding.simulation import World
from shardwise.sharding.state import State
from shardwise.sharding.tiers import Tier
from shardwise.transforms.background import Writing
from shardwise.transforms.carry import FromState
from shardwise.transforms.desync import agreed, watched
from shardwise.transforms.importing import FromFiles
from shardwise.transforms.initialise import FromModule
from shardwise.transforms.lifting import lifted, same, unzip
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.metrics import Metrics
from shardwise.transforms.module_init import InitModule
from shardwise.transforms.moving import move_state
from shardwise.transforms.rank_program import RankProgram
from shardwise.transforms.restoring import FromCheckpoint, from_checkpoint
from shardwise.transforms.saving import absolute
from shardwise.transforms.uneven import Parts, even_batch, own_part

T = TypeVar("T")

_WARN_AFTER = 3
"""Skipped steps in a row; one or two are how a dynamic loss scale finds its value."""


class Program:
    """`init`, `step`, `grads`, `update` and `eval` of one lowered plan; made by `lowered.bind()`.

    All methods but `shard_batch` are collective: every rank calls them in the same order.
    """

    def __init__(self, ranks: Sequence[RankProgram], world: World | None) -> None:
        self._ranks = ranks
        self._world = world

    @property
    def lowered(self) -> Lowering:
        """What runs: after the first step, in the order of units that it has shown."""
        return self._ranks[0].lowering

    @property
    def last_collectives(self) -> tuple[Collective, ...]:
        """What the last call ran on this rank (rank 0 of a simulation), as recorded."""
        return tuple(self._ranks[0].mover.executed)

    @strict_keywords
    def init(
        self,
        source: int | FromModule | FromState | FromCheckpoint | FromFiles = 0,
        *,
        seed: int | None = None,
        init: InitModule | None = None,
    ) -> State:
        """A fresh state, or the state of another program carried over or read from disk.

        Args:
            source: a seed, `from_module(model)`, `from_state(state)`, `from_checkpoint(path)`, or
                files of other systems: `from_safetensors`, `from_deepspeed`, `from_dcp` and
                `from_torch_save`.
            seed: the same as `source`, by name; beside another source, what dropout draws from.
            init: called for each module after its own `reset_parameters`, as `module.apply` would.

        Raises:
            InitError: parameters or buffers that no init touched, or that the module lacks.
            StateError: the state that is carried over is of another model or optimizer.
        """
        if init is not None and isinstance(same(source), FromModule | FromState):
            warnings.warn("init= has no effect: this source has all values.", stacklevel=3)

        def run(rank: RankProgram, source: Any) -> State:
            return _call(rank, "init", None, lambda: rank.init(source, seed, init))

        return self._each(run, source)

    @strict_keywords
    def step(self, state: State, batch: Any, *, donate: bool = True) -> tuple[State, Metrics]:
        """Gradients and update on this rank's part of the global batch.

        If the loss or a gradient is not finite on any rank, every rank skips the update:
        parameters, optimizer state, buffers, step count and so the learning rate schedule stay as
        they are. `metrics` says so and why; after three such steps in a row a warning does too.

        Args:
            state: consumed; see [Note: donation].
            batch: this rank's part, a pytree; see `shard_batch`. Under `accumulate(n)` it is cut
                into n micro-batches, or is `MicroBatches`. None: this rank has no batch; it takes
                part with nothing to add.
            donate: False leaves `state` usable and costs a copy of it.

        Raises:
            DonatedStateError: the state was consumed before.
            RankError: a rank has failed; the state is unchanged and still usable.
            LossScaleError: the gradients overflow at the minimum of a dynamic loss scale; likewise.
        """
        site = call_site()

        def run(rank: RankProgram, state: State, batch: Any) -> tuple[State, Metrics]:
            given = state if donate else state.clone()
            result = _call(rank, "step", given, lambda: rank.step(given, batch))
            if donate:
                state.consume(f"step {int(given.count)} at {site}")
            return result

        new, metrics = unzip(self._each(run, state, batch))
        metrics = same(metrics)
        if not metrics.applied:
            _warn_of_skips(same(new), metrics.reason)
        return new, metrics

    def grads(self, state: State, batch: Any) -> tuple[Grads, Metrics]:
        """Gradients of the mean loss over the global batch; the state stays usable."""

        def run(rank: RankProgram, state: State, batch: Any) -> tuple[Grads, Metrics]:
            return _call(rank, "grads", state, lambda: rank.grads(state, batch))

        grads, metrics = unzip(self._each(run, state, batch))
        return grads, same(metrics)

    @strict_keywords
    def update(self, state: State, grads: Grads, *, donate: bool = True) -> State:
        """One optimizer step with the given gradients; skipped if they are not finite.

        Gradients that were rebuilt by `optree.tree_map` are checked first, in one packed reduction.

        Raises:
            LossScaleError: skipped at the minimum of a dynamic loss scale; the state is unchanged.
        """
        site = call_site()

        def run(rank: RankProgram, state: State, grads: Grads) -> tuple[State, str]:
            given = state if donate else state.clone()
            result, _, fault = _call(rank, "update", given, lambda: rank.update(given, grads))
            if donate:
                state.consume(f"update {int(given.count)} at {site}")
            return result, fault

        new, fault = unzip(self._each(run, state, grads))
        if same(fault):
            _warn_of_skips(same(new), same(fault))
        return new

    def eval(self, state: State, batch: Any) -> Metrics:
        """The loss and metrics in eval mode, in one forward pass; the state stays usable.

        Args:
            state: read.
            batch: this rank's part; None: this rank has none.
        """

        def run(rank: RankProgram, state: State, batch: Any) -> Metrics:
            return _call(rank, "eval", state, lambda: rank.evaluate(state, batch))

        return same(self._each(run, state, batch))

    @strict_keywords
    def move(self, state: State, to: str | Tier | None = None) -> State:
        """The whole state on another tier, to free the device between phases, or back again.

        No step takes a state that is away; `save` and `from_state` do.

        Args:
            state: consumed.
            to: `"pinned_host"`, `disk(path)` or `"device"`; None: where the plan says.

        Raises:
            OffloadError: a tier cannot hold it; on every rank, and the state stays usable.

        >>> # state = program.move(state, "pinned_host")   # generate with another program
        >>> # state = program.move(state)                  # and train again
        """
        site, tier = call_site(), to if isinstance(to, Tier | None) else Tier.parse(to)

        def run(rank: RankProgram, state: State) -> State:
            about: dict[str, Any] = {"to": tier, "call": f"move to {tier or 'the plan'} at {site}"}
            place = (rank.home, rank.lowering, rank.mover.transport)
            return _call(rank, "move", state, lambda: move_state(state, *place, **about))

        return self._each(run, state)

    @strict_keywords
    def save(self, path: str | os.PathLike[str], state: State, *, overwrite: bool = False) -> None:
        """Write a state to a directory; complete and on disk when this returns, on every rank.

        Each rank writes what it holds, once among replicas, into a hidden directory beside `path`;
        when all have, it is renamed. A crash leaves `path` as it was. The state stays usable, and
        beside it a save holds 16 MiB. Its only exchanges are two votes, and a third the first time.

        Args:
            path: the directory to be made, with those above it; the same on all ranks, on a file
                system that they share.
            state: of this program.
            overwrite: replace a checkpoint of that name. Where the system cannot exchange two
                names in one step, the old one is set aside for a moment; after a crash in it
                `restore` finds it there.

        Raises:
            CheckpointError: a rank could not write (disk full, no permission), there is a
                checkpoint of that name, or not all ranks call this; on every rank, and nothing is
                left of the save.
        """
        site = call_site()

        def run(rank: RankProgram, state: State) -> None:
            def save() -> None:
                rank.background.settle()
                rank.saver.save(path, state, overwrite=overwrite, at=site)

            _call(rank, "save", state, save)

        self._each(run, state)

    @strict_keywords
    def save_async(
        self, path: str | os.PathLike[str], state: State, *, overwrite: bool = False
    ) -> Writing:
        """Write a state to a directory while training goes on; complete when `wait` returns.

        Returns when this rank has copied what it writes to host memory, which is kept for later
        saves; steps taken meanwhile do not change what is written. One save is in flight at a time:
        another one, or a restore, waits for it first, and raises what it has raised. The process
        ends when its save has ended. The first call makes a group of all ranks for the thread;
        later ones have no collective but the votes of that thread.

        Args:
            path: as for `save`.
            state: of this program; may be given to `step` at once.
            overwrite: as for `save`.

        Returns:
            What tells when it is complete, and how long training has waited.

        Raises:
            CheckpointError: the save before has failed; on every rank.
        """
        site, start = call_site(), time.perf_counter()

        def run(rank: RankProgram, state: State) -> Beside | None:
            def save() -> Beside | None:
                return rank.background.save(path, state, overwrite=overwrite, at=site)

            return _call(rank, "save_async", state, save)

        thread = same(self._each(run, state))
        held = self._ranks[0].background.copy_bytes
        return Writing(str(absolute(path)), time.perf_counter() - start, held, thread)

    @strict_keywords
    def restore(self, path: Any, *, partial: Sequence[str] | str = (), cast: bool = False) -> State:
        """What `save` has written, under whatever plan: `init(from_checkpoint(path, ...))`.

        Args:
            path: of the checkpoint.
            partial: see `from_checkpoint`.
            cast: likewise.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it does not fit; the same
                report on every rank.
        """
        return self.init(from_checkpoint(path, partial=partial, cast=cast))

    def agree(self, value: bool) -> bool:
        """Whether `value` is true on every rank; one packed reduction.

        Ranks that run out of batches at different times stop together, at the shortest::

            batches = iter(loader)
            while program.agree((batch := next(batches, None)) is not None):
                state, metrics = program.step(state, batch)

        or at the longest, where a rank that has run out passes None and adds nothing::

            while not program.agree((batch := next(batches, None)) is None):
                state, metrics = program.step(state, batch)

        `eval` works the same way.

        Args:
            value: this rank's answer; lifted in a simulation if ranks differ.
        """

        def run(rank: RankProgram, value: Any) -> bool:
            return _call(rank, "agree", None, lambda: rank.agree(bool(value)))

        return same(self._each(run, value))

    def shard_batch(self, batch: Any, *, uneven: str = "split", weight: str = "weight") -> Any:
        """This rank's part of a global batch: dimension 0 of every tensor, in `plan.batch` order.

        In a simulation: the parts of all ranks, lifted.

        Args:
            batch: a pytree of tensors with the same rows.
            uneven: what to do if rows do not divide. `"split"`: parts differ by one row at most,
                and ranks for which there is none get None, which `step` takes; the step is exact.
                `"drop"`: leave out the last rows. `"pad"`: repeat rows, and add a leaf of 1 for
                rows and 0 for repeated ones to the batch, always; the loss
                `sw.Mean((loss_per_row * batch["weight"]).sum(), batch["weight"].sum())` is then
                that of the batch. `"error"`: raise.
            weight: name of that leaf.

        Raises:
            BatchError: tensors differ in rows, there are none, or rows may not be cut so.
        """
        lowering = self.lowered
        parts = Parts(lowering.plan.mesh, lowering.batch_axes)
        whole = even_batch(batch, parts, uneven=uneven, weight=weight)
        cut = [own_part(whole, parts, rank.mover.coords) for rank in self._ranks]
        return Lifted(cut) if self._world is not None else cut[0]

    def _each(self, run: Callable[..., T], *args: Any) -> Any:
        """Call for this rank, or for all simulated ranks with their parts of lifted arguments."""
        if self._world is None:
            # What is made in inference mode could never be trained; new threads are not in it.
            with torch.inference_mode(False):
                return run(self._ranks[0], *args)
        parts = [lifted(arg, len(self._ranks)) for arg in args]
        return Lifted(
            self._world.run(lambda rank: run(self._ranks[rank], *(a.ranks[rank] for a in parts)))
        )


def on_each(program: Program, call: str, run: Callable[..., T], *args: Any) -> Any:
    """Run something on this rank of a program, or on all simulated ones; all ranks call it.

    Args:
        program: whose ranks.
        call: its name, for errors.
        run: gets the rank, and its own part of the arguments.
        args: lifted where ranks differ.

    Returns:
        What it returned; lifted in a simulation.
    """

    def named(rank: RankProgram, *own: Any) -> T:
        return _call(rank, call, None, lambda: run(rank, *own))

    return program._each(named, *args)


_PREDICTED: Mapping[str, Callable[[Lowering], Sequence[Collective]]] = {
    "step": lambda lowering: lowering.collectives(),
    "grads": lambda lowering: lowering.grads_items,
    "update": lambda lowering: lowering.update_items,
    "eval": lambda lowering: lowering.eval_items,
}


def _call(rank: RankProgram, name: str, state: State | None, run: Callable[[], T]) -> T:
    """Run one call of a program on one rank; in debug mode between exchanges of what is done."""
    step = int(state.count) if isinstance(state, State) else None
    if not rank.debug:
        return watched(rank.mover, name, step, run)
    predicted = _PREDICTED[name](rank.lowering) if name in _PREDICTED else ()

    def checked() -> T:
        return agreed(rank.mover, run, predicted=predicted, device=rank.device)

    return watched(rank.mover, name, step, checked)


def _warn_of_skips(state: State, reason: str) -> None:
    """Say once per run of skipped steps that nothing is being learnt."""
    scaling = state.loss_scale
    if int(scaling.skipped_in_a_row) == _WARN_AFTER:
        warnings.warn(
            f"{_WARN_AFTER} steps in a row were skipped ({int(scaling.skipped)} in all, "
            f"{int(state.count)} applied): {reason}. They changed no parameter, no optimizer state "
            f"and no schedule. The loss scale is {scaling.scale.item():g}.",
            RuntimeWarning,
            stacklevel=4,
        )
