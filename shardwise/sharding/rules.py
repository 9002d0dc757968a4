"""Rules: an ordered map from logical axes to mesh axes, from which specs follow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import SpecError, nearest
from shardwise.sharding.grammar import Position
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec

Target = str | Sequence[str] | None
"""Mesh axes of a rule as a user writes them: one, several (major to minor), or None."""

# `Axes.anonymous` stands for a tensor nobody described, so no rule can speak about it.
_ANONYMOUS = re.compile(r"d[0-9]+")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Rules:
    """Ordered rules `logical axis -> mesh axes`; the first free match wins.

    Rules are tried in order. A rule applies to every dimension, or part of one, of that name that
    has no rule yet, unless one of its mesh axes already cuts this tensor elsewhere. The same name
    may have several rules. None keeps the name whole and ends the search.

    Args:
        pairs: rules in order, as a mapping or as pairs.
        named: more rules, after them.

    >>> rules = Rules(heads="tp", embed=("dp", "fsdp"), hd=None)
    >>> axes = Axes.parse("(heads hd) embed")
    >>> rules.spec(axes, Mesh(dp=2, fsdp=2, tp=2), (64, 32), sizes={"hd": 16})
    Spec('(heads/tp hd) embed/(dp fsdp)')
    """

    pairs: tuple[tuple[str, tuple[str, ...]], ...]

    def __init__(
        self, pairs: Mapping[str, Target] | Iterable[tuple[str, Target]] = (), /, **named: Target
    ) -> None:
        rules = [*(pairs.items() if isinstance(pairs, Mapping) else pairs), *named.items()]
        normal = tuple((name, _axes(target)) for name, target in rules)
        object.__setattr__(self, "pairs", normal)

    def __repr__(self) -> str:
        shown = (f"({name!r}, {_written(axes)!r})" for name, axes in self.pairs)
        return f"Rules([{', '.join(shown)}])"

    @property
    def names(self) -> tuple[str, ...]:
        """Logical axes that have a rule, once each, in order."""
        return tuple(dict.fromkeys(name for name, _ in self.pairs))

    def replace(self, **named: Target) -> Rules:
        """Rules in which each given name has exactly the given rule, at its old place or the end.

        >>> Rules(embed=None, mlp="tp").replace(embed="fsdp", experts="ep")
        Rules([('embed', 'fsdp'), ('mlp', 'tp'), ('experts', 'ep')])
        """
        merged: dict[tuple[str, int], Target] = {}
        for i, (name, axes) in enumerate(self.pairs):
            if name not in named:
                merged[name, i] = axes
            else:
                merged.setdefault((name, -1), named[name])
        added = {(name, -1): target for name, target in named.items() if name not in self.names}
        return Rules([(name, target) for (name, _), target in {**merged, **added}.items()])

    def spec(
        self,
        axes: Axes,
        mesh: Mesh,
        shape: Sequence[int],
        *,
        sizes: Mapping[str, int] | None = None,
    ) -> Spec:
        """The spec these rules give to a tensor.

        Args:
            axes: names of its dimensions.
            mesh: the mesh whose axes the rules name.
            shape: its shape.
            sizes: sizes of logical axes that the shape alone leaves open, such as `hd`.

        Raises:
            SpecError: a mesh axis the mesh does not have, a name without a rule, or a size that
                is unknown or does not divide by the mesh axes that should cut it.
        """
        self.check(mesh)
        self._check_names(axes)
        spec = Spec(axes, tuple(self._choose(axes).items()))
        given = {name: size for name, size in (sizes or {}).items() if name in axes.names}
        _check_divides(spec, mesh, axes.known_sizes(shape, **given), tuple(shape))
        return spec

    def check(self, mesh: Mesh) -> None:
        """Raise `SpecError` for a rule that names an axis the mesh does not have."""
        for name, axes in self.pairs:
            for axis in axes:
                if axis not in mesh:
                    raise SpecError(
                        f"the rule {name!r} -> {_written(axes)!r} names an unknown mesh axis.",
                        facts=f"{mesh!r} has no axis {axis!r}.",
                        why="Rules map logical axes to axes of this mesh; one of size 1 is off.",
                        fix=f"{nearest(axis, mesh.names)}; or {axis}=1 in the mesh",
                        axis=axis,
                    )

    def to_json(self) -> list[list[str | list[str]]]:
        """Plain lists: `[[name, [mesh axis, ...]], ...]`."""
        return [[name, list(axes)] for name, axes in self.pairs]

    @staticmethod
    def from_json(data: Sequence[Sequence[str | Sequence[str]]]) -> Rules:
        """The inverse of `to_json`.

        Raises:
            SpecError: an entry that is not `[name, [mesh axis, ...]]`.
        """
        for entry in data:
            if not _is_entry(entry):
                raise SpecError(
                    f"Rules.from_json cannot read the entry {entry!r}.",
                    why="An entry is [name, [mesh axis, ...]].",
                    fix="write rules with to_json",
                )
        return Rules([(str(name), tuple(axes)) for name, axes in data])

    def _choose(self, axes: Axes) -> dict[Position, tuple[str, ...]]:
        """Positions that are cut, with their mesh axes."""
        chosen: dict[Position, tuple[str, ...]] = {}
        places = axes.places()
        for name, mesh_axes in self.pairs:
            for position in places.get(name, ()):
                if position not in chosen and _is_free(axes, position, mesh_axes, chosen):
                    chosen[position] = mesh_axes
        return {position: mesh_axes for position, mesh_axes in chosen.items() if mesh_axes}

    def _check_names(self, axes: Axes) -> None:
        for name in axes.names:
            if name not in self.names and not _ANONYMOUS.fullmatch(name):
                raise SpecError(
                    f"the logical axis {name!r} of '{axes}' has no rule.",
                    why="Every name needs a rule, so that a misspelt one cannot stay whole "
                    "unnoticed.",
                    fix=f"{nearest(name, self.names)}; or add the rule {name}=None",
                    name=name,
                )


def _axes(target: Target) -> tuple[str, ...]:
    if target is None:
        return ()
    return (target,) if isinstance(target, str) else tuple(target)


def _written(axes: tuple[str, ...]) -> Target:
    """A target as a user would write it."""
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2:
        return False
    name, axes = entry
    if not isinstance(name, str) or not isinstance(axes, Sequence) or isinstance(axes, str):
        return False
    return all(isinstance(axis, str) for axis in axes)


def _is_free(
    axes: Axes,
    position: Position,
    mesh_axes: tuple[str, ...],
    chosen: Mapping[Position, tuple[str, ...]],
) -> bool:
    """Whether no mesh axis of a rule cuts an element of the tensor a second time."""
    return all(
        axes.alternatives(position, other) or not set(mesh_axes) & set(used)
        for other, used in chosen.items()
    )


def _check_divides(
    spec: Spec, mesh: Mesh, known: Mapping[str, int], shape: tuple[int, ...]
) -> None:
    for position, mesh_axes in spec.shards:
        count = mesh.product(mesh_axes)
        size = known.get(spec.axes.node_text(position))
        if size is None and count > 1:
            raise _unknown_size(spec, position, mesh_axes, shape)
        if size is not None and size % count:
            raise _uneven(spec, position, mesh, size, shape)


def _unknown_size(
    spec: Spec, position: Position, mesh_axes: tuple[str, ...], shape: tuple[int, ...]
) -> SpecError:
    name, dim = spec.axes.node_text(position), position[0]
    return SpecError(
        f"cannot cut {name!r} of '{spec.axes}' over {', '.join(mesh_axes)}: its size is unknown.",
        facts=f"shape {shape}: dim {dim} '{spec.axes.dim_name(dim)}' has size {shape[dim]}.",
        why="A part of a dimension is cut evenly, and the shape leaves its size open.",
        fix=f"sizes={{{name!r}: ...}}",
        name=name,
        dim=dim,
    )


def _uneven(
    spec: Spec, position: Position, mesh: Mesh, size: int, shape: tuple[int, ...]
) -> SpecError:
    name, mesh_axes = spec.axes.node_text(position), dict(spec.shards)[position]
    count = mesh.product(mesh_axes)
    return SpecError(
        f"cannot cut {name!r} of '{spec.axes}' over {', '.join(mesh_axes)} evenly.",
        facts=[
            f"shape {shape}; {name} is {size}; {size} % {count} == {size % count}.",
            f"{mesh!r}.",
        ],
        why=f"The rule {name!r} -> {_written(mesh_axes)!r} cuts a logical axis evenly.",
        fix=f"{name}=None keeps it whole; or choose axis sizes whose product divides {size}",
        name=name,
        size=size,
        count=count,
    )


llama = Rules(
    vocab="tp",
    heads="tp",
    kv="tp",
    mlp="tp",
    embed=None,
    hd=None,
    group=None,
    norm=None,
    layers=None,
)
"""Megatron-style tensor parallelism for Llama-like models; ZeRO adds its own axes to the homes."""
