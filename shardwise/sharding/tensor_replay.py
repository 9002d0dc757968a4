"""What edits of tensor parallelism write while they replay, and what is derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.sharding.axes import Axes
from shardwise.sharding.axes_sources import evaluate
from shardwise.sharding.derived import Base, TensorParallel
from shardwise.sharding.edits import SequenceEdit, TensorEdit
from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.frames import Frame
from shardwise.sharding.grammar import Position
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.tensor_cuts import CUT, WHOLE, Asked, Cuts, TensorAxis, cut_tensors
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo


@dataclass(slots=True)
class TensorDraft:
    """What edits write, and then what it amounts to."""

    edits: list[tuple[TensorEdit, tuple[str, ...]]] = field(default_factory=list)
    sequences: dict[str, SequenceEdit] = field(default_factory=dict)
    axes: dict[str, TensorAxis] = field(default_factory=dict)
    marks: dict[str, dict[Position, tuple[str, ...]]] = field(default_factory=dict)
    frames: dict[str, Frame] = field(default_factory=dict)


def resolve_cuts(draft: TensorDraft, base: Base, infos: dict[str, ParamInfo]) -> tuple[Mesh, Cuts]:
    """Decide what is cut, once all edits are known.

    Args:
        draft: what they wrote; gets axes, marks and frames.
        base: of the plan.
        infos: by path; parameters that are selected and have no named axes get the guessed ones.

    Raises:
        PlanError: a sequence is to be cut over an axis that cuts no layers; an edit cuts nothing,
            or lists a name that no parameter has.
    """
    asked: list[Asked] = []
    for edit, paths in draft.edits:
        names, known = _names(edit, base)
        for path in paths:
            info, guess = infos[path], base.naming.guesses.get(path)
            if guess is None or info.axes != Axes.anonymous(info.axes.ndim):
                continue
            axes = Axes.parse(guess)
            if not set(axes.names).isdisjoint(CUT if names is None else names):
                infos[path] = replace(info, axes=axes)
        asked.append(Asked(edit.axis, names, known, paths, edit.by, listed=edit.names is not None))
    cuts = cut_tensors(base.mesh, asked, infos, base.naming.sizes)
    for one in asked if not cuts.failures else ():
        _check_names_occur(one, infos, base)
    for axis, edit in draft.sequences.items():
        if not edit.active:
            continue
        if not any(one.axis == axis for one in asked):
            raise PlanError(
                f"{edit.by or 'sequence_parallel'} cuts activations over an axis that cuts no "
                "layers.",
                facts=f"{base.mesh!r}; tensor axes: {', '.join(cuts.axes) or 'none'}.",
                why="The sequence is cut between layers whose weights are cut over the same axis.",
                fix=f"sw.tensor_parallel({axis!r}) as well",
                axis=axis,
            )
        if axis in cuts.axes:
            cuts.axes[axis] = replace(cuts.axes[axis], sequence=True)
    draft.axes, draft.marks, draft.frames = cuts.axes, cuts.marks, cuts.frames
    return cuts.mesh, cuts


def _check_names_occur(one: Asked, infos: Mapping[str, ParamInfo], base: Base) -> None:
    """Refuse an edit that leaves everything whole: nobody would notice."""
    wanted = CUT if one.names is None else one.names
    chosen = [infos[path] for path in one.paths]
    names = tuple(dict.fromkeys(name for info in chosen for name in info.axes.names))
    where = f"{len(chosen)} parameters that where= selects"
    if not set(names).isdisjoint(wanted):
        listed = one.names if one.listed and one.names else ()
        for name in listed:
            if name not in names:
                raise PlanError(
                    f"{one.by} lists the name {name!r}, which no parameter has.",
                    where=where,
                    facts=f"they have the names {', '.join(names)}.",
                    why="A name that is never met is a mistake: what it means stays whole.",
                    fix=nearest(name, names),
                    name=name,
                    num_params=len(chosen),
                )
        return
    anonymous = [info.axes == Axes.anonymous(info.axes.ndim) for info in chosen]
    pairs = zip(chosen, anonymous, strict=True)
    names = tuple(dict.fromkeys(name for info, no in pairs if not no for name in info.axes.names))
    rules = base.rules.pairs if base.rules else ()
    over = ", ".join(dict.fromkeys(axis for _, axes in rules for axis in axes))
    told = f"none: the rules cut over {over or 'no axis'}"
    raise PlanError(
        f"{one.by} cuts none of {len(chosen)} parameters.",
        where=where,
        facts=[
            f"{sum(anonymous)} have no named axes; the others have: {', '.join(names) or 'none'}.",
            f"names to cut over {one.axis!r}: {', '.join(wanted) or told}.",
        ],
        why="Axes come from axes=, from modules, from the family of a model, or are guessed from "
        "well-known names of layers; what has no name stays whole on every rank.",
        fix="axes={'up.weight': 'mlp embed', 'down.weight': 'embed mlp', ...} in sw.plan"
        if wanted
        else f"rules=sw.Rules(..., mlp={one.axis!r}), or names=[...]",
        num_params=len(chosen),
        unnamed=sum(anonymous),
    )


def _names(edit: TensorEdit, base: Base) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Names that are cut, and all that have a rule; None for the default ones."""
    if edit.names is not None:
        return edit.names, base.rules.names if base.rules else (*CUT, *WHOLE)
    if base.rules is None:
        return None, ()
    cut = tuple(name for name, axes in base.rules.pairs if edit.axis in axes)
    return cut, base.rules.names


def derive_tensor(draft: TensorDraft, base: Base, infos: Mapping[str, ParamInfo]) -> TensorParallel:
    """What lowering reads of tensor parallelism.

    Args:
        draft: after `resolve_cuts`.
        base: of the plan.
        infos: by path, after `resolve_cuts`.
    """
    if not draft.axes:
        return TensorParallel()
    parts = {name: n for axis in draft.axes.values() for name, n in axis.cuts.items()}
    local = {name: -(-n // parts.get(name, 1)) for name, n in base.naming.sizes.items()}
    modes = [edit.logits for edit, _ in draft.edits if edit.logits != "auto"]
    return TensorParallel(
        axes=FrozenMap(draft.axes),
        frames=FrozenMap(draft.frames),
        ints=FrozenMap(
            (place, evaluate(text, local))
            for place, text in base.naming.ints.items()
            if _is_cut(place, base, draft.frames)
        ),
        logits=modes[-1] if modes else "auto",
        whole=FrozenMap(_whole(draft, infos)),
        guessed=frozenset(info.path for info in base.infos if info.axes != infos[info.path].axes),
    )


def _whole(draft: TensorDraft, infos: Mapping[str, ParamInfo]) -> dict[str, str]:
    """Why parameters are not cut, by path."""
    asked = {path for _, paths in draft.edits for path in paths}
    found: dict[str, str] = {}
    for path, info in infos.items():
        if path in draft.frames:
            continue
        unnamed = info.axes == Axes.anonymous(info.axes.ndim)
        named = "no names known" if unnamed else f"'{info.axes}'"
        found[path] = named if path in asked else "left out by where="
    return found


def _is_cut(place: str, base: Base, frames: Mapping[str, Frame]) -> bool:
    """Whether the module that holds an attribute has parameters that are cut.

    The attribute may be one of something that the module holds, such as a configuration: the
    module is the nearest one above that has parameters at all.
    """
    above = place.split(".")[:-1]
    while True:
        prefix = ".".join([*above, ""])
        inside = [info.path for info in base.infos if info.path.startswith(prefix)]
        if inside or not above:
            return any(path in frames for path in inside)
        above = above[:-1]
