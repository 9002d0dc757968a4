"""Rules of views: where the sharded dimension goes.

The integers of a view are those of one rank: `view(batch, seq, 2, 16)` of a block of 32 is read as
two heads of each rank, and `view(batch, seq, 1, 32)` as one head of each. A dimension of which each
rank has one row is taken to merge with what comes after it. A cut in front of equal segments
(`q|k|v` as 3 x heads) stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from shardwise.transforms.activation_types import Constant, Partial, Sharded, Type
from shardwise.transforms.type_rules import Call, Rule, beside_sharded, join_equal


def _through(call: Call, name: str = "self") -> Sharded | Type:
    kind = call.of(name)
    if isinstance(kind, Sharded | Partial | Constant):
        return kind
    return join_equal(call, [call.operand(name)])


def _dim(value: int, ndim: int) -> int:
    return value % ndim if ndim else 0


def _view(call: Call) -> Type:
    kind = _through(call)
    if not isinstance(kind, Sharded):
        return kind
    before, after = tuple(call.given["self"].shape), tuple(call.outputs[0].shape)
    if before == after:
        return kind
    groups = _groups(before, after) if 0 not in before else None
    for olds, news in groups or ():
        if kind.dim not in olds:
            continue
        if len(olds) == len(news) == 1:
            return replace(kind, dim=news[0])
        ahead = math.prod(before[dim] for dim in olds if dim < kind.dim)
        behind = math.prod(before[dim] for dim in olds if dim > kind.dim)
        if kind.rows is not None:
            wide = [dim for dim in news if after[dim] != 1]
            if len(wide) == 1 and before[kind.dim] == after[wide[0]]:
                return replace(kind, dim=wide[0])  # dimensions of one row come or go around it
            break
        segments = tuple(segment * behind for segment in kind.segments) * ahead
        placed = _place(segments, [after[dim] for dim in news])
        if placed is not None and (not kind.mixed or len(placed[1]) == len(kind.mixed)):
            return replace(kind, dim=news[placed[0]], segments=placed[1])
    raise call.mismatch(
        f"a view from {before} to {after} does not keep a block of dim {kind.dim} together",
        dim=kind.dim,
        shapes_of_view=(before, after),
    )


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]] | None:
    """The dimensions that a view merges and splits, in runs of equal size."""
    groups: list[tuple[list[int], list[int]]] = []
    old = new = 0
    while old < len(before) or new < len(after):
        olds: list[int] = []
        news: list[int] = []
        if old < len(before):
            olds, old = [old], old + 1
        if new < len(after):
            news, new = [new], new + 1
        while (size := math.prod(before[dim] for dim in olds)) != (
            goal := math.prod(after[dim] for dim in news)
        ):
            if size < goal and old < len(before):
                olds, old = [*olds, old], old + 1
            elif size > goal and new < len(after):
                news, new = [*news, new], new + 1
            else:
                return None
        groups.append((olds, news))
    return groups


def _place(segments: tuple[int, ...], sizes: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """Which of the sizes that a dimension is split into is cut, and its segments."""
    if not sizes:
        return None
    if len(sizes) == 1:
        return 0, segments
    lead, rest = sizes[0], math.prod(sizes[1:])
    every, left = divmod(len(segments), lead)
    if len(segments) > 1 and not left and segments == segments[:every] * lead:
        inner = _place(segments[:every], sizes[1:])
        return None if inner is None else (inner[0] + 1, inner[1])
    if all(segment % rest == 0 for segment in segments):
        return 0, tuple(segment // rest for segment in segments)
    return None


def _permuted(call: Call, order: Sequence[int]) -> Type:
    kind = _through(call)
    if not isinstance(kind, Sharded):
        return kind
    return replace(kind, dim=list(order).index(kind.dim))


def _permute(call: Call) -> Type:
    ndim = call.given["self"].dim()
    return _permuted(call, [_dim(dim, ndim) for dim in call.given["dims"]])


def _transpose(call: Call) -> Type:
    ndim = call.given["self"].dim()
    order = list(range(ndim))
    first, second = (0, ndim - 1) if call.op == "t" else (call.given["dim0"], call.given["dim1"])
    if ndim:
        order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def _unsqueeze(call: Call) -> Type:
    kind = _through(call)
    if not isinstance(kind, Sharded):
        return kind
    at = _dim(call.given["dim"], call.outputs[0].dim())
    return replace(kind, dim=kind.dim + (at <= kind.dim))


def _squeeze(call: Call) -> Type:
    kind = _through(call)
    if not isinstance(kind, Sharded):
        return kind
    shape = call.given["self"].shape
    dims = call.given.get("dim")
    dims = range(len(shape)) if dims is None else dims
    dims = [dims] if isinstance(dims, int) else dims
    gone = {_dim(dim, len(shape)) for dim in dims if shape[dim] == 1}
    if kind.dim in gone:
        raise call.mismatch(
            f"dim {kind.dim} is squeezed, of which each rank has one row of its own", dim=kind.dim
        )
    return replace(kind, dim=kind.dim - sum(dim < kind.dim for dim in gone))


def _expand(call: Call) -> Type:
    kind = _through(call)
    if not isinstance(kind, Sharded):
        return kind
    before, after = call.given["self"].shape, call.outputs[0].shape
    dim = kind.dim + len(after) - len(before)
    if before[kind.dim] != after[dim]:
        raise call.mismatch(
            f"a block of {before[kind.dim]} rows is repeated to {after[dim]}",
            rows=(before[kind.dim], after[dim]),
        )
    return replace(kind, dim=dim)


def _cut(call: Call, kind: Sharded, start: int, stop: int) -> Type:
    """The rows from `start` to `stop` of a sharded dimension, which must be whole segments."""
    size = sum(kind.segments)
    if (start, stop) == (0, size):
        return kind
    bounds = [sum(kind.segments[:count]) for count in range(len(kind.segments) + 1)]
    if kind.rows is not None or start not in bounds or stop not in bounds or start >= stop:
        ends = "|".join(map(str, kind.segments))
        raise call.mismatch(
            f"rows {start} to {stop} of dim {kind.dim} cut through a segment: each rank has "
            f"{size} rows in segments {ends}",
            start=start,
            stop=stop,
            segments=kind.segments,
        )
    kept = slice(bounds.index(start), bounds.index(stop))
    mixed = kind.mixed[kept]
    if len(set(mixed)) == 1:
        return replace(kind, segments=kind.segments[kept], copies=mixed[0], mixed=())
    return replace(kind, segments=kind.segments[kept], mixed=mixed)


def _slice(call: Call) -> Type:
    kind = _through(call)
    ndim = call.given["self"].dim()
    if not isinstance(kind, Sharded) or _dim(call.given.get("dim", 0), ndim) != kind.dim:
        return kind
    size = sum(kind.segments)
    start, stop, step = slice(
        call.given.get("start"), call.given.get("end"), call.given.get("step", 1)
    ).indices(size)
    if step != 1:
        raise call.mismatch(
            f"every {step}th row of dim {kind.dim} is taken, of which each rank has a block",
            step=step,
        )
    return _cut(call, kind, start, stop)


def _split(call: Call) -> Sequence[Type]:
    kind = _through(call)
    ndim = call.given["self"].dim()
    if not isinstance(kind, Sharded) or _dim(call.given.get("dim", 0), ndim) != kind.dim:
        return [kind] * len(call.outputs)
    found: list[Type] = []
    start = 0
    for output in call.outputs:
        stop = start + output.shape[kind.dim]
        found.append(_cut(call, kind, start, stop))
        start = stop
    return found


def _select(call: Call) -> Type | Sequence[Type]:
    kind = _through(call)
    if isinstance(kind, Sharded):
        at = _dim(call.given.get("dim", 0), call.given["self"].dim())
        if at == kind.dim:
            raise call.mismatch(
                f"one row of dim {at} is taken, of which each rank has a block of "
                f"{sum(kind.segments)}",
                dim=at,
                rows=sum(kind.segments),
            )
        kind = replace(kind, dim=kind.dim - (at < kind.dim))
    return [kind] * len(call.outputs) if call.op == "unbind" else kind


def _is_nothing(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and not tensor.shape[0]


def _cat(call: Call) -> Type:
    operands = [one for one in call.operands(["tensors"]) if not _is_nothing(one[0])]
    kinds = [kind for _, kind in operands]
    if kinds and all(isinstance(kind, Partial) for kind in kinds):
        return Partial()
    cut = [kind for kind in kinds if isinstance(kind, Sharded)]
    if not cut:
        return join_equal(call, operands)
    if any(kind.dim != cut[0].dim for kind in cut):
        raise call.mismatch(
            f"the inputs are sharded on dims {[kind.dim for kind in cut]}",
            dims=tuple(kind.dim for kind in cut),
        )
    first = min(cut, key=lambda kind: kind.copies)
    stacked = call.op == "stack"
    ndim = call.outputs[0].dim()
    at = _dim(call.given.get("dim", 0), ndim)
    rest = [one for one in operands if not isinstance(one[1], Sharded)]
    along = at == cut[0].dim and not stacked
    if (along and rest) or any(not isinstance(kind, Constant) for _, kind in rest):
        raise call.mismatch(
            f"a block of dim {cut[0].dim} and a value that is the same on all ranks are put "
            f"together along dim {at}",
            dim=at,
        )
    beside_sharded(call, rest)
    if along:
        if any(kind.may_be_padded or kind.mixed or kind.copies != first.copies for kind in cut):
            raise call.mismatch(
                "blocks with padding, or with other copies, are put together along their dimension"
            )
        return replace(first, dim=at, segments=tuple(s for kind in cut for s in kind.segments))
    if len({(kind.segments, kind.rows) for kind in cut}) > 1:
        raise call.mismatch(
            f"the inputs are cut differently: {', '.join(map(str, cut))}",
            segments=tuple(kind.segments for kind in cut),
        )
    return replace(first, dim=first.dim + (stacked and at <= first.dim))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), _view),
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    **dict.fromkeys(
        ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"), _split
    ),
    "select": _select,
    "unbind": _select,
    "cat": _cat,
    "stack": _cat,
}
