"""What a plan and a program tell of layers that are cut over a mesh axis, word for word."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

pytestmark = pytest.mark.abstract

VOCAB, WIDTH, HEADS, KV, HD, HIDDEN = 13, 16, 8, 2, 4, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, KV
        self.wq, self.wk = nn.Linear(WIDTH, HEADS * HD), nn.Linear(WIDTH, KV * HD)
        self.wv, self.wo = nn.Linear(WIDTH, KV * HD), nn.Linear(HEADS * HD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(*y.shape[:2], count, HD).transpose(1, 2)

        key, value = (heads(layer(x), self.num_kv_heads) for layer in (self.wk, self.wv))
        query = heads(self.wq(x), self.num_heads)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x)) * self.scale
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return sw.cross_entropy(model(tokens), tokens, reduction="mean")


AXES = {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}


def laid_out(mesh: sw.Mesh, *transforms: sw.Transform, axes: dict[str, str] | None = None) -> str:
    return str(sw.plan(Model(), mesh, *transforms, axes=AXES if axes is None else axes))


def cells(text: str, path: str) -> list[str]:
    """The line of a path, cut where columns are."""
    line = next(line for line in text.splitlines() if line.startswith(f"{path} "))
    return re.split(r" {2,}", line)


def footer(text: str) -> list[str]:
    return text.partition("\n\n")[2].splitlines()


def test_columns_show_what_is_cut_guesses_copies_and_padding() -> None:
    mesh = sw.Mesh(fsdp=2, tp=4)
    text = laid_out(mesh, sw.tensor_parallel("tp"), sw.shard_optimizer("fsdp"))
    _, _, axes, params, _, opt, compute, _ = cells(text, "layers.{0..1}.up.weight")
    assert (axes, compute) == ("mlp embed", "mlp/(tp0 tp1) embed")
    assert (params, opt) == ("mlp/(tp0 tp1) embed", "mlp/(tp0 tp1) embed/fsdp")
    _, _, axes, *_, compute, _ = cells(text, "layers.{0..1}.attention.wk.weight")
    assert (axes, compute) == ("(kv hd) embed (guess)", "(kv/tp0 hd) embed")
    _, _, axes, *_, compute, nbytes = cells(text, "embed.weight")
    # 13 rows in 4 blocks of 4 rows.
    assert (axes, compute) == ("vocab embed (guess)", "vocab/(tp0 tp1) embed pad 3")
    assert nbytes == f"{4 * WIDTH * 4} B"
    assert cells(text, "layers.{0..1}.norm.weight")[-2] == "whole"


def test_below_the_table_stands_what_is_cut_and_what_is_not() -> None:
    text = laid_out(sw.Mesh(fsdp=2, tp=4), sw.tensor_parallel("tp"), sw.zero(3, "fsdp"))
    assert footer(text) == [
        "Mesh(fsdp=2, tp0=2, tp1=2)   30 parameters, 4,784 elements   2 units",
        "batch over fsdp   prefetch 0",
        "tp cuts layers: vocab in 4, heads in 4, kv in 2 (copies over tp1), mlp in 4   logits auto"
        "   sequences whole between layers",
        "whole on every rank: no names known (8 parameters, 128 elements)",
        "integers on every rank: layers.{0..1}.attention.num_heads = 2, "
        "layers.{0..1}.attention.num_kv_heads = 1",
        "guessed axes: 16 parameters; axes= confirms or corrects them",
        footer(text)[-1],
    ]


def test_settings_of_tensor_axes_are_told() -> None:
    chosen = sw.tensor_parallel("tp", "layers.*", names=["mlp"], logits="gathered")
    text = laid_out(sw.Mesh(tp=2), chosen, sw.sequence_parallel("tp"))
    lines = footer(text)
    assert lines[2].endswith("mlp in 2   logits gathered   sequences cut between layers")
    kept = lines[3]
    assert kept.startswith("whole on every rank: left out by where= (2 parameters, 416 elements)")
    assert "no names known (22 parameters, 2,784 elements)" in kept
    assert "guess" not in text
    assert not any(line.startswith("integers") for line in lines)


def test_names_that_stay_whole_are_the_reason() -> None:
    axes = {**AXES, "norm.weight": "norm", "norm.bias": "norm"}
    kept = footer(laid_out(sw.Mesh(tp=2), sw.tensor_parallel("tp"), axes=axes))[3]
    assert "'norm' (4 parameters, 64 elements)" in kept


def test_an_axis_of_one_rank_cuts_nothing() -> None:
    text = laid_out(sw.Mesh(fsdp=2, tp=1), sw.tensor_parallel("tp"))
    assert not any(line.startswith(("tp cuts", "whole on")) for line in footer(text))
    assert "/tp" not in text.partition("\n\n")[0].replace("tp1", "")


def test_a_name_is_found_in_one_place_or_another() -> None:
    plan = sw.plan(Model(), sw.Mesh(tp=2), sw.tensor_parallel("tp"), axes=AXES)
    assert "axes 'mlp embed' (from: user)" in plan.why("layers.0.up.weight")
    assert "axes 'vocab embed' (from: guess)" in plan.why("embed.weight")
    assert "(from:" not in plan.why("layers.0.norm.weight")


def test_neither_reasons_nor_guesses_make_another_plan() -> None:
    guessed = sw.plan(Model(), sw.Mesh(tp=2), sw.tensor_parallel("tp"), axes=AXES)
    axes = {path: str(guessed.info(path).axes) for path in guessed.tensor.guessed}
    said = sw.plan(Model(), sw.Mesh(tp=2), sw.tensor_parallel("tp"), axes={**AXES, **axes})
    assert said.same_layout(guessed)
    assert not said.tensor.guessed


# -- lowered.text() ---------------------------------------------------------------------------


def lower(steps: int, *, batch: Tensor | None) -> sw.Lowered:
    plan = sw.plan(
        Model(), sw.Mesh(fsdp=2, tp=2), sw.tensor_parallel("tp"), sw.accumulate(steps), axes=AXES
    )
    return sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=batch)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_report_tells_what_activations_move(steps: int) -> None:
    rows, length, size = 4, 6, 4
    lowered = lower(steps, batch=sw.like((rows, length), torch.int64))
    tokens = rows // steps * length
    # Forward: embedding, attention and MLP of each layer. Backward: both again, and the head.
    moved = 10 * 2 * tokens * WIDTH * size // 2
    numbers = 3 * tokens * size
    text = lowered.text()
    assert (
        f"activations of one micro-batch: all_reduce tp x10 {moved:,} B, "
        f"all_gather tp x1 {numbers:,} B"
    ) in text
    line = next(one for one in text.splitlines() if one.startswith("  activations  all_reduce"))
    assert line.split()[2:] == ["tp", f"x{10 * steps}", f"{steps * moved:,}", "B"]


def test_without_a_batch_the_report_says_that_it_does_not_know() -> None:
    text = lower(1, batch=None).text()
    assert "activations of one micro-batch" not in text
    assert (
        "note: what activations move over tp is not known until the first step (no batch given)"
    ) in text.splitlines()
