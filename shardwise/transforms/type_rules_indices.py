"""Rules of lookups: the index is the same on all ranks, and the dimension it looks in is whole."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from shardwise.transforms.activation_types import Partial, Sharded, Type
from shardwise.transforms.type_rules import (
    Call,
    Operand,
    Rule,
    beside_sharded,
    broadcast,
    join_equal,
)


def _source(call: Call, name: str, index: list[Operand]) -> Sharded | None:
    """The cut of what is looked up in, if it is cut; the index must be whole then."""
    kind = call.of(name)
    if not isinstance(kind, Sharded):
        return None
    if any(isinstance(other, Sharded | Partial) for _, other in index):
        raise call.mismatch("the index differs between ranks, and so does what it looks up in")
    return kind


def _cut_through(call: Call, kind: Sharded) -> Exception:
    rows = sum(kind.segments)
    return call.mismatch(
        f"rows of dim {kind.dim} are looked up, of which each rank has only {rows}",
        dim=kind.dim,
        rows=rows,
    )


def _embedding(call: Call) -> Type:
    weight, index = call.operand("weight"), call.operand("indices")
    kind = _source(call, "weight", [index])
    if kind is not None:
        if kind.dim == 0:
            raise _cut_through(call, kind)
        beside_sharded(call, [index])
        return replace(kind, dim=index[0].dim())
    if isinstance(index[1], Sharded):
        beside_sharded(call, [weight])
        return index[1]
    return join_equal(call, [weight, index])


def _index_select(call: Call) -> Type:
    index = call.operands(["index"])
    kind = _source(call, "self", index)
    if kind is None:
        return join_equal(call, call.operands())
    if call.given["dim"] % call.given["self"].dim() == kind.dim:
        raise _cut_through(call, kind)
    beside_sharded(call, index)
    return kind


def _gather(call: Call) -> Type:
    """The index has an entry for each entry of the result, so both are cut alike."""
    source, kind = call.operand("self")
    index, other = call.operand("index")
    if not isinstance(kind, Sharded) or not isinstance(other, Sharded):
        return join_equal(call, [(source, kind), (index, other)])
    if kind.dim == call.given["dim"] % source.dim():
        raise _cut_through(call, kind)
    return broadcast(call, [(source, kind), (index, other)], index.shape)


def _index(call: Call) -> Type:
    """`x[i, :, j]`: the dimensions that are indexed together become those of the index."""
    given: list[Tensor | None] = list(call.given["indices"])
    index = call.operands(["indices"])
    kind = _source(call, "self", index)
    if kind is None:
        return join_equal(call, call.operands())
    dims: list[int] = []
    at = 0
    for one in given:
        wide = 1 if one is None or not _is_mask(one) else one.dim()
        dims += range(at, at + wide) if one is not None else []
        at += wide
    if kind.dim in dims:
        raise _cut_through(call, kind)
    ndim = call.given["self"].dim()
    beside_sharded(call, index)
    # Indices with a whole dimension between them put theirs in front.
    together = dims == list(range(dims[0], dims[-1] + 1))
    wide = call.outputs[0].dim() - (ndim - len(dims))
    before = kind.dim - sum(dim < kind.dim for dim in dims)
    moved = before + wide if not together or kind.dim > dims[0] else before
    return replace(kind, dim=moved)


def _is_mask(index: Tensor) -> bool:
    return str(index.dtype) in ("torch.bool", "torch.uint8")


RULES: dict[str, Rule] = {
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "index": _index,
}
