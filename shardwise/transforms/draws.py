"""What the calls of `sw.dropout` in one pass draw from, so that it depends on no layout.

[Note: draws]
A mask is keyed by the seed, the step, the place of the call (path of the running module, and the
call's own name), and how many calls this place has made before in the pass. Its counters are an
element's row in the global batch and its position in the whole row. So ranks (tensor axes too) and
micro-batches cut one mask, and nothing is saved for backward, which draws it again.

A recomputation must not count a call once more, and nobody tells an operation that it runs in one:
the checkpoint may be the user's own, around any part of a module, and of several calls the last one
comes first. What every recomputation does restore is the state of the default generator. So each
call draws a mark from it, which tells a new call from one that is known.

Operations find the pass they run in through a value of the thread. A pass belongs to one thread
(simulated ranks have one each) and to those that autograd starts for its backward, which inherit
the value. It is set for the length of a pass; without it `sw.dropout` is torch's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.sharding.bits import squares_key
from shardwise.sharding.collectives import Collective
from shardwise.sharding.compat import set_thread_value, thread_value
from shardwise.sharding.errors import RandomError
from shardwise.sharding.movement import Mover, finish
from shardwise.sharding.rng import key
from shardwise.transforms.micro import batch_rows
from shardwise.transforms.replaying import aside
from shardwise.transforms.tensor_context import Cut, DropoutCall, current_tensor_context

_NAME = "shardwise.draws"


@dataclass(frozen=True, slots=True)
class Draw:
    """What one call draws.

    Args:
        key: of the generator, irregular as `squares_key` makes it.
        rows: of the batch that the call has here; its elements are divided among them.
        first: the place of the first one in the global batch.
        cuts: of the tensor by tensor axes; positions in a row are those of the whole tensor.
    """

    key: int
    rows: int
    first: Tensor | int
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of the global batch a pass runs on.

    Args:
        count: None if the batch does not tell.
        first: place of the first one.
    """

    count: int | None
    first: Tensor | int


class Draws:
    """The draws of one training pass; see [Note: draws].

    Args:
        seed: of the state.
        step: of the state.
        rows: that the pass runs on; None if the first pass over the model showed no draw, so that
            ranks have not told each other how many rows they have.
        located: whether every module says when it runs, not just those that are `Dropout`.
    """

    def __init__(self, seed: int, step: int, rows: Rows | None, *, located: bool) -> None:
        self.place: str | None = None
        self._seed = seed
        self._step = step
        self._rows = rows
        self._located = located
        self._counts: Counter[tuple[str, str]] = Counter()
        self._known: dict[int, tuple[int, DropoutCall]] = {}
        self._turned = False

    def turn(self) -> None:
        """Say that forward is over: what comes now is known."""
        self._turned = True

    def draw(self, x: Tensor, name: str, batch_dim: int | None) -> Draw:
        """What a call draws; the same again if a recomputation repeats it.

        Raises:
            RandomError: the first pass has shown no such call, the dimension has no rows of the
                batch, or a recomputation has not restored the random state.
        """
        if self._rows is None or (self.place is None and not self._located):
            raise _unseen(self._where(name))
        mark = aside(_mark)
        found = self._known.get(mark)
        if found is None:
            if self._turned:
                raise _not_restored(self._where(name))
            found = self._known[mark] = self._next(name)
        number, call = found
        context = current_tensor_context()
        cuts = context.cuts_of(x, call) if context is not None else ()
        if batch_dim is None:
            return Draw(number, 1, 0, cuts)
        count = self._rows.count
        if count is None:
            raise _no_rows(self._where(name))
        if x.shape[batch_dim] % count:
            raise _other_rows(self._where(name), x, batch_dim, count)
        _check_rows(self._where(name), x, batch_dim, cuts)
        return Draw(number, count, self._rows.first, cuts)

    def _next(self, name: str) -> tuple[int, DropoutCall]:
        call = _call(self._counts, self.place, name)
        return squares_key(key(self._seed, self._step, "dropout", *call)), call

    def _where(self, name: str) -> str:
        module = "loss_fn" if self.place is None else f"module {self.place or '(root)'}"
        return module + (f", name {name!r}" if name else "")


class EvalDraws:
    """The draws of an evaluation: none."""

    place: str | None = None

    def draw(self, x: Tensor, name: str, batch_dim: int | None) -> Draw:
        """An evaluation draws nothing.

        Raises:
            RandomError: always.
        """
        raise RandomError(
            "sw.dropout(x, p) was called with training=True in program.eval.",
            where=f"module {self.place}" if self.place else "loss_fn, or a module called by it",
            facts=f"x has shape {tuple(x.shape)}" + (f", name is {name!r}" if name else ""),
            why="An evaluation is a function of the state: it has no step to key a mask by.",
            fix="sw.dropout(x, p, training=self.training), or the module sw.Dropout(p)",
            shape=tuple(x.shape),
        )


class TracedDraws:
    """Notes which draws a trace meets.

    Args:
        path: says which module runs, where tensor axes cut layers.

    Attributes:
        functional: whether one came from another module than `Dropout`.
    """

    def __init__(self, path: Callable[[], str | None] = lambda: None) -> None:
        self.place: str | None = None
        self.functional = False
        self._path = path
        self._counts: Counter[tuple[str, str]] = Counter()

    def draw(self, x: Tensor, name: str, batch_dim: int | None) -> None:
        """Fake tensors have no elements to drop; the context notes how they are cut."""
        self.functional |= self.place is None
        context = current_tensor_context()
        if context is None:
            return
        place = self.place if self.place is not None else self._path()
        call = _call(self._counts, place, name)
        _check_rows(f"module {call.place or '(root)'}", x, batch_dim, context.cuts_of(x, call))


