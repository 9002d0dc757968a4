"""Modules of the template whose saved values go to a tier, and the hooks around their forward.

[Note: hooks inside of hooks]
Only the innermost hooks see what autograd saves. Inside of these run those of checkpoints, in a
module or around one, and the values that a checkpoint saves are its own: a module that is called
inside of one keeps nothing, in forward or in a recomputation. Around these run those of the checks
of the first step, which get every value first.

The graph holds no tensor as it was saved: a result that an operation saves would hold the graph,
which nothing could free then but its own backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.offload.saved import Group, Keeper, Saved
from shardwise.sharding.compat import saved_hooks_on_top, storage_key
from shardwise.sharding.derived import Acts
from shardwise.sharding.errors import OffloadError
from shardwise.sharding.tiers import Memories
from shardwise.sharding.tree import FrozenMap
from shardwise.transforms.binding import Stage
from shardwise.transforms.checks import Packing
from shardwise.transforms.outputs import place
from shardwise.transforms.runtime import Engine


class SavedValues:
    """What the modules of one program save.

    Args:
        acts: from the plan.
        keeper: puts values on tiers.
        engine: knows weights and batch, which are there anyway.
        module: whose buffers are as well.
    """

    def __init__(
        self,
        acts: FrozenMap[str, Acts],
        keeper: Keeper,
        engine: Engine,
        module: nn.Module,
    ) -> None:
        self._acts = acts
        self._keeper = keeper
        self._engine = engine
        self._module = module
        self._resting: frozenset[int] = frozenset()

    def around(self, path: str) -> AbstractContextManager[Any]:
        """Hooks for one call of a module's forward.

        Args:
            path: of the module.
        """
        outer = saved_hooks_on_top()
        if not torch.is_grad_enabled() or not (
            outer is None or isinstance(outer[0], Packing | _Putting)
        ):
            return nullcontext()
        if not self._keeper.num_alive:  # the first call of a pass
            keys = [key for unit in self._engine.units.values() for key in unit.storage_keys]
            keys += [storage_key(buffer) for buffer in self._module.buffers() if place(buffer)]
            self._resting = self._engine.given.union(keys)
        acts = self._acts[path]
        group = Group(self._keeper, acts.tier, acts.prefetch)
        checks = outer if outer is not None and isinstance(outer[0], Packing) else None
        if outer is not None and isinstance(outer[0], _Putting):
            checks = outer[0].checks
        put = _Putting(path, group, self._resting, checks)
        return torch.autograd.graph.saved_tensors_hooks(put, put.take)


def keep_saved_values(
    acts: FrozenMap[str, Acts], engine: Engine, stage: Stage, memories: Memories
) -> None:
    """Have the modules of a stage keep on tiers what they save, and what they do not recompute.

    Args:
        acts: from the plan.
        engine: the guide of the stage.
        stage: of a program.
        memories: allocates on tiers.
    """
    keeper = Keeper(memories)
    module = stage.template.module
    engine.saving = SavedValues(acts, keeper, engine, module).around
    stage.keep_with(keeper)


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Staying(NamedTuple):
    """A tensor that stays where it is, and how often it had been written when it was saved."""

    tensor: Tensor
    version: int

    @property
    def times_written(self) -> int:
        return self.tensor._version - self.version


class _Putting:
    """Hooks of one call; `checks` are those of the first step, or None."""

    def __init__(
        self, path: str, group: Group, resting: frozenset[int], checks: Hooks | None
    ) -> None:
        self._path = path
        self._group = group
        self._resting = resting
        self.checks = checks

    def __call__(self, tensor: Tensor) -> Any:
        """What the graph holds instead of a tensor."""
        packed = tensor if self.checks is None else self.checks[0](tensor)
        if packed is not tensor:
            return packed
        rests = place(tensor) and storage_key(tensor) in self._resting
        saved = None if rests else self._group.save(tensor)
        return _Staying(tensor.detach(), tensor._version) if saved is None else saved

    def take(self, packed: Any) -> Tensor:
        """The tensor again."""
        if not isinstance(packed, Saved | _Staying):
            assert self.checks is not None
            return self.checks[1](packed)
        tensor = packed.tensor if isinstance(packed, _Staying) else packed.take()
        if packed.times_written:
            raise _written(self._path, tensor, packed.times_written)
        return tensor


def _written(module: str, tensor: Tensor, times: int) -> OffloadError:
    return OffloadError(
        f"A value that {module or '(root)'!r} saved for backward was written in place afterwards.",
        where=f"a tensor of shape {tuple(tensor.shape)} saved in module {module or '(root)'!r}",
        facts=f"{tensor.dtype}, {tensor.nbytes:,} bytes, written {times} times",
        why="Its gradient needs the values that it had; autograd refuses such a write as well.",
        fix="use the operation that is not in place, or clone() the tensor before it",
        module=module,
        times=times,
    )
