"""Every example runs alone and on two ranks, to the same figures; ports agree with their origin.

Ranks compute in float64, so that "the same" is to rounding, also behind Adam and a sampled policy.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import shardwise as sw
from examples import from_deepspeed, from_fsdp2, levels, own_optimizer, own_transform, two_homes

FOLDER = Path(__file__).parents[2] / "examples"
TESTED_ELSEWHERE = {"gpt", "quickstart", "resume"}
NAMES = (
    "adapters",
    "from_deepspeed",
    "from_fsdp2",
    "hf_tensor",
    "hf_zero3",
    "levels",
    "own_optimizer",
    "own_transform",
    "rl_loop",
    "two_homes",
)
HUGGING_FACE = ("hf_tensor", "hf_zero3")
MAX_LINES = 59

CUT_LAYERS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
Figures = dict[str, list[float]]


def run_all() -> Figures:
    """Every example on this rank, in one job."""
    torch.set_default_dtype(torch.float64)
    figures = {name: importlib.import_module(f"examples.{name}").main() for name in NAMES}
    figures["update only"] = own_optimizer.main(in_place=False)
    return figures


def run_fsdp2() -> list[float]:
    torch.set_default_dtype(torch.float64)
    return from_fsdp2.fsdp2_main()


@pytest.fixture(scope="module")
def alone() -> Figures:
    pytest.importorskip("transformers")
    return sw.spawn(run_all, ranks=1, timeout=100)[0]


@pytest.fixture(scope="module")
def both() -> list[Figures]:
    pytest.importorskip("transformers")
    return sw.spawn(run_all, ranks=2, timeout=100)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def close(figures: list[float]) -> Any:
    return pytest.approx(figures, rel=1e-9)


@pytest.mark.abstract
def test_every_example_is_tested_and_short() -> None:
    sizes = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert sizes.keys() == {*NAMES, *TESTED_ELSEWHERE}
    assert not [name for name, lines in sizes.items() if lines > MAX_LINES]


@pytest.mark.gloo
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HUGGING_FACE])
def test_one_rank_and_two_give_the_same_figures(
    name: str, alone: Figures, both: list[Figures]
) -> None:
    assert both[0][name] == both[1][name]
    assert both[0][name] == close(alone[name])


@pytest.mark.gloo
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_gives_the_same_figures(
    name: str, alone: Figures, both: list[Figures]
) -> None:
    """Its norms compute in float32 whatever the dtype of the model."""
    assert both[0][name] == both[1][name]
    assert both[0][name] == pytest.approx(alone[name], rel=1e-5)


@pytest.mark.simulated
def test_a_llama_on_two_by_two_ranks(alone: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with default_dtype(torch.float64), sw.simulate(sw.Mesh(fsdp=2, tp=2)):
        figures = importlib.import_module("examples.hf_tensor").main()
    assert figures == pytest.approx(alone["hf_tensor"], rel=1e-5)


@pytest.mark.gloo
@pytest.mark.parametrize("name", NAMES)
def test_training_gets_somewhere(name: str, alone: Figures) -> None:
    figures = alone[name]
    assert all(math.isfinite(figure) for figure in figures)
    if name == "rl_loop":
        assert sum(figures[-5:]) > 2 * sum(figures[:5])
    elif name == "adapters":
        assert figures[3] < figures[2] < figures[0]  # the base joins
        assert figures[6] < figures[5]  # merged: the same function, one step later
    else:
        assert figures[-1] < 0.97 * figures[0]


@pytest.mark.gloo
def test_the_port_from_fsdp2_agrees_with_fsdp2(both: list[Figures]) -> None:
    first, second = sw.spawn(run_fsdp2, ranks=2, timeout=60)
    # Each rank reports its own rows. FSDP2 clips by c / (norm + 1e-6).
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert both[0]["from_fsdp2"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.gloo
def test_an_optimizer_with_update_only_takes_the_same_steps(both: list[Figures]) -> None:
    assert both[0]["update only"] == close(both[0]["own_optimizer"])


@pytest.mark.gloo
def test_the_port_from_deepspeed_does_what_its_config_says(both: list[Figures]) -> None:
    """Beside torch's AdamW under the same clipping and schedule, on the whole batch."""
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        batch = (torch.eye(16), torch.arange(16) % 8)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    ramp = LambdaLR(adamw, lambda t: t / 2 if t < 2 else (1 + math.cos(math.pi * (t - 2) / 7)) / 2)
    losses = plain_losses(model, lambda: from_deepspeed.loss_fn(model, batch), adamw, ramp)
    assert both[0]["from_deepspeed"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.gloo
def test_hugging_face_trains_as_it_does_by_itself(both: list[Figures]) -> None:
    hf_zero3 = importlib.import_module("examples.hf_zero3")
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = hf_zero3.LlamaForCausalLM(hf_zero3.CONFIG)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    batch = hf_zero3.make_batch(8, 16, seed=0)
    losses = plain_losses(model, lambda: model(**batch).loss, adamw)
    assert both[0]["hf_zero3"] == pytest.approx(losses, rel=1e-5)


def plain_losses(
    model: nn.Module, loss_of: Callable[[], Tensor], optimizer: Any, *schedulers: Any
) -> list[float]:
    """Four steps of plain torch on the whole batch."""
    losses = []
    for _ in range(4):
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# -- what the plans of the examples say ---------------------------------------------------------


@pytest.mark.abstract
def test_levels_differ_by_pattern() -> None:
    plan = levels.make_plan(sw.Mesh(fsdp=4))
    homes = ("params", "grads", "opt")

    def cut(path: str) -> list[str]:
        return [home for home in homes if getattr(plan, home)[path].mesh_axes]

    assert cut("norm.weight") == cut("layers.1.norm1.bias") == []
    assert cut("layers.1.up.weight") == cut("layers.2.attention.qkv.bias") == list(homes)
    assert cut("embed.weight") == cut("head.weight") == ["grads", "opt"]
    assert plan.keep == {"layers.2"}


@pytest.mark.abstract
def test_a_llama_is_cut_by_the_names_of_its_family() -> None:
    hf_tensor = importlib.import_module("examples.hf_tensor")
    with torch.device("meta"):
        model = hf_tensor.LlamaForCausalLM(hf_tensor.CONFIG)
    plan = hf_tensor.make_plan(model, sw.Mesh(fsdp=2, tp=4))
    assert not plan.tensor.guessed
    cuts = {name: str(plan.compute[f"model.layers.1.{name}.weight"]) for name in CUT_LAYERS}
    assert cuts == {
        "self_attn.q_proj": "(heads/(tp0 tp1) hd) embed",
        "self_attn.k_proj": "(kv/tp0 hd) embed",
        "self_attn.o_proj": "embed (heads/(tp0 tp1) hd)",
        "mlp.up_proj": "mlp/(tp0 tp1) embed",
        "mlp.down_proj": "embed mlp/(tp0 tp1)",
    }


@pytest.mark.abstract
def test_two_homes_gather_inside_a_node_only() -> None:
    plan = two_homes.make_plan(two_homes.Model(), sw.Mesh(node=2, local=4))
    lowered = sw.lower(plan, two_homes.loss_fn, sw.optim.adamw(1e-2))
    gathers = {
        (item.reason, item.axis)
        for item in lowered.collectives()
        if item.kind == "all_gather" and item.reason in ("forward", "backward")
    }
    assert gathers == {("forward", "local"), ("backward", "local")}
    assert plan.params["head.weight"].mesh_axes == ("local",)
    assert set(plan.opt["head.weight"].mesh_axes) == {"node", "local"}


@pytest.mark.simulated
@pytest.mark.parametrize("name", [n for n in NAMES if n not in (*HUGGING_FACE, "two_homes")])
def test_three_simulated_ranks_give_the_same_figures(
    name: str, alone: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows do not divide by three, nor do most dimensions."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with default_dtype(torch.float64), sw.simulate(sw.Mesh(fsdp=3)):
        assert importlib.import_module(f"examples.{name}").main() == close(alone[name])


@pytest.mark.simulated
def test_two_homes_on_two_nodes(alone: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with default_dtype(torch.float64), sw.simulate(sw.Mesh(node=2, local=2)):
        assert two_homes.main() == close(alone["two_homes"])


@pytest.mark.abstract
def test_the_own_transform_is_like_any_other() -> None:
    transform = own_transform.shard_large("fsdp", above=64)
    mesh = sw.Mesh(fsdp=4)
    plan = sw.plan(own_transform.Model(), mesh, transform, sw.prefetch(1))
    assert plan.params["layers.0.weight"].mesh_axes == ("fsdp",)
    assert plan.params["layers.0.bias"].mesh_axes == ()
    assert plan.opt["layers.0.bias"].mesh_axes == ("fsdp",)
    assert plan == sw.plan(own_transform.Model(), mesh, sw.prefetch(1), transform)
    assert sw.Plan.from_json(plan.to_json()) == plan
    assert "shard_large('fsdp', above=64): zero(3" in plan.why("layers.0.weight")
    none_large = sw.plan(own_transform.Model(), mesh, own_transform.shard_large("fsdp", above=999))
    assert none_large.same_layout(sw.plan(own_transform.Model(), mesh, sw.zero(1, "fsdp")))
