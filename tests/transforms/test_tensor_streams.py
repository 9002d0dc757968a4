"""Streams apart: ranks of a tensor axis differ inside, agree outside, and repeat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.transforms.tensor_streams import apart

pytestmark = pytest.mark.abstract

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")],
    ),
]


def drop(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_differ_inside_and_agree_outside(device: str) -> None:
    ones = torch.ones(256, device=device)

    def run(place: int) -> list[Tensor]:
        torch.manual_seed(3)
        return [drop(ones), apart(place, drop, ones), drop(ones), apart(place, drop, x=ones)]

    first, same, other = run(0), run(0), run(1)
    assert all(one.equal(two) for one, two in zip(first, same, strict=True))
    assert [one.equal(two) for one, two in zip(first, other, strict=True)] == [
        True, False, True, False,
    ]  # fmt: skip
    assert not first[1].equal(first[3])


@pytest.mark.parametrize("draws", [0, 1, 1000])
def test_what_is_drawn_inside_does_not_count_outside(draws: int) -> None:
    torch.manual_seed(1)
    apart(0, torch.rand, draws)
    after = torch.rand(4)
    torch.manual_seed(1)
    apart(1, torch.rand, 7)
    assert after.equal(torch.rand(4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [0, 1])
def test_a_recomputation_repeats(place: int, device: str) -> None:
    torch.manual_seed(5)
    masks: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        mask = apart(place, drop, torch.ones_like(x))
        masks.append(mask)
        return (x * mask).sin()

    x = torch.ones(64, device=device, requires_grad=True)
    total = checkpoint(block, x, use_reentrant=False).sum()
    torch.rand(3, device=device)
    (grad,) = torch.autograd.grad(total, [x])
    assert len(masks) == 2
    assert masks[0].equal(masks[1])
    torch.testing.assert_close(grad, masks[0] * masks[0].cos())


def test_an_error_puts_the_stream_back() -> None:
    def fail() -> None:
        torch.rand(9)
        raise KeyError

    torch.manual_seed(2)
    with pytest.raises(KeyError):
        apart(0, fail)
    after = torch.rand(2)
    torch.manual_seed(2)
    apart(1, int)
    assert after.equal(torch.rand(2))
