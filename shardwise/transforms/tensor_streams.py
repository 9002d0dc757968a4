"""Random streams that differ between the ranks of a tensor axis, for operations on cut tensors.

[Note: streams apart]
Ranks of a tensor axis have the default generators in one state, so that what they compute alike
draws alike. An operation on a cut activation must not: ranks have other elements. It runs with a
stream of its own, keyed by a number that the default generator of the host gives (equal on all
ranks of the axis) and by the rank's place; afterwards all generators go on from where they were
when that number had been drawn. So ranks agree again, and a recomputation, which restores the
default generators, draws the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.sharding.compat import without_functions
from shardwise.sharding.pytree import tree_leaves
from shardwise.sharding.rng import key, keyed
from shardwise.transforms.replaying import aside

R = TypeVar("R")


def apart(place: int, run: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Call a function with a random stream of its own for each place along a tensor axis.

    Args:
        place: of this rank.
        run: the function; it talks to no other rank.
        args: of the function; its device is that of the first tensor that is not on the host.
        kwargs: of the function.

    References:
        [Note: streams apart].

    >>> _ = torch.manual_seed(0)
    >>> first = apart(0, torch.rand, 2), torch.rand(2)
    >>> _ = torch.manual_seed(0)
    >>> second = apart(1, torch.rand, 2), torch.rand(2)
    >>> first[0].equal(second[0]), first[1].equal(second[1])
    (False, True)
    """
    with keyed(key(aside(_number), place), _device((args, kwargs))):
        return run(*args, **kwargs)


def _number() -> int:
    """Drawn on the host, which need not wait for a GPU."""
    with without_functions():  # no mode counts it among the random functions of a module
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def _device(tree: Any) -> torch.device:
    found = (leaf.device for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return next((device for device in found if device.type == "cuda"), torch.device("cpu"))
