"""Regions: recomputed modules of the template, and how a call of one runs forward and again.

[Note: regions]
A region takes the place of its module's `forward` on the private template, inside of the hooks of
units: `Enter` and `Leave` run once. It passes all tensors among its arguments, however nested, to
torch's checkpoint (without reentry), so that a region around it sees them as values it saves and
random streams of their device are set back. Everything else that a second run could see changed is
as it was before the first: lists and dicts are rebuilt, caches of keys and values copied, and
written buffers are those that forward has read, while the module's own stay as forward left them.

Around units the recomputation has to come at a known place in the list of collectives. `Probe`, the
first node inside, saves a tensor; `Reach`, the last node, asks for it before anything inside is
reached, and so has torch recompute the region there. What this rank leaves out of the region has
joined in before `Reach`, since backward comes to what was created last first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardwise.offload.saved import Group, Keeper
from shardwise.sharding.derived import Remat
from shardwise.sharding.pytree import tree_flatten, tree_unflatten
from shardwise.sharding.tiers import Tier
from shardwise.transforms.outputs import is_cache, place, replace_tensors
from shardwise.transforms.replaying import Kept, Recording, Replaying, aside

Recomputing = Callable[["Region"], AbstractContextManager[None]]
"""What the engine does around a recomputation."""


class _Buffer(NamedTuple):
    """Where a buffer of a region is held."""

    name: str
    table: dict[str, Any]
    key: str


class Region:
    """A module that is recomputed in backward.

    Args:
        name: its path.
        module: of the template.
        policy: what is kept.
        spans: whether units or boundaries lie inside of it.
        crosses: whether boundaries do.
        buffers: names of the template's buffers by identity.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        policy: Remat,
        *,
        spans: bool,
        buffers: Mapping[int, str],
        crosses: bool = False,
    ) -> None:
        self.name = name
        self.crosses = crosses
        self.policy = policy
        self.spans = spans
        self.forward: Callable[..., Any] = module.forward
        self.written: frozenset[str] = frozenset()
        self.keeper: Keeper | None = None
        self._buffers = [
            _Buffer(buffers[id(value)], child._buffers, key)
            for child in module.modules()
            for key, value in child._buffers.items()
            if value is not None
        ]

    def kept(self) -> Kept:
        """What takes the values that one call keeps."""
        if self.keeper is None or not self.policy.tier:
            return Kept(self.name)
        # Their recomputations come one after the other, the last one first.
        return Kept(self.name, Group(self.keeper, Tier.parse(self.policy.tier), prefetch=1))

    @property
    def keeps_values(self) -> bool:
        """Whether the policy keeps some results."""
        return self.policy.policy != "everything"

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the buffers inside that the forward pass writes."""
        held = {b.name: b.table[b.key] for b in self._buffers if b.name in self.written}
        return {name: value.detach().clone() for name, value in held.items()}

    def snapshot_bytes(self, written: Sequence[str]) -> int:
        """Bytes of such copies."""
        held = {b.name: b.table[b.key] for b in self._buffers if b.name in written}
        return sum(value.nbytes for value in held.values())

    def exchange(self, values: Mapping[str, Any]) -> None:
        """Put other tensors in the place of written buffers."""
        for buffer in self._buffers:
            if buffer.name in values:
                buffer.table[buffer.key] = values[buffer.name]

    def held(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors that the module holds as these buffers now."""
        return {b.name: b.table[b.key] for b in self._buffers if b.name in names}


class _Run:
    """The function that torch checkpoints: one call of a region, run once and again."""

    def __init__(
        self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], around: Recomputing
    ) -> None:
        leaves, self._structure = tree_flatten((args, kwargs), none_is_leaf=True)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._others = [_Given if isinstance(leaf, Tensor) else before(leaf) for leaf in leaves]
        self._region = region
        self._around = around
        # The user's own containers, for the first run; held no longer than that, since what a
        # region around this one saves must be free to go.
        self._original: list[Any] = [args, kwargs]
        self._snapshot: dict[str, Tensor] = aside(region.snapshot) if region.written else {}
        self.probe: Any = None

    def __call__(self, *given: Tensor) -> Any:
        if self._original:
            kwargs, args = self._original.pop(), self._original.pop()
            self.probe = _probe() if self._region.spans else None
            return self._region.forward(*args, **kwargs)
        if self._region.spans:
            _probe()
        new = iter(given)
        leaves = [next(new) if leaf is _Given else before(leaf) for leaf in self._others]
        args, kwargs = cast(tuple[Any, Any], tree_unflatten(self._structure, leaves))
        region = self._region
        now = region.held(self._snapshot)
        with self._around(region):
            try:
                region.exchange({name: one.clone() for name, one in self._snapshot.items()})
                return region.forward(*args, **kwargs)
            finally:
                region.exchange(now)


