"""What remat saves and costs is what was predicted: flops, bytes held, and bytes at the peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.testing import measure
from shardwise.testing.echo import bind_alone
from tests.transforms.rematted import Block, Net, mean_square, rows

pytestmark = pytest.mark.abstract

MIB = 2**20
WIDTH = 32
REMATS: dict[str, list[sw.Transform]] = {
    "none": [],
    "everything": [sw.remat("layers.*")],
    "dots": [sw.remat("layers.*", "dots")],
    "save": [sw.remat("layers.*", sw.save("attn_out", "hidden"))],
    "body": [sw.remat("body")],
    "root": [sw.remat("")],
    "nested": [sw.remat(["", "body", "layers.*", "up"])],
    "nested dots": [sw.remat(["", "body", "layers.*"], "dots")],
    "mixed": [
        sw.remat("body"),
        sw.remat("layers.*", "dots"),
        sw.remat("layers.1", "nothing"),
        sw.remat("down", sw.save("x")),
    ],
}


# -- flops ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_flops() -> int:
    return flops_of([])[0]


def flops_of(remats: list[sw.Transform]) -> tuple[int, sw.Lowered]:
    torch.manual_seed(0)
    module, batch = Net().double(), rows()
    plan = sw.plan(module, sw.Mesh(fsdp=1), sw.zero(3, "fsdp"), *remats)
    program = sw.lower(plan, mean_square, sw.optim.sgd(0.1), batch=batch).bind()
    state = program.init(sw.from_module(module))
    with FlopCounterMode(display=False) as counter:
        program.grads(state, batch)
    return counter.get_total_flops(), program.lowered


@pytest.mark.parametrize("name", REMATS)
def test_extra_flops_are_the_predicted_ones(name: str, plain_flops: int) -> None:
    flops, lowered = flops_of(REMATS[name])
    assert lowered.recomputation is not None
    assert flops - plain_flops == lowered.recomputation.flops
    if "dots" in name:
        assert flops == plain_flops
    if name == "everything":  # all of the layers but the last product, which backward needs not
        assert 0.9 < lowered.recomputation.flops / lowered.forward_flops < 1


# -- bytes ----------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Model(nn.Module):
    """Activations are much larger than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def grads_measured(remats: list[sw.Transform]) -> tuple[int, int, sw.Lowered]:
    """Bytes that forward has left when it ends, and the peak of the call."""
    batch = torch.randn(8, 192, WIDTH)
    left: list[int] = []

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        if not left:
            return model(batch).square().mean()
        out, usage = measure(lambda: model(batch))
        left.append(usage.kept)
        return out.square().mean()

    mesh = sw.Mesh(fsdp=2)
    lowered = sw.lower(
        sw.plan(Model(), mesh, sw.zero(3, "fsdp"), *remats), loss_fn, sw.optim.sgd(0.1), batch=batch
    )
    program = bind_alone(lowered)
    state, _ = program.step(program.init(0, None), batch)
    _, usage = measure(lambda: program.grads(state, batch))
    left.append(0)
    program.grads(state, batch)
    return left[-1], usage.peak, lowered


@pytest.mark.parametrize("name", REMATS)
def test_held_and_peak_bytes_are_the_predicted_ones(name: str) -> None:
    held, peak, lowered = grads_measured(REMATS[name])
    memory = lowered.memory()
    assert memory.activations is not None
    assert memory.recompute is not None
    weights = sum(4 * p.numel() for p in Model().parameters())  # children of the root stay open
    assert abs(held - memory.activations) <= 0.01 * memory.activations + weights
    predicted = memory.activations + memory.recompute
    assert abs(peak - predicted - memory.grads) <= 0.05 * predicted + MIB


def test_the_report_prints_the_trade() -> None:
    lowered = grads_measured(REMATS["everything"])[2]
    memory, cost = lowered.memory(), lowered.recomputation
    plain = grads_measured([])[2].memory().activations
    assert cost is not None
    assert cost.plain_bytes == plain
    assert plain > 10 * memory.activations
    (line,) = [line for line in lowered.text().splitlines() if line.startswith("remat:")]
    assert line.startswith(
        f"remat: activations {plain:,} B -> {memory.activations:,} B, and up to "
        f"{memory.recompute:,} B while recomputing, for {cost.flops:,} flops (+"
    )
    share = round(100 * cost.flops / (3 * lowered.forward_flops))
    assert line.endswith(f"(+{share}% of a step)")
    assert f"activations {memory.activations:,} B and {memory.recompute:,} B" in str(memory)


def test_without_a_batch_the_trade_is_unknown_and_never_zero() -> None:
    plan = sw.plan(Model(), sw.Mesh(fsdp=2), sw.remat("layers.*"))
    lowered = sw.lower(plan, mean_square, sw.optim.sgd(0.1))
    assert lowered.memory().recompute is None
    assert "remat: its bytes and flops are unknown (no batch given" in lowered.text()


def test_the_printed_plan_names_what_is_recomputed() -> None:
    plan = sw.plan(
        Model(),
        sw.Mesh(fsdp=2),
        sw.remat("layers.*", sw.save("attn_out")),
        sw.remat("layers.1.up", "dots"),
    )
    chosen = "body.layers.{0..3} (save attn_out), body.layers.1.up (dots)"
    assert f"remat: {chosen}" in str(plan)
    without = sw.plan(Model(), sw.Mesh(fsdp=2))
    assert without.diff(plan) == (f"remat: none -> {chosen}",)
    assert sw.Plan.from_json(plan.to_json()).remat == plan.remat
    assert "remat('layers.*', save('attn_out'))" in plan.why("body.layers.2.up.weight")
    assert "remat(" not in plan.why("body.head.weight")
