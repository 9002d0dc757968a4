"""DTY-1, BF-1, BF-2 and BUF-2: mixed dtypes, masters, stochastic rounding, running statistics."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.latest import read_manifest

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)
PARTS = (slice(0, 2), slice(2, 4))
"""What each of two ranks sees of four rows."""


def whole(tree: Any) -> dict[str, Tensor]:
    return {path: value.detach().clone() for path, value in sw.to_global(tree).items()}


# -- DTY-1 -------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A bfloat16 matrix beside float32 norm and gate, in one unit; casts are the author's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x).bfloat16()).float() * self.gate


def squares(model: nn.Module, x: Tensor) -> sw.Mean:
    out = model(x)
    return sw.Mean(out.double().square().sum(), len(x))


@pytest.mark.parametrize("level", range(4))
def test_dty_1_a_unit_of_mixed_dtypes_trains_as_on_one_process(level: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Mixed(), Mixed())
    x = torch.randn(4, 4)
    own = {path: p.dtype for path, p in module.named_parameters()}
    plan = sw.plan(module, MESH, sw.zero(level, "fsdp"))
    assert not plan.precision.casts
    with pytest.warns(UserWarning, match=r"4 of 10 trained parameters \(first: 0.linear.weight\)"):
        lowered = sw.lower(plan, squares, sw.optim.sgd(0.125))
    one = copy.deepcopy(module)
    with sw.simulate(MESH):
        program = lowered.bind()
        state = program.init(sw.from_module(module))
        for _ in range(3):
            params = list(one.parameters())
            # Each rank's part by itself, added in the dtype of the parameter: that of the wire.
            found = [torch.autograd.grad(squares(one, x[at]).total, params) for at in PARTS]
            with torch.no_grad():
                for p, first, second in zip(params, *found, strict=True):
                    p -= ((first + second) / 4).to(p.dtype) * 0.125
            state, _ = program.step(state, program.shard_batch(x))
            assert program.last_collectives == program.lowered.collectives()
        after = whole(state.params)
        program.save(str(tmp_path / "saved"), state)
        restored = whole(program.restore(str(tmp_path / "saved")).params)
    stored = read_manifest(tmp_path / "saved").by_name
    for path, p in one.named_parameters():
        assert after[path].dtype == own[path] == stored[f"params/{path}"].dtype
        assert restored[path].dtype == own[path]
        assert torch.equal(restored[path], after[path]), path
        assert torch.equal(after[path], p.detach()), path
    buckets = lowered.buckets["0"]
    assert sorted(str(bucket.params.dtype) for bucket in buckets) == [
        "torch.bfloat16",
        "torch.float32",
    ]


# -- BF-1 --------------------------------------------------------------------------------------


class Norm(nn.Module):
    """One weight per channel, and a loss whose gradient is 1 everywhere."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def plus_all(model: nn.Module, x: Tensor) -> sw.Mean:
    return sw.Mean(model(x).float().sum(), len(x))


