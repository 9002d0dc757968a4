"""What errors about tensor axes say: where, every number, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.sharding.errors import PlanError, ShardwiseError
from tests.transforms.five_parts import check

WIDTH, HIDDEN, VOCAB = 4, 8, 6
AXES = {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Parts that a forward of the test puts together."""

    def __init__(self, forward: Forward | None = None, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, **embedding)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.count = 4
        self.run = forward or (lambda model, x: model.down(torch.relu(model.up(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(self, self.embed(tokens))


def mean_square(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


def make_plan(
    *transforms: sw.Transform,
    model: nn.Module | None = None,
    axes: dict[str, str] | None = None,
    tp: int = 2,
) -> sw.Plan:
    chosen = transforms or (sw.tensor_parallel("tp", "up|down"),)
    named = AXES if axes is None else axes
    return sw.plan(model or Model(), sw.Mesh(tp=tp), *chosen, axes=named)


def lower(forward: Forward | None = None, loss_fn: Any = mean_square, **options: Any) -> sw.Lowered:
    plan = make_plan(sw.tensor_parallel("tp", names=["mlp"]), model=Model(forward), **options)
    return sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=sw.like((2, 3), torch.int64))


# -- misuses ---------------------------------------------------------------------------------


def branch(model: Model, x: Tensor) -> Tensor:
    return model.down(model.up(x if x.sum() > 0 else -x))


def scaled_twice(model: Model, x: Tensor) -> Tensor:
    return model.down(model.up(x) * model.scale) * model.scale


def two_losses(model: Model, tokens: Tensor) -> Tensor:
    """Of 4 hidden units of 8, and of 4 channels of 4."""
    x = model.embed(tokens)
    cut = sw.cross_entropy(model.up(x), tokens)
    whole = model.down(torch.relu(model.up(x)))
    return cut + sw.cross_entropy(whole, tokens % WIDTH)


def cut_embedding(**options: Any) -> None:
    plan = make_plan(
        sw.tensor_parallel("tp", names=["vocab"]),
        model=Model(**options),
        axes={"embed.weight": "vocab embed"},
    )
    sw.lower(plan, mean_square, sw.optim.sgd(0.1), batch=sw.like((2, 3), torch.int64))


class Entry(NamedTuple):
    """A misuse, and what the error must say: words (place, numbers, fix), and numbers by name."""

    misuse: Callable[[], object]
    words: tuple[str, ...]
    numbers: dict[str, Any]
    kind: type[ShardwiseError] = PlanError


ENTRIES = {
    "axis": Entry(
        lambda: sw.tensor_parallel(2),  # pyright: ignore[reportArgumentType]
        (
            "tensor_parallel(2) names no mesh axis",
            "argument axis of tensor_parallel(axis)",
            "Fix: tensor_parallel('tp')",
        ),
        {"axis": 2},
    ),
    "no layers": Entry(
        lambda: make_plan(sw.sequence_parallel("tp")),
        (
            "sequence_parallel('tp') cuts activations over an axis that cuts no layers",
            "Mesh(tp=2); tensor axes: none.",
            "Fix: sw.tensor_parallel('tp') as well",
        ),
        {"axis": "tp"},
    ),
    "logits": Entry(
        lambda: sw.tensor_parallel("tp", logits="gatherd"),
        (
            "tensor_parallel('tp', logits='gatherd') has no possible logits",
            "argument logits of tensor_parallel()",
            "logits is 'gatherd'; allowed: 'auto', 'gathered', 'cut'.",
            "Fix: did you mean 'gathered'?",
        ),
        {"logits": "gatherd"},
    ),
    "branch": Entry(
        lambda: lower(branch),
        (
            "The forward pass cannot be traced",
            "test_tensor_messages.py",
            "x if x.sum() > 0 else -x",
            "Fix: remove the branch on a value, or leave these layers whole with where=",
        ),
        {},
    ),
    "loss": Entry(
        lambda: lower(lambda model, x: model.up(x), lambda m, b: m(b).sum()),
        (
            "The loss is not the same on all ranks of 'tp'.",
            "loss_fn(model, batch)",
            "it is partial",
            "Fix: sw.cross_entropy for logits over a cut vocabulary, or logits='gathered'",
        ),
        {"axis": "tp"},
    ),
    "two uses": Entry(
        lambda: lower(scaled_twice),
        (
            "1 whole parameters are used both inside and outside of what 'tp' cuts.",
            "scale",
            "Fix: use two parameters, or cut this one as well with axes=",
        ),
        {"path": "scale"},
    ),
    "two losses": Entry(
        lambda: lower(loss_fn=two_losses),
        (
            "A dimension of length 4 is cut in one loss and whole in another.",
            "sw.cross_entropy",
            "rows=8",
            "Fix: logits='gathered' in tensor_parallel",
        ),
        {"length": 4},
    ),
    "max_norm": Entry(
        lambda: cut_embedding(max_norm=1.0),
        (
            "The vocabulary of 'embed' cannot be cut: it has max_norm=1.0.",
            "module embed",
            "Fix: make the embedding without max_norm, or leave it out with where=",
        ),
        {"path": "embed"},
    ),
    "sparse": Entry(
        lambda: cut_embedding(sparse=True), ("it has sparse=True.", "module embed"), {}
    ),
    "unlike parts": Entry(
        lambda: make_plan(
            sw.tensor_parallel("tp"),
            axes={"up.weight": "kv embed", "down.weight": "kv mlp"},
            tp=8,
        ),
        (
            "cuts 'kv' of 1 of 6 parameters into other parts than elsewhere",
            "down.weight   shape (4, 8)   axes 'kv mlp'",
            "elsewhere kv is cut into 8 parts.",
            "Fix: make the axis small enough to cut all of them evenly",
        ),
        {"name": "kv", "parts": 8},
    ),
    "open sizes": Entry(
        lambda: make_plan(sw.tensor_parallel("tp"), axes={**AXES, "up.weight": "(heads hd) embed"}),
        (
            "does not know the sizes of 1 of 6 parameters",
            "up.weight   shape (8, 4)   axes '(heads hd) embed'",
            "leave 2 sizes open: heads, hd.",
            "Fix: sw.plan(..., sizes={'hd': ...})",
        ),
        {"shape": (8, 4)},
    ),
    "integer": Entry(
        lambda: sw.plan(
            Model(),
            sw.Mesh(tp=2),
            axes={**AXES, "count": "(2 heads)", "embed.weight": "vocab heads"},
        ),
        (
            "count is 4, but '(2 heads)' is 8.",
            "sizes: heads=4.",
            "Fix: correct the expression, or give sizes=",
        ),
        {"path": "count", "value": 4, "counted": 8},
    ),
    "local": Entry(
        lambda: sw.local(torch.relu, in_specs="a", out_specs="a", random="both"),
        (
            "sw.local(fn, random='both') is no way to draw.",
            "argument random of sw.local",
            "'alike', 'apart'",
            "Fix: random='apart'",
        ),
        {"random": "both"},
    ),
}


@pytest.mark.abstract
@pytest.mark.parametrize("name", ENTRIES)
def test_an_error_says_where_how_much_and_what_to_do(name: str) -> None:
    entry = ENTRIES[name]
    with pytest.raises(entry.kind) as caught:
        entry.misuse()
    check(caught.value, entry.kind, *entry.words, **entry.numbers)


@pytest.mark.abstract
@pytest.mark.parametrize(
    ("entry", "shown"),
    [(("up.weight", 3.5), "'up.weight': 3.5"), ((3, "mlp embed"), "3: 'mlp embed'")],
)
def test_axes_of_a_module_that_name_nothing(entry: tuple[Any, Any], shown: str) -> None:
    model = Model()
    model.axes = dict([entry])  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError) as caught:
        sw.plan(model, sw.Mesh(tp=2))
    fix = "Fix: examples: {'qkv.weight': '(3 heads hd) embed', 'num_heads': 'heads', 'hd': 64}"
    check(caught.value, PlanError, f"the axes of the model, a Model has an entry {shown}.", fix)


@pytest.mark.simulated
def test_a_token_that_the_vocabulary_does_not_have() -> None:
    mesh = sw.Mesh(tp=2)
    model = Model()
    plan = make_plan(sw.tensor_parallel("tp"), model=model, axes={"embed.weight": "vocab embed"})
    good = torch.arange(VOCAB).view(2, 3)
    with sw.simulate(mesh):
        program = sw.lower(plan, mean_square, sw.optim.sgd(0.1), batch=good).bind()
        state = program.init(sw.from_module(model))
        with pytest.raises(ShardwiseError, match="tokens from 1 to 6; the vocabulary has 6 rows"):
            program.step(state, program.shard_batch(good + 1))


@pytest.mark.abstract
def test_the_loss_of_torch_needs_whole_logits() -> None:
    """With `logits='cut'` it is refused; by default they are gathered for it."""

    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    class Head(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens))

    def lowered(logits: str) -> sw.Lowered:
        chosen = sw.tensor_parallel("tp", logits=logits)
        plan = make_plan(chosen, model=Head(), axes={"head.weight": "vocab embed"})
        return sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=sw.like((2, 3), torch.int64))

    kinds = {item.kind for item in lowered("auto").collectives() if item.reason == "activations"}
    assert "all_gather" in kinds
    with pytest.raises(PlanError) as caught:
        lowered("cut")
    check(caught.value, PlanError, "axis 'tp'", "(6, 3) on each rank")
