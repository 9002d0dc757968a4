"""`sw.linear_cross_entropy` against the product and `sw.cross_entropy`; its largest tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.sharding.compat import FakeTensorMode, assert_on_device
from shardwise.sharding.errors import LossError
from shardwise.transforms import tiled_loss
from shardwise.transforms.tensor_context import in_tensor_context
from tests.transforms.cut_classes import Context, joined, on_ranks
from tests.transforms.five_parts import check
from tests.transforms.test_cross_entropy import allowed, reference, valued

pytestmark = pytest.mark.abstract

OPTIONS = [
    {},
    {"chunks": 3, "label_smoothing": 0.1},
    {"chunks": 100, "z_loss": 0.1, "reduction": "mean"},
    {"chunks": 4, "softcap": 2.0, "reduction": "none", "ignore_index": 2},
]


def case(classes: int = 33) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 5, 6), (classes, 6), (classes,))
    )
    target = torch.randint(0, classes, (2, 5), generator=generator)
    target[0, 3], target[1, 0] = -100, classes - 1
    return hidden, weight, bias, target


def tiled(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, **options: Any) -> Tensor:
    return sw.linear_cross_entropy(hidden, weight, target, bias=bias, **options)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, **options: Any) -> Tensor:
    options.pop("chunks", None)
    logits, cap = hidden @ weight.t() + bias, options.pop("softcap", None)
    return reference(logits if cap is None else cap * (logits / cap).tanh(), target, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_the_product_and_the_loss(options: dict[str, Any]) -> None:
    *inputs, target = case()
    target = allowed(target, options)
    inputs = [one.requires_grad_() for one in inputs]
    got = valued(tiled, target, options, *inputs)
    for one, other in zip(got, valued(plain, target, dict(options), *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ranks", "classes"), [(2, 33), (4, 33), (4, 5)])
@pytest.mark.parametrize("options", OPTIONS)
def test_cut_classes_are_whole_ones(ranks: int, classes: int, options: dict[str, Any]) -> None:
    hidden, weight, bias, target = case(classes)
    target = allowed(target, options)

    def run(context: Context) -> tuple[list[Tensor], Context]:
        own = hidden.clone().requires_grad_()
        blocks = context.local(weight, 0, torch.inf), context.local(bias, 0, torch.nan)
        return valued(tiled, target, options, own, *blocks), context

    results = on_ranks(ranks, classes, run)
    inputs = [one.requires_grad_() for one in (hidden, weight, bias)]
    want = valued(plain, target, dict(options), *inputs)
    numbers = 4 if options.get("label_smoothing") else 3
    for found, context in results:
        assert found[0].equal(results[0][0][0])
        assert context.gathered == [("linear_cross_entropy", (numbers, 10))]
        assert context.entered == ["linear_cross_entropy"]
    got = [results[0][0][0], sum(found[1] for found, _ in results)]
    got += [joined([found[at] for found, _ in results], classes, 0) for at in (2, 3)]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


class _Largest(TorchDispatchMode):
    """The most elements that a new tensor has had."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *(one.numel() for one in made)])
        return result


