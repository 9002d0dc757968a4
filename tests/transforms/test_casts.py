"""Casts at module boundaries, and buffers in dtypes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import rest_bytes
from tests.laws.test_memory import loss_fn as mean_square
from tests.oracles.mixed_precision import Net

pytestmark = pytest.mark.simulated


class Seeing(nn.Module):
    """Keeps the dtypes of all that it is given and of what its inner module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4)
        self.narrow = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any], *, scale: Tensor) -> dict[str, Any]:
        seen = [batch["pair"][0].dtype, batch["ids"].dtype, scale.dtype]
        inner = self.wide(batch["pair"][0])
        out = self.narrow(inner) * scale + batch["pair"][1]
        return {
            "out": out,
            "ids": batch["ids"],
            "seen": [*seen, inner.dtype],
            "same": batch["same"],
        }


def test_nested_inputs_and_keywords_are_cast_and_nothing_else_is() -> None:
    seen: list[Any] = []
    marker = {"n": torch.tensor(1)}

    def loss(model: nn.Module, x: Tensor) -> sw.Mean:
        batch = {"pair": (x, x * 2), "ids": torch.arange(2), "same": marker}
        out = model(batch, scale=torch.ones(()))
        seen[:] = [*out["seen"], out["out"].dtype, out["ids"].dtype, out["same"] is marker]
        return sw.Mean(out["out"].float().square().sum(), len(x))

    plan = sw.plan(
        Seeing(),
        sw.Mesh(fsdp=1),
        sw.precision(compute="bfloat16", outputs="float32"),
        sw.precision(where="wide", compute="float32"),
        sw.precision(where="narrow", compute="bfloat16"),
    )
    # As many elements of each: the wider one is around.
    assert {path: str(cast) for path, cast in plan.precision.casts.items()} == {
        "": "float32, returns float32",
        "narrow": "bfloat16, returns float32",
    }
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss, sw.optim.sgd(0.1)).bind()
        state = program.init(0)
        program.step(state, program.shard_batch(torch.randn(4, 4).double()))
    wide, ids = torch.float32, torch.int64
    assert seen == [wide, ids, wide, wide, wide, ids, True]


def test_a_plan_that_changes_no_compute_dtype_has_no_casts() -> None:
    plan = sw.plan(Net(), sw.Mesh(fsdp=2), sw.precision(params="float32", reduce="bfloat16"))
    assert not plan.precision.casts
    only = sw.plan(Net(), sw.Mesh(fsdp=2), sw.precision(outputs="float64"))
    assert {path: str(cast) for path, cast in only.precision.casts.items()} == {
        "": "as it comes, returns float64"
    }


def test_buffers_rest_in_the_dtype_that_was_asked_for() -> None:
    mesh, module = sw.Mesh(fsdp=2), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plan = sw.plan(module, mesh, sw.precision(where="*.running_var", buffers="float64"))
    assert sw.Plan.from_json(plan.to_json()) == plan
    assert "buffer 1.running_var: rests in float64" in str(plan)
    lowered = sw.lower(plan, mean_square, sw.optim.sgd(0.1))
    with sw.simulate(mesh):
        state = lowered.bind().init(0)
        found = {name: value.dtype for name, value in state.ranks[0].buffers.items()}
        assert rest_bytes(state.ranks[0]) == lowered.memory().rest_bytes
    assert found["1.running_var"] == torch.float64
    assert found["1.running_mean"] == torch.float32
    assert found["1.num_batches_tracked"] == torch.int64
