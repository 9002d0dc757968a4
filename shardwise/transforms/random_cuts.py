"""Random functions on cut activations: which ones they are, and how they draw apart.

[Note: random functions]
Dropout of a block must not draw what the other ranks draw for theirs; dropout of what is whole
must (see [Note: streams apart]). Types tell which is which, and a step has none. So a trace notes
every function of torch that draws for a block: the innermost module, the name of the function, and
how many of that name were called before in that call of the module, by itself or by modules inside
of it. In a step these modules count the same functions and run those that were noted apart. Other
modules are left alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode

from shardwise.sharding.errors import PlanError
from shardwise.sharding.mesh import Mesh
from shardwise.transforms.activation_types import Sharded
from shardwise.transforms.places import Forward, Places, function_name
from shardwise.transforms.tensor_streams import apart
from shardwise.transforms.typing_mode import Drawn


class Blocks(NamedTuple):
    """That ranks along an axis have blocks of their own, each of them on `copies` ranks."""

    axis: str
    copies: int


Numbered = tuple[str, int]
"""The name of a function, and how many of that name came before in a call of a module."""

Apart = Mapping[str, Mapping[Numbered, tuple[Blocks, ...]]]
"""By path of a module, the functions that draw apart, and along what."""


class RandomTrace:
    """Notes the random functions of a trace; see [Note: random functions].

    Args:
        places: of the trace.
    """

    def __init__(self, places: Places) -> None:
        self.apart: dict[str, dict[Numbered, tuple[Blocks, ...]]] = {}
        self._places = places
        self._known: dict[tuple[str | None, str, int], tuple[Blocks, ...]] = {}

    def saw(self, name: str, drawn: Drawn) -> None:
        """A function was called.

        Raises:
            PlanError: it draws for blocks where a step cannot find it again.
        """
        number = self._places.number_around(f"function {name}")
        if not drawn:
            return
        path = self._places.path
        found = [_blocks(kinds) for _, kinds, _ in drawn]
        known = self._known.setdefault((path, name, number), found[0])
        other = next((one for one in found if one != known), None)
        if other is not None:
            raise _drawn_both_ways(path, name, number, known, other)
        if not known:
            return
        if path is None or self._places.is_recomputed:
            raise _not_found_again(path, name, known)
        self.apart.setdefault(path, {})[name, number] = known


def drawing_apart(
    run: Forward,
    wanted: Mapping[Numbered, tuple[Blocks, ...]],
    place: Callable[[tuple[Blocks, ...]], int],
) -> Forward:
    """A forward in which some functions draw apart.

    Args:
        run: the forward of a module.
        wanted: which functions, and along what.
        place: of this rank along several axes.
    """

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Apart(wanted, place):
            return run(*args, **kwargs)

    return forward


def place_along(mesh: Mesh, coords: Mapping[str, int]) -> Callable[[tuple[Blocks, ...]], int]:
    """What numbers the blocks along several axes, and gives that of the rank at `coords`.

    >>> place_along(Mesh(fsdp=2, tp=4), {"fsdp": 1, "tp": 2})((Blocks("tp", 2),))
    1
    """

    def place(blocks: tuple[Blocks, ...]) -> int:
        index = 0
        for axis, copies in blocks:
            along = mesh.index(mesh.parts(axis), coords) // copies
            index = index * (mesh[axis] // copies) + along
        return index

    return place


class _Apart(TorchFunctionMode):
    """Counts the functions of one call of a module, and runs some apart."""

    def __init__(
        self,
        wanted: Mapping[Numbered, tuple[Blocks, ...]],
        place: Callable[[tuple[Blocks, ...]], int],
    ) -> None:
        super().__init__()
        self._wanted = wanted
        self._place = place
        self._names = {name for name, _ in wanted}
        self._counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, with a stream of its own if it is wanted."""
        kwargs = kwargs or {}
        name = function_name(func)
        if name not in self._names:
            return func(*args, **kwargs)
        number = self._counts[name]
        self._counts[name] += 1
        blocks = self._wanted.get((name, number))
        if blocks is None:
            return func(*args, **kwargs)
        return apart(self._place(blocks), func, *args, **kwargs)


def _blocks(kinds: Mapping[str, Any]) -> tuple[Blocks, ...]:
    return tuple(
        Blocks(axis, kind.copies) for axis, kind in kinds.items() if isinstance(kind, Sharded)
    )


def _told(blocks: tuple[Blocks, ...]) -> str:
    axes = ", ".join(repr(axis) for axis, _ in blocks)
    return f"on a block along {axes}" if blocks else "on what is the same on all ranks"


def _drawn_both_ways(
    path: str | None, name: str, number: int, first: tuple[Blocks, ...], second: tuple[Blocks, ...]
) -> PlanError:
    place = "loss_fn" if path is None else f"module {path or '(root)'}"
    return PlanError(
        f"{name}, call {number} of its name in {place}, draws once for a block and once not.",
        where=place,
        facts=[f"first: {_told(first)}", f"then: {_told(second)}"],
        why="Ranks draw apart for blocks and alike for what they all have; a step knows a call by "
        "its module and number.",
        fix="use a module of its own for each (nn.Dropout twice), or sw.dropout, which depends on "
        "no layout",
        function=name,
        number=number,
    )


def _not_found_again(path: str | None, name: str, blocks: tuple[Blocks, ...]) -> PlanError:
    outside = path is None
    place = "loss_fn" if outside else f"module {path or '(root)'}, inside of a checkpoint"
    known = "inside of modules" if outside else "and in a recomputation by the module it is in"
    fix = (
        "call it in a module"
        if outside
        else "make what is recomputed a module of its own, or use sw.remat instead"
    )
    return PlanError(
        f"{name} draws {_told(blocks)} where a step cannot find it again.",
        where=place,
        why=f"Ranks draw apart for blocks of their own; such a call is found {known}.",
        fix=f"{fix}; or sw.dropout, which depends on no layout",
        function=name,
        axes=tuple(axis for axis, _ in blocks),
    )
