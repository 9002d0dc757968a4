"""Dropout whose mask depends on no layout: `sw.dropout` and `sw.Dropout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.sharding.bits import block_elements, squares
from shardwise.sharding.errors import RandomError
from shardwise.sharding.functional import bound
from shardwise.transforms.draws import Draw, current_draws

# The golden ratio of 2^64: rows begin far from each other among the counters, so that an element's
# counter does not depend on how long the rows are (padding changes no mask).
_ROW_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    name: str = "",
    batch_dim: int | None = 0,
) -> Tensor:
    """Set elements to zero with probability `p` and divide the others by `1 - p`.

    Inside of a program the mask is a function of seed, step, place of the call and of the element's
    row in the global batch: gathered, it is the same for every mesh, number of ranks, level and
    number of micro-batches, and a continued state draws what the uninterrupted run draws. Nothing
    is saved for backward. Costs one packed all-gather of a number a step, and two to three times
    the time of torch's dropout on a CPU, in forward and in backward. Outside of a program it is
    torch's.

    Args:
        x: an activation; where tensor axes cut it, ranks cut the mask alike.
        p: probability of an element to be dropped.
        training: False returns `x`.
        name: what this call is for. Calls of one module without a name, or of one name, are told
            apart by their order.
        batch_dim: the dimension of `x` that holds the rows of the batch, or as many rows for each
            of them (`"(batch seq) embed"`). None: `x` is no part of the batch, such as a weight,
            and the mask is equal on all data ranks and for all micro-batches.

    Raises:
        RandomError: `p` is no probability, in an evaluation, where the dimension does not hold the
            rows of the batch, where the first pass over the model has met no dropout, or in a
            recomputation that has not restored the random state.

    References:
        Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    >>> dropout(torch.ones(3), 0.5, training=False)
    tensor([1., 1., 1.])
    """
    _check(p)
    x = bound(x)
    if not training or p == 0:
        return x
    draws = current_draws()
    if draws is None:
        return functional.dropout(x, p, training=True)
    draw = draws.draw(x, name, batch_dim)
    scale = 1 / (1 - p) if p < 1 else 0.0
    if draw is None or not x.numel():
        return x * scale
    return _Dropped.apply(x, draw, p, batch_dim or 0)


class Dropout(nn.Module):
    """`dropout` as a module, in the place of `nn.Dropout`; the identity in eval mode.

    Args:
        p: probability of an element to be dropped.
        batch_dim: as for `dropout`.

    Raises:
        RandomError: `p` is no probability.

    >>> Dropout(0.1)
    Dropout(p=0.1)
    """

    def __init__(self, p: float = 0.5, *, batch_dim: int | None = 0) -> None:
        super().__init__()
        _check(p)
        self.p = p
        self.batch_dim = batch_dim

    def forward(self, x: Tensor) -> Tensor:
        """Drop in training mode."""
        return dropout(x, self.p, training=self.training, batch_dim=self.batch_dim)

    def extra_repr(self) -> str:
        """Arguments."""
        return f"p={self.p}" + (f", batch_dim={self.batch_dim}" if self.batch_dim != 0 else "")


class _Dropped(torch.autograd.Function):
    """Masks its input, and in backward the gradient, from the same counters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Draw, p: float, dim: int) -> Tensor:
        ctx.draw, ctx.p, ctx.dim = draw, p, dim
        return masked(x, draw, p, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Dropped.apply(grads[0], ctx.draw, ctx.p, ctx.dim), None, None, None


def masked(x: Tensor, draw: Draw, p: float, dim: int = 0) -> Tensor:
    """`x` with elements dropped, block by block: no mask and no index exists as a whole.

    Args:
        x: not empty.
        draw: key and rows.
        p: probability of an element to be dropped.
        dim: the dimension that holds the rows.

    >>> masked(torch.ones(2, 4), Draw(7, 2, 0), 0.5)[1:].equal(masked(torch.ones(1, 4),
    ...     Draw(7, 1, 1), 0.5))
    True
    """
    grid = x.movedim(dim, 0).contiguous().view(draw.rows, -1)
    out = torch.empty_like(grid)
    positions = _positions(x, draw, dim)
    threshold = round(p * 2.0**32)
    scale = 1 / (1 - p) if p < 1 else 0.0
    for rows, columns in _blocks(grid.shape[0], grid.shape[1], block_elements(x.device)):
        counters = torch.arange(rows.start, rows.stop, device=x.device)
        counters = (counters + draw.first).mul_(_ROW_STRIDE).unsqueeze(1)
        counters = counters + positions(columns)
        dropped = squares(draw.key, counters) < threshold
        part = out[rows, columns]
        torch.mul(grid[rows, columns], scale, out=part)
        part.masked_fill_(dropped, 0)
    return out.view(x.movedim(dim, 0).shape).movedim(0, dim)


def _place_in_row(cut_dim: int, rows_dim: int) -> int:
    """Which dimension of a row a dimension of the tensor is; the rows' own one comes first.

    >>> [_place_in_row(at, 1) for at in range(3)]
    [1, 0, 2]
    """
    if cut_dim == rows_dim:
        return 0
    return cut_dim + 1 if cut_dim < rows_dim else cut_dim


def _positions(x: Tensor, draw: Draw, dim: int) -> Callable[[slice], Tensor]:
    """What gives the positions in the whole row, for columns of a block of it."""
    device = x.device
    if not draw.cuts:
        return lambda columns: torch.arange(columns.start, columns.stop, device=device)
    cuts = {_place_in_row(cut.dim, dim % x.ndim): cut for cut in draw.cuts}
    shape = (x.shape[dim] // draw.rows, *x.movedim(dim, 0).shape[1:])
    tables: list[Tensor | None] = []
    for at, size in enumerate(shape):
        table = None
        if at in cuts:
            table = torch.zeros(size, dtype=torch.int64, device=device)  # any will do for padding
            for run in cuts[at].runs:
                span = torch.arange(run.start, run.stop, device=device)
                table[run.at : run.at + run.count] = span
        tables.append(table)

    def positions(columns: slice) -> Tensor:
        left = torch.arange(columns.start, columns.stop, device=device)
        found, stride = torch.zeros_like(left), 1
        for at in reversed(range(len(shape))):
            index = left % shape[at]
            left = left // shape[at]
            table = tables[at]
            found += stride * (index if table is None else table[index])
            stride *= shape[at] if at not in cuts else cuts[at].size
        return found

    return positions


def _blocks(rows: int, columns: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut a grid into blocks of at most `size` elements: several rows, or parts of one."""
    high, wide = max(1, size // columns), min(columns, size)
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            yield slice(top, min(top + high, rows)), slice(left, min(left + wide, columns))


def _check(p: float) -> None:
    if not 0 <= p <= 1:
        raise RandomError(
            f"Dropout of {p} is no probability.",
            where="sw.dropout(x, p)",
            facts=f"p is {p}.",
            why="p is the probability of an element to be dropped.",
            fix="a number from 0 to 1",
            p=p,
        )
