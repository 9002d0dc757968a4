"""`sw.constrain` and `sw.local` in a step: the crossings that a trace has chosen, in their turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shardwise.sharding.errors import BatchError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec
from shardwise.transforms.call_facts import CallFacts
from shardwise.transforms.declared import LocalRegion, marked
from shardwise.transforms.places import Places
from shardwise.transforms.random_cuts import Blocks, place_along
from shardwise.transforms.tensor_layers import Boundary
from shardwise.transforms.tensor_streams import apart

Cross = Callable[[Boundary, str, Tensor], Tensor]
"""Takes an activation across a boundary, as it was chosen."""


def call_name(places: Places, what: str) -> str:
    """What the next such call of the innermost module is called."""
    path = "loss_fn" if places.path is None else places.path or "(root)"
    return f"{path} {what} {places.number(what)}"


def steps(place: str) -> tuple[str, str]:
    """An activation takes at most two crossings along an axis; what they are called."""
    return place, f"{place} then"


class DeclaredRun:
    """Runs the calls of user code on one rank.

    Args:
        mesh: sizes of axes.
        coords: of the rank.
        places: of the pass.
        cross: runs a crossing.
        length_of: the length of the sequence in a stack of modules.
    """

    def __init__(
        self,
        mesh: Mesh,
        coords: Mapping[str, int],
        *,
        places: Places,
        cross: Cross,
        length_of: Callable[[str], int],
    ) -> None:
        self._mesh = mesh
        self._place = place_along(mesh, coords)
        self._places = places
        self._cross = cross
        self._length_of = length_of

    def constrain(self, tensor: Tensor, spec: Spec, facts: CallFacts) -> Tensor:
        """See `sw.constrain`."""
        name = call_name(self._places, "constrain")
        return self._bring(name, "in0", tensor, marked(spec, facts.axes))

    def local(self, region: LocalRegion, args: tuple[Any, ...], facts: CallFacts) -> Any:
        """See `sw.local`.

        Raises:
            BatchError: a sequence that does not divide now.
        """
        name = call_name(self._places, "local")
        given = list(args)
        for at, tensor in region.tensors(args, name).items():
            spec = region.in_specs[at]
            assert spec is not None
            given[at] = self._bring(name, f"in{at}", tensor, marked(spec, facts.axes))
        for axis, stack in facts.even.get(name, ()):
            if self._length_of(stack) % self._mesh[axis]:
                raise _uneven(name, self._length_of(stack), self._mesh[axis])
        if region.random == "apart":
            blocks = tuple(Blocks(axis, 1) for axis in region.cut_axes(facts.axes))
            returned = apart(self._place(blocks), region.run, *given)
        else:
            returned = region.run(*given)
        results = [
            self._bring(name, f"out{at}", one, facts.axes)
            for at, one in enumerate(region.results(returned, name))
        ]
        return results[0] if region.returns_one else tuple(results)

    def _bring(self, name: str, place: str, tensor: Tensor, axes: tuple[str, ...]) -> Tensor:
        for axis in axes:
            boundary = Boundary(name, "call", (axis,))
            for step in steps(place):
                tensor = self._cross(boundary, step, tensor)
        return tensor


def _uneven(name: str, length: int, ranks: int) -> BatchError:
    return BatchError(
        f"A sequence of {length} cannot be cut over {ranks} ranks without padding.",
        where=name,
        facts=f"{length} % {ranks} == {length % ranks}.",
        why="The function of sw.local would compute with padding as if it were tokens.",
        fix=f"batches in which it divides by {ranks}, or the sequence whole in in_specs",
        length=length,
        ranks=ranks,
    )
