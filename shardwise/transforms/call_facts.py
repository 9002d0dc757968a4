"""What a trace tells a step about calls inside of modules, where tensor axes cut layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.sharding.mesh import Mesh
from shardwise.transforms.binding import Stage
from shardwise.transforms.dropout_cuts import CutAt
from shardwise.transforms.random_cuts import Apart, drawing_apart, place_along
from shardwise.transforms.tensor_context import DropoutCall


@dataclass(frozen=True)
class CallFacts:
    """What a trace has found out about calls; see [Note: places].

    Args:
        axes: tensor axes of more than one rank.
        apart: random functions that draw apart.
        dropouts: how the input of each call of `sw.dropout` is cut.
        placed: modules that declare layouts, and so have to say when they run.
        even: by the name of a call of `sw.local`, axes and stacks of modules between which the
            sequence has to divide.
    """

    axes: tuple[str, ...] = ()
    apart: Apart = field(default_factory=dict)
    dropouts: Mapping[DropoutCall, tuple[CutAt, ...]] = field(default_factory=dict)
    placed: frozenset[str] = frozenset()
    even: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)


def prepare_calls(stage: Stage, facts: CallFacts, mesh: Mesh, coords: Mapping[str, int]) -> None:
    """Make the modules that a trace has named find their calls again.

    Args:
        stage: the template that steps run on.
        facts: from the trace.
        mesh: sizes of axes.
        coords: of this rank.
    """
    place = place_along(mesh, coords)
    for path, wanted in facts.apart.items():
        stage.surround(path, functools.partial(drawing_apart, wanted=wanted, place=place))
    stage.place_modules(sorted(facts.placed))
