"""Rules of reductions, of what runs along one dimension, and of norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from shardwise.transforms.activation_types import Constant, Free, Partial, Sharded, Type
from shardwise.transforms.type_rules import Call, Rule, beside_sharded, join_equal

LINEAR = ("sum", "mean", "cumsum", "flip", "roll", "tril", "triu", "diagonal")


def _dims(call: Call, ndim: int) -> set[int]:
    found = call.given.get("dim", call.given.get("dims"))
    if call.op in ("tril", "triu"):
        found = (-2, -1)
    elif isinstance(found, int):
        found = (found,)
    return {dim % ndim for dim in found} if found else set(range(ndim))


def _equal_or_partial(call: Call) -> Type:
    kind = call.of("self")
    if not isinstance(kind, Partial):
        return join_equal(call, [call.operand("self")])
    if call.op in LINEAR:
        return kind
    raise call.mismatch(f"{call.op} of a partial sum is not the sum of {call.op} over the ranks")


def _reduction(call: Call) -> Type | Sequence[Type]:
    kind = call.of("self")
    if not isinstance(kind, Sharded):
        return [_equal_or_partial(call)] * len(call.outputs)
    ndim = call.given["self"].dim()
    dims = _dims(call, ndim)
    if kind.dim not in dims:
        lost = 0 if call.given.get("keepdim") else sum(dim < kind.dim for dim in dims)
        return [replace(kind, dim=kind.dim - lost)] * len(call.outputs)
    if call.op == "sum" and not kind.may_be_padded and not kind.is_copied:
        return Partial()
    raise call.mismatch(
        f"{call.op} runs over dim {kind.dim}, of which each rank has only "
        f"{sum(kind.segments)} rows",
        dim=kind.dim,
        rows=sum(kind.segments),
    )


def _along(call: Call) -> Sequence[Type]:
    kind = call.of("self")
    if not isinstance(kind, Sharded):
        return [_equal_or_partial(call)] * len(call.outputs)
    if kind.dim not in _dims(call, call.given["self"].dim()):
        return [kind] * len(call.outputs)
    raise call.mismatch(
        f"{call.op} runs along dim {kind.dim}, of which each rank has only "
        f"{sum(kind.segments)} rows",
        dim=kind.dim,
        rows=sum(kind.segments),
    )


def _norm(call: Call) -> Sequence[Type]:
    """Layer norm and RMS norm: the last dimensions must be whole."""
    source, kind = call.operand("input")
    rest = call.operands(["weight", "bias"])
    if not isinstance(kind, Sharded):
        return [join_equal(call, [(source, kind), *rest])] * len(call.outputs)
    if kind.dim >= source.dim() - len(call.given["normalized_shape"]):
        raise call.mismatch(
            f"{call.op} normalises over dim {kind.dim}, of which each rank has only "
            f"{sum(kind.segments)} rows",
            dim=kind.dim,
            rows=sum(kind.segments),
        )
    if any(isinstance(other, Sharded) for _, other in rest):
        raise call.mismatch("the weight of a norm is cut, and the dimension that it scales is not")
    beside_sharded(call, rest)
    return [kind if _has(one, kind) else Free(()) for one in call.outputs]


def _has(output: Tensor, kind: Sharded) -> bool:
    return output.dim() > kind.dim and output.shape[kind.dim] == sum(kind.segments)


def _empty_like(call: Call) -> Type:
    """A new block has the cut of the old one."""
    kind = call.of("self")
    if isinstance(kind, Sharded):
        return kind
    return Free(()) if call.op.startswith("rand") else Constant()


def _constant(call: Call) -> Type:
    source = call.given.get("self")
    if isinstance(source, Tensor) and isinstance(call.of("self"), Sharded):
        kind = call.of("self")
        if tuple(source.shape) == tuple(call.outputs[0].shape):
            return kind
    return Constant()


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"),
            *("prod", "any", "all", "argmax", "argmin", "norm", "linalg_vector_norm"),
            *("logsumexp", "nansum", "median", "aminmax"),
        ),
        _reduction,
    ),
    **dict.fromkeys(
        (
            *("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp"),
            *("sort", "topk", "flip", "roll", "tril", "triu"),
        ),
        _along,
    ),
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
    **dict.fromkeys(
        (
            *("zeros_like", "ones_like", "full_like", "empty_like"),
            *("rand_like", "randn_like", "randint_like"),
        ),
        _empty_like,
    ),
    **dict.fromkeys(
        (
            *("zeros", "ones", "full", "empty", "empty_strided", "scalar_tensor"),
            *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
        ),
        _constant,
    ),
}
