"""MEM-2 (and the bytes of UNU-2): nothing stays gathered, whatever a call was or how it ended."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import RankError
from shardwise.testing.ledger import rest_bytes

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(60)]

WIDTH, DEPTH = 128, 4
UNIT_BYTES = 4 * WIDTH * WIDTH
SMALL_BYTES = UNIT_BYTES // 16


class Model(nn.Module):
    """Bias-free units; the mode of a batch tells how they are run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x, mode = batch["x"], batch["mode"]
        for index, layer in enumerate(self.layers):
            if mode == "skip" and index == 1:
                continue
            if mode == "fail" and index == 2:
                raise ValueError("in the middle of forward")
            with torch.set_grad_enabled(
                torch.is_grad_enabled() and (mode != "teacher" or index > 1)
            ):
                x = torch.tanh(layer(x))
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> sw.Mean:
    out = model(batch)
    return sw.Mean(out.square().sum(), out.shape[0])


def batch(mode: str) -> dict[str, Any]:
    return {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)), "mode": mode}


def settled_bytes() -> int:
    """`live_bytes` once gloo's own thread has let go of the last messages; it may take a moment."""
    levels = []
    for _ in range(6):
        time.sleep(0.02)
        levels.append(live_bytes())
    return min(levels)


def live_bytes() -> int:
    """Bytes behind all tensors that were made since `gc.freeze()`, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isinstance asks deprecated module attributes
        for found in gc.get_objects():
            if type(found) in (Tensor, nn.Parameter):
                storage = found.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def kept_by_calls(level: int, extra: str) -> dict[str, int]:
    """One of two ranks: bytes that each call leaves behind, beside its result."""
    gc.freeze()
    mesh = sw.Mesh(fsdp=2)
    torch.manual_seed(0)
    module = Model()
    transforms = {"": [], "prefetch": [sw.prefetch(2)], "keep": [sw.keep_gathered()]}[extra]
    plan = sw.plan(module, mesh, sw.zero(level, "fsdp"), *transforms)
    program = sw.lower(plan, loss_fn, sw.optim.adamw(1e-3)).bind()
    states = [program.init(sw.from_module(module))]
    rest = rest_bytes(states[0])

    def step(mode: str) -> None:
        states[0], _ = program.step(states[0], program.shard_batch(batch(mode)))

    def fail() -> None:
        with pytest.raises(RankError, match="in the middle of forward"):
            step("fail")

    def grads() -> None:
        program.grads(states[0], program.shard_batch(batch("plain")))

    def evaluate() -> None:
        program.eval(states[0], program.shard_batch(batch("plain")))

    calls: dict[str, Callable[[], None]] = {
        "eval": evaluate,
        "grads": grads,
        "step": lambda: step("plain"),
        "a teacher without gradients": lambda: step("teacher"),
        "a unit that is skipped": lambda: step("skip"),
        "an exception in forward": fail,
        "a step after the exception": lambda: step("plain"),
        "a leak": lambda: leaked.append(torch.zeros(WIDTH, WIDTH)),
    }
    leaked: list[Tensor] = []
    step("plain")  # what is made once is made now
    before = settled_bytes()
    kept = {}
    for name, call in calls.items():
        call()
        kept[name] = settled_bytes() - before
    assert rest_bytes(states[0]) == rest
    assert rest < live_bytes() < 4 * rest + SMALL_BYTES, "the ledger does not see the state"
    return kept


@pytest.mark.parametrize(("level", "extra"), [(3, ""), (3, "prefetch"), (3, "keep"), (1, "")])
def test_mem_2_every_call_gives_back_what_it_gathered(level, extra):
    for kept in sw.spawn(kept_by_calls, ranks=2, args=(level, extra), timeout=30):
        assert abs(kept.pop("a leak") - UNIT_BYTES) < SMALL_BYTES
        assert len(kept) == 7
        assert {name: nbytes for name, nbytes in kept.items() if nbytes > SMALL_BYTES} == {}


def shards_and_results() -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """One of two ranks: bytes at rest, and parameters after a run with and without a failure."""
    mesh = sw.Mesh(fsdp=2)
    torch.manual_seed(0)
    module = Model()
    plan = sw.plan(module, mesh, sw.zero(3, "fsdp"))
    results = []
    for fails in (False, True):
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        for index in range(3):
            if fails and index == 1:
                with pytest.raises(RankError):
                    program.step(state, program.shard_batch(batch("fail")))
            state, _ = program.step(state, program.shard_batch(batch("plain")))
        results.append(sw.to_global(dict(state.params)))
    return rest_bytes(state), *results


def test_mem_2_rest_is_the_shard_and_results_are_right_after_an_exception():
    for rest, plain, failed in sw.spawn(shards_and_results, ranks=2, timeout=30):
        assert rest == (DEPTH + 1) * UNIT_BYTES // 2 + 16  # count and rate of the optimizer
        assert all(torch.equal(plain[path], failed[path]) for path in plain)
