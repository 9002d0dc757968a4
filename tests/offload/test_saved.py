"""What autograd saves goes to a tier and comes back bit for bit, and nothing outlives its graph."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.offload.saved import MIN_BYTES, Group, Keeper, Saved
from shardwise.sharding.compat import StorageWeakRef
from shardwise.sharding.errors import OffloadError
from shardwise.sharding.tiers import PINNED_HOST, Memories, Tier, disk

pytestmark = pytest.mark.abstract

CPU = torch.device("cpu")
LENGTH = MIN_BYTES // 4
"""Elements of float32 that are just enough to be moved."""


class Counted(Memories):
    """Host memory that remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.given: list[tuple[Tier, int]] = []

    def empty(self, tier: Tier, length: int, dtype: torch.dtype) -> Tensor:
        """See `Memories.empty`."""
        self.given.append((tier, length * dtype.itemsize))
        return super().empty(tier, length, dtype)


class Hooks:
    """The hooks of one call of a module, with nothing beside."""

    def __init__(self, keeper: Keeper, prefetch: int = 1) -> None:
        self._group = Group(keeper, PINNED_HOST, prefetch)

    def pack(self, tensor: Tensor) -> Any:
        return self._group.save(tensor) or tensor.detach()

    def unpack(self, held: Any) -> Tensor:
        return held.take() if isinstance(held, Saved) else held


def saving(keeper: Keeper, prefetch: int = 1) -> torch.autograd.graph.saved_tensors_hooks:
    hooks = Hooks(keeper, prefetch)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)


def there_and_back(tensor: Tensor) -> Tensor | None:
    saved = Group(Keeper(Counted()), PINNED_HOST, 1).save(tensor)
    return None if saved is None else saved.take()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.size(), one.stride()) == (
        other.dtype,
        other.size(),
        other.stride(),
    ) and torch.equal(one, other)


# -- values ---------------------------------------------------------------------------------------

BIG = torch.arange(12 * LENGTH, dtype=torch.float32)
VIEWS: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: BIG,
    "transposed": lambda: BIG.view(64, -1).t(),
    "every second": lambda: BIG[::2],
    "a middle third of the columns": lambda: BIG.view(-1, 48)[:, 16:32],
    "a small part": lambda: BIG[5 : 5 + LENGTH],
    "the end": lambda: BIG[-LENGTH:],
    "half": lambda: BIG.to(torch.bfloat16)[3:].unsqueeze(0),
    "bytes": lambda: (BIG % 251).to(torch.uint8).view(2, -1)[1],
    "another dtype of the same bytes": lambda: BIG.view(torch.int32),
    "complex": lambda: torch.complex(BIG, -BIG)[7:],
    "repeated": lambda: BIG.view(2, 1, -1).expand(2, 3, -1),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_any_view_comes_back(make: Callable[[], Tensor]) -> None:
    tensor = make()
    back = there_and_back(tensor)
    assert back is not None
    assert same_bits(back, tensor)
    assert back.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("start", [0, 1, 3, 16, 129])
def test_a_part_lies_on_the_same_alignment(start: int) -> None:
    """Kernels choose vector code by address, which may change the last bit of a result."""
    part = BIG[start : start + LENGTH]
    back = there_and_back(part)
    assert back is not None
    assert back.data_ptr() % 64 == part.data_ptr() % 64


def sparse() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a beta
        return torch.eye(LENGTH).to_sparse_csr()


STAYING: dict[str, Callable[[], Tensor]] = {
    "one byte too small": lambda: torch.zeros(MIN_BYTES - 1, dtype=torch.uint8),
    "one element, repeated": lambda: torch.zeros(1).expand(LENGTH),
    "empty": lambda: torch.zeros(0),
    "conjugated": lambda: torch.complex(BIG, BIG).conj(),
    "negated": lambda: torch.complex(BIG, BIG).conj().imag,
    "sparse": lambda: torch.eye(LENGTH).to_sparse(),
    "sparse rows": sparse,
    "on another device": lambda: torch.zeros(LENGTH, device="meta"),
    "a parameter": lambda: torch.nn.Parameter(BIG.clone()),
}


@pytest.mark.parametrize("make", STAYING.values(), ids=STAYING.keys())
def test_what_stays(make: Callable[[], Tensor]) -> None:
    memories = Counted()
    assert Group(Keeper(memories), PINNED_HOST, 1).save(make()) is None
    assert memories.given == []


def test_the_smallest_that_moves() -> None:
    assert there_and_back(torch.zeros(MIN_BYTES, dtype=torch.uint8)) is not None


# -- copies ---------------------------------------------------------------------------------------


def test_views_of_one_storage_share_one_copy() -> None:
    """Queries, keys and values are parts of one product."""
    memories = Counted()
    group = Group(Keeper(memories), PINNED_HOST, 1)
    parts = BIG.view(-1, 48).chunk(3, dim=-1)
    saved = [group.save(part) for part in parts]
    assert memories.given == [(PINNED_HOST, BIG.nbytes)]
    back = [one.take() for one in saved if one is not None]
    assert len({one.untyped_storage().data_ptr() for one in back}) == 1
    assert all(same_bits(one, part) for one, part in zip(back, parts, strict=True))


