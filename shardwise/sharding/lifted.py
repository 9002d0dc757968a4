"""Values of simulated ranks side by side, and the whole tensors behind them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwise.sharding.compat import StridedShard
from shardwise.sharding.errors import SimulationError
from shardwise.sharding.leaves import Leaves


class Lifted:
    """One value per simulated rank; attributes, items, calls of torch and arithmetic map over them.

    >>> lifted = Lifted([torch.ones(2), torch.zeros(2)])
    >>> (lifted * 3).ranks[0]
    tensor([3., 3.])
    >>> torch.sum(lifted).ranks
    (tensor(2.), tensor(0.))
    """

    __slots__ = ("ranks",)

    def __init__(self, ranks: Iterable[Any]) -> None:
        self.ranks = tuple(ranks)

    def map(self, function: Callable[..., Any], *others: Any) -> Lifted:
        """Apply a function rank by rank; other arguments may be lifted too."""
        return Lifted(
            function(value, *(_at(other, rank) for other in others))
            for rank, value in enumerate(self.ranks)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        values = [getattr(value, name) for value in self.ranks]
        if all(callable(value) for value in values):
            return lambda *args: Lifted(
                value(*(_at(arg, rank) for arg in args)) for rank, value in enumerate(values)
            )
        return Lifted(values)

    def __getitem__(self, key: Any) -> Lifted:
        return self.map(operator.getitem, key)

    def __repr__(self) -> str:
        return f"Lifted({len(self.ranks)} ranks of {type(self.ranks[0]).__name__})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Lifted:
        """Run a torch function rank by rank."""
        count = next(len(arg.ranks) for arg in args if isinstance(arg, Lifted))
        return Lifted(
            func(*(_at(arg, rank) for arg in args), **(kwargs or {})) for rank in range(count)
        )

    def __add__(self, other: Any) -> Lifted:
        return self.map(operator.add, other)

    def __sub__(self, other: Any) -> Lifted:
        return self.map(operator.sub, other)

    def __mul__(self, other: Any) -> Lifted:
        return self.map(operator.mul, other)

    def __truediv__(self, other: Any) -> Lifted:
        return self.map(operator.truediv, other)

    __radd__ = __add__
    __rmul__ = __mul__


def _at(value: Any, rank: int) -> Any:
    return value.ranks[rank] if isinstance(value, Lifted) else value


def to_global(value: Any) -> Any:
    """The whole tensors behind DTensors, lifted DTensors, and mappings or named tuples of them.

    In a real job this is a collective: every rank calls it, in the same order. Costs an all-gather
    of each leaf and memory for the whole result on every rank. A leaf that is no DTensor, as tensor
    axes cut parts of a fused dimension, says nothing of the others: pass the mapping that it is in,
    such as `state.params`.

    Raises:
        SimulationError: simulated ranks hold different values of something that is not sharded.

    >>> to_global({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    if isinstance(value, Lifted):
        return _whole_of_ranks(value)
    if isinstance(value, DTensor):
        return _whole(value)
    if isinstance(value, Leaves):
        return {path: _whole_leaf(value, path) for path in value}
    if isinstance(value, Mapping):
        return {key: to_global(part) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [to_global(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [to_global(part) for part in value]
    return value


def _whole(value: DTensor) -> Tensor:
    if value.device_mesh.size() == 1:
        return value.to_local()
    return value.full_tensor()


def _whole_leaf(leaves: Leaves, path: str) -> Any:
    block = leaves.block(path)
    if block is None:
        return to_global(leaves[path])
    blocks = [torch.empty_like(block) for _ in range(leaves.home.mesh.size)]
    dist.all_gather(blocks, block)
    return leaves.joined(path, blocks)


def _whole_leaf_of_ranks(value: Lifted, path: str) -> Any:
    blocks = [leaves.block(path) for leaves in value.ranks]
    if blocks[0] is None:
        return to_global(value.map(operator.getitem, path))
    return value.ranks[0].joined(path, blocks)


def _whole_of_ranks(value: Lifted) -> Any:
    first = value.ranks[0]
    if isinstance(first, Leaves):
        return {path: _whole_leaf_of_ranks(value, path) for path in first}
    if isinstance(first, DTensor):
        return _assemble(value.ranks)
    if isinstance(first, Mapping):
        return {key: to_global(value.map(operator.getitem, key)) for key in first}
    if isinstance(first, tuple):
        parts = [to_global(value[index]) for index in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    for rank, other in enumerate(value.ranks[1:], 1):
        same = torch.equal(first, other) if isinstance(first, Tensor) else first == other
        if not same:
            raise SimulationError(
                f"Ranks 0 and {rank} hold different values, and nothing says how they join.",
                facts=[f"rank 0: {first}", f"rank {rank}: {other}"],
                why="to_global joins sharded tensors and takes one of equal values.",
                fix="read value.ranks to see each rank's own",
                rank=rank,
            )
    return first


def _assemble(ranks: tuple[Any, ...]) -> Tensor:
    """Join the blocks of all ranks along the dimensions that are cut."""
    first: DTensor = ranks[0]
    cuts: dict[int, list[tuple[int, int]]] = {}
    for axis, placement in enumerate(first.placements):
        if isinstance(placement, Shard | StridedShard):
            factor = getattr(placement, "split_factor", 1)
            cuts.setdefault(placement.dim, []).append((factor, axis))
    dims = sorted(cuts)
    mesh = first.device_mesh
    blocks: dict[tuple[tuple[int, ...], ...], Tensor] = {}
    for rank, value in enumerate(ranks):
        place = (mesh.mesh == rank).nonzero()[0].tolist()
        at = tuple(tuple(place[axis] for _, axis in sorted(cuts[dim])) for dim in dims)
        blocks.setdefault(at, value.to_local())
    for dim in reversed(dims):
        rows: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
        for at in sorted(blocks):
            rows.setdefault(at[:-1], []).append(blocks[at])
        blocks = {at: torch.cat(parts, dim=dim) for at, parts in rows.items()}
    return blocks[()]
