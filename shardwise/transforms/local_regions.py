"""`sw.local`: a function that computes on this rank's blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.sharding.errors import PlanError
from shardwise.sharding.functional import bound
from shardwise.sharding.spec import Spec
from shardwise.transforms.declared import LocalRegion
from shardwise.transforms.tensor_context import current_tensor_context

_RANDOM = (None, "alike", "apart")


def local(
    fn: Callable[..., Any],
    *,
    in_specs: str | Spec | Sequence[str | Spec | None],
    out_specs: str | Spec | Sequence[str | Spec],
    random: str | None = None,
) -> Callable[..., Any]:
    """A function that runs on the blocks that each rank has, between declared layouts.

    For what types of activations cannot follow: custom operations, indices that differ by rank,
    products in an unusual order. Arguments are brought to `in_specs` as by `sw.constrain`, results
    are taken for what `out_specs` says of them. The layouts of gradients follow: that of a cut or
    partial value is its own, and that of a whole argument is summed over the ranks in backward.
    Outside of a program, and in plans without tensor axes, it is `fn` itself.

    Args:
        fn: of tensors; it talks to no other rank, and what it reads that needs a gradient is an
            argument (parameters too).
        in_specs: one for each positional argument, or one alone; None leaves an argument as it is:
            no tensor, or blocks that no spec tells (q, k and v side by side).
        out_specs: a spec for one tensor, or one for each tensor of a tuple. A result that is a
            summand has to be declared: `"batch seq embed +tp"`.
        random: how random operations in `fn` draw: `"apart"`, each rank for its own block, or
            `"alike"`. They are refused without it.

    Returns:
        A function of the same arguments.

    Raises:
        PlanError: here: a `random` that is none. When lowered: an axis that cuts no layers, a
            wrong number of dimensions, arguments or results, a layout that cannot be reached, or
            a function that reads a parameter, draws or crosses without saying so.

    References:
        The idea is that of `jax.shard_map`.

    >>> import torch
    >>> product = local(torch.matmul, in_specs=("batch mlp/tp", "mlp/tp embed"),
    ...                 out_specs="batch embed +tp")
    >>> product(torch.ones(2, 4), torch.ones(4, 3))[0]
    tensor([4., 4., 4.])
    """
    if random not in _RANDOM:
        raise PlanError(
            f"sw.local(fn, random={random!r}) is no way to draw.",
            where="argument random of sw.local",
            facts=f"known: {', '.join(map(repr, _RANDOM))}",
            why="Ranks draw for their own blocks, or all the same.",
            fix="random='apart' for dropout on blocks",
            random=random,
        )
    one_in = isinstance(in_specs, str | Spec)
    one_out = isinstance(out_specs, str | Spec)
    region = LocalRegion(
        fn,
        tuple(None if one is None else _spec(one) for one in ([in_specs] if one_in else in_specs)),
        tuple(_spec(one) for one in ([out_specs] if one_out else out_specs)),
        returns_one=one_out,
        random=random,
    )

    @functools.wraps(fn, updated=())
    def run(*args: Any) -> Any:
        args = tuple(bound(one) for one in args)
        context = current_tensor_context()
        if context is not None:
            return context.local(region, args)
        region.tensors(args, "sw.local")
        returned = fn(*args)
        region.results(returned, "sw.local")
        return returned

    return run


def _spec(given: str | Spec) -> Spec:
    return Spec.parse(given) if isinstance(given, str) else given
