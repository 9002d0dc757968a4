"""Counter-based bits: known answers, any cut, statistics, indices of blocks, rounding at random."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.sharding.bits import (
    block_elements,
    global_index,
    random_bits,
    squares,
    squares_key,
    stochastic_round,
    uniform,
)
from shardwise.sharding.errors import RandomError
from tests.transforms.five_parts import check

pytestmark = pytest.mark.abstract

CPU = torch.device("cpu")
LOW_64 = (1 << 64) - 1
KEYS = st.integers(0, 2**63 - 1)
NUMBERS = 1 << 20
SIGMAS = 5  # a sound generator exceeds it once in 1.7 million checks
KIND = {torch.bfloat16: (torch.int16, 8), torch.float16: (torch.int16, 11)}  # bits, precision


# -- the generator -------------------------------------------------------------------------------


def squares_of_the_paper(ctr: int, key: int) -> int:
    """Squares32 with Python's integers, line by line."""
    x = y = ctr * key & LOW_64
    z = y + key & LOW_64
    for add in (y, z, y):
        x = x * x + add & LOW_64
        x = x >> 32 | x << 32 & LOW_64
    return (x * x + z & LOW_64) >> 32


def test_known_answers() -> None:
    # The upper halves of what two other implementations test Squares64 with, for this key.
    bits = squares(0x548C9DECBCE65297, torch.arange(3))
    assert [f"{value:08x}" for value in bits.tolist()] == ["36d88366", "944716e0", "c8a8f4e0"]


@given(KEYS, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9))
def test_bits_are_those_of_the_paper_also_where_products_wrap(
    key: int, counters: list[int]
) -> None:
    own = squares_key(key)
    want = [squares_of_the_paper(counter & LOW_64, own) for counter in counters]
    assert squares(own, torch.tensor(counters)).tolist() == want
    assert random_bits(key, torch.tensor(counters)).tolist() == want


@given(st.integers())
def test_keys_are_irregular(key: int) -> None:
    digits = f"{squares_key(key):x}"
    assert len(digits) == 16
    assert "0" not in digits
    assert len(set(digits[:8])) == len(set(digits[8:])) == 8
    assert squares_key(key) % 2 == 1


def test_keys_differ() -> None:
    assert len({squares_key(key) for key in range(20_000)}) == 20_000


@settings(max_examples=15)
@given(KEYS, st.data())
def test_any_cut_of_the_counters_gives_that_cut_of_the_bits(key: int, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 7, block_elements(CPU) + 3, 3 * block_elements(CPU)]))
    start = data.draw(st.integers(0, size - 1))
    step = data.draw(st.integers(1, 5))
    whole = random_bits(key, torch.arange(size))
    assert torch.equal(whole[start::step], random_bits(key, torch.arange(size)[start::step]))
    grid = torch.arange(size).unsqueeze(1).expand(size, 2)
    assert torch.equal(random_bits(key, grid), whole.unsqueeze(1).expand(size, 2))
    assert torch.equal(random_bits(key, torch.tensor(start)), whole[start])


def test_no_counters_and_counters_that_are_kept() -> None:
    assert random_bits(0, torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)
    index = torch.arange(9)
    random_bits(0, index)
    assert torch.equal(index, torch.arange(9))


@pytest.mark.gpu
def test_the_bits_of_a_gpu_are_those_of_the_cpu() -> None:
    index = torch.arange(3 << 20)
    assert torch.equal(random_bits(9, index.cuda()).cpu(), random_bits(9, index))
    x = torch.randn(1 << 20)
    for dtype in KIND:
        ours = stochastic_round(x.cuda(), dtype, 3, torch.arange(1 << 20, device="cuda"))
        assert torch.equal(ours.cpu(), stochastic_round(x, dtype, 3, torch.arange(1 << 20)))


# -- statistics ----------------------------------------------------------------------------------


def counters(kind: str) -> Tensor:
    """In a row; every second row of a matrix; far from each other."""
    plain = torch.arange(NUMBERS)
    if kind == "strided":
        return global_index((2048, 1024), (2048, 512), dim=1, start=512).flatten()
    return plain * -7046029254386353131 if kind == "far" else plain


