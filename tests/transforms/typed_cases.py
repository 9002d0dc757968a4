"""Operations for the oracle of activation types, by name: what runs on all data and on a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A function of tensors of these global shapes; every size is a multiple of six."""

    function: Function
    shapes: tuple[tuple[int, ...], ...]


CUBE = (6, 12, 6)
INDEX = torch.tensor([1, 0, 3, 3])
PAIR = torch.tensor([1, 0])
MASK = torch.tensor([True, False])


def _half(x: Tensor, dim: int) -> int:
    """Half of a dimension on one rank is half of all of it only if it is even."""
    half, left = divmod(x.shape[dim], 2)
    if left:
        raise RuntimeError("an odd dimension has no half")
    return half


UNARY: dict[str, Function] = {
    "relu": torch.relu,
    "neg": torch.neg,
    "bell": lambda x: torch.exp(-x * x),
    "twice": lambda x: x * 2.0,
    "half": lambda x: x / 2.0,
    "one_more": lambda x: x + 1.0,
    "square": lambda x: x * x,
    "double": lambda x: x + x,
    "clone": torch.clone,
    "detach": lambda x: x.detach() + x,
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze": lambda x: x[:, None].expand(-1, 2, -1, -1).sum(1),
    "sum_last": lambda x: x.sum(-1, keepdim=True),
    "sum_mid": lambda x: x.sum((0, 1), keepdim=True),
    "mean_first": lambda x: x.mean(0, keepdim=True),
    "softmax_last": lambda x: torch.softmax(x, -1),
    "log_softmax_mid": lambda x: torch.log_softmax(x, 1),
    "norm_last": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "rms": lambda x: F.rms_norm(x, (x.shape[-1],)),
    "cumsum": lambda x: x.cumsum(1),
    "var": lambda x: x.var(-1, keepdim=True, correction=0),
    "amax": lambda x: x.amax(0, keepdim=True),
    "max": lambda x: x.max(1, keepdim=True).values,
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(1, dim=0).values,
    "argmax": lambda x: x * x.argmax(1, keepdim=True),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: torch.cat([x[..., _half(x, -1) :], x[..., : _half(x, -1)]], -1),
    "tril": torch.tril,
    "slice_first": lambda x: x[:, : _half(x, 1)],
    "slice_second": lambda x: x[..., _half(x, -1) :],
    "step": lambda x: x[::2],
    "row": lambda x: x.select(1, 0).unsqueeze(1),
    "unbind": lambda x: torch.stack(x.unbind(0)[:2], 0),
    "cat": lambda x: torch.cat([x, x], 1),
    "cat_split": lambda x: torch.cat([x, 2 * x], 1).chunk(2, 1)[1],
    "stack": lambda x: torch.stack([x, -x], 1).select(1, 1),
    "cat_nothing": lambda x: torch.cat([x.new_zeros(0), x], 0),
    "index": lambda x: x[:, INDEX % x.shape[1]],
    "index_select": lambda x: x.index_select(0, INDEX[:2] * 0),
    "masked": lambda x: x.masked_fill(x > 0, 1.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "add_": lambda x: x.clone().add_(x),
    "copy_": lambda x: torch.zeros_like(x).copy_(x) + x,
    "part_written": lambda x: _written(x),
    "ones_like": lambda x: torch.ones_like(x) * x,
    "fill_": lambda x: x.clone().fill_(2.0) + x,
    "gelu": F.gelu,
    "silu": F.silu,
    "to": lambda x: x.to(torch.float64),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
}


def _written(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    half = _half(x, 1)
    out[:, half:] = x[:, half:]
    return out + x


CASES: dict[str, Case] = {
    "add": Case(torch.add, (CUBE, CUBE)),
    "sub": Case(torch.sub, (CUBE, CUBE)),
    "mul": Case(torch.mul, (CUBE, CUBE)),
    "div": Case(lambda x, y: x / (y * y + 1.0), (CUBE, CUBE)),
    "add_row": Case(torch.add, (CUBE, (6,))),
    "mul_row": Case(torch.mul, (CUBE, (12, 6))),
    "mul_one": Case(torch.mul, (CUBE, (6, 1, 6))),
    "maximum": Case(torch.maximum, (CUBE, CUBE)),
    "where": Case(lambda x, y: torch.where(x > y, x, y), (CUBE, CUBE)),
    "cat": Case(lambda x, y: torch.cat([x, y], 1), (CUBE, CUBE)),
    "cat_last": Case(lambda x, y: torch.cat([x, y], -1), (CUBE, CUBE)),
    "stack": Case(lambda x, y: torch.stack([x, y], 1), (CUBE, CUBE)),
    "mm": Case(torch.mm, ((6, 12), (12, 6))),
    "mv": Case(torch.mv, ((6, 12), (12,))),
    "dot": Case(torch.dot, ((12,), (12,))),
    "bmm": Case(torch.bmm, ((6, 6, 12), (6, 12, 6))),
    "addmm": Case(torch.addmm, ((6,), (6, 12), (12, 6))),
    "baddbmm": Case(torch.baddbmm, ((6, 6, 6), (6, 6, 12), (6, 12, 6))),
    "matmul": Case(torch.matmul, ((2, 6, 6, 12), (2, 6, 12, 6))),
    "matmul_3": Case(torch.matmul, ((6, 6, 12), (12, 6))),
    "matmul_batch": Case(torch.matmul, ((6, 12), (6, 12, 6))),
    "matmul_one": Case(torch.matmul, ((6, 1, 12), (1, 12, 6))),
    "linear": Case(F.linear, ((2, 6, 12), (6, 12))),
    "linear_bias": Case(F.linear, ((2, 6, 12), (6, 12), (6,))),
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (6,), w, b), (CUBE, (6,), (6,))),
    "rms_norm": Case(lambda x, w: F.rms_norm(x, (6,), w), (CUBE, (6,))),
    "embedding": Case(lambda w: F.embedding(INDEX.reshape(2, 2), w), ((6, 12),)),
    "gather": Case(lambda x, y: x.gather(1, y.argmax(1, keepdim=True) * 0), (CUBE, CUBE)),
    "attention": Case(F.scaled_dot_product_attention, ((2, 6, 6, 3), (2, 6, 6, 3), (2, 6, 6, 3))),
    "grouped": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 12, 3, 3), (2, 6, 3, 3), (2, 6, 3, 3)),
    ),
    "masked_attention": Case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        ((2, 6, 6, 3), (2, 6, 6, 3), (2, 6, 6, 3), (2, 1, 6, 6)),
    ),
    "eager": Case(
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v,
        ((2, 6, 6, 3), (2, 6, 6, 3), (2, 6, 6, 3)),
    ),
    "gated": Case(
        lambda x, up, gate, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        ((2, 3, 6), (12, 6), (12, 6), (6, 12)),
    ),
    "fused_gate": Case(
        lambda x, both, down: _gated(F.linear(x, both), down), ((2, 3, 6), (24, 6), (6, 12))
    ),
    "two_indices": Case(lambda x: x[:, PAIR, PAIR], ((6, 6, 6, 6),)),
    "indices_apart": Case(lambda x: x[:, PAIR, :, PAIR], ((6, 6, 6, 6),)),
    "wide_index": Case(lambda x: x[:, INDEX.reshape(2, 2)], (CUBE,)),
    "first_index": Case(lambda x: x[PAIR], (CUBE,)),
    "mask": Case(lambda x: x[:, MASK], ((6, 2, 6),)),
    "wide_mask": Case(lambda x: x[MASK[:, None] | MASK], ((2, 2, 6),)),
    "copy_": Case(lambda x, y: (x * 1.0).copy_(y) + y, (CUBE, CUBE)),
    "add_": Case(lambda x, y: (x * 1.0).add_(y), (CUBE, CUBE)),
}


def _gated(both: Tensor, down: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.linear(torch.relu(gate) * up, down)
