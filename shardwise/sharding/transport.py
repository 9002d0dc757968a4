"""Which primitive of torch.distributed serves which movement, per backend; nothing is tuned later.

[Note: gloo]
Medians in ms on two cores, torch 2.13, four ranks with one thread each, 16 MB (1 MB, 64 KB) a rank:

    gather          all_gather_into_tensor  125 (7.0, 4.1)   scratch n * L
                    n broadcasts             48 (5.6, 3.0)   no scratch             <- large
                    all_to_all, copied       87 (7.0, 2.2)   scratch n * L          <- small
    reduce-scatter  reduce_scatter_tensor   195 (12, 5.8)    not in rank order
                    all_to_all + sum         62 (5.2, 1.5)   scratch n * L          <- small
                    isend/irecv in pieces    57 (7.4, 3.8)   scratch n * L / 4      <- large
    all-reduce      all_reduce               30 (8.5, 6.3)   not in rank order from 3 ranks on
                    reduce-scatter, gather   37 (6.4, 3.5)   in rank order          <- large
                    gather, sum             267 (9.8, 1.3)   in rank order          <- small

Two ranks, a stack of 2 (8, 21, 40) MB: all_to_all + sum 2.3 (7.4, 18, 32), pieces 9.5 (12, 18, 30).
So from 16 MB on pieces cost no time and save a scratch as large as the stack.

Both reduce-scatters that are used add in rank order, and sums in rank order are the same bits as
one process that adds the parts in turn. Operations in flight on one group keep their order; the
order must not depend on the rank, since gloo pairs whatever meets without an error.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.sharding.compat import joined_group, set_group_timeout, timeout_of
from shardwise.sharding.movement import Pending, Transport, finish

_SMALL_BYTES = 256 * 1024
_WHOLE_STACK_BYTES = 16 * 1024 * 1024
_PIECES = 8
_PIECES_IN_FLIGHT = 2


def all_reduce_scratch_bytes(nbytes: int, ranks: int) -> int:
    """What a gloo all-reduce takes beside the buffer that it sums."""
    if nbytes <= _SMALL_BYTES:
        return 2 * ranks * nbytes
    return scratch_bytes(nbytes, ranks) + nbytes // ranks


def stays_in_flight(stack_bytes: int) -> bool:
    """Whether a gloo reduce-scatter of a whole stack returns before it has ended."""
    return stack_bytes <= _WHOLE_STACK_BYTES


def scratch_bytes(stack_bytes: int, ranks: int) -> int:
    """What a gloo reduce-scatter of a whole stack receives into before it is summed."""
    if stays_in_flight(stack_bytes):
        return stack_bytes
    return stack_bytes // ranks // _PIECES * _PIECES_IN_FLIGHT * (ranks - 1)


class Alone:
    """The transport of a world of one."""

    def all_gather(self, out: Tensor, mine: Tensor, axis: str) -> None:
        """Copy."""
        out.copy_(mine)

    def reduce_scatter(self, out: Tensor, whole: Tensor, axis: str) -> None:
        """Copy."""
        out.copy_(whole)

    def all_reduce(self, whole: Tensor, axis: str) -> None:
        """Nothing to add."""

    def all_to_all(
        self, out: Tensor, mine: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Copy."""
        out.copy_(mine)

    def broadcast(self, whole: Tensor) -> None:
        """Nothing to fetch."""

    def gather_objects(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]


class _All:
    """Several works in flight, and a source that must live until they have ended."""

    def __init__(self, works: Sequence[Any], source: Tensor | None = None) -> None:
        self._works = works
        self._source = source

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._source = None


class _Exchanged:
    """A reduce-scatter whose rows are on their way; they are summed when they have arrived."""

    def __init__(self, work: Any, out: Tensor, received: Tensor) -> None:
        self._work = work
        self._out = out
        self._received: Tensor | None = received

    def wait(self) -> None:
        """Wait for the rows, and sum them once."""
        if self._received is not None:
            self._work.wait()
            _add_rows(self._out, self._received.unbind(0))
            self._received = None


