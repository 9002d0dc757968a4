"""Rules of products: matrix products and attention.

A contraction over a dimension of which both operands hold the same block is a partial sum; a block
of any other dimension goes to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from shardwise.transforms.activation_types import Constant, Free, Partial, Sharded, Type
from shardwise.transforms.type_rules import (
    Call,
    Operand,
    Rule,
    beside_sharded,
    broadcast,
    join_equal,
    same,
)

Labels = Sequence[Hashable]


def contract(
    call: Call, factors: tuple[Operand, Operand], labels: tuple[Labels, Labels], result: Labels
) -> Type:
    """The type of a product of two operands whose dimensions are labelled as in `einsum`.

    Raises:
        TypeMismatch: a block meets a value that is not cut, or partial sums are multiplied.
    """
    cut = [
        (at, labels[at][kind.dim], kind)
        for at, (_, kind) in enumerate(factors)
        if isinstance(kind, Sharded)
    ]
    if not cut:
        return _of_equals(call, *factors)
    if any(isinstance(kind, Partial) for _, kind in factors):
        raise call.mismatch("a partial sum meets a block; it has to be summed first")
    (at, label, kind), *others = sorted(cut, key=lambda one: one[2].copies)
    for _, other_label, other_kind in others:
        if label != other_label:
            raise call.mismatch(
                f"dim {kind.dim} of one factor and dim {other_kind.dim} of the other are cut, "
                "which are not multiplied with each other",
                dims=(kind.dim, other_kind.dim),
            )
        same(call, kind, other_kind, (0, 0))
    if not others:
        whole, around = factors[1 - at], labels[1 - at]
        size = whole[0].shape[list(around).index(label)] if label in around else 1
        if label in around and (label not in result or size != 1):
            raise call.mismatch(
                f"dim {kind.dim} of one factor is cut ({sum(kind.segments)} rows on each rank), "
                f"and it is multiplied with a dimension of {size} rows which are the same on all "
                "ranks",
                dim=kind.dim,
                sizes=(sum(kind.segments), size),
            )
        beside_sharded(call, [whole])
    if label in result:
        return replace(kind, dim=list(result).index(label))
    if kind.rows is not None:
        raise call.mismatch(
            f"dim {kind.dim} is contracted, which is padded to more than {kind.rows} rows",
            rows=kind.rows,
        )
    if kind.stack or kind.is_copied:
        held = f"copied on {kind.copies} ranks" if kind.is_copied else "padded for odd lengths"
        raise call.mismatch(
            f"dim {kind.dim} is contracted, of which blocks are {held}", copies=kind.copies
        )
    return Partial()


def _of_equals(call: Call, first: Operand, second: Operand) -> Type:
    kinds = [first[1], second[1]]
    if Partial() not in kinds:
        return join_equal(call, [first, second])
    other = kinds[1] if kinds[0] == Partial() else kinds[0]
    if other in (Free(()), Constant()):
        return Partial()
    raise call.mismatch(f"a partial sum is multiplied with a value that is {other}")


def _with_bias(call: Call, product: Type, factors: Sequence[Operand], bias: Operand) -> Type:
    if isinstance(product, Partial) or isinstance(bias[1], Partial):
        if product == bias[1]:
            return product
        raise call.mismatch(
            "the product is a partial sum and the bias is not (or the other way round): the bias "
            "would be added once for each rank"
        )
    if isinstance(product, Sharded):
        out = call.outputs[0]
        return broadcast(call, [(out, product), bias], out.shape)
    return join_equal(call, [*factors, bias])


def _matrices(names: tuple[str, str], labels: tuple[str, str], result: str) -> Rule:
    def rule(call: Call) -> Type:
        first, second = (call.operand(name) for name in names)
        product = contract(call, (first, second), labels, result)
        bias = call.given.get("self") if "self" not in names else None
        if not isinstance(bias, Tensor):
            return product
        return _with_bias(call, product, (first, second), call.operand("self"))

    return rule


def _batch(tensor: Tensor) -> list[Hashable]:
    """Labels of the batch dimensions, counted from the right so that they broadcast."""
    return list(range(tensor.dim() - 2, 0, -1))


def matmul(call: Call) -> Type:
    """The rule of `torch.matmul` as a whole, before it is made of views and `bmm`."""
    first, second = call.operand("input"), call.operand("other")
    left, right = first[0], second[0]
    labels = [*_batch(left), *("mk" if left.dim() > 1 else "k")]
    others = [*_batch(right), *("kn" if right.dim() > 1 else "k")]
    batch = max(_batch(left), _batch(right), key=len)
    result = [*batch, *(one for one in "mn" if one in labels or one in others)]
    return contract(call, (first, second), (labels, others), result)


def linear(call: Call) -> Type:
    """The rule of `torch.nn.functional.linear` as a whole."""
    first, second = call.operand("input"), call.operand("weight")
    rows = list(range(first[0].dim() - 1, 0, -1))
    others = ["n", "k"] if second[0].dim() > 1 else ["k"]
    result = [*rows, "n"] if second[0].dim() > 1 else rows
    product = contract(call, (first, second), ([*rows, "k"], others), result)
    if not isinstance(call.given.get("bias"), Tensor):
        return product
    return _with_bias(call, product, (first, second), call.operand("bias"))


def attention(call: Call) -> Sequence[Type]:
    """The rule of scaled dot-product attention: batch and heads may be cut."""
    named = call.named()
    operands = [(one, kind) for _, one, kind in named]
    cut = [(name, one, kind) for name, one, kind in named if isinstance(kind, Sharded)]
    if not cut:
        return [join_equal(call, operands)] * len(call.outputs)
    out = call.outputs[0]
    for name, one, kind in cut:
        if kind.dim - one.dim() >= -2:
            raise call.mismatch(
                f"dim {kind.dim} of {name} is cut, along which the attention is computed",
                dim=kind.dim,
            )
    query, kind = call.operand("query")
    if not isinstance(kind, Sharded):
        raise call.mismatch(f"{cut[0][0]} is cut and the query is not")
    for name, one, other in named:
        if name == "query":
            continue
        at = kind.dim - query.dim() + one.dim()
        if isinstance(other, Sharded):
            grouped = len(kind.segments) == len(other.segments) == 1 and at == one.dim() - 3
            fewer = name in ("key", "value") and grouped and other.dim == at
            if not (fewer and not query.shape[kind.dim] % one.shape[at]):
                same(call, kind, other, (kind.dim, other.dim - one.dim() + query.dim()))
        elif at >= 0 and one.shape[at] not in _fitting(other, kind):
            raise call.mismatch(
                f"dim {kind.dim} of the query is cut, and dim {at} of {name}, of size "
                f"{one.shape[at]}, is the same on all ranks",
                dim=at,
                size=one.shape[at],
            )
    beside_sharded(call, [one for one in operands if not isinstance(one[1], Sharded)])
    return [
        kind
        if one is out or (one.dim() > kind.dim and one.shape[kind.dim] == query.shape[kind.dim])
        else Free(())
        for one in call.outputs
    ]


def _fitting(kind: Type, cut: Sharded) -> tuple[int, ...]:
    return (1, sum(cut.segments)) if isinstance(kind, Constant) else (1,)


WHOLE: dict[str, tuple[tuple[str, ...], Callable[[Call], Type | Sequence[Type]]]] = {
    "linear": (("input", "weight", "bias"), linear),
    "matmul": (("input", "other"), matmul),
    "scaled_dot_product_attention": (("query", "key", "value", "attn_mask"), attention),
}
"""Functions that are typed as a whole: the names of their first arguments, and the rule."""

RULES: dict[str, Rule] = {
    "mm": _matrices(("self", "mat2"), ("mk", "kn"), "mn"),
    "bmm": _matrices(("self", "mat2"), ("bmk", "bkn"), "bmn"),
    "mv": _matrices(("self", "vec"), ("mk", "k"), "m"),
    "dot": _matrices(("self", "tensor"), ("k", "k"), ""),
    "addmm": _matrices(("mat1", "mat2"), ("mk", "kn"), "mn"),
    "baddbmm": _matrices(("batch1", "batch2"), ("bmk", "bkn"), "bmn"),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        attention,
    ),
}
