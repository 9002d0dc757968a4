"""The edit that puts a part of a plan on a tier, and what it amounts to.

[Note: a fraction of a home]
A tensor has one tier, so a fraction of a home is a choice of tensors: going through them in the
order of the model, each one is taken if the taken part of all elements so far stays within the
fraction. That spreads over all layers what is moved, misses the fraction by one tensor at most, and
depends on nothing but the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from shardwise.sharding.derived import HERE, Acts, Rests
from shardwise.sharding.edits import Edit
from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.spec import Spec
from shardwise.sharding.tiers import DEVICE, Tier
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo

PARTS = ("params", "grads", "moments", "masters", "acts")
"""What can have a tier of its own; the `opt` home is moments and masters."""


class Placed(NamedTuple):
    """The last word on one part of one parameter, or on the activations of one module."""

    tier: Tier
    prefetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadEdit(Edit):
    """Put a part of what rests on a tier, or what modules save for backward.

    `where` is over parameters; for `acts` it holds masks only, and `modules` are patterns.
    """

    kind: ClassVar[str] = "offload"
    part: str
    tier: str
    fraction: float = 1.0
    prefetch: int = 1
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        Tier.parse(self.tier)
        if self.part not in PARTS:
            raise PlanError(
                f"{self.by or 'an offload edit'} names the unknown part {self.part!r}.",
                facts=f"parts: {', '.join(PARTS)}, and opt for moments and masters",
                why="These are what a training step keeps.",
                fix=nearest(self.part, (*PARTS, "opt")),
                part=self.part,
            )
        fits = isinstance(self.fraction, int | float) and 0 < self.fraction <= 1
        if not fits or isinstance(self.fraction, bool):
            raise PlanError(
                f"{self.by or 'an offload edit'} has no possible fraction.",
                where="argument fraction of offload()",
                facts=f"fraction is {self.fraction!r}; allowed: 0 < fraction <= 1.",
                why="It is the part of all elements that is put on the tier.",
                fix="fraction=0.5 for half of them, or to='device' for none",
                fraction=self.fraction,
            )
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise PlanError(
                f"{self.by or 'an offload edit'} has no possible prefetch.",
                where="argument prefetch of offload()",
                facts=f"prefetch is {self.prefetch!r}; allowed: a whole number, at least 0.",
                why="It counts the units that are fetched ahead; each adds its own bytes.",
                fix="prefetch=1, or prefetch=0 for none",
                prefetch=self.prefetch,
            )

    @property
    def phase(self) -> str:
        """A matter of memory."""
        return "memory"


def spread(sizes: Mapping[str, int], fraction: float) -> list[str]:
    """The keys that make up a fraction of all sizes; see [Note: a fraction of a home].

    >>> spread({"a": 4, "b": 4, "c": 4, "d": 4}, 0.5)
    ['b', 'd']
    """
    taken: list[str] = []
    inside = total = 0
    for key, size in sizes.items():
        total += size
        # Sizes are whole numbers of elements, so a millionth cannot be one.
        if inside + size <= fraction * total * (1 + 1e-9):
            inside += size
            taken.append(key)
    return taken


def tiers_of(
    placed: Mapping[tuple[str, str], Placed], homes: Mapping[str, Mapping[str, Spec]], path: str
) -> Rests:
    """The tiers of one parameter, from its edits and the memories that its specs name."""

    def tier(part: str, home: str) -> Tier:
        given = placed.get((part, path))
        spec = homes[home].get(path)
        if spec is None:
            return DEVICE
        asked = DEVICE if given is None else given.tier
        # `tree_at` replays last: the memory of its spec counts.
        return asked if asked.memory == spec.memory else Tier(spec.memory)

    moments = tier("moments", "opt")
    masters = placed.get(("masters", path))
    return Rests(
        params=tier("params", "params"),
        grads=tier("grads", "grads"),
        moments=moments,
        masters=DEVICE if masters is None or path not in homes["opt"] else masters.tier,
    )


def resting(rests: Mapping[str, Rests]) -> FrozenMap[str, Rests]:
    """Those that do not wholly rest on the device."""
    return FrozenMap((path, one) for path, one in rests.items() if one != HERE)


def acts_of(placed: Mapping[str, Placed], modules: Sequence[str]) -> FrozenMap[str, Acts]:
    """What modules save for backward and where, outer modules first."""
    return FrozenMap(
        (path, Acts(placed[path].tier, placed[path].prefetch))
        for path in modules
        if path in placed and placed[path].tier != DEVICE
    )


def sizes_of(infos: Iterable[ParamInfo]) -> dict[str, int]:
    """Elements by parameter."""
    return {info.path: math.prod(info.shape) for info in infos}
