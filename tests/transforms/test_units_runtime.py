"""What modules may do inside a unit and return from it, trained against one process."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from tests.oracles.one_process import Run, assert_same, one_process, sharded

pytestmark = pytest.mark.simulated

WIDTH, VOCAB = 4, 7
PLANS = {
    "zero-1": (sw.Mesh(fsdp=2), [sw.zero(1, "fsdp")]),
    "zero-3": (sw.Mesh(fsdp=2), [sw.zero(3, "fsdp"), sw.prefetch(1)]),
    "hybrid": (sw.Mesh(dp=2, fsdp=2), [sw.zero(3, "fsdp")]),
}
every_plan = pytest.mark.parametrize("kind", PLANS)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    out = model(batch["x"])
    return sw.Mean((out - batch["y"]).square().sum(), out.shape[0])


def batches(steps: int = 2, rows: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [{"x": normal(rows, 3, WIDTH), "y": normal(rows, 3, WIDTH)} for _ in range(steps)]


def check(
    make: Callable[[], nn.Module],
    kind: str,
    *more: sw.Transform,
    loss: Any = loss_fn,
    data: Any = None,
    units: Any = None,
) -> Run:
    """Train sharded and in one process, and compare everything.

    By momentum: Adam would turn the rounding noise of an attention's key bias, whose gradient is
    zero, into full steps.
    """
    torch.manual_seed(1)
    module = make().double()
    mesh, transforms = PLANS[kind]
    data = data or batches()
    plan = sw.plan(module, mesh, *transforms, *more, units=units)
    frozen = {info.path for info in plan.infos} - plan.opt.keys()
    plain = copy.deepcopy(module)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name not in frozen)
    want = one_process(
        plain, loss, data, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), parts=mesh.size
    )
    got = sharded(module, plan, loss, data, sw.optim.sgd(0.1, momentum=0.9))
    assert_same(got, want)
    return got


class Lines(nn.Module):
    """Units of one kind, each called by `call(unit, x)`."""

    def __init__(self, unit: Callable[[], nn.Module], call: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(unit() for _ in range(2))
        self.call = call or (lambda unit, x: unit(x))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.call(layer, x)
        return x


# -- modules of torch ---------------------------------------------------------------------------


TORCH_MODULES = {
    # An LSTM keeps views of its weights beside them and rebinds them.
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda unit, x: unit(x)[0]),
    "gru": (lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), lambda unit, x: unit(x)[0]),
    "attention": (
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        lambda unit, x: unit(x, x, x)[0],
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
        lambda unit, x: unit(x),
    ),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda unit, x: unit(x, x)),
    "conv": (lambda: nn.Conv1d(3, 3, 3, padding=1), lambda unit, x: unit(x)),
    "prelu": (lambda: nn.PReLU(), lambda unit, x: unit(x)),
}


@every_plan
@pytest.mark.parametrize("name", TORCH_MODULES)
def test_modules_of_torch_as_units(name, kind):
    make, call = TORCH_MODULES[name]
    check(lambda: Lines(make, call), kind)


# -- what a unit returns -------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Record:
    first: Tensor
    second: Any = None


@dataclass(frozen=True)
class Sealed:
    first: Tensor
    second: Any = None


class Items(dict):
    """A dict of a type of its own."""


@dataclass
class Output(collections.OrderedDict):
    """As transformers' outputs: a dict and a dataclass that show the same values."""

    a: Tensor | None = None
    b: Any = None
    missing: Any = None

    def __post_init__(self) -> None:
        self.update({key: value for key, value in vars(self).items() if value is not None})


class Returns(nn.Module):
    def __init__(self, build: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.build = build

    def forward(self, x: Tensor) -> Any:
        return self.build(torch.tanh(self.one(x)), torch.tanh(self.two(x)))


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda a, b: (a, None, b), lambda out: out[0] * out[2]),
    "list": (lambda a, b: [a, "text", b], lambda out: out[0] * out[2]),
    "dict": (lambda a, b: {"b": b, "a": a}, lambda out: out["a"] * out["b"]),
    "nested": (lambda a, b: {"a": (a, [b])}, lambda out: out["a"][0] * out["a"][1][0]),
    "named tuple": (Pair, lambda out: out.first * out.second),
    "dataclass": (Record, lambda out: out.first * out.second),
    "frozen dataclass": (Sealed, lambda out: out.first * out.second),
    "nested dataclass": (
        lambda a, b: Record(a, {"deep": Sealed(b)}),
        lambda out: out.first * out.second["deep"].first,
    ),
    "ordered dict": (
        lambda a, b: collections.OrderedDict(a=a, b=b),
        lambda out: out["a"] * out["b"],
    ),
    "subclass of dict": (lambda a, b: Items(a=a, b=[b]), lambda out: out["a"] * out["b"][0]),
    "model output": (
        lambda a, b: Output(a=a, b=(b,)),
        lambda out: out.a * out["b"][0] + out["a"] * out.b[0],
    ),
    "the same twice": (lambda a, b: (a, a, b), lambda out: out[0] * out[1] * out[2]),
    "a view": (
        lambda a, b: (a, a[..., :2], b),
        lambda out: out[0].square() + out[2] * out[1].sum(),
    ),
}