def run_norm(
    mesh: sw.Mesh, steps: int, optimizer: Any, *transforms: Any, module: nn.Module | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = module or Norm()
    plan = sw.plan(module, mesh, *transforms)
    with sw.simulate(mesh):
        program = sw.lower(plan, plus_all, optimizer).bind()
        state = program.init(sw.from_module(module))
        part = program.shard_batch(torch.ones(4, 16))
        for _ in range(steps):
            state, _ = program.step(state, part)
        return whole(state.params), whole(state.master)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf_1_a_master_moves_where_bfloat16_alone_stays(ranks: int) -> None:
    mesh, adam = sw.Mesh(fsdp=ranks), sw.optim.adamw(6e-4, weight_decay=0.0)
    level = sw.zero(3, "fsdp")
    params, masters = run_norm(mesh, 100, adam, level, sw.precision(params="bfloat16"))
    assert masters["weight"].dtype == torch.float32
    torch.testing.assert_close(masters["weight"], torch.full((16,), 0.94), rtol=1e-4, atol=0.0)
    assert torch.equal(params["weight"], masters["weight"].bfloat16())
    plain = sw.precision(params="bfloat16", master="bfloat16")
    # Half a step of bfloat16 below 1 is 2**-9: what is warned of is what happens.
    with pytest.warns(
        UserWarning, match="bfloat16 without a master copy: a step of less than 0.00195"
    ):
        params, masters = run_norm(mesh, 100, adam, level, plain)
    assert torch.equal(params["weight"], torch.ones(16, dtype=torch.bfloat16))
    assert masters == {}


# -- BF-2 --------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype).sum() * self.weight


def sum_of_table(model: nn.Module, x: Tensor) -> sw.Mean:
    return sw.Mean(model(x).float().sum(), len(x))


LAYOUTS = {
    "one rank": (sw.Mesh(fsdp=1), ()),
    "replicated": (sw.Mesh(dp=2), ()),
    "zero 1": (sw.Mesh(fsdp=2), (sw.zero(1, "fsdp"),)),
    "zero 3": (sw.Mesh(fsdp=4), (sw.zero(3, "fsdp"),)),
    "zero 3 on columns": (sw.Mesh(fsdp=2), (sw.zero(3, "fsdp", on=1),)),
    "hybrid": (sw.Mesh(dp=2, fsdp=2), (sw.zero(3, "fsdp"), sw.shard_optimizer(("fsdp", "dp")))),
    "params only": (sw.Mesh(fsdp=2), (sw.shard_params("fsdp"),)),
}


def run_table(name: str, steps: int, *, seed: int = 0, **precision: Any) -> Any:
    mesh, transforms = LAYOUTS[name]
    module = Table()
    rounded = sw.precision(rounding="stochastic", **precision)
    plan = sw.plan(module, mesh, *transforms, rounded)
    with sw.simulate(mesh):
        # A gradient of 1 in every element, and a step of a quarter of bfloat16's below 1.
        lowered = sw.lower(plan, sum_of_table, sw.optim.sgd(2.0**-10, momentum=0.5))
        program = lowered.bind()
        state = program.init(sw.from_module(module), seed=seed)
        part = program.shard_batch(torch.ones(4, 1))
        for _ in range(steps):
            state, _ = program.step(state, part)
            assert program.last_collectives == program.lowered.collectives()
        assert whole(state.master) == {}
        moments = [v for v in sw.to_global(state.opt) if isinstance(v, dict)]
        assert moments
        return whole(state.params)["weight"], moments


def test_bf_2_stochastic_rounding_moves_by_the_update_on_average() -> None:
    """400 steps of 2**-10 on 512 elements: a mean of 400 * 2**-10 within 5 %, as promised."""
    mesh, module = sw.Mesh(fsdp=2), Table()
    plan = sw.plan(module, mesh, sw.zero(3, "fsdp"), sw.precision(rounding="stochastic"))
    with sw.simulate(mesh):
        program = sw.lower(plan, sum_of_table, sw.optim.sgd(2.0**-10)).bind()
        state = program.init(sw.from_module(module), seed=0)
        part = program.shard_batch(torch.ones(4, 1))
        for step in range(400):
            before = whole(state.params)["weight"].float() if step < 3 else None
            state, _ = program.step(state, part)
            if before is not None:
                exact = before - 2.0**-10
                after = whole(state.params)["weight"]
                # The value itself where bfloat16 has it, else one of the two next to it.
                grid = 2.0**-8
                low = (exact / grid).floor() * grid
                assert ((after.float() == low) | (after.float() == low + grid)).all()
                assert len(after.float().unique()) > 1
        moved = 1.0 - whole(state.params)["weight"].float().mean().item()
    assert moved == pytest.approx(400 * 2.0**-10, rel=0.05)


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_bf_2_bits_are_the_same_for_every_mesh_and_level(master: str) -> None:
    first, moments = run_table("one rank", 4, master=master)
    assert first.dtype == torch.bfloat16
    assert len(first.unique()) > 2
    for name in LAYOUTS:
        params, others = run_table(name, 4, master=master)
        assert torch.equal(params, first), name
        for ours, theirs in zip(others, moments, strict=True):
            for path, value in ours.items():
                assert value.dtype == getattr(torch, master)
                assert torch.equal(value, theirs[path]), name
    again, _ = run_table("one rank", 4, master=master, seed=1)
    assert not torch.equal(again, first)


# -- BUF-2 -------------------------------------------------------------------------------------


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.bn = nn.BatchNorm1d(6)
        self.down = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.bn(self.up(x))))


def test_buf_2_running_statistics_stay_in_float32_under_bfloat16() -> None:
    torch.manual_seed(0)
    module = WithStatistics()
    policy = (sw.precision(compute="bfloat16"), sw.precision(where="bn", compute="float32"))
    plan = sw.plan(module, MESH, sw.zero(3, "fsdp"), *policy)
    generator = torch.Generator().manual_seed(1)
    with sw.simulate(MESH):
        program = sw.lower(plan, squares, sw.optim.sgd(0.01)).bind()
        state = program.init(sw.from_module(module))
        for _ in range(20):
            x = torch.randn(8, 4, generator=generator)
            state, metrics = program.step(state, program.shard_batch(x))
        buffers = whole(state.buffers)
    assert metrics.loss.isfinite()
    assert buffers["bn.running_mean"].dtype == buffers["bn.running_var"].dtype == torch.float32
    assert buffers["bn.num_batches_tracked"] == 20
    assert buffers["bn.num_batches_tracked"].dtype == torch.int64
    # 0.9 ** 20 of the first value is left, and what came in was no bfloat16 number.
    mean = buffers["bn.running_mean"]
    assert not torch.equal(mean, mean.bfloat16().float())