class _Given:
    """Stands for a tensor among the leaves of the arguments."""


def checkpointed(
    region: Region,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: Recomputing,
    end: Callable[[], None],
) -> Any:
    """Run a region so that backward recomputes it; see [Note: regions].

    Args:
        region: what to run.
        args: of the module's forward.
        kwargs: likewise.
        around: entered around each recomputation.
        end: called when a region around units has run, before `Reach`.
    """
    run = _Run(region, args, kwargs, around)
    del args, kwargs
    tensors, run.tensors = run.tensors, []
    inputs = {place(tensor) for tensor in tensors} if region.spans else set()
    output = _checkpoint(region, run, tensors)
    del tensors
    probe, run.probe = run.probe, None
    if not region.spans:
        return output
    aside(end)
    return aside(_mark, region, output, probe, inputs)


def _checkpoint(region: Region, run: _Run, tensors: list[Tensor]) -> Any:
    # Whatever crosses does so again, in its turn, also behind the last tensor that is needed.
    with set_checkpoint_early_stop(not region.crosses):
        return _checkpoint_now(region, run, tensors)


def _checkpoint_now(region: Region, run: _Run, tensors: list[Tensor]) -> Any:
    if not region.keeps_values:
        return checkpoint(run, *tensors, use_reentrant=False)
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
    kept = region.kept()

    def modes() -> tuple[Recording, Replaying]:
        return Recording(kept, region.policy, device), Replaying(kept, region.policy, device)

    output = checkpoint(run, *tensors, use_reentrant=False, context_fn=modes)
    kept.close()
    return output


def _mark(region: Region, output: Any, probe: Tensor, inputs: set[int]) -> Any:
    """Put `Reach` on what a region returns."""

    def reach(tensors: list[Tensor]) -> Sequence[Tensor]:
        # By identity: what was one tensor stays one, so in-place use of it keeps its meaning.
        left = {id(tensor): tensor for tensor in tensors}
        wanted = [key for key, tensor in left.items() if tensor.requires_grad]
        if wanted:
            places = [place(left[key]) for key in wanted]
            shared = [p != 0 and (p in inputs or places.count(p) > 1) for p in places]
            new = Reach.apply(probe.grad_fn, shared, *(left[key] for key in wanted))
            left.update(zip(wanted, new, strict=True))
        return [left[id(tensor)] for tensor in tensors]

    return replace_tensors(output, region.name, reach)


class Probe(torch.autograd.Function):
    """Saves a tensor at the beginning of a region, for which torch recomputes the region."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        """Save it."""
        ctx.save_for_backward(anchor)
        return anchor.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        """Nothing depends on it."""


class Reach(torch.autograd.Function):
    """What a region returns, unchanged; backward has the region recomputed first."""

    @staticmethod
    def forward(ctx: Any, probe: Any, shared: Sequence[bool], *tensors: Tensor) -> Any:
        """Alias as `Leave` does."""
        ctx.probe = probe
        ctx.set_materialize_grads(False)
        return tuple(
            tensor.view_as(tensor) if alias else tensor.detach()
            for tensor, alias in zip(tensors, shared, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Ask for what the probe has saved, then let the gradients pass."""
        _ = ctx.probe.saved_tensors
        return (None, None, *grads)


def _probe() -> Tensor:
    with torch.enable_grad():
        return Probe.apply(torch.zeros((), requires_grad=True))


def before(value: Any) -> Any:
    """A cache as it is now, without copies of its tensors; anything else itself.

    A cache is changed in place by the layers that it is passed to, and they run again.
    """
    if isinstance(value, list):
        return [before(part) for part in cast(list[Any], value)]
    if isinstance(value, dict) and type(value) is dict:
        return {key: before(part) for key, part in cast(dict[Any, Any], value).items()}
    if not is_cache(value):
        return value
    copied = copy.copy(value)
    vars(copied).update({name: before(part) for name, part in vars(value).items()})
    return copied