@pytest.mark.parametrize("kind", ["plain", "strided", "far"])
@pytest.mark.parametrize("key", [0, 1, 123456789])
def test_numbers_are_uniform_and_independent(kind: str, key: int) -> None:
    values = uniform(key, counters(kind), torch.float64)
    n = len(values)
    centred = values - 0.5
    assert abs(centred.mean().item()) < SIGMAS * math.sqrt(1 / 12 / n)
    # The variance of (u - 1/2)^2 is 1/180.
    assert abs(centred.square().mean().item() - 1 / 12) < SIGMAS * math.sqrt(1 / 180 / n)
    for lag in (1, 2, 512, 4096):
        product = (centred[lag:] * centred[:-lag]).mean().item()
        assert abs(product) < SIGMAS / 12 / math.sqrt(n - lag), lag
    bits = random_bits(key, counters(kind))
    for place in range(32):
        share = (bits >> place & 1).double().mean().item()
        assert abs(share - 0.5) < SIGMAS * 0.5 / math.sqrt(n), place


def chi_square(cells: Tensor, number: int) -> float:
    """In standard deviations from its mean; the number of cells is large."""
    counts = torch.bincount(cells, minlength=number).double()
    expected = len(cells) / number
    value = ((counts - expected).square() / expected).sum().item()
    return (value - (number - 1)) / math.sqrt(2 * (number - 1))


@pytest.mark.parametrize("kind", ["plain", "strided", "far"])
def test_pairs_of_neighbours_and_of_keys_fill_the_square(kind: str) -> None:
    first, second = random_bits(5, counters(kind)), random_bits(6, counters(kind))
    high, other = first >> 26, second >> 26
    low = first & 63
    assert abs(chi_square((high[::2] << 6) + high[1::2], 4096)) < SIGMAS
    assert abs(chi_square((low[::2] << 6) + low[1::2], 4096)) < SIGMAS
    assert abs(chi_square((high << 6) + other, 4096)) < SIGMAS
    assert abs(chi_square((high << 6) + low, 4096)) < SIGMAS


def test_the_statistics_would_notice() -> None:
    sawtooth = torch.arange(NUMBERS) % 4096
    assert abs(chi_square(sawtooth, 4096)) > SIGMAS  # too even
    # Keys that are not irregular are why there is `squares_key`.
    share = (squares(5, torch.arange(NUMBERS)) >> 31).double().mean().item()
    assert abs(share - 0.5) > SIGMAS * 0.5 / math.sqrt(NUMBERS)


def test_uniform_numbers_are_below_one_in_the_dtype_asked_for() -> None:
    for dtype in (torch.float32, torch.float64):
        values = uniform(1, torch.arange(NUMBERS), dtype)
        assert values.dtype == dtype
        assert values.min() >= 0
        assert values.max() < 1
        assert values.max() > 1 - 1e-5


# -- indices of blocks ---------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_the_index_of_a_block_is_that_cut_of_the_whole_index(
    shape: list[int], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    rows = data.draw(st.integers(1, shape[dim] - start))
    whole = torch.arange(math.prod(shape)).view(shape)
    block = [rows if place == dim else size for place, size in enumerate(shape)]
    want = whole.narrow(dim, start, rows)
    assert torch.equal(global_index(shape, block, dim, start), want)
    first = data.draw(st.integers(0, want.numel()))
    last = data.draw(st.integers(first, want.numel()))
    part = global_index(shape, block, dim, start, span=(first, last))
    assert torch.equal(part, want.flatten()[first:last])


def test_the_index_of_a_scalar_and_of_padding() -> None:
    assert global_index((), ()).tolist() == 0
    assert global_index((5, 2), (3, 2), start=3).shape == (3, 2)
    assert global_index((2, 0), (2, 0), dim=1).shape == (2, 0)