def test_a_small_part_is_copied_alone() -> None:
    memories = Counted()
    part = BIG[100 : 100 + LENGTH]
    assert Group(Keeper(memories), PINNED_HOST, 1).save(part) is not None
    ((_, nbytes),) = memories.given
    assert part.nbytes <= nbytes < part.nbytes + 512


def test_values_before_and_after_a_write_are_two_copies() -> None:
    memories = Counted()
    group, tensor = Group(Keeper(memories), PINNED_HOST, 1), torch.zeros(LENGTH)
    before = group.save(tensor)
    tensor.add_(1)
    after = group.save(tensor)
    assert before is not None
    assert after is not None
    assert (before.times_written, after.times_written) == (1, 0)
    assert len(memories.given) == 2
    assert torch.equal(before.take(), torch.zeros(LENGTH))
    assert torch.equal(after.take(), torch.ones(LENGTH))


def test_writes_count_through_views_and_after_the_tensor_is_gone() -> None:
    tensor = torch.zeros(2, LENGTH)
    saved = Group(Keeper(Counted()), PINNED_HOST, 1).save(tensor)
    assert saved is not None
    row = tensor[0]
    del tensor
    row.zero_()
    assert saved.times_written == 1


def test_a_new_storage_at_the_place_of_a_freed_one_is_another_value() -> None:
    group = Group(Keeper(Counted()), PINNED_HOST, 1)
    values = [float(value) for value in range(20)]
    kept = [group.save(torch.full((LENGTH,), value)) for value in values]
    assert [float(one.take()[0]) for one in kept if one] == values


def test_the_copy_goes_to_the_tier() -> None:
    memories, tier = Counted(), disk("/local/scratch")
    Group(Keeper(memories), tier, 1).save(BIG)
    assert [given for given, _ in memories.given] == [tier]


# -- lifetimes ------------------------------------------------------------------------------------


def chain(keeper: Keeper, x: Tensor, calls: int, prefetch: int = 1) -> tuple[Tensor, list[Any]]:
    """One value saved in each call; and weak references to them."""
    storages = []
    for _ in range(calls):
        with saving(keeper, prefetch):
            x = x * 1.5
            storages.append(StorageWeakRef(x.untyped_storage()))
            x = x.sin()
    return x, storages


def test_memory_is_free_between_forward_and_backward() -> None:
    keeper, x = Keeper(Counted()), torch.randn(LENGTH, requires_grad=True)
    y, storages = chain(keeper, x, 3)
    assert [storage.expired() for storage in storages] == [True] * 3
    plain = x
    for _ in range(3):
        plain = (plain * 1.5).sin()
    (want,) = torch.autograd.grad(plain.sum(), x)
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, want)
    assert keeper.num_alive == 0


def test_backward_twice_and_twice_differentiable() -> None:
    keeper, x = Keeper(Counted()), torch.randn(LENGTH, requires_grad=True)
    y, _ = chain(keeper, x, 3)
    grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(3)]
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    plain = x
    for _ in range(3):
        plain = (plain * 1.5).sin()
    (first,) = torch.autograd.grad(plain.sum(), x, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(first.sum(), x)[0])
    del y, first
    gc.collect()
    assert keeper.num_alive == 0


def test_a_graph_that_is_dropped_takes_its_copies_along() -> None:
    keeper = Keeper(Counted())
    y, _ = chain(keeper, torch.randn(LENGTH, requires_grad=True), 3)
    assert keeper.num_alive == 3
    del y
    gc.collect()
    assert keeper.num_alive == 0


def test_without_gradients_nothing_is_copied() -> None:
    memories = Counted()
    with torch.no_grad():
        chain(Keeper(memories), torch.randn(LENGTH, requires_grad=True), 3)
    assert memories.given == []


def test_a_tier_that_is_full_ends_the_forward_pass_with_its_own_error() -> None:
    class Full(Memories):
        def empty(self, tier: Tier, length: int, dtype: torch.dtype) -> Tensor:
            raise OffloadError("The disk has no room.", why="It is full.", fix="free some")

    keeper = Keeper(Full(CPU))
    with pytest.raises(OffloadError, match="no room"):
        chain(keeper, torch.randn(LENGTH, requires_grad=True), 1)
    gc.collect()
    assert keeper.num_alive == 0


# -- fetching ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_every_call_fetches_those_before_it(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When backward reaches a call, it and as many calls before it as asked are on their way."""
    numbers: list[int] = []
    fetched: list[int] = []
    reached: list[int] = []
    fetch, reach = Group.fetch, Group.reach

    def count_fetch(group: Group) -> None:
        if group.number not in fetched:
            fetched.append(group.number)
        fetch(group)

    def count_reach(group: Group) -> None:
        reach(group)
        numbers.append(group.number)
        reached.append(len(fetched))

    monkeypatch.setattr(Group, "fetch", count_fetch)
    monkeypatch.setattr(Group, "reach", count_reach)
    keeper, x = Keeper(Counted()), torch.randn(LENGTH, requires_grad=True)
    torch.autograd.grad(chain(keeper, x, 5, prefetch)[0].sum(), x)
    assert numbers == [5, 4, 3, 2, 1]
    assert fetched == [5, 4, 3, 2, 1]
    assert reached == [min(place + 1 + prefetch, 5) for place in range(5)]
