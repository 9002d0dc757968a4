"""Law 3: the collectives that run are the predicted ones, by kind, axis, bytes and order."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from torch import Tensor

import shardwise as sw
from shardwise.sharding.collectives import Collective, payload_bytes
from shardwise.sharding.simulation import Simulated
from shardwise.testing.strategies import Training, make_optimizer, trainings

pytestmark = pytest.mark.simulated

Seen = tuple[str, str, int]


@contextmanager
def overheard() -> Generator[dict[int, list[Seen]]]:
    """What really reaches the transport, by rank: kind, axis and bytes that leave."""
    seen: dict[int, list[Seen]] = defaultdict(list)
    lock = threading.Lock()

    def listen(kind: str, leaving: Callable[[int, tuple[Any, ...]], int]) -> Callable[..., Any]:
        original = getattr(Simulated, kind)

        def call(self: Simulated, *args: Any) -> Any:
            ranks = self.mesh[args[-1]]
            with lock:
                seen[self.rank].append((kind, args[-1], leaving(ranks, args)))
            return original(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        # (n - 1) / n of the whole buffer, twice that for an all-reduce: see the design.
        rules: dict[str, Callable[[int, tuple[Any, ...]], int]] = {
            "all_gather": lambda n, args: args[0].nbytes * (n - 1) // n,
            "reduce_scatter": lambda n, args: args[1].nbytes * (n - 1) // n,
            "all_reduce": lambda n, args: 2 * args[0].nbytes * (n - 1) // n,
        }
        for kind, leaving in rules.items():
            patch.setattr(Simulated, kind, listen(kind, leaving))
        yield seen


def summary(items: tuple[Collective, ...]) -> list[Seen]:
    return [(item.kind, item.axis, item.nbytes) for item in items]


@given(trainings(features=("attention", "tied", "twice", "unused", "nested", "frozen", "scalar")))
def test_transports_hear_what_was_predicted(training: Training) -> None:
    model = training.model
    optimizer = make_optimizer(training.optimizer)
    with sw.simulate(training.mesh) as world:
        program = sw.lower(training.plan(model), training.toy.loss_fn, optimizer).bind()
        state = program.init(training.seed)
        part = program.shard_batch(training.batches[0])
        calls: list[tuple[Callable[[], Any], Callable[[], tuple[Collective, ...]]]] = [
            (lambda: program.eval(state, part), lambda: program.lowered.eval_items),
            (lambda: program.grads(state, part), lambda: program.lowered.grads_items),
            (lambda: program.step(state, part), lambda: program.lowered.collectives()),
        ]
        for call, predicted in calls:
            with overheard() as seen:
                call()
            for rank in range(world.mesh.size):
                assert seen[rank] == summary(predicted())
            assert program.last_collectives == predicted()


@given(trainings())
def test_a_trace_before_the_first_step_predicts_as_well(training: Training) -> None:
    """`lower(batch=)` knows what a program without it learns in its first step."""
    model = training.model
    optimizer = make_optimizer(training.optimizer)
    plan, loss_fn = training.plan(model), training.toy.loss_fn
    rows = training.batches[0]["inputs"].tensor_split(training.mesh.size)
    labels = training.batches[0]["labels"].tensor_split(training.mesh.size)
    batch: dict[str, Tensor] = {"inputs": rows[0], "labels": labels[0]}
    traced = sw.lower(plan, loss_fn, optimizer, batch=batch)
    with sw.simulate(training.mesh):
        program = sw.lower(plan, loss_fn, optimizer).bind()
        program.step(program.init(0), program.shard_batch(training.batches[0]))
    assert program.last_collectives == traced.collectives()
    assert payload_bytes(program.last_collectives) == payload_bytes(traced.collectives())


@given(trainings())
def test_one_rank_moves_nothing(training: Training) -> None:
    model = training.model
    plan = sw.plan(model, sw.Mesh(fsdp=1, dp=1), sw.zero(3, ("fsdp", "dp")))
    optimizer = make_optimizer(training.optimizer)
    assert sw.lower(plan, training.toy.loss_fn, optimizer).collectives() == ()
