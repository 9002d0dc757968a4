"""`sw.constrain`: the layout that an activation has from here on."""

from __future__ import annotations

from torch import Tensor

from shardwise.sharding.functional import bound
from shardwise.sharding.spec import Spec
from shardwise.transforms.declared import check_dims
from shardwise.transforms.tensor_context import current_tensor_context


def constrain(x: Tensor, spec: str | Spec) -> Tensor:
    """Say how an activation lies from here on, and bring it there if it lies otherwise.

    For modules whose forward does what no rule of types follows, or where a layout is wanted that
    the layers around do not ask for. Along a tensor axis, a partial sum becomes whole by an
    all-reduce, or cut by a reduce-scatter; what is cut becomes whole by an all-gather; of what is
    whole every rank takes its block, and backward is an all-gather. What lies as it should costs
    nothing. All of it is in `lowered.collectives()`. Outside of a program, and in plans without
    tensor axes, it is the identity.

    Args:
        x: an activation.
        spec: a name for each dimension, and marks of the tensor axes that cut some of them, as in
            `"batch seq heads/tp hd"`. What is not marked is whole; `"batch seq embed +tp"` states
            that `x` is a summand.

    Returns:
        The same values; with a mark, this rank's block of them.

    Raises:
        PlanError: when lowered: `x` has another number of dimensions, an axis cuts no layers, a
            dimension does not divide, or nothing brings `x` there in one step.
        SpecError: the text does not follow the grammar.

    References:
        GSPMD: General and Scalable Parallelization for ML Computation Graphs, section 3.

    >>> import torch
    >>> x = torch.ones(2, 3, 4, 8)
    >>> constrain(x, "batch seq heads/tp hd") is x
    True
    """
    x = bound(x)
    parsed = Spec.parse(spec) if isinstance(spec, str) else spec
    check_dims("sw.constrain(x, spec)", "sw.constrain", parsed, x)
    context = current_tensor_context()
    return x if context is None else context.constrain(x, parsed)
