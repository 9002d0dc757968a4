"""The one choke point through which tensors move between ranks; it executes, records and checks.

A `Collective` is what lowering predicts; `Mover` runs it on a `Transport` (a process group, the
simulation, or nothing) and refuses any call whose kind, axis or bytes were not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.sharding.collectives import Collective, all_reduce_bytes
from shardwise.sharding.errors import ImplicitCommError, RankError
from shardwise.sharding.lost import is_lost, lost_peers
from shardwise.sharding.mesh import Mesh


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Return when the result may be read."""
        ...


class Transport(Protocol):
    """What moves bytes; `None` as a result means that the call has already finished."""

    def all_gather(self, out: Tensor, mine: Tensor, axis: str) -> Pending | None:
        """Concatenate `mine` of every rank along `axis`, in rank order, into flat `out`."""
        ...

    def reduce_scatter(self, out: Tensor, whole: Tensor, axis: str) -> Pending | None:
        """Sum this rank's part of `whole` over the axis, in rank order, into flat `out`."""
        ...

    def all_reduce(self, whole: Tensor, axis: str) -> Pending | None:
        """Sum over the axis in place."""
        ...

    def all_to_all(
        self, out: Tensor, mine: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending | None:
        """Send each rank of the job its elements of flat `mine`, in rank order, into flat `out`."""
        ...

    def broadcast(self, whole: Tensor) -> None:
        """Overwrite with the values of rank 0 of the job."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks of the job, in rank order."""
        ...


class _Watched:
    """A collective in flight that says what is missing when it fails."""

    __slots__ = ("_mover", "_pending", "_position")

    def __init__(self, pending: Pending, mover: Mover, position: int) -> None:
        self._pending = pending
        self._mover = mover
        self._position = position

    def wait(self) -> None:
        """Return when the result may be read."""
        try:
            self._pending.wait()
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise self._mover.lose(error, self._position) from error


class Mover:
    """Runs predicted collectives for one rank, in order, and records what ran.

    Args:
        mesh: names and sizes of the axes.
        rank: position of this rank in the mesh.
        transport: what moves the bytes.
    """

    def __init__(self, mesh: Mesh, rank: int, transport: Transport) -> None:
        self.mesh = mesh
        self.rank = rank
        self.coords = mesh.coords(rank)
        self.transport = transport
        self.executed: list[Collective] = []
        self.busy = False
        self._sizes = {axis: mesh[axis] for axis in (*mesh, *(name for name, _ in mesh.joins))}
        self.call = "a call"  # what the user has called, for errors
        self._expected: tuple[Collective, ...] = ()
        self._lost: tuple[str, int | None] | None = None

    def begin(self, expected: Sequence[Collective]) -> None:
        """Start a call whose collectives are known."""
        self._expected = tuple(expected)
        self.executed = []

    def expect(self, more: Sequence[Collective]) -> None:
        """Add what is known only now."""
        self._expected = (*self._expected, *more)

    def amend(self, item: Collective) -> Collective:
        """Expect other bytes next: an activation is as large as its batch, which may change.

        Args:
            item: in the place of one of the same kind and axis.

        Returns:
            What is expected now, if that is the same; else the item.
        """
        position = len(self.executed)
        was = self._expected[position] if position < len(self._expected) else None
        if was is None or was is item or was == item:
            return was or item
        if replace(was, nbytes=item.nbytes, dtype=item.dtype) == item:
            self._expected = (*self._expected[:position], item, *self._expected[position + 1 :])
        return item

    def skip(self, items: Sequence[Collective]) -> None:
        """Leave out what comes next, as all peers of the axis do: activations of a skipped unit."""
        position = len(self.executed)
        assert self._expected[position : position + len(items)] == tuple(items)
        self._expected = self._expected[:position] + self._expected[position + len(items) :]

    @property
    def can_join(self) -> bool:
        """Whether what is left of a call can be run with nothing to give.

        What each rank sends in an all-to-all between plans is known to the exchange only.
        """
        rest = self._expected[len(self.executed) :]
        return self._lost is None and all(item.kind != "all_to_all" for item in rest)

    def finish_with_zeros(
        self, device: torch.device, items: Sequence[Collective | None] = ()
    ) -> None:
        """Run what is left of a call with nothing to give, after a failure on this rank.

        The other ranks are in the middle of the same list; they must not be left alone.

        Args:
            device: where tensors live.
            items: all collectives of the call in the sizes that the others use, None for those that
                they leave out; default: as predicted.

        Raises:
            RankError: peers were lost before, so nobody is there to be joined.
        """
        if self._lost is not None:
            raise self._lost_error(*self._lost)
        self._refit(items)
        for item in self._expected[len(self.executed) :]:
            size = self.mesh[item.axis]
            count = item.buffer_bytes(size) // item.dtype.itemsize
            whole = torch.zeros(count, dtype=item.dtype, device=device)
            if item.kind == "all_gather":
                finish(self.all_gather(whole, whole.new_zeros(count // size), item))
            elif item.kind == "reduce_scatter":
                finish(self.reduce_scatter(whole.new_zeros(count // size), whole, item))
            else:
                finish(self.all_reduce(whole, item))

    def _refit(self, items: Sequence[Collective | None]) -> None:
        """Expect the same as before in other sizes; what was skipped lies before what is left."""
        done = len(self.executed)
        left = self._expected[done:]
        fitted = tuple(items)[len(items) - len(left) :] if len(left) <= len(items) else ()
        pairs = zip(fitted, left, strict=False)
        if all(one is None or replace(one, nbytes=was.nbytes) == was for one, was in pairs):
            rest = (one for one in fitted if one is not None)
            self._expected = (*self._expected[:done], *rest) if fitted else self._expected

    def end(self) -> None:
        """Check that everything predicted has run."""
        if len(self.executed) != len(self._expected):
            missing = self._expected[len(self.executed)]
            raise ImplicitCommError(
                "A call ended before all its predicted collectives had run.",
                facts=[
                    f"ran {len(self.executed)} of {len(self._expected)}; next was",
                    str(missing),
                ],
                why="Collectives that run equal lowered.collectives(), on every rank.",
                fix="report this with the plan: it is a fault of shardwise",
                ran=len(self.executed),
                expected=len(self._expected),
            )

    def all_gather(self, out: Tensor, mine: Tensor, item: Collective) -> Pending | None:
        """See `Transport.all_gather`; `item` is the prediction."""
        self._check("all_gather", (self.mesh[item.axis] - 1) * mine.nbytes, item)
        return self._run(item, self.transport.all_gather, out, mine, item.axis)

    def reduce_scatter(self, out: Tensor, whole: Tensor, item: Collective) -> Pending | None:
        """See `Transport.reduce_scatter`; `item` is the prediction."""
        self._check("reduce_scatter", (self.mesh[item.axis] - 1) * out.nbytes, item)
        return self._run(item, self.transport.reduce_scatter, out, whole, item.axis)

    def all_reduce(self, whole: Tensor, item: Collective) -> Pending | None:
        """See `Transport.all_reduce`; `item` is the prediction."""
        self._check("all_reduce", all_reduce_bytes(whole.nbytes, self._sizes[item.axis]), item)
        return self._run(item, self.transport.all_reduce, whole, item.axis)

    def all_to_all(
        self,
        out: Tensor,
        mine: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        item: Collective,
    ) -> Pending | None:
        """See `Transport.all_to_all`; `item` is the prediction."""
        self._check("all_to_all", mine.nbytes, item)
        return self._run(item, self.transport.all_to_all, out, mine, received, sent)

    def lose(self, error: RuntimeError, position: int | None = None) -> RankError:
        """The error for peers that did not join; from now on this rank joins nothing more.

        Args:
            error: what the backend raised.
            position: of the collective; None: an exchange of objects.
        """
        self._lost = self._lost or (str(error), position)
        return self._lost_error(*self._lost)

    def _lost_error(self, text: str, position: int | None) -> RankError:
        peers: Sequence[int] = range(self.mesh.size)
        place, expected = "an exchange of objects", "all ranks tell what they have found"
        if position is not None:
            item = self.executed[position] if position < len(self.executed) else self._next
            place = f"collective {position} of {len(self._expected)}"
            expected = str(item)
            peers = self.mesh.peers(item.axis, self.rank) if item.axis in self.mesh else peers
        others = [peer for peer in peers if peer != self.rank]
        return lost_peers(
            text, rank=self.rank, peers=others, call=self.call, place=place, expected=expected
        )

    @property
    def _next(self) -> Collective:
        return self._expected[len(self.executed)]

    def _run(
        self, item: Collective, run: Callable[..., Pending | None], *args: Any
    ) -> Pending | None:
        position = len(self.executed)
        self.busy = True
        try:
            pending = run(*args)
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise self.lose(error, position) from error
        finally:
            self.busy = False
        self.executed.append(item)
        return None if pending is None else _Watched(pending, self, position)

    def _check(self, kind: str, nbytes: int, item: Collective) -> None:
        position = len(self.executed)
        expected = self._expected[position] if position < len(self._expected) else None
        same = expected is item or expected == item
        if same and kind == item.kind and nbytes == item.nbytes:
            return
        raise ImplicitCommError(
            f"Collective {position} is not the one that was predicted.",
            facts=[
                f"about to run  {Collective(kind, item.axis, nbytes, item.unit, item.reason)}",
                f"predicted     {expected or 'nothing more'}",
            ],
            why="Collectives that run equal lowered.collectives(), in order, on every rank.",
            fix="lower again with lower(..., batch=) so that the order of units is known",
            position=position,
            nbytes=nbytes,
        )


def gather(
    mover: Mover, mine: Tensor, stack: Tensor, items: Sequence[Collective]
) -> Pending | None:
    """Run `gather_items`; only the last collective may still be in flight on return."""
    part = mine
    for item in items[:-1]:
        whole = part.new_empty(part.numel() * mover.mesh[item.axis])
        finish(mover.all_gather(whole, part, item))
        part = whole
    return mover.all_gather(stack, part, items[-1])


def scatter(
    mover: Mover, stack: Tensor, items: Sequence[Collective]
) -> tuple[Tensor, Pending | None]:
    """Run `scatter_items`: this rank's flat part of the sum, which may still be in flight.

    Only the collective of a single axis may be: with several, what lies between is freed at once.
    """
    whole, pending = stack, None
    for item in items:
        part = whole.new_empty(whole.numel() // mover.mesh[item.axis])
        pending = mover.reduce_scatter(part, whole, item)
        if len(items) > 1:
            finish(pending)
            pending = None
        whole = part
    return whole, pending


def finish(pending: Pending | None) -> None:
    """Wait for a collective that may have finished already."""
    if pending is not None:
        pending.wait()


def packed_sum(mover: Mover, values: Tensor, items: Sequence[Collective]) -> Tensor:
    """Sum a vector of float64 scalars over mesh axes, added in rank order along each axis.

    Args:
        mover: the choke point.
        values: flat float64 vector.
        items: one collective per axis, from `packed_items`.

    Returns:
        The flat vector of sums, the same bits on every rank.
    """
    for item in items:
        size = mover.mesh[item.axis]
        stack = values.new_empty(size * values.numel())
        finish(mover.all_gather(stack, values, item))
        parts = stack.view(size, -1)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        values = total
    return values