class _Grouped:
    """Process groups by mesh axis, and one of all ranks of the job."""

    def __init__(
        self, groups: Mapping[str, dist.ProcessGroup], everyone: dist.ProcessGroup
    ) -> None:
        self._groups = groups
        self._everyone = everyone
        self._sizes = {axis: group.size() for axis, group in groups.items()}
        self._places = {axis: group.rank() for axis, group in groups.items()}

    def all_to_all(
        self, out: Tensor, mine: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """See `Transport.all_to_all`."""
        dist.all_to_all_single(out, mine, list(received), list(sent), group=self._everyone)

    def broadcast(self, whole: Tensor) -> None:
        """See `Transport.broadcast`."""
        dist.broadcast(whole, group_src=0, group=self._everyone)

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Transport.gather_objects`."""
        values: list[Any] = [None] * self._everyone.size()
        dist.all_gather_object(values, value, group=self._everyone)
        return values

    def beside(self) -> Transport:
        """See `make_beside`."""
        kind = "cuda" if dist.get_backend(self._everyone) == "nccl" else "cpu"
        waits = timeout_of(self._everyone, kind)
        made: Any = dist.new_group(backend="gloo", timeout=waits)
        return Gloo({}, made)


class Gloo(_Grouped):
    """CPU ranks over gloo; see [Note: gloo]."""

    def all_gather(self, out: Tensor, mine: Tensor, axis: str) -> Pending:
        """See `Transport.all_gather`."""
        group, size = self._groups[axis], self._sizes[axis]
        rows = out.view(size, -1)
        mine = mine.reshape(-1)
        if mine.nbytes <= _SMALL_BYTES:
            source = mine.expand(size, -1).contiguous()
            work = dist.all_to_all_single(
                rows.view(-1), source.view(-1), group=group, async_op=True
            )
            return _All([work], source)
        rows[self._places[axis]].copy_(mine)
        return _All(
            [
                dist.broadcast(row, group_src=place, group=group, async_op=True)
                for place, row in enumerate(rows)
            ]
        )

    def reduce_scatter(self, out: Tensor, whole: Tensor, axis: str) -> Pending | None:
        """See `Transport.reduce_scatter`."""
        rows = whole.view(self._sizes[axis], -1)
        if not stays_in_flight(whole.nbytes):
            self._reduce_in_pieces(out.view(-1), rows, axis)
            return None
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(
            received.view(-1), rows.view(-1), group=self._groups[axis], async_op=True
        )
        return _Exchanged(work, out.view(-1), received)

    def _reduce_in_pieces(self, out: Tensor, rows: Tensor, axis: str) -> None:
        """Exchange column pieces of the rows, two in flight, and add each as it arrives.

        Works of `isend` are held until the end: gloo loses a message whose work is dropped.
        """
        group, place = self._groups[axis], self._places[axis]
        peers = [rank for rank in range(len(rows)) if rank != place]
        step = -(-out.numel() // _PIECES)
        spans = [slice(a, min(a + step, out.numel())) for a in range(0, out.numel(), step)]
        scratch = out.new_empty((_PIECES_IN_FLIGHT, len(peers), step))
        sends: list[Any] = []

        def post(number: int) -> tuple[list[Any], list[Tensor]]:
            span = spans[number]
            width = span.stop - span.start
            parts = list(scratch[number % _PIECES_IN_FLIGHT, :, :width])
            receives = [
                dist.irecv(part, group=group, group_src=peer)
                for peer, part in zip(peers, parts, strict=True)
            ]
            sends.extend(dist.isend(rows[p, span], group=group, group_dst=p) for p in peers)
            parts.insert(place, rows[place, span])
            return receives, parts

        in_flight = [post(number) for number in range(min(_PIECES_IN_FLIGHT, len(spans)))]
        for number, span in enumerate(spans):
            receives, parts = in_flight.pop(0)
            for receive in receives:
                receive.wait()
            _add_rows(out[span], parts)
            if number + _PIECES_IN_FLIGHT < len(spans):
                in_flight.append(post(number + _PIECES_IN_FLIGHT))
        for send in sends:
            send.wait()

    def all_reduce(self, whole: Tensor, axis: str) -> Any:
        """See `Transport.all_reduce`."""
        size = self._sizes[axis]
        flat = whole.view(-1)
        if size == 2:
            return dist.all_reduce(flat, group=self._groups[axis], async_op=True)
        if flat.nbytes > _SMALL_BYTES:
            body = flat[: flat.numel() // size * size]
            mine = flat.new_empty(body.numel() // size)
            finish(self.reduce_scatter(mine, body, axis))
            self.all_gather(body, mine, axis).wait()
            flat = flat[body.numel() :]
        if flat.numel():
            rows = flat.new_empty((size, flat.numel()))
            self.all_gather(rows, flat, axis).wait()
            _add_rows(flat, rows.unbind(0))
        return None


class Native(_Grouped):
    """Backends whose own collectives are the best there are (NCCL, and fake groups)."""

    def all_gather(self, out: Tensor, mine: Tensor, axis: str) -> Any:
        """See `Transport.all_gather`."""
        return _gather(out.view(-1), mine.view(-1), group=self._groups[axis], async_op=True)

    def reduce_scatter(self, out: Tensor, whole: Tensor, axis: str) -> Any:
        """See `Transport.reduce_scatter`; the order of the sum is the backend's."""
        return _scatter(out.view(-1), whole.view(-1), group=self._groups[axis], async_op=True)

    def all_reduce(self, whole: Tensor, axis: str) -> Any:
        """See `Transport.all_reduce`; the order of the sum is the backend's."""
        # The method of the group: what `dist.all_reduce` does around it takes the host 20 us more.
        return self._groups[axis].allreduce([whole])


# torch 2.13 renamed these two and warns about the older names; 2.11 has only the older ones.
_names = vars(dist)
_gather: Any = _names.get("all_gather_single") or _names["all_gather_into_tensor"]
_scatter: Any = _names.get("reduce_scatter_single") or _names["reduce_scatter_tensor"]


def _add_rows(out: Tensor, rows: Sequence[Tensor]) -> None:
    """Sum in row order; `out` may be the first of the rows, no other."""
    first, *others = rows
    out.copy_(first)
    for row in others:
        out.add_(row)


def make_transport(
    device_mesh: DeviceMesh,
    *,
    joins: Sequence[tuple[str, tuple[str, ...]]] = (),
    timeout: float | None = None,
) -> Transport:
    """The transport for the backend of a torch mesh, with a group for every axis that has peers.

    Args:
        device_mesh: over all ranks of the job.
        joins: names of axes that several axes make together, with these.
        timeout: seconds that a collective may wait, in groups of its own where the default group
            waits for another time; default: as long as one of the default group, where torch would
            give every axis its own 30 minutes.
    """
    default = dist.group.WORLD
    assert default is not None
    known = timeout_of(default, device_mesh.device_type)
    waits = known if timeout is None else datetime.timedelta(seconds=timeout)
    # torch types a new group as what a rank outside of it gets, too.
    made: Any = default if waits == known else dist.new_group(timeout=waits)
    everyone: dist.ProcessGroup = made
    groups: dict[str, dist.ProcessGroup] = {}
    for index, name in enumerate(device_mesh.mesh_dim_names or ()):
        if device_mesh.size(index) > 1:
            group = device_mesh.get_group(name)
            if group is default:
                group = everyone
            elif waits is not None:
                set_group_timeout(waits, group)
            groups[name] = group
    for name, parts in joins:
        joined = joined_group(device_mesh, parts)
        if waits is not None:
            set_group_timeout(waits, joined)
        groups[name] = joined
    backend = str(dist.get_backend())
    return Gloo(groups, everyone) if "gloo" in backend else Native(groups, everyone)


def make_beside(transport: Transport) -> Transport:
    """The exchanges of all ranks for another thread, on the host; see [Note: beside training].

    A collective: every rank calls it, in the same order as what else uses the job's groups.

    Args:
        transport: of training; that of a world of one serves itself.
    """
    return transport.beside() if isinstance(transport, _Grouped) else transport


def spans_processes(transport: Transport) -> bool:
    """Whether ranks are processes of a job, and not simulated or alone."""
    return isinstance(transport, _Grouped)
