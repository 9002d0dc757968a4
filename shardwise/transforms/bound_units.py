"""Units whose weights are used where they rest: bound for a whole pass, without brackets.

[Note: bound units]
Where nothing of a unit is gathered, cast, reduced or freed there is nothing to do when it is
entered and left. Its parameters are leaves of the graph over the `params` home. Autograd leaves the
first gradient of a step on each; what a later pass adds goes in place to what has landed, so passes
hold no gradients twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import Tensor

from shardwise.transforms.unit_runtime import UnitRuntime


class BoundUnits:
    """The bound units of one rank.

    Args:
        units: all of its units.
    """

    def __init__(self, units: Iterable[UnitRuntime]) -> None:
        self._units = [unit for unit in units if unit.rests_bound]
        self._leaves: list[tuple[UnitRuntime, list[Tensor]]] = []

    @property
    def leaves(self) -> list[Tensor]:
        """Of this pass; none without a backward."""
        return [leaf for _, leaves in self._leaves for leaf in leaves]

    def bind(self, used: Set[str], *, grad: bool) -> None:
        """Start a pass; see `UnitRuntime.bind_for_pass`."""
        self._leaves = [(unit, unit.bind_for_pass(used, grad=grad)) for unit in self._units]

    def check(self) -> None:
        """End a forward.

        Raises:
            UnitError: a module has put another tensor in the place of a parameter.
        """
        for unit in self._units:
            unit.check_bound()

    def take_grads(self) -> list[str]:
        """After backward: keep gradients; returns the paths that have one."""
        taken = [(unit, leaves) for unit, leaves in self._leaves if leaves]
        self._leaves = []
        return [path for unit, leaves in taken for path in unit.take_grads(leaves)]

    def forget(self) -> None:
        """End a pass, whatever its state."""
        self._leaves = []
