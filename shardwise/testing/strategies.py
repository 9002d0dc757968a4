"""Hypothesis strategies for meshes, models, plans and optimizers; needs the `testing` extra.

Everything drawn is a plain value that prints as the code that makes it. Draws shrink towards one
axis of size 1, a model without blocks and the empty chain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise import optim
from shardwise.optim.base import GradientTransform
from shardwise.sharding.edits import GATHER_MODES, REDUCE_MODES
from shardwise.sharding.errors import PlanError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan, Transform, plan
from shardwise.sharding.tree import match, match_exact
from shardwise.testing.models import EXACT, Toy
from shardwise.transforms import accumulate as passes
from shardwise.transforms import loss_scale as scales
from shardwise.transforms import zero as homes

_AXES = ("fsdp", "dp", "node")
_SHAPES = ((1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (2, 1, 2), (2, 2, 2))
# Not 1 or 2: of so few channels a LayerNorm leaves nothing but signs, and all gradients behind it
# would be rounding noise.
_WIDTHS = (3, 4, 5, 8)
_HIDDEN = (1, 2, 5, 12)
_VOCABS = (0, 4, 7, 33)


@dataclass(frozen=True)
class Move:
    """A transform as a value: the name of its constructor and the arguments."""

    call: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def transform(self) -> Transform:
        """Make the transform."""
        module = next(m for m in (passes, scales, homes) if hasattr(m, self.call))
        return getattr(module, self.call)(*self.args, **dict(self.options))

    def __repr__(self) -> str:
        options = [f"{key}={value!r}" for key, value in self.options]
        return f"sw.{self.call}({', '.join([*map(repr, self.args), *options])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Make IPython and hypothesis print `repr`; for dataclasses they would list all fields."""
        del cycle
        printer.text(repr(self))


@dataclass(frozen=True)
class Training:
    """All that a training run follows from; properties build the parts anew.

    Args:
        mesh: named axes.
        toy: the model.
        moves: the transforms, in order.
        units: patterns of modules that are units; None: the default rule.
        optimizer: a name in `OPTIMIZERS`.
        rows: of each global batch.
        steps: number of batches.
        seed: of weights and batches.
    """

    mesh: Mesh
    toy: Toy
    moves: tuple[Move, ...]
    units: tuple[str, ...] | None
    optimizer: str
    rows: int
    steps: int
    seed: int

    @property
    def model(self) -> nn.Module:
        """A new module; its values do not matter, training starts from the seed."""
        return self.toy.build()

    @property
    def runs_units_once(self) -> bool:
        """Whether no unit runs twice in one pass, as the bits of the split reference need."""
        # A block with attention runs its norm twice, which matters once that norm is a unit.
        norms_are_units = any("norm" in pattern for pattern in self.units or ())
        twice = norms_are_units and "attention" in self.toy.features
        return not twice and "twice" not in self.toy.features

    def plan(self, model: nn.Module) -> Plan:
        """The plan for a model that `model` has built."""
        return plan(model, self.mesh, *(m.transform() for m in self.moves), units=self.units)

    @property
    def batches(self) -> list[dict[str, Tensor]]:
        """Global batches."""
        return [self.toy.batch(self.rows, self.seed + step) for step in range(self.steps)]


def make_optimizer(name: str) -> GradientTransform:
    """One of the optimizers that `OPTIMIZERS` names.

    >>> make_optimizer("sgd").couples
    'element'
    """
    rate = optim.warmup_cosine(1e-2, warmup=2, steps=20, start=5e-3)
    # Adam divides the rounding noise of a gradient that is mathematically zero (the bias of a key,
    # all that a LayerNorm of one channel sees) by eps: with 1e-8 that noise is seen at 1e-9.
    adamw = optim.adamw(rate, eps=1e-4)
    match name:
        case "sgd":
            return optim.sgd(0.1)
        case "momentum":
            return optim.sgd(0.1, momentum=0.9, weight_decay=0.01)
        case "adamw":
            return adamw
        case "clipped sgd":
            return optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1))
        case "clipped adamw":
            return optim.chain(optim.clip_by_global_norm(0.5), adamw)
        case _:
            largest = optim.clip_by_global_norm(0.05, ord=math.inf)
            groups = optim.clip_by_group_norm({"**": 0.1})
            return optim.chain(largest, groups, optim.sgd(0.1, momentum=0.9))


ELEMENTWISE = ("sgd", "momentum", "adamw")
"""Optimizers whose bits do not depend on how parameters are cut."""

OPTIMIZERS = (*ELEMENTWISE, "clipped sgd", "clipped adamw", "group clipped momentum")
"""All optimizers that `make_optimizer` knows."""


_KEEPING = st.fixed_dictionaries(
    {"reduce": st.sampled_from(REDUCE_MODES), "gather": st.sampled_from(GATHER_MODES)}
).map(lambda options: tuple(options.items()))


@st.composite
def meshes(draw: st.DrawFn, *, max_ranks: int = 4) -> Mesh:
    """One to three data axes in any order; at most `max_ranks` ranks."""
    shape = draw(st.sampled_from([s for s in _SHAPES if math.prod(s) <= max_ranks]))
    names = draw(st.permutations(_AXES))
    sizes: dict[str, Any] = dict(zip(names, shape, strict=False))
    return Mesh(**sizes)


def toys(*, features: Sequence[str] = EXACT) -> st.SearchStrategy[Toy]:
    """Small models with any of the given features."""
    return st.builds(
        Toy,
        width=st.sampled_from(_WIDTHS),
        hidden=st.sampled_from(_HIDDEN),
        depth=st.integers(0, 3),
        vocab=st.sampled_from(_VOCABS),
        features=st.sets(st.sampled_from(features), max_size=4).map(sorted).map(tuple),
    )


