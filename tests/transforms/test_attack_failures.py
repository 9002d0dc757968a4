"""One exception on one rank, at every point of a step: all ranks say so, and the next is right.

The peers of the failing rank are in the middle of a list of collectives: each must find its match.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding import simulation
from shardwise.sharding.errors import RankError
from shardwise.transforms import buffers, unit_runtime
from tests.transforms.attacked import ONE, WIDTH, Stack, batches, bind, loss_fn, started

pytestmark = pytest.mark.simulated

PLACES: dict[str, tuple[Any, str]] = {
    "memory": (buffers.Storage, "take"),
    "copies": (buffers, "copy_all"),
    "bind": (unit_runtime.UnitRuntime, "bind"),
    "unbind": (unit_runtime.UnitRuntime, "unbind"),
    "finish": (unit_runtime.UnitRuntime, "finish"),
    "reduce a unit": (unit_runtime.UnitRuntime, "reduce"),
    "reduce a bucket": (buffers.BucketBuffers, "reduce"),
    "all_gather": (simulation.Simulated, "all_gather"),
    "reduce_scatter": (simulation.Simulated, "reduce_scatter"),
    "all_reduce": (simulation.Simulated, "all_reduce"),
}
PLANS: dict[str, tuple[sw.Mesh, list[sw.Transform]]] = {
    "zero-0": (sw.Mesh(fsdp=2), [sw.zero(0, "fsdp")]),
    "zero-1 hybrid": (sw.Mesh(dp=2, fsdp=2), [sw.zero(1, "fsdp")]),
    "zero-3 of 3": (sw.Mesh(dp=1, fsdp=3), [sw.zero(3, "fsdp")]),
    "zero-3 ahead": (sw.Mesh(fsdp=2), [sw.zero(3, "fsdp"), sw.prefetch(1)]),
}


class InjectedError(RuntimeError):
    pass


class Fault:
    """Raises once, at the `at`-th call on simulated rank 1 while it is armed."""

    def __init__(self) -> None:
        self.at = 0
        self.calls = 0

    def arm(self, at: int) -> None:
        self.at, self.calls = at, 0

    def tick(self) -> None:
        if self.at and threading.current_thread().name == "rank 1":
            self.calls += 1
            if self.calls == self.at:
                raise InjectedError(f"injected at call {self.at}")


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Fault]:
    fault = Fault()
    run = simulation.World.run

    def named(world: Any, main: Callable[[int], Any]) -> list[Any]:
        def in_rank(rank: int) -> Any:
            threading.current_thread().name = f"rank {rank}"
            return main(rank)

        return run(world, in_rank)

    owner, name = PLACES[request.param]
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        fault.tick()
        return original(*args, **kwargs)

    monkeypatch.setattr(simulation.World, "run", named)
    monkeypatch.setattr(owner, name, failing)
    yield fault
    fault.arm(0)


class Mixed(nn.Module):
    """A unit of two trainable buckets, because of their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(x) + self.narrow(x.float()).double())


def mixed() -> Stack:
    module = Stack(Mixed)
    for layer in module.layers:
        layer.narrow.float()
    return module


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("call", ["grads", "eval"])
@pytest.mark.parametrize("fault", PLACES, indirect=True)
def test_a_failure_at_any_call_reaches_all_ranks(fault: Fault, call: str, kind: str) -> None:
    mesh, transforms = PLANS[kind]
    with started(mixed(), *transforms, mesh=mesh) as (program, state):
        parts = program.shard_batch(batches(rows=12)[0])
        want = [grad.clone() for grad in program.grads(state, parts)[0].ranks[0].flats.values()]
        lost = 0  # failures of the packed reduction itself, which no other can follow
        for at in range(1, 60):
            fault.arm(at)
            try:
                getattr(program, call)(state, parts)
            except RankError as error:
                if "injected" not in str(error):
                    raise
            except InjectedError:
                lost += 1
            if fault.calls < at:
                break
            fault.arm(0)
            grads, _ = program.grads(state, parts)
            got = grads.ranks[0].flats.values()
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), at
        assert at < 59
        assert lost <= len(program.lowered.scalar_items)


# -- interrupts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["grads", "eval", "step"])
@pytest.mark.parametrize("mesh", [ONE, sw.Mesh(fsdp=2)], ids=["1", "2"])
def test_an_interrupt_leaves_nothing_of_its_state_behind(call: str, mesh: sw.Mesh) -> None:
    """The next call is given another state, whose weights it must see."""
    armed = False

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
        mean = loss_fn(model, batch)
        if armed:
            raise KeyboardInterrupt
        return mean

    def run(program: sw.Program) -> None:
        nonlocal armed
        batch = program.shard_batch(batches()[0])
        first, second = program.init(0), program.init(1)
        want = program.eval(second, batch).loss
        assert want != program.eval(first, batch).loss
        program.grads(first, batch)
        armed = True
        with pytest.raises(KeyboardInterrupt):
            getattr(program, call)(first, batch)
        armed = False
        assert torch.equal(program.eval(second, batch).loss, want)
        assert torch.equal(program.grads(second, batch)[1].loss, want)

    if mesh is ONE:
        run(bind(Stack(), loss=loss))
    else:
        with sw.simulate(mesh):
            run(bind(Stack(), mesh=mesh, loss=loss))
