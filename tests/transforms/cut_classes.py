"""Ranks that have cut the classes: threads with a context for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.transforms.tensor_context import Cut, VocabShard, in_tensor_context


class Context:
    """What a pass over one tensor axis knows: which tensors are cut, and how to talk."""

    room = 0

    def __init__(self, place: int, ranks: int, classes: int) -> None:
        count = -(-classes // ranks)
        first = min(place * count, classes)
        self.shard = VocabShard("tp", ranks, place, classes, first, min(count, classes - first))
        self.block = count
        self.cut: list[tuple[Tensor, int]] = []
        self.gathered: list[tuple[str, tuple[int, ...]]] = []
        self.entered: list[str] = []

    def local(self, whole: Tensor, dim: int, fill: float = 7.5) -> Tensor:
        """This rank's block, with garbage as padding."""
        shard = self.shard
        shape = list(whole.shape)
        shape[dim] = self.block
        block = whole.new_full(shape, fill)
        block.narrow(dim, 0, shard.count).copy_(whole.narrow(dim, shard.first, shard.count))
        block.requires_grad_()
        self.cut.append((block, dim))
        return block

    def shard_of(self, tensor: Tensor, dim: int) -> VocabShard | None:
        return self.shard if any(t is tensor and d == dim for t, d in self.cut) else None

    def cuts_of(self, tensor: Tensor) -> tuple[Cut, ...]:
        return ()

    def all_gather(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        assert not tensor.requires_grad
        self.gathered.append((name, tuple(tensor.shape)))
        return self.exchange(tensor)

    def all_reduce(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        raise AssertionError("nothing here sums")

    def enter(self, tensor: Tensor, axis: str, name: str) -> Tensor:
        self.entered.append(name)
        return tensor

    def by_row(
        self, run: Callable[..., Tensor], rows: Tensor, weights: Sequence[Tensor], *args: Any
    ) -> Tensor:
        return run(rows, *weights, *args)

    def invariant(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        return run(*args)

    exchange: Callable[[Tensor], Tensor]


def on_ranks(ranks: int, classes: int, run: Callable[[Context], Any]) -> list[Any]:
    """Run on every rank in a thread of its own; each all-gather waits for all ranks."""
    barrier = threading.Barrier(ranks, timeout=30)
    slots: list[Any] = [None] * ranks
    results: list[Any] = [None] * ranks

    def one(place: int) -> None:
        context = Context(place, ranks, classes)

        def exchange(tensor: Tensor) -> Tensor:
            slots[place] = tensor.clone()
            barrier.wait()
            stack = torch.stack(list(slots))
            barrier.wait()
            return stack

        context.exchange = exchange
        try:
            with in_tensor_context(context):
                results[place] = run(context)
        except BaseException as error:
            results[place] = error
            barrier.abort()

    threads = [threading.Thread(target=one, args=(place,)) for place in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in results if isinstance(one, BaseException)]
    real = [one for one in errors if not isinstance(one, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


def joined(blocks: list[Tensor], classes: int, dim: int) -> Tensor:
    """The whole, and that what padding has got is zero."""
    count = blocks[0].shape[dim]
    whole = torch.cat(blocks, dim)
    assert count * len(blocks) == whole.shape[dim]
    assert not whole.narrow(dim, classes, whole.shape[dim] - classes).any()
    return whole.narrow(dim, 0, classes)
