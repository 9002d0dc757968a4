"""The tensors that one collective moves: a unit's parameters cut alike, in each of their homes.

[Note: three homes, one bucket]
A bucket has one flat layout per home. Movement between two homes is the `Regroup` between their
layouts, so DDP, ZeRO-1/2/3, hybrid and mixed plans differ only in `Layout.axes`. Two facts are
decided here and nowhere else. Gradients *land* in the optimizer's layout when that refines their
home, since nothing reads them in between: so ZeRO-1 moves a reduce-scatter and an all-gather, not
an all-reduce and an all-gather. And the optimizer holds a master copy only when the `params` home
cannot give it back for free: it can, if the dtype is equal and the `opt` layout refines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.sharding.errors import PlanError
from shardwise.sharding.layout import Layout, Regroup, make_layout
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import ParamInfo, Plan, Unit
from shardwise.sharding.spec import Spec


@dataclass(frozen=True)
class Route:
    """A way between two layouts: gather to a coarser one, then cut; either may be absent."""

    source: Layout
    target: Layout
    gather: Regroup | None
    cut: Regroup | None

    @property
    def middle(self) -> Layout:
        """The layout between gathering and cutting."""
        return self.gather.coarse if self.gather else self.source


@dataclass(frozen=True)
class Bucket:
    """Parameters of one unit that lie and move together; see [Note: three homes, one bucket].

    `landing` is where reduced gradients arrive; `sum_axes` are batch axes that do not cut it.
    """

    name: str
    unit: str
    paths: tuple[str, ...]
    trainable: bool
    params: Layout
    wire: Layout
    compute: Layout
    landing: Layout | None
    opt: Layout | None
    has_master: bool
    gather: Regroup | None
    reduce: Regroup | None
    sum_axes: tuple[str, ...]

    @property
    def in_place(self) -> bool:
        """Whether modules may read the `params` home itself."""
        return self.gather is None and self.params == self.compute

    @property
    def lands_in_opt(self) -> bool:
        """Whether gradients land in the layout of the `opt` home."""
        return bool(self.landing and self.opt and self.opt.cast(self.landing.dtype) == self.landing)


def route(source: Layout, target: Layout, mesh: Mesh) -> Route:
    """The movement from one layout to another: no bytes if the target refines the source."""
    if source.axes == target.axes and target.refines(source):
        return Route(source, target, None, None)
    if target.refines(source):
        return Route(source, target, None, Regroup(source, target, mesh))
    if source.refines(target):
        return Route(source, target, Regroup(target, source, mesh), None)
    tensors = [(e.path, e.shape, e.dim) for e in source.entries]
    whole = make_layout(tensors, (), mesh, source.dtype)
    cut = Regroup(whole, target, mesh) if target.axes else None
    return Route(source, target, Regroup(whole, source, mesh), cut)


def make_buckets(plan: Plan) -> dict[str, tuple[Bucket, ...]]:
    """The buckets of every unit, by unit name, in the order of `plan.units`."""
    infos = {info.path: info for info in plan.infos}
    return {unit.name: _unit_buckets(plan, unit, infos) for unit in plan.units}


def torch_dtype(name: str) -> torch.dtype:
    """`"float32"` -> `torch.float32`."""
    return getattr(torch, name)


def _unit_buckets(plan: Plan, unit: Unit, infos: dict[str, ParamInfo]) -> tuple[Bucket, ...]:
    groups: dict[tuple[object, ...], list[ParamInfo]] = {}
    for path in unit.params:
        groups.setdefault(_alike(plan, infos[path]), []).append(infos[path])
    # Trainable buckets come first, so that Enter's inputs and outputs are a prefix of the unit's.
    ordered = sorted(groups.values(), key=lambda members: members[0].path not in plan.opt)
    return tuple(
        _make_bucket(plan, unit, f"{unit.name or '(root)'}/{index}", members)
        for index, members in enumerate(ordered)
    )


def _alike(plan: Plan, info: ParamInfo) -> tuple[object, ...]:
    """What parameters of one bucket have in common."""
    homes = [plan.params[info.path], plan.grads.get(info.path), plan.opt.get(info.path)]
    cuts = [_cut(spec, plan.mesh) if spec is not None else (0, ()) for spec in homes]
    nested = [
        inner[0] == outer[0] for n, outer in enumerate(cuts) for inner in cuts[n + 1 :] if outer[1]
    ]
    dtypes = [spec.dtype if spec is not None else "" for spec in [*homes, plan.compute[info.path]]]
    return (tuple(axes for _, axes in cuts), tuple(nested), tuple(dtypes))


def _cut(spec: Spec, mesh: Mesh) -> tuple[int, tuple[str, ...]]:
    """The dimension that is cut and the axes that cut it; axes of size 1 cut nothing."""
    cuts = []
    for dim in range(spec.axes.ndim):
        axes = tuple(axis for axis in spec.dim_axes(dim) if mesh[axis] > 1)
        if axes:
            cuts.append((dim, axes))
    if len(cuts) > 1:
        raise PlanError(
            f"The home {spec} cuts {len(cuts)} dimensions of one tensor.",
            facts=[f"dim {dim}: {' '.join(axes)}" for dim, axes in cuts],
            why="Data axes cut one dimension of a parameter.",
            fix="put all data axes on one dimension",
            dims=len(cuts),
        )
    return cuts[0] if cuts else (0, ())


def _make_bucket(plan: Plan, unit: Unit, name: str, members: Sequence[ParamInfo]) -> Bucket:
    mesh = plan.mesh
    path = members[0].path
    trainable = path in plan.opt

    def layout(home: str) -> Layout:
        specs = getattr(plan, home)
        tensors = [(m.path, m.shape, _cut(specs[m.path], mesh)[0]) for m in members]
        axes = _cut(specs[path], mesh)[1]
        return make_layout(tensors, axes, mesh, torch_dtype(specs[path].dtype))

    params = layout("params")
    compute = layout("compute")
    wire = params.cast(compute.dtype)
    landing = opt = None
    has_master = False
    if trainable:
        grads, opt = layout("grads"), layout("opt")
        landing = opt.cast(grads.dtype) if opt.refines(grads) else grads
        has_master = opt.dtype != params.dtype or not opt.refines(params)
    return Bucket(
        name=name,
        unit=unit.name,
        paths=tuple(m.path for m in members),
        trainable=trainable,
        params=params,
        wire=wire,
        compute=compute,
        landing=landing,
        opt=opt,
        has_master=has_master,
        gather=Regroup(compute, wire, mesh) if wire.axes else None,
        reduce=Regroup(compute.cast(landing.dtype), landing, mesh)
        if landing is not None and landing.axes
        else None,
        sum_axes=tuple(a for a in plan.batch if landing and a not in landing.axes and mesh[a] > 1),
    )
