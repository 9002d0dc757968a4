"""TEN-5: patterns and rules of a tensor-parallel plan that match nothing, too much, or twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import PatternError, PlanError

WIDTH, HIDDEN, VOCAB = 8, 16, 12
RIGHT = {
    "up.weight": "mlp embed",
    "up.bias": "mlp",
    "down.weight": "embed mlp",
    "head.weight": "vocab embed",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.act, self.down = nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Unknown(nn.Module):
    """Layers with names that tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return sw.cross_entropy(model(tokens), tokens, reduction="mean")


def make_plan(*transforms: sw.Transform, model: nn.Module | None = None, **options: Any) -> sw.Plan:
    axes = options.pop("axes", RIGHT)
    chosen = transforms or (sw.tensor_parallel("tp"),)
    return sw.plan(model or Model(), sw.Mesh(tp=2), *chosen, axes=axes, **options)


def lower(plan: sw.Plan) -> sw.Lowered:
    return sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=sw.like((2, 4), torch.int64))


# -- rules that match act, and it is told how --------------------------------------------------


@pytest.mark.abstract
def test_ten_5_what_was_cut_how_is_reported() -> None:
    text = str(make_plan())
    assert "tp cuts layers: vocab in 2, mlp in 2" in text
    assert "whole on every rank: no names known (6 parameters, 48 elements)" in text
    for path, compute in (
        ("embed.weight", "vocab/tp embed"),
        ("layers.{0..1}.up.bias", "mlp/tp"),
        ("layers.{0..1}.down.weight", "embed mlp/tp"),
    ):
        line = next(line for line in text.splitlines() if line.startswith(f"{path} "))
        assert compute in line


@pytest.mark.simulated
@pytest.mark.parametrize("head", [RIGHT, {k: v for k, v in RIGHT.items() if k != "head.weight"}])
def test_ten_5_rules_that_match_act(head: dict[str, str]) -> None:
    """Also a rule for the head of a tied model, which is one for its embedding."""
    model = Model().double()
    batch = torch.arange(8).view(2, 4)
    weights = []
    for size in (1, 2):
        mesh = sw.Mesh(tp=size)
        plan = sw.plan(model, mesh, sw.tensor_parallel("tp"), axes=head)
        with sw.simulate(mesh):
            program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=batch).bind()
            state = program.init(sw.from_module(model))
            state, _ = program.step(state, program.shard_batch(batch))
            weights.append(sw.to_global(state.params))
        blocks = plan.tensor.frames["embed.weight"].block if size > 1 else (VOCAB, WIDTH)
        assert blocks == (VOCAB // size, WIDTH)
    for path, weight in weights[0].items():
        torch.testing.assert_close(weights[1][path], weight, rtol=0, atol=1e-12)


# -- patterns --------------------------------------------------------------------------------


@pytest.mark.abstract
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("upp.weight", ("no segment is 'upp'", "did you mean 'up'?")),
        ("layers.2.up.weight", ("'layers.2.up.weight' matches none of 14 paths",)),
        ("up.wieght", ("no segment is 'wieght'", "did you mean 'weight'?")),
    ],
)
def test_ten_5_a_pattern_that_matches_nothing(pattern: str, words: tuple[str, ...]) -> None:
    with pytest.raises(PatternError) as caught:
        make_plan(axes={**RIGHT, pattern: "mlp embed"})
    for word in words:
        assert word in str(caught.value)
    assert caught.value.numbers == {"pattern": pattern, "num_paths": 14}


@pytest.mark.abstract
def test_ten_5_a_selection_that_matches_nothing() -> None:
    with pytest.raises(PatternError) as caught:
        make_plan(sw.tensor_parallel("tp", "layer.*"))
    for word in ("tensor_parallel('tp', where='layer.*')", "did you mean 'layers'?"):
        assert word in str(caught.value)


@pytest.mark.abstract
def test_ten_5_a_pattern_for_a_module_without_parameters() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(axes={**RIGHT, "act": "mlp"})
    for word in ("'act'", "module 'layers.0.act', which has no parameters", "14 parameters"):
        assert word in str(caught.value)


