"""TEN-6: low-rank pairs on a column layer and on a row layer, whose base is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardwise as sw
from tests.oracles.one_process import assert_same, one_process, sharded

pytestmark = pytest.mark.simulated

RANK = 2


class Lora(nn.Module):
    """A layer with a pair beside it, named as peft names them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, outputs, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.lora_A["default"], self.lora_B["default"]
        return self.base_layer(x) + 0.5 * up(down(x))


class Block(nn.Module):
    """Column, then row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = Lora(6, 8), Lora(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between layers that are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


AXES = {
    "up.base_layer.weight": "mlp embed",
    "up.base_layer.bias": "mlp",
    "down.base_layer.weight": "embed mlp",
    "down.base_layer.bias": "embed",
}


def build() -> nn.Module:
    """All values are random: a pair with zeros would give no gradient to its other half."""
    torch.manual_seed(0)
    return Net().double()


def plan_of(model: nn.Module, sizes: dict[str, int], *more: Any) -> sw.Plan:
    """Only the pairs train."""
    data = [sw.zero(3, "fsdp")] if "fsdp" in sizes else []
    frozen = [path for path, _ in model.named_parameters() if "lora_" not in path]
    moves = [sw.tensor_parallel("tp"), *data, *more, *(sw.freeze(f"^{path}") for path in frozen)]
    return sw.plan(model, sw.Mesh(**sizes), *moves, axes=AXES)


def loss_fn(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    error = (model(batch["x"]) - batch["y"]).square()
    return sw.Mean(error.sum(), error.numel())


def batches(steps: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = {"generator": generator, "dtype": torch.float64}
    return [{name: torch.randn(4, 5, 3, **made) for name in ("x", "y")} for _ in range(steps)]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


SGD = sw.optim.sgd(0.1, momentum=0.9)
PAIR = "layers.0.{}.lora_{}.default.weight"


def frozen_base(model: nn.Module) -> nn.Module:
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in path)
    return model


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 4}, {"fsdp": 2, "tp": 2}], ids=str)
def test_ten_6_output_and_gradients_are_those_of_one_process(
    sizes: dict[str, int], sequence: bool
) -> None:
    model = build()
    more = [sw.sequence_parallel("tp")] * sequence
    plan = plan_of(model, sizes, *more)
    want = one_process(frozen_base(build()), loss_fn, batches(), momentum)
    assert len(want.grads[0]) == 8
    assert_same(sharded(model, plan, loss_fn, batches(), SGD), want)


def test_ten_6_which_half_is_cut() -> None:
    """B of a column layer and A of a row layer; the others are whole on every rank."""
    plan = plan_of(build(), {"tp": 2})
    blocks = {
        (layer, half): plan.tensor.frames.get(PAIR.format(layer, half))
        for layer in ("up", "down")
        for half in "AB"
    }
    shapes = {at: None if frame is None else frame.block for at, frame in blocks.items()}
    assert shapes == {
        ("up", "A"): None,
        ("up", "B"): (4, RANK),
        ("down", "A"): (RANK, 4),
        ("down", "B"): None,
    }


def test_ten_6_adapters_come_and_go_whole(tmp_path: Path) -> None:
    """Adapter weights of a full checkpoint are loaded, and exported with their global shapes."""
    model, other = build(), build()
    values = {
        path: torch.randn_like(value) for path, value in other.named_parameters() if "lora_" in path
    }
    other.load_state_dict(values, strict=False)
    folder = tmp_path / "before"
    folder.mkdir()
    whole = {name: value.contiguous() for name, value in other.state_dict().items()}
    save_file(whole, folder / "model.safetensors")
    plan = plan_of(model, {"fsdp": 2, "tp": 2})
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_fn, SGD).bind()
        state = program.init(sw.from_safetensors(folder))
        state, _ = program.step(state, program.shard_batch(batches()[0]))
        sw.export_safetensors(state, tmp_path / "after", dtype=torch.float64, trained=True)
    want = one_process(frozen_base(other), loss_fn, batches(1), momentum)
    saved = load_file(tmp_path / "after" / "model.safetensors")
    assert sorted(saved) == sorted(values)
    for path, value in saved.items():
        torch.testing.assert_close(value, want.params[path], rtol=1e-9, atol=1e-11)