AnyDraws = Draws | EvalDraws | TracedDraws


def current_draws() -> AnyDraws | None:
    """Those of the pass that this thread runs; None outside of any.

    >>> current_draws() is None
    True
    """
    return thread_value(_NAME)


@contextmanager
def drawing(draws: AnyDraws) -> Generator[None]:
    """Context of a pass."""
    around = current_draws()
    set_thread_value(_NAME, draws)
    try:
        yield
    finally:
        set_thread_value(_NAME, around)


def locate(module: nn.Module, path: str) -> None:
    """Have a module of the template say that it runs, to the draws of the pass."""
    run = module.forward

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        draws = current_draws()
        if draws is None:
            return run(*args, **kwargs)
        around, draws.place = draws.place, path
        try:
            return run(*args, **kwargs)
        finally:
            draws.place = around

    vars(module)["forward"] = forward


def micro_rows(
    mover: Mover, micros: Sequence[Any], items: Sequence[Collective], device: torch.device
) -> list[Rows]:
    """The rows that each micro-batch of this rank has in the global batch.

    Ranks come in the order in which `shard_batch` cuts, and on each its micro-batches in turn. One
    number along each axis, innermost first, is enough to know how many rows come before.

    Args:
        mover: the choke point.
        micros: of this rank.
        items: the collectives.
        device: where the numbers are gathered; the host does not wait for them.
    """
    found = [batch_rows(micro) for micro in micros]
    counts = [next(iter(rows)) if len(rows) == 1 else None for rows in found]
    own = sum(count or 0 for count in counts)
    first: Tensor | int = 0
    if items:
        total = torch.tensor([own], dtype=torch.float64, device=device)
        first = torch.zeros((), dtype=torch.int64, device=device)
        for item in items:
            parts = total.new_empty(mover.mesh[item.axis])
            finish(mover.all_gather(parts, total, item))
            first = first + parts[: mover.coords[item.axis]].sum().long()
            total = parts.sum().reshape(1)
    rows: list[Rows] = []
    for count in counts:
        rows.append(Rows(count, first))
        first = first + (count or 0)
    return rows


def _call(counts: Counter[tuple[str, str]], place: str | None, name: str) -> DropoutCall:
    """The next call of a place."""
    where = place if place is not None else "loss_fn"
    counts[where, name] += 1
    return DropoutCall(where, name, counts[where, name] - 1)


def _check_rows(where: str, x: Tensor, batch_dim: int | None, cuts: Sequence[Cut]) -> None:
    if batch_dim is not None and any(cut.dim == batch_dim % x.ndim for cut in cuts):
        raise _cut_rows(where, x, batch_dim)


def _mark() -> int:
    """A number that the default generator gives again where its state is restored."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _unseen(where: str) -> RandomError:
    return RandomError(
        "sw.dropout was called where the first pass over the model met none.",
        where=where,
        why="Masks are cut from one mask of the global batch, so ranks tell each other how many "
        "rows they have before forward, if the trace of the first pass has shown that it is used.",
        fix="use the module sw.Dropout(p), which is known without a trace, or call sw.dropout "
        "with the first batch too; what ended a trace early is in lowered.notes",
    )


def _no_rows(where: str) -> RandomError:
    return RandomError(
        "sw.dropout cannot tell the rows of the batch.",
        where=where,
        why="An element's mask depends on its row in the global batch; the tensors of this batch "
        "have none or differ in dimension 0.",
        fix="pass tensors of the same number of rows as the batch, or batch_dim=None if x is no "
        "part of the batch and its mask is to be equal on all ranks",
    )


def _other_rows(where: str, x: Tensor, batch_dim: int, rows: int) -> RandomError:
    size = x.shape[batch_dim]
    return RandomError(
        f"Dimension {batch_dim} of the input of sw.dropout does not hold the rows of the batch.",
        where=where,
        facts=f"x has shape {tuple(x.shape)}; {size} % {rows} rows == {size % rows}.",
        why="An element's mask depends on its row in the global batch, so each row of the batch "
        "has the same number of rows of x.",
        fix="name the dimension with batch_dim=, or batch_dim=None if x is no part of the batch "
        "and its mask is to be equal on all ranks",
        shape=tuple(x.shape),
        rows=rows,
    )


def _cut_rows(where: str, x: Tensor, batch_dim: int) -> RandomError:
    return RandomError(
        f"Dimension {batch_dim} of the input of sw.dropout holds the rows of the batch, and a "
        "tensor axis cuts it.",
        where=where,
        facts=f"x has shape {tuple(x.shape)} on this rank.",
        why="An element's mask depends on its row in the global batch, which is not known where "
        "another dimension is merged with the rows and cut.",
        fix="call sw.dropout before the dimensions are merged, on 'batch seq ...'",
        shape=tuple(x.shape),
        batch_dim=batch_dim,
    )


def _not_restored(where: str) -> RandomError:
    return RandomError(
        "sw.dropout was called in backward by a recomputation with other random numbers.",
        where=where,
        why="A recomputation has to repeat what forward has drawn, and is known by the state of "
        "the default generator.",
        fix="torch.utils.checkpoint.checkpoint(..., preserve_rng_state=True), its default, or "
        "sw.remat in the plan",
    )
