"""Whether two sets of named tensors agree, and what is said when they do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch

from shardwise.sharding.errors import ShardwiseError
from shardwise.sharding.plan import Plan

_LAW_1 = 1e-9
_SAFETY = 16.0
_FLOOR = 1e-3
_NO_NOISE: Mapping[str, float] = {}


class EquivalenceError(ShardwiseError, AssertionError):
    """A program does not do what a law says; `numbers` has law, step, path and difference."""


def tolerance(dtype: torch.dtype, depth: int) -> float:
    """The largest difference that rounding may make, relative to the largest element.

    Sums of `depth` elements in two orders differ by about `eps * sqrt(depth)`; float64 keeps the
    fixed bound of law 1, which leaves room for the steps in between.

    Args:
        dtype: in which both sides were computed.
        depth: elements of the longest sum behind one number.

    >>> tolerance(torch.float64, 10_000)
    1e-09
    >>> tolerance(torch.float32, 100) < tolerance(torch.float32, 10_000) < 1e-3
    True
    """
    if dtype == torch.float64:
        return _LAW_1
    return _SAFETY * torch.finfo(dtype).eps * math.sqrt(max(depth, 1))


@dataclass(frozen=True)
class Judge:
    """Compares and reports.

    Args:
        plan: named in reports.
        relative: see `tolerance`; 0.0 asks for equal bits.
        oracle: what the program is compared with, in words.
    """

    plan: Plan
    relative: float
    oracle: str

    def same_tree(self, what: str, ours: Any, theirs: Any, *, step: int) -> None:
        """Compare two pytrees of tensors leaf by leaf."""
        self.same_tensors(what, named_leaves(ours), named_leaves(theirs), step=step)

    def same_tensors(
        self,
        what: str,
        ours: Mapping[str, Any],
        theirs: Mapping[str, Any],
        *,
        step: int,
        noise: Mapping[str, float] = _NO_NOISE,
    ) -> None:
        """Compare tensors by name; names and shapes must be the same too.

        Args:
            what: the tensors, in words.
            ours: those of the program.
            theirs: those of the oracle.
            step: number of the step.
            noise: by how much the oracle is off by its own rounding, where that is known.

        Raises:
            EquivalenceError: law 1 is broken; names the worst tensor.
        """
        if ours.keys() != theirs.keys():
            odd = sorted(ours.keys() ^ theirs.keys())
            raise self.broken(1, f"{what} are of other parameters", odd[0], step=step, odd=odd)
        largest = max((_size(value) for value in theirs.values()), default=0.0)
        worst = (0.0, "", 0.0, 0.0)
        for name, value in theirs.items():
            if _shape(ours[name]) != _shape(value):
                shapes = {"ours": _shape(ours[name]), "theirs": _shape(value)}
                raise self.broken(1, f"{what} have another shape", name, step=step, **shapes)
            difference = _distance(ours[name], value)
            allowed = self.relative * max(_size(value), _FLOOR * largest)
            allowed += _SAFETY * noise.get(name, 0.0)
            excess = difference / allowed if allowed else math.inf if difference else 0.0
            worst = max(worst, (excess, name, difference, allowed))
        excess, name, difference, allowed = worst
        if excess > 1.0:
            raise self.broken(
                1, f"{what} differ", name, step=step, difference=difference, allowed=allowed
            )

    def broken(self, law: int, what: str, path: str, *, step: int, **numbers: Any) -> Exception:
        """The error for a law that does not hold."""
        shown = [f"{key.replace('_', ' ')}: {value}" for key, value in numbers.items()]
        return EquivalenceError(
            f"Law {law} is broken at step {step}: {what} from {self.oracle}.",
            where=path,
            facts=[*shown, repr(self.plan), *str(self.plan).splitlines()],
            why=_LAWS[law],
            fix="; otherwise ".join(filter(None, (_FIXES.get(what.split(maxsplit=1)[0]), _REPORT))),
            law=law,
            step=step,
            path=path,
            **numbers,
        )


_LAWS = {
    1: "k steps of the program equal k steps of the model it was made from, on the global batch.",
    3: "Collectives that run equal lowered.collectives().",
    6: "The same seed gives the same initial weights on any mesh.",
}

_LOSS = (
    "a scalar loss is the mean over rows: return sw.Mean(total, count) for any other mean; rows "
    "that see each other (batch statistics) and dropout are outside of this law"
)
_OPTIMIZER = (
    "an optimizer of your own says what it couples, and its apply does what its update does; Adam "
    "needs eps=1e-4 where a gradient is mathematically zero"
)
# By the first word of what is wrong.
_FIXES = {
    "losses": _LOSS,
    "metrics": _LOSS,
    "parameters": _OPTIMIZER,
    "optimizer": _OPTIMIZER,
    "initial": "draw in reset_parameters, from torch's own generator only",
}
_REPORT = "report this plan, it is a fault of shardwise"


def distances(ours: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, float]:
    """The largest difference of each tensor from the same one in a wider dtype.

    >>> distances({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.5]).double()})
    {'w': 0.5}
    """
    shared = ours.keys() & exact.keys()
    return {name: _size(ours[name].detach().double() - exact[name].detach()) for name in shared}


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by the keys that lead to them.

    >>> named_leaves({"mu": {"w": 1}})
    {'mu w': 1}
    """
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return {" ".join(map(str, path)): leaf for path, leaf in zip(paths, leaves, strict=True)}


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(torch.as_tensor(value).shape)


def _size(value: Any) -> float:
    tensor = torch.as_tensor(value).detach()
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _distance(ours: Any, theirs: Any) -> float:
    """The largest difference; infinite if either has a NaN or they are of other dtypes."""
    a, b = torch.as_tensor(ours).detach(), torch.as_tensor(theirs).detach()
    if torch.equal(a, b) and a.dtype == b.dtype:
        return 0.0
    if a.dtype != b.dtype:
        return math.inf
    difference = float((a.double() - b.double()).abs().max())
    return math.inf if math.isnan(difference) else difference
