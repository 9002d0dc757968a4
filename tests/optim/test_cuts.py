"""The bits of `apply` do not depend on how a flat group is cut, or on layout and threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.optim import GradientTransform
from shardwise.optim.flat import on_whole_vectors
from tests.optim.cases import CASES, Case

pytestmark = pytest.mark.abstract

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def unaligned(values: Tensor, offset: int) -> Tensor:
    """The values at `offset` elements into a buffer of their own."""
    buffer = values.new_zeros(offset + values.numel())
    buffer[offset:] = values
    return buffer[offset:]


def two_steps(optimizer: GradientTransform, param: Tensor, grads: list[Tensor]) -> list[Tensor]:
    params = {"w": param}
    state = optimizer.init(params)
    for grad in grads:
        optimizer.apply(params, {"w": grad}, state, scale=torch.tensor(0.7, dtype=torch.float64))
    return [param, *(field["w"] for field in state[2:] if field)]


@st.composite
def cut_points(draw: st.DrawFn) -> tuple[int, list[int], int]:
    length = draw(st.integers(1, 200))
    cuts = draw(st.lists(st.integers(0, length), max_size=4).map(sorted))
    return length, [0, *cuts, length], draw(st.integers(0, 9))


@cases
@dtypes
@given(cut=cut_points(), seed=st.integers(0, 1000))
def test_pieces_have_the_bits_of_the_whole(
    case: Case, dtype: torch.dtype, cut: tuple[int, list[int], int], seed: int
) -> None:
    length, points, offset = cut
    generator = torch.Generator().manual_seed(seed)
    param, *grads = (torch.randn(length, generator=generator).to(dtype) for _ in range(3))
    whole = two_steps(case.ours, param.clone(), grads)
    for start, stop in itertools.pairwise(points):
        rows = slice(start, stop)
        pieces = [unaligned(grad[rows], offset) for grad in grads]
        part = two_steps(case.ours, unaligned(param[rows], offset), pieces)
        assert all(torch.equal(p, w[rows]) for p, w in zip(part, whole, strict=True))


@cases
def test_bits_do_not_depend_on_threads(case: Case) -> None:
    values = [torch.randn(300_007, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    one = two_steps(case.ours, values[0].clone(), values[1:])
    torch.set_num_threads(2)
    two = two_steps(case.ours, values[0].clone(), values[1:])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@cases
def test_bits_do_not_depend_on_strides(case: Case) -> None:
    values = [torch.randn(7, 20, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    flat = two_steps(case.ours, values[0].clone(), values[1:])
    strided = values[0].t().contiguous().t()
    assert not strided.is_contiguous()
    other = two_steps(case.ours, strided, values[1:])
    assert other[0] is strided
    assert all(torch.equal(a, b) for a, b in zip(flat, other, strict=True))


def test_the_comparison_would_notice_a_seam() -> None:
    """A kernel with a different tail, as torch's fused ones have, fails without the padding."""

    def kernel(param: Tensor) -> None:
        body = param.numel() - param.numel() % 32
        param[:body].add_(1.0)
        param[body:].add_(2.0)

    bare, padded = torch.zeros(100), torch.zeros(100)
    kernel(bare)
    on_whole_vectors(kernel, written=[padded], read=[])
    assert bare.unique().numel() == 2
    assert torch.equal(padded, torch.ones(100))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128])
def test_whole_vectors_cover_every_element_once(length: int) -> None:
    written, read = torch.zeros(length), torch.arange(float(length))
    on_whole_vectors(lambda w, r: w.add_(r), written=[written], read=[read])
    assert torch.equal(written, read)
