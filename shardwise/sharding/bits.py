"""Random bits as a pure function of (key, counter), so that no sharding can change them.

[Note: counter-based bits]
An element's random bits depend on a key (what the randomness is for: seed, step, path) and on the
element's index in the *whole* tensor, never on who draws, in which order or on which device. Any
cut of the index draws the same cut of the bits. The generator is Squares (Widynski 2020), four
rounds of squaring modulo 2^64 and a rotation by 32, with int64 operations that wrap alike on every
device. Its keys must look irregular: `squares_key` hashes the key given and spells it as the paper
asks (hexadecimal digits that are not zero and differ within each half, odd). Indices are
processed in blocks that stay in the cache: about twenty passes over a block, two over the memory.

References: Widynski, "Squares: A Fast Counter-Based RNG", 2020, arXiv:2004.06278; Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011 (why counters).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.sharding.errors import RandomError

_LOW_32 = 0xFFFFFFFF
# 32 Ki elements and the three scratch buffers are 1 MiB; on a GPU 64 MiB, which outweighs launches.
_BLOCK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 21}
# Bits of a float32 mantissa that the dtype does not have.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
_SMALLEST_NORMAL_HALF = 2.0**-14
_HALF_STEPS_PER_ONE = 2.0**24


def random_bits(key: int, index: Tensor) -> Tensor:
    """32 random bits for every counter, the same on every device and for any cut of the counters.

    Args:
        key: any integer; every key is its own stream.
        index: int64 counters of any shape, such as `global_index` makes.

    Returns:
        An int64 tensor of the shape of `index` with values in [0, 2^32).

    Raises:
        RandomError: the counters are not int64.

    >>> bits = random_bits(7, torch.arange(4))
    >>> torch.equal(bits[2:], random_bits(7, torch.arange(2, 4)))
    True
    """
    return squares(squares_key(key), index)


def squares(key: int, index: Tensor) -> Tensor:
    """The generator itself: `squares32` of the paper, for a key that is already irregular.

    Args:
        key: an odd 64-bit integer in the sense of [Note: counter-based bits].
        index: int64 counters.

    Raises:
        RandomError: the counters are not int64.

    >>> hex(squares(0x548C9DECBCE65297, torch.tensor(0)).item())
    '0x36d88366'
    """
    if index.dtype != torch.int64:
        raise RandomError(
            f"Random bits need int64 counters, got {_name(index.dtype)}.",
            where="random_bits(key, index)",
            facts=f"counters of shape {tuple(index.shape)}",
            why="A counter is an element's index in the whole tensor, which may exceed 2^31.",
            fix="pass index.long(), or make the counters with shardwise.sharding.bits.global_index",
            dtype=index.dtype,
        )
    bits = index.clone(memory_format=torch.contiguous_format)
    flat = bits.view(-1)
    size = block_elements(index.device)
    scratch = torch.empty((3, min(size, flat.numel())), dtype=torch.int64, device=index.device)
    signed = key - (1 << 64) if key >> 63 else key
    for block in flat.split(size) if flat.numel() else ():
        _squares_(block, signed, scratch[:, : block.numel()])
    return bits


def _squares_(x: Tensor, key: int, scratch: Tensor) -> None:
    """Overwrite counters with their bits; int64 products wrap as the paper's uint64 ones do."""
    y, z, high = scratch.unbind()
    y.copy_(x.mul_(key))
    torch.add(x, key, out=z)
    for term in (y, z, y):
        torch.addcmul(term, x, x, out=x)
        # The shift copies the sign: the mask makes it the logical one that a rotation needs.
        torch.bitwise_right_shift(x, 32, out=high).bitwise_and_(_LOW_32)
        x.bitwise_left_shift_(32).bitwise_or_(high)
    torch.addcmul(z, x, x, out=x)
    x.bitwise_right_shift_(32).bitwise_and_(_LOW_32)


def squares_key(key: int) -> int:
    """An irregular 64-bit key: 16 digits, none zero, different within each half, the last odd.

    >>> f"{squares_key(0):x}"
    'adb4f7216ca2f4b9'
    """
    digest = hashlib.blake2b(str(key).encode(), digest_size=16).digest()
    digits: list[int] = []
    for half in (digest[:8], digest[8:]):
        draw = int.from_bytes(half, "big")
        free = list(range(1, 16))
        draw, place = divmod(draw, 8)
        last = free.pop(2 * place)
        for size in range(14, 7, -1):
            draw, place = divmod(draw, size)
            digits.append(free.pop(place))
        digits.append(last)
    return int("".join(f"{digit:x}" for digit in digits), 16)


def block_elements(device: torch.device) -> int:
    """Counters processed at a time: a block of each thread stays in that core's cache.

    >>> block_elements(torch.device("cpu")) // torch.get_num_threads()
    32768
    """
    if device.type == "cpu":
        return _BLOCK_ELEMENTS["cpu"] * torch.get_num_threads()
    return _BLOCK_ELEMENTS["cuda"]


