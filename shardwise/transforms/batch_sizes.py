"""The arithmetic of batch sizes: global = micro * accumulate * data ranks."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.sharding.errors import BatchError, strict_keywords
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan

_MODEL_AXES = ("tp", "pp", "cp")
"""Names of mesh axes whose ranks work on the same rows."""


class BatchSizes(NamedTuple):
    """Sizes that agree: `global_ == micro * accumulate * ranks`."""

    global_: int  # rows of a step over all ranks
    micro: int  # rows of one pass on one rank
    accumulate: int  # passes of a step
    ranks: int  # that have rows of their own


@strict_keywords
def batch_sizes(
    of: Mesh | Plan,
    *,
    global_: int | None = None,
    micro: int | None = None,
    accumulate: int | None = None,
) -> BatchSizes:
    """Work out the one size that is missing, or check that all three agree.

    Args:
        of: a plan, whose batch axes split the rows and which says how many passes a step has, if it
            says so or if only one other size is known; or a mesh, of which all axes split the rows
            but those named `tp`, `pp` and `cp`.
        global_: rows of a step over all ranks.
        micro: rows of one pass on one rank.
        accumulate: passes of a step.

    Raises:
        BatchError: fewer than two sizes are known, one is no positive number, or they do not
            multiply; shows the product.

    >>> batch_sizes(Mesh(dp=4, tp=2), global_=64, micro=2)
    BatchSizes(global_=64, micro=2, accumulate=8, ranks=4)
    """
    ranks = _data_ranks(of)
    given = {"global_": global_, "micro": micro, "accumulate": accumulate}
    one_known = (global_ is None) != (micro is None)
    if isinstance(of, Plan) and (of.accumulation.steps > 1 or (accumulate is None and one_known)):
        given["accumulate"] = _steps_of(of, accumulate)
    for name, size in given.items():
        if size is not None and (type(size) is not int or size < 1):
            raise _wrong(given, ranks, f"{name} is {size!r}, which is no positive whole number")
    known = {name: size for name, size in given.items() if size is not None}
    if len(known) == 1 or not known:
        raise _wrong(given, ranks, f"{len(known)} of 3 sizes are known", "name two of the three")
    whole, part, steps = given["global_"], given["micro"], given["accumulate"]
    if whole is None:
        whole = (part or 1) * (steps or 1) * ranks
    elif part is None or steps is None:
        other = (part or steps or 1) * ranks
        if whole % other:
            raise _wrong(given, ranks, f"{whole} % ({part or steps} * {ranks}) == {whole % other}")
        part, steps = part or whole // other, steps or whole // other
    assert part is not None
    assert steps is not None
    if part * steps * ranks != whole:
        product = part * steps * ranks
        raise _wrong(given, ranks, f"{part} * {steps} * {ranks} == {product}, not {whole}")
    return BatchSizes(whole, part, steps, ranks)


def _data_ranks(of: Mesh | Plan) -> int:
    if isinstance(of, Plan):
        return of.mesh.product(of.batch)
    return of.product(tuple(axis for axis in of.names if axis not in _MODEL_AXES))


def _steps_of(plan: Plan, accumulate: int | None) -> int:
    steps = plan.accumulation.steps
    if accumulate not in (None, steps):
        raise BatchError(
            "The plan and the argument name different numbers of passes.",
            where="batch_sizes(plan, accumulate=)",
            facts=f"the plan has accumulate({steps}), the argument is {accumulate!r}.",
            why="A step of a program runs as many passes as its plan says.",
            fix="leave accumulate= out, or change the plan",
            accumulate=accumulate,
            steps=steps,
        )
    return steps


def _wrong(given: dict[str, int | None], ranks: int, what: str, fix: str = "") -> BatchError:
    shown = ", ".join(f"{name}={size}" for name, size in given.items())
    product = " * ".join(
        "?" if size is None else str(size) for size in (given["micro"], given["accumulate"], ranks)
    )
    return BatchError(
        f"The batch sizes do not agree: {what}.",
        where="batch_sizes()",
        facts=[
            shown,
            f"micro * accumulate * data ranks: {product}; global: {given['global_'] or '?'}",
        ],
        why="global_ == micro * accumulate * data ranks; any two of the sizes give the third.",
        fix=fix or "change one of the sizes so that the product is the global batch",
        ranks=ranks,
        **{name: size for name, size in given.items() if size is not None},
    )
