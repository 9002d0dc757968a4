"""`sw.cross_entropy` against torch's, whole and with the classes cut over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import shardwise as sw
from shardwise.sharding.errors import BatchError, LossError
from tests.transforms.cut_classes import Context, joined, on_ranks
from tests.transforms.five_parts import check

pytestmark = pytest.mark.abstract

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 0.1, "reduction": "mean"},
    {"reduction": "none"},
    {"ignore_index": 3, "reduction": "mean"},
]


def reference(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    z, reduction = options.pop("z_loss", 0.0), options.pop("reduction", "sum")
    flat, ids = logits.flatten(0, -2), target.flatten()
    losses = functional.cross_entropy(flat, ids, reduction="none", **options)
    valid = ids != options.get("ignore_index", -100)
    losses = losses + z * flat.logsumexp(-1) ** 2 * valid
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()


def case(classes: int = 33, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, classes, generator=generator, dtype=torch.float64) * 3
    target = torch.randint(0, classes, (2, 5), generator=generator)
    target[0, 1] = -100
    target[1, 4] = classes - 1
    return logits, target


def valued(run: Any, target: Tensor, options: dict[str, Any], *inputs: Tensor) -> list[Tensor]:
    loss = run(*inputs, target, **options)
    weight = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad((loss * weight).sum(), inputs)]


def allowed(target: Tensor, options: dict[str, Any]) -> Tensor:
    return target.masked_fill(target == -100, options.get("ignore_index", -100))


@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_torchs(options: dict[str, Any]) -> None:
    logits, target = case()
    logits.requires_grad_()
    target = allowed(target, options)
    got = valued(sw.cross_entropy, target, options, logits)
    want = valued(reference, target, dict(options), logits)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("ranks", "classes"), [(2, 33), (4, 33), (4, 5), (3, 3)])
@pytest.mark.parametrize("options", OPTIONS)
def test_cut_classes_are_whole_ones(ranks: int, classes: int, options: dict[str, Any]) -> None:
    logits, target = case(classes)
    target = allowed(target, options)

    def run(context: Context) -> tuple[list[Tensor], Any]:
        found = valued(sw.cross_entropy, target, options, context.local(logits, 2))
        return found, context.gathered

    results = on_ranks(ranks, classes, run)
    want = valued(reference, target, dict(options), logits.requires_grad_())
    for (loss, _), gathered in results:
        assert loss.equal(results[0][0][0])
        numbers = 4 if options.get("label_smoothing") else 3
        assert gathered == [("cross_entropy", (numbers, 10))]
        torch.testing.assert_close(loss, want[0], rtol=1e-12, atol=1e-12)
    grads = joined([found[1] for found, _ in results], classes, 2)
    torch.testing.assert_close(grads, want[1], rtol=1e-12, atol=1e-12)


def test_gradients_are_derivatives() -> None:
    logits, target = case(7)

    def run(x: Tensor) -> Tensor:
        return sw.cross_entropy(x, target, label_smoothing=0.2, z_loss=0.1, reduction="none")

    assert torch.autograd.gradcheck(run, logits.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, target = case()
    low = logits.to(dtype).requires_grad_()
    loss, grad = valued(sw.cross_entropy, target, {}, low)
    exact, want = valued(reference, target, {}, low.detach().double().requires_grad_())
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_all_ignored_is_nothing() -> None:
    logits, target = case()
    target.fill_(-100)
    loss, grad = valued(sw.cross_entropy, target, {}, logits.requires_grad_())
    assert loss == 0
    assert not grad.any()
    assert sw.cross_entropy(logits, target, reduction="mean").isnan()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_of_masked_logits_takes_no_part(ranks: int) -> None:
    logits, target = case(8)
    logits[..., :4] = -torch.inf
    target = torch.where(target >= 0, 4 + target % 4, target)
    results = on_ranks(
        ranks, 8, lambda context: valued(sw.cross_entropy, target, {}, context.local(logits, 2))
    )
    want = valued(reference, target, {}, logits.requires_grad_())
    torch.testing.assert_close(results[0][0], want[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(joined([r[1] for r in results], 8, 2), want[1])


def test_many_blocks_of_tokens_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.transforms import class_loss

    logits, target = case()
    logits.requires_grad_()
    want = valued(sw.cross_entropy, target, {"label_smoothing": 0.1}, logits)
    monkeypatch.setitem(class_loss._BLOCK_BYTES, "cpu", 3 * 33 * 8)
    got = valued(sw.cross_entropy, target, {"label_smoothing": 0.1}, logits)
    assert all(one.equal(other) for one, other in zip(got, want, strict=True))


def test_a_target_that_is_no_class() -> None:
    logits, target = case()
    target[0, 0], target[1, 1] = 33, -1
    with pytest.raises(BatchError) as info:
        sw.cross_entropy(logits, target)
    check(
        info.value, BatchError, "2 of 10 targets", "first one is 33", "33 classes", "[0, 33)",
        "mask these targets with -100", count=2, value=33, classes=33,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "texts", "numbers"),
    [
        ({"reduction": "max"}, ["reduction 'max'", '"mean"'], {"reduction": "max"}),
        ({"label_smoothing": 1.5}, ["1.5", "from 0 to 1"], {"label_smoothing": 1.5}),
        ({"z_loss": -1.0}, ["-1.0", "1e-4"], {"z_loss": -1.0}),
    ],
)
def test_wrong_options(options: dict[str, Any], texts: list[str], numbers: dict[str, Any]) -> None:
    with pytest.raises(LossError) as info:
        sw.cross_entropy(*case(), **options)
    check(info.value, LossError, *texts, **numbers)


def test_wrong_shapes_and_dtypes() -> None:
    logits, target = case()
    with pytest.raises(LossError) as info:
        sw.cross_entropy(logits.movedim(-1, 1), target)
    check(info.value, LossError, "(2, 33, 5)", "movedim(1, -1)", target_shape=(2, 5))
    with pytest.raises(LossError) as info:
        sw.cross_entropy(logits, target.double())
    check(info.value, LossError, "torch.float64", "target.long()", target_dtype=torch.float64)


def test_labels_of_the_next_token() -> None:
    labels = torch.tensor([[1, 2, 3], [4, -5, 6]])
    assert sw.shift_labels(labels, -5).tolist() == [[2, 3, -5], [-5, 6, -5]]
