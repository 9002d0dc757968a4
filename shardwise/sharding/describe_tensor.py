"""Tensor parallelism in the table of a plan: what is cut, what stayed whole and why, integers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.sharding.derived import Derived
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.repeats import collapse, render_group
from shardwise.sharding.tensor_cuts import GROUP, TensorAxis

GUESS = "(guess)"
"""Marks axes that are taken from well-known names of layers only."""


def tensor_lines(derived: Derived) -> Iterator[str]:
    """The lines below the table; none without an axis that cuts layers."""
    tensor = derived.tensor
    axes = [axis for axis in tensor.axes.values() if derived.mesh[axis.name] > 1]
    for axis in axes:
        between = "cut" if axis.sequence else "whole"
        yield (
            f"{axis.name} cuts layers: {_names(axis, derived.mesh)}   logits {tensor.logits}   "
            f"sequences {between} between layers"
        )
    if not axes:
        return
    if tensor.whole:
        yield f"whole on every rank: {_whole(derived)}"
    if tensor.ints:
        ints = tensor.ints
        groups = collapse(ints, lambda path: ints[path])
        shown = ", ".join(f"{render_group(group)} = {ints[group[0]]}" for group in groups)
        yield f"integers on every rank: {shown}"
    if tensor.guessed:
        yield f"guessed axes: {_count(len(tensor.guessed))}; axes= confirms or corrects them"


def _names(axis: TensorAxis, mesh: Mesh) -> str:
    """Names with the number of their parts, and the axes that hold copies.

    >>> from shardwise.sharding.tree import FrozenMap
    >>> mesh = Mesh(tp=4).split_joined("tp", {"tp0": 2, "tp1": 2})
    >>> _names(TensorAxis("tp", mesh.parts("tp"), FrozenMap(heads=4, kv=2)), mesh)
    'heads in 4, kv in 2 (copies over tp1)'
    """
    shown: list[str] = []
    for name, parts in axis.cuts.items():
        copies: list[str] = []
        cut = 1
        for part in axis.parts:
            if cut >= parts and len(axis.parts) > 1 and name != GROUP:
                copies.append(part)
            cut *= mesh[part]
        more = f" (copies over {' '.join(copies)})" if copies else ""
        shown.append(f"{name} in {parts}{more}")
    return ", ".join(shown) or "none has a name that is cut"


def _whole(derived: Derived) -> str:
    """Parameters that no axis cuts, by reason, with their elements."""
    groups: dict[str, list[int]] = {}
    for info in derived.infos:
        reason = derived.tensor.whole.get(info.path)
        if reason is not None:
            groups.setdefault(reason, []).append(math.prod(info.shape))
    return ", ".join(
        f"{reason} ({_count(len(sizes))}, {sum(sizes):,} elements)"
        for reason, sizes in groups.items()
    )


def _count(number: int) -> str:
    """A number of parameters.

    >>> _count(1), _count(2)
    ('1 parameter', '2 parameters')
    """
    return f"{number} parameter{'s' if number != 1 else ''}"