@pytest.mark.abstract
def test_ten_5_a_rule_for_a_layer_that_is_not_linear() -> None:
    """A norm reads all of its channels, so its weight cannot be cut."""
    with pytest.raises(PlanError) as caught:
        lower(make_plan(axes={**RIGHT, "norm.weight": "mlp", "norm.bias": "mlp"}))
    for word in ("module layers.0.norm", "axis 'tp'", "(2, 4, 8)", "weight: sharded on dim 0"):
        assert word in str(caught.value)


# -- rules -----------------------------------------------------------------------------------


@pytest.mark.abstract
@pytest.mark.parametrize(
    ("axes", "first", "second"),
    [
        ({**RIGHT, "layers.0.up.weight": "embed mlp"}, "up.weight", "layers.0.up.weight"),
        ({**RIGHT, "embed.weight": "embed vocab"}, "head.weight", "embed.weight"),
    ],
    ids=["one layer", "tied"],
)
def test_ten_5_two_rules_for_one_parameter(axes: dict[str, str], first: str, second: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(axes=axes)
    for word in (
        f"two rules for 1 parameters: {first!r} and {second!r}",
        f"{first!r}: '{axes[first]}' comes first; {second!r}: '{axes[second]}' names no parameter",
        f"Fix: leave one of them out, or put {second!r} before {first!r}",
    ):
        assert word in str(caught.value)


@pytest.mark.abstract
def test_ten_5_two_rules_that_say_the_same_of_a_tied_weight() -> None:
    both = {**RIGHT, "embed.weight": "vocab embed"}
    assert make_plan(axes=both).same_layout(make_plan())


@pytest.mark.abstract
def test_ten_5_a_misspelt_name_of_a_dimension() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(axes={**RIGHT, "up.weight": "mpl embed"})
    for word in ("no rule for the name 'mpl' of 2 of 13 parameters", "did you mean 'mlp'?"):
        assert word in str(caught.value)
    assert caught.value.numbers["name"] == "mpl"


@pytest.mark.abstract
def test_ten_5_a_name_to_cut_that_no_parameter_has() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(sw.tensor_parallel("tp", names=["mlp", "vocb"]))
    for word in ("lists the name 'vocb', which no parameter has", "did you mean 'vocab'?"):
        assert word in str(caught.value)
    assert caught.value.numbers == {"name": "vocb", "num_params": 13}


@pytest.mark.abstract
def test_ten_5_a_model_of_which_nothing_is_known_does_not_run_whole_unnoticed() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(model=Unknown(), axes={})
    for word in (
        "tensor_parallel('tp') cuts none of 4 parameters",
        "4 have no named axes; the others have: none.",
        "names to cut over 'tp': vocab, heads, kv, mlp",
        "Fix: axes={'up.weight': 'mlp embed', 'down.weight': 'embed mlp', ...} in sw.plan",
    ):
        assert word in str(caught.value)
    assert caught.value.numbers == {"num_params": 4, "unnamed": 4}


@pytest.mark.abstract
def test_ten_5_rules_that_cut_over_another_axis() -> None:
    rules = sw.Rules(mlp="pt", vocab=None, embed=None)
    with pytest.raises(PlanError) as caught:
        make_plan(rules=rules)
    for word in (
        "cuts none of 13 parameters",
        "names to cut over 'tp': none: the rules cut over pt.",
        "Fix: rules=sw.Rules(..., mlp='tp'), or names=[...]",
    ):
        assert word in str(caught.value)


@pytest.mark.abstract
def test_ten_5_an_edit_of_several_that_cuts_nothing() -> None:
    layers, norms = sw.tensor_parallel("tp", "layers.0"), sw.tensor_parallel("tp", "*norm*")
    with pytest.raises(
        PlanError, match=r"tensor_parallel\('tp', where='\*norm\*'\) cuts none of 4"
    ):
        make_plan(layers, norms)