# -- stochastic rounding -------------------------------------------------------------------------


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of `dtype` around x, by stepping from the nearest one."""
    near = x.to(dtype)
    below = torch.where(near.float() <= x, near, _step(near, -1))
    above = torch.where(near.float() >= x, near, _step(near, 1))
    return below.float(), above.float()


def _step(values: Tensor, direction: int) -> Tensor:
    """The next value of the dtype, up or down; bits order magnitudes, and 0 has two neighbours."""
    bits = values.view(torch.int16)
    away = (values > 0) == (direction > 0)
    stepped = (bits + torch.where(away, 1, -1).to(torch.int16)).view(values.dtype)
    smallest = torch.tensor(1, dtype=torch.int16).view(values.dtype) * direction
    return torch.where(values == 0, smallest, stepped)


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=60)
@given(st.lists(FLOATS, min_size=1, max_size=20), st.sampled_from(list(KIND)), KEYS)
def test_a_rounded_value_is_one_of_its_two_neighbours(
    values: list[float], dtype: torch.dtype, key: int
) -> None:
    x = torch.tensor(values)
    rounded = stochastic_round(x, dtype, key, torch.arange(len(values))).float()
    below, above = neighbours(x, dtype)
    assert ((rounded == below) | (rounded == above)).all()


@pytest.mark.parametrize("dtype", list(KIND))
def test_every_value_of_the_dtype_is_unchanged(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    rounded = stochastic_round(values.float(), dtype, 1, torch.arange(2**16))
    assert torch.equal(rounded.isnan(), values.isnan())
    kept = ~values.isnan()
    assert torch.equal(rounded[kept].view(torch.int16), values[kept].view(torch.int16))


def test_a_nan_of_any_payload_stays_one() -> None:
    patterns = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    for dtype in KIND:
        rounded = stochastic_round(patterns.view(torch.float32), dtype, 0, torch.arange(4))
        assert rounded.isnan().all()


@pytest.mark.parametrize("dtype", list(KIND))
@pytest.mark.parametrize("value", [1 + 2.0**-13, -3.7, 1e-3, 2.0**-17 + 2.0**-26, -(2.0**-26)])
def test_the_mean_of_rounded_values_is_the_value(dtype: torch.dtype, value: float) -> None:
    x = torch.full((NUMBERS,), value)
    rounded = stochastic_round(x, dtype, 2, torch.arange(NUMBERS)).double()
    below, above = (side[0].double().item() for side in neighbours(x[:1], dtype))
    exact = x[0].double().item()
    share = (exact - below) / (above - below) if above > below else 0.0
    error = abs(rounded.mean().item() - exact)
    assert error <= SIGMAS * (above - below) * math.sqrt(share * (1 - share) / NUMBERS)
    assert set(rounded.unique().tolist()) <= {below, above}


def test_many_small_updates_arrive() -> None:
    """BF-2 without a program: 400 updates of a quarter of the step below 1."""
    x, update = torch.ones(512, dtype=torch.bfloat16), 2.0**-10
    for step in range(400):
        x = stochastic_round(x.float() - update, torch.bfloat16, step, torch.arange(512))
    moved = 1 - x.double().mean().item()
    assert moved == pytest.approx(400 * update, rel=0.05)


# -- errors --------------------------------------------------------------------------------------


def test_counters_that_are_no_int64() -> None:
    with pytest.raises(RandomError) as caught:
        random_bits(0, torch.arange(3, dtype=torch.int32))
    check(caught.value, RandomError, "got int32", "shape (3,)", ".long()", dtype=torch.int32)


def test_numbers_that_would_round_up_to_one() -> None:
    with pytest.raises(RandomError) as caught:
        uniform(0, torch.arange(3), torch.bfloat16)
    check(caught.value, RandomError, "bfloat16", "ask for float32", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("source", "target", "number"),
    [
        (torch.float64, torch.bfloat16, 3),
        (torch.float32, torch.float32, 3),
        (torch.float32, torch.bfloat16, 4),
    ],
)
def test_rounding_that_is_not_offered(
    source: torch.dtype, target: torch.dtype, number: int
) -> None:
    with pytest.raises(RandomError) as caught:
        stochastic_round(torch.ones(3, dtype=source), target, 0, torch.arange(number))
    check(
        caught.value,
        RandomError,
        f"counters ({number},)",
        "cast to float32 first",
        source=source,
        target=target,
        counters=(number,),
    )