def uniform(key: int, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1) for every counter, exact multiples of 2^-24 (float64: 2^-32).

    Args:
        key: any integer; every key is its own stream.
        index: int64 counters.
        dtype: float32 or float64. A narrower one would round some of them up to 1.

    Raises:
        RandomError: the dtype is neither, or the counters are not int64.

    >>> bool((uniform(0, torch.arange(1000)) < 1).all())
    True
    """
    kept = {torch.float32: 24, torch.float64: 32}.get(dtype)
    if kept is None:
        raise RandomError(
            f"Uniform numbers in {_name(dtype)} are not offered.",
            where="uniform(key, index, dtype)",
            why="With few mantissa bits numbers near 1 would round up to 1, outside of [0, 1).",
            fix="ask for float32 or float64 and compare or cast yourself",
            dtype=dtype,
        )
    bits = random_bits(key, index).bitwise_right_shift_(32 - kept)
    return bits.to(dtype).mul_(2.0**-kept)


def global_index(
    shape: Sequence[int],
    block: Sequence[int],
    dim: int = 0,
    start: int = 0,
    *,
    span: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Index, in the flattened whole tensor, of every element of a local block.

    Rows beyond the whole tensor (padding) get indices of other elements, which nobody reads.

    Args:
        shape: shape of the whole tensor.
        block: shape of the local block: as the whole except along `dim`.
        dim: the dimension that is cut.
        start: the block's first row along `dim`.
        span: only the block's flattened elements `[span[0], span[1])`, as a flat tensor, for
            callers that work through a large block in pieces.
        device: where the counters are made.

    >>> global_index((2, 4), (2, 2), dim=1, start=2).tolist()
    [[2, 3], [6, 7]]
    """
    first, last = span or (0, math.prod(block))
    index = torch.arange(first, last, device=device)
    if block:
        after = math.prod(shape[dim + 1 :])
        run, stride = block[dim] * after, shape[dim] * after
        if dim and run and math.prod(block[:dim]) > 1:
            index += torch.div(index, run, rounding_mode="floor").mul_(stride - run)
        index += start * after
    return index if span else index.view(tuple(block))


def stochastic_round(x: Tensor, dtype: torch.dtype, key: int, index: Tensor) -> Tensor:
    """Round float32 to one of its two neighbours in `dtype`, unbiased: E[result] = x.

    The upper neighbour is taken with a probability proportional to the distance from the lower
    one. Values that `dtype` holds are unchanged; NaN and infinities stay.

    Args:
        x: float32 values.
        dtype: bfloat16 or float16.
        key: the stream, such as `rng.key(seed, step, path)`.
        index: int64 counters, one per value.

    Raises:
        RandomError: another dtype on either side, or as many counters as values are not given.

    >>> x = torch.full((4096,), 1 + 2.0**-9)
    >>> y = stochastic_round(x, torch.bfloat16, 0, torch.arange(4096)).float()
    >>> sorted(set(y.tolist())), round((y > 1).float().mean().item(), 1)
    ([1.0, 1.0078125], 0.2)

    References: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015,
    arXiv:1502.02551.
    """
    _check_rounding(x, dtype, index)
    dropped = _DROPPED_BITS[dtype]
    bits = random_bits(key, index)
    noise = bits.bitwise_right_shift(32 - dropped).to(torch.int32)
    # float32 of one sign is ordered as its bits are: adding below the kept ones and cutting rounds
    # the magnitude up with the probability asked for, and a carry moves into the exponent.
    raised = noise.add_(x.contiguous().view(torch.int32)).bitwise_and_(-(1 << dropped))
    rounded = raised.view(torch.float32)
    if dtype == torch.float16:
        small = x.abs() < _SMALLEST_NORMAL_HALF
        rounded = torch.where(small, _round_subnormal(x, bits), rounded)
    # The carry of a NaN whose kept bits are all ones runs into the sign.
    return torch.where(x.isnan(), x, rounded).to(dtype)


def _round_subnormal(x: Tensor, bits: Tensor) -> Tensor:
    """Round to multiples of 2^-24, the step of float16 below its smallest normal number."""
    scaled = x.abs().mul_(_HALF_STEPS_PER_ONE)
    lower = scaled.floor()
    draw = (bits >> 8).to(torch.float32).mul_(2.0**-24)
    steps = lower.add_(draw < scaled.sub_(lower))
    return steps.div_(_HALF_STEPS_PER_ONE).copysign_(x)


def _check_rounding(x: Tensor, dtype: torch.dtype, index: Tensor) -> None:
    if x.dtype == torch.float32 and dtype in _DROPPED_BITS and x.shape == index.shape:
        return
    raise RandomError(
        f"Stochastic rounding of {_name(x.dtype)} {tuple(x.shape)} to {_name(dtype)} with counters "
        f"{tuple(index.shape)} is not offered.",
        where="stochastic_round(x, dtype, key, index)",
        why="It rounds float32 to bfloat16 or float16 and needs one counter per value.",
        fix="cast to float32 first, and make the counters with shardwise.sharding.bits."
        "global_index for the same block",
        source=x.dtype,
        target=dtype,
        counters=tuple(index.shape),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
