"""Do all ranks make the same call and run the same collectives: the check of `bind(debug=True)`.

[Note: two exchanges a call]
Before a call ranks tell each other what they call, at which step, and a hash of the collectives
that they are about to run; so another call or another order is an error before a byte moves, and
not a wait for ever. Afterwards they tell a hash of what ran, how the call ended and what it
reported. Only when hashes differ are whole lists exchanged, to name the first collective that does.
Without debug there is no exchange, and only a rank that has lost its peers says where it was.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwise.sharding.collectives import Collective
from shardwise.sharding.errors import RankError
from shardwise.sharding.lost import is_lost
from shardwise.sharding.movement import Mover
from shardwise.transforms.metrics import Metrics

T = TypeVar("T")


class Opening(NamedTuple):
    """What a rank tells before a call; `digest` is of the collectives that it expects."""

    call: str
    digest: str


class Closing(NamedTuple):
    """What a rank tells after a call; `failure` is empty if there was none."""

    digest: str
    failure: str
    reported: str


def watched(mover: Mover, call: str, step: int | None, run: Callable[[], T]) -> T:
    """Run a call, and have a rank that loses its peers say in which call and where.

    Args:
        mover: the choke point.
        call: what the user has called.
        step: number of steps that the state has taken, if there is a state.
        run: the call.

    Raises:
        RankError: this rank has lost its peers.
    """
    mover.call = call if step is None else f"{call} {step}"
    try:
        return run()
    except RuntimeError as error:
        # Collectives of the schedule explain themselves; this is an exchange of objects.
        if not is_lost(error):
            raise
        raise mover.lose(error) from error


def agreed(
    mover: Mover,
    run: Callable[[], T],
    *,
    predicted: Sequence[Collective],
    device: torch.device,
) -> T:
    """Run a call between the two exchanges; see [Note: two exchanges a call].

    Args:
        mover: the choke point; it knows the name of the call.
        run: the call; its result or exception is passed on when all ranks agree.
        predicted: the collectives that this rank expects.
        device: where tensors live.

    Raises:
        RankError: ranks call different functions, run other collectives, or end differently.
    """
    where = mover.call
    openings: list[Opening] = mover.transport.gather_objects(Opening(where, _digest(predicted)))
    check_calls([one.call for one in openings])
    _check_lists(mover, openings, predicted, f"{where}, before it began")
    failure: Exception | None = None
    result: Any = None
    try:
        result = run()
    except Exception as error:
        if not mover.can_join:
            raise
        mover.finish_with_zeros(device)
        failure = error
    ran = tuple(mover.executed)
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    about = Closing(_digest(ran), text, _reported(result))
    try:
        closings: list[Closing] = mover.transport.gather_objects(about)
        if failure is not None:
            raise failure
        _check_failures(closings, where)
        _check_lists(mover, closings, ran, f"{where}, after it had run")
        _check_reports(closings, where)
    finally:
        del failure  # its traceback holds this frame
    return result


def _digest(items: Sequence[Collective]) -> str:
    text = "\n".join(f"{item} {item.dtype}" for item in items)
    return hashlib.sha256(text.encode()).hexdigest()


def _reported(result: Any) -> str:
    """What all ranks must have found alike, with every digit."""
    if isinstance(result, tuple):
        return next((_reported(part) for part in result if isinstance(part, Metrics)), "")
    if not isinstance(result, Metrics):
        return ""
    numbers: dict[str, Any] = {"loss": result.loss, "tokens": result.tokens, **result.aux}
    numbers |= {} if result.grad_norm is None else {"grad_norm": result.grad_norm}
    numbers |= result.group_norms
    words = [f"{name}={_digits(value)}" for name, value in numbers.items()]
    return f"applied={result.applied} skipped={result.skipped_steps} {' '.join(words)}"


def _digits(value: Any) -> str:
    return repr(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)


def check_calls(calls: Sequence[str]) -> None:
    """Check that all ranks make one call, each told with the step that its state is at.

    Raises:
        RankError: they do not; on every rank.

    >>> check_calls(["step 3", "step 3"])
    """
    other = next((rank for rank, one in enumerate(calls) if one != calls[0]), None)
    if other is None:
        return
    raise RankError(
        "Ranks do not make the same call.",
        where=f"rank {other} against rank 0",
        facts=[f"rank {rank}: program.{call}" for rank, call in enumerate(calls)],
        why="All ranks call the functions of a program in the same order, at the same step. "
        "Nothing has run; the states are unchanged.",
        fix="look for Python branches that differ by rank; ranks that run out of batches stop "
        "together with program.agree(...)",
        rank=other,
        calls=tuple(calls),
    )


def _check_lists(
    mover: Mover,
    told: Sequence[Opening] | Sequence[Closing],
    items: Sequence[Collective],
    where: str,
) -> None:
    digests = [one.digest for one in told]
    if len(set(digests)) == 1:
        return
    lists: list[list[str]] = mover.transport.gather_objects(
        [f"{item} {item.dtype}" for item in items]
    )
    other = next(rank for rank, one in enumerate(digests) if one != digests[0])
    pairs = itertools.zip_longest(lists[0], lists[other])
    position = next(index for index, (one, two) in enumerate(pairs) if one != two)
    raise RankError(
        f"Rank {other} does not run the collectives of rank 0: number {position} differs.",
        where=where,
        facts=[
            f"rank {rank}: {' '.join(_item(one, position).split())} (of {len(one)})"
            for rank, one in enumerate(lists)
        ],
        why="Ranks walk one list of collectives; with different ones tensors reach wrong places. "
        + ("Nothing has run." if "before" in where else "The states are not to be trusted."),
        fix="lower the same plan, with the same batch= and module, on every rank",
        rank=other,
        position=position,
    )


def _item(items: Sequence[str], position: int) -> str:
    return items[position] if position < len(items) else "nothing more"


def _check_failures(closings: Sequence[Closing], where: str) -> None:
    failed = [rank for rank, one in enumerate(closings) if one.failure]
    if not failed:
        return
    raise RankError(
        f"Rank {failed[0]} failed in {where}, and this rank did not.",
        where=f"rank {failed[0]} of {len(closings)}",
        facts=closings[failed[0]].failure.splitlines(),
        why="A call succeeds on all ranks or on none; after a failure in the middle of an update "
        "the states are not to be trusted.",
        fix="see the failure of that rank above, and go on from a checkpoint",
        rank=failed[0],
        failed=len(failed),
    )


def _check_reports(closings: Sequence[Closing], where: str) -> None:
    reports = [one.reported for one in closings]
    other = next((rank for rank, one in enumerate(reports) if one != reports[0]), None)
    if other is None:
        return
    raise RankError(
        f"Ranks report different results of {where}.",
        where=f"rank {other} against rank 0",
        facts=[f"rank {rank}: {one}" for rank, one in enumerate(reports)],
        why="Metrics are reduced, so they are the same bits on every rank; the states are not to "
        "be trusted.",
        fix="report this with the plan, and go on from a checkpoint",
        rank=other,
    )