def axes_of(mesh: Mesh) -> st.SearchStrategy[str | tuple[str, ...] | None]:
    """No axis, one, or several in any order."""
    several = st.permutations(mesh.names).flatmap(
        lambda names: st.integers(1, len(names)).map(lambda count: tuple(names[:count]))
    )
    return st.one_of(st.none(), st.sampled_from(mesh.names), several)


def unit_patterns(model: nn.Module) -> st.SearchStrategy[tuple[str, ...] | None]:
    """The default rule, or patterns: single blocks, units inside units, head and first layer."""
    paths = [path for path, module in model.named_modules() if path and list(module.parameters())]
    candidates = [("norm", "head"), ("*.norm", "*.up"), ("layers.*", "*.up")]
    fitting = [
        patterns
        for patterns in candidates
        if all(any(match_exact(pattern, path) for path in paths) for pattern in patterns)
        and not ("layers.*" in patterns and _has_lists(model))
    ]
    return st.sampled_from([None, *fitting])


@st.composite
def moves(
    draw: st.DrawFn, mesh: Mesh, model: nn.Module, patterns: tuple[str, ...] | None = None
) -> tuple[Move, ...]:
    """A chain of transforms that suit a mesh and a model with these units."""
    paths = [path for path, _ in model.named_parameters()]
    found = plan(model, mesh, units=patterns).units
    units = [unit.name for unit in found if unit.kind == "unit"]
    where = st.sampled_from(["**", *_matching(["weight", "~weight", "layers.*", "*norm*"], paths)])
    cut = st.fixed_dictionaries({"where": where}).map(lambda d: tuple(d.items()))
    axes = axes_of(mesh)
    home = st.sampled_from(["shard_optimizer", "shard_grads", "shard_params"])
    choices = [
        st.builds(Move, home, st.tuples(axes), cut),
        st.builds(Move, home, st.tuples(axes), st.just((("on", 0), ("pad", True)))),
        st.builds(
            Move,
            st.just("zero"),
            st.tuples(st.integers(0, 3), axes.filter(bool)),
            cut,
        ),
        st.builds(Move, st.just("prefetch"), st.tuples(st.integers(0, 3))),
        st.builds(Move, st.just("freeze"), st.tuples(where)),
        st.builds(Move, st.just("accumulate"), st.tuples(st.integers(1, 3)), _KEEPING),
        # Powers of two, so that bits stay; with a window of 1 the scale grows at every other step.
        st.builds(Move, st.just("loss_scale"), st.just((1024.0,))),
        st.builds(Move, st.just("loss_scale"), st.just(()), st.just((("window", 1),))),
    ]
    if units:
        choices.append(
            st.builds(Move, st.just("keep_gathered"), st.tuples(st.sampled_from(["**", *units])))
        )
    # Drawn one by one: the lengths of `st.lists` are mostly 0 and 1.
    return tuple(draw(st.one_of(choices)) for _ in range(draw(st.integers(0, 5))))


@st.composite
def plans(
    draw: st.DrawFn,
    model: nn.Module,
    *,
    max_ranks: int = 4,
    units: Sequence[str] | None = None,
) -> Plan:
    """Plans for a model of yours; a failing one shrinks to the fewest ranks and transforms.

    Args:
        draw: given by hypothesis.
        model: any module; never modified, and the module of every plan.
        max_ranks: of the largest mesh; a test costs the work of all ranks.
        units: as for `shardwise.plan`.

    >>> from hypothesis import find
    >>> find(plans(nn.Linear(3, 3)), lambda plan: True)
    Plan(Mesh(fsdp=1), 2 parameters)
    """
    mesh = draw(meshes(max_ranks=max_ranks))
    chosen = draw(moves(mesh, model, None if units is None else tuple(units)))
    try:
        return plan(model, mesh, *(move.transform() for move in chosen), units=units)
    except PlanError:
        reject()  # an uneven cut over several axes


@st.composite
def trainings(
    draw: st.DrawFn,
    *,
    features: Sequence[str] = EXACT,
    optimizers: Sequence[str] = OPTIMIZERS,
    max_ranks: int = 4,
) -> Training:
    """A small mesh, a model, a plan for it, an optimizer and a seed, in one draw."""
    mesh = draw(meshes(max_ranks=max_ranks))
    toy = draw(toys(features=features))
    model = toy.build()
    units = draw(unit_patterns(model))
    chosen = draw(moves(mesh, model, units))
    passes_of_step = max([1, *(move.args[0] for move in chosen if move.call == "accumulate")])
    training = Training(
        mesh=mesh,
        toy=toy,
        moves=chosen,
        units=units,
        optimizer=draw(st.sampled_from(optimizers)),
        # Two rows a pass, so that batch statistics exist; more of them make uneven parts.
        rows=2 * passes_of_step * mesh.size + draw(st.integers(0, 3)),
        steps=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
    )
    try:
        infos = training.plan(model).infos
    except PlanError:
        reject()  # an uneven cut over several axes
    if all(info.path.startswith("spare") for info in infos if info.trainable):
        reject()  # nothing that is used can be trained
    return training


def _has_lists(model: nn.Module) -> bool:
    """Whether the children of a list are lists, which are never called and so cannot be units."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return any(isinstance(child, nn.ModuleList) for parent in lists for child in parent)


def _matching(patterns: Iterable[str], paths: Sequence[str]) -> list[str]:
    return [pattern for pattern in patterns if any(match(pattern, path) for path in paths)]