@pytest.mark.parametrize("chunks", [8, "auto"])
def test_logits_never_exist_as_a_whole(chunks: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, classes, width = 64, 200, 4
    monkeypatch.setattr(tiled_loss, "_TILE_BYTES", 8 * classes * 4)
    hidden, weight = torch.randn(tokens, width), torch.randn(classes, width)
    target = torch.arange(tokens)

    def largest(run: Any) -> int:
        leaves = [one.clone().requires_grad_() for one in (hidden, weight)]
        with _Largest() as mode:
            torch.autograd.grad(run(*leaves), leaves)
        return mode.numel

    whole = largest(lambda h, w: sw.cross_entropy(h @ w.t(), target))
    assert whole == tokens * classes
    tiles = largest(lambda h, w: sw.linear_cross_entropy(h, w, target, chunks=chunks))
    assert tiles == tokens * classes // 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_added_up_in_float32(dtype: torch.dtype) -> None:
    *inputs, target = case()
    low = [one.to(dtype).requires_grad_() for one in inputs]
    exact = [one.detach().double().requires_grad_() for one in low]
    got = valued(tiled, target, {"chunks": 5}, *low)
    want = valued(plain, target, {}, *exact)
    assert [one.dtype for one in got] == [torch.float32, dtype, dtype, dtype]
    for one, other in zip(got, want, strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 4 * torch.finfo(dtype).eps


def test_frozen_inputs_and_autocast() -> None:
    hidden, weight, _, target = (one.float() if one.is_floating_point() else one for one in case())
    weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        loss = sw.linear_cross_entropy(hidden.requires_grad_(), weight, target, chunks=2)
    (grad,) = torch.autograd.grad(loss, [hidden])
    want = sw.linear_cross_entropy(hidden, weight, target)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=0.02, atol=0)
    assert loss != want


def test_no_tokens_are_no_loss() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    loss = sw.linear_cross_entropy(torch.ones(0, 3), weight, torch.ones(0, dtype=torch.long))
    assert loss == 0
    assert not torch.autograd.grad(loss, [weight])[0].any()


@pytest.mark.parametrize(
    ("change", "texts", "numbers"),
    [
        ({"weight": torch.ones(6, 33)}, ["(6, 33)", "Conv1D"], {"weight_shape": (6, 33)}),
        ({"bias": torch.ones(6)}, ["bias (6,)", "bias 'classes'"], {"bias_shape": (6,)}),
        ({"chunks": 0}, ["into 0 tiles", 'chunks="auto"'], {"chunks": 0}),
        ({"softcap": -2.0}, ["softcap of -2.0", "30.0"], {"softcap": -2.0}),
    ],
)
def test_wrong_arguments(change: dict[str, Any], texts: list[str], numbers: dict[str, Any]) -> None:
    hidden, weight, bias, target = case()
    arguments = {"hidden": hidden, "weight": weight, "bias": bias, "target": target} | change
    with pytest.raises(LossError) as info:
        sw.linear_cross_entropy(**arguments)
    check(info.value, LossError, *texts, **numbers)


@pytest.mark.parametrize("cut", [False, True])
def test_a_trace_has_no_values_to_check(cut: bool) -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(2, 5, 6), torch.empty(17, 6, requires_grad=True)
        target = torch.empty(2, 5, dtype=torch.long)
        context = Context(1, 2, 33)
        context.exchange = lambda tensor: torch.stack([tensor, tensor])
        context.cut = [(weight, 0)] if cut else []
        with in_tensor_context(context):
            loss = sw.linear_cross_entropy(hidden, weight, target, reduction="mean")
            logits = torch.empty(2, 5, 17)
            context.cut += [(logits, 2)] if cut else []
            loss = loss + sw.cross_entropy(logits, target)
        (grad,) = torch.autograd.grad(loss, [weight])
    assert grad.shape == weight.shape
    assert len(context.gathered) == 2 * cut


def test_an_assertion_on_a_device_has_its_text() -> None:
    assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="a target is outside"):
        assert_on_device(torch.tensor(False), "a target is outside")


def test_a_step_with_it_is_one_with_torchs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 33)).double()
    hidden, _, _, target = case()

    def loss_with(function: Any) -> Any:
        def loss_fn(module: Any, batch: dict[str, Tensor]) -> sw.Mean:
            return sw.Mean(function(module(batch["x"]), batch["y"]), (batch["y"] != -100).sum())

        return loss_fn

    def trained(function: Any) -> float:
        program = sw.lower(
            sw.plan(model, sw.Mesh(fsdp=1)), loss_with(function), sw.optim.sgd(0.1)
        ).bind()
        state = program.init(sw.from_module(model))
        for _ in range(3):
            state, metrics = program.step(state, {"x": hidden, "y": target})
        return float(metrics.loss)

    got, want = trained(sw.cross_entropy), trained(reference)
    assert abs(got - want) < 1e-12