@pytest.mark.parametrize("kind", ["zero-1", "zero-3"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_what_a_unit_returns(name, kind):
    build, read = CONTAINERS[name]
    types = []

    def call(unit: nn.Module, x: Tensor) -> Tensor:
        out = unit(x)
        types.append(type(out))
        return read(out)

    check(lambda: Lines(lambda: Returns(build), call), kind)
    assert set(types) == {type(build(torch.ones(1, 2), torch.ones(1, 2)))}


def test_a_unit_that_returns_a_weight_or_a_view_of_one():
    """What shares memory with the weights is copied on its way out."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight[0] if x.ndim == 3 else self.weight

    check(lambda: Lines(Gives, lambda unit, x: x * unit(x) @ unit(x[0])), "zero-3")


def test_a_unit_that_changes_its_output_in_place():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x).mul_(2)

    check(lambda: Lines(InPlace, lambda unit, x: unit(x).add_(1.0)), "zero-3")


# -- parameters that are read from outside their module ------------------------------------------


class TiedReads(nn.Module):
    """The head reads the embedding's weight directly."""

    def __init__(self, *, early: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mix = nn.Linear(VOCAB, WIDTH)
        self.early = early

    def forward(self, x: Tensor) -> Tensor:
        if self.early:  # before anybody has entered the embedding
            x = x + self.embed.weight.mean(0)
        x = x + self.embed((x.detach().abs().sum(-1) * 10).long() % VOCAB)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.mix(F.linear(x, self.embed.weight))


@every_plan
@pytest.mark.parametrize("early", [False, True])
def test_direct_reads_of_a_weight_of_the_root(early, kind):
    check(lambda: TiedReads(early=early), kind)


def test_other_ways_to_read_a_weight_of_the_root():
    def loss(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
        mean = loss_fn(model, batch)
        weights = [p for n, p in model.named_parameters() if n in ("embed.weight", "mix.weight")]
        penalty = (
            sum(w.square().sum() for w in weights)
            + model.embed.weight.norm()
            + len(model.embed.weight)
        )
        return sw.Mean(mean.total + 0.01 * penalty * mean.count, mean.count)

    check(TiedReads, "zero-3", loss=loss)


def test_a_unit_whose_weight_is_read_by_a_unit_inside_it():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return torch.tanh(F.linear(self.lin(x), weight))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.inner(x, self.own.weight))

    check(lambda: Lines(Outer), "zero-3", units=["layers.*", "layers.*.inner"])


def test_tensors_that_leave_by_a_side_door_and_need_no_empty_weight():
    """Autograd runs what was created last first, so most escapes are reached in time and exact."""

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.aux = torch.tanh(self.lin(torch.tanh(self.lin(x)))).square().sum()
            return self.lin(x)

    def loss(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
        mean = loss_fn(model, batch)
        return sw.Mean(mean.total + sum(layer.aux for layer in model.layers), mean.count)

    check(lambda: Lines(Leaky), "zero-3", loss=loss)


# -- frozen parameters ---------------------------------------------------------------------------


@every_plan
@pytest.mark.parametrize("where", ["layers.0", "layers.*", "weight", "~weight", "embed"])
def test_frozen_parameters_keep_their_values(where, kind):
    torch.manual_seed(1)
    before = {n: p.clone() for n, p in TiedReads().double().named_parameters()}
    got = check(TiedReads, kind, sw.freeze(where))
    frozen = before.keys() - got.moments["mu"].keys()
    assert frozen
    assert all(torch.equal(got.params[path], before[path]) for path in frozen)


def test_requires_grad_of_the_module_is_respected():
    def make() -> nn.Module:
        module = TiedReads()
        module.layers[0].requires_grad_(False)
        module.embed.weight.requires_grad_(False)
        return module

    got = check(make, "zero-3")
    assert "embed.weight" not in got.moments["mu"]
    assert "layers.0.bias" not in got.moments["mu"]


# -- hooks ---------------------------------------------------------------------------------------


@every_plan
def test_hooks_of_the_user_run_on_what_enters_and_leaves(kind):
    def make() -> nn.Module:
        module = Lines(lambda: nn.Linear(WIDTH, WIDTH))
        module.layers[0].register_forward_pre_hook(lambda m, args: (2 * args[0],))
        module.layers[0].register_forward_hook(lambda m, args, out: torch.tanh(out))
        module.layers[1].register_forward_hook(lambda m, args, out: out * m.weight.shape[0])
        module.register_forward_hook(lambda m, args, out: out + 1)
        return module

    check(make, kind)


def test_hooks_on_gradients_of_a_module():
    seen = []

    def make() -> nn.Module:
        module = Lines(lambda: nn.Linear(WIDTH, WIDTH))
        module.layers[1].register_full_backward_hook(
            lambda m, gin, gout: seen.append(gout[0].norm())
        )
        return module

    check(make, "zero-3")
    plain, engine = seen[: 2 * 2], seen[2 * 2 :]  # 2 steps, 2 parts; then grads and step each
    assert len(engine) == 2 * len(plain)
    rows = 8  # inside a pass gradients are those of the sum
    assert {round(x.item() * rows, 7) for x in plain} == {round(x.item(), 7) for x in engine}
