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

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardwise.sharding.assembling import Assembly, make_assembly
from shardwise.sharding.derived import HERE, Accumulation, Rests
from shardwise.sharding.errors import PlanError
from shardwise.sharding.layout import Layout, Regroup, frames_of, make_layout
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import ParamInfo, Plan, Unit
from shardwise.sharding.spec import Spec
from shardwise.sharding.tensor_cuts import copy_axes
from shardwise.sharding.tiers import DEVICE

Couples: TypeAlias = Literal["element", "tensor", "tree"]
"""What an optimizer must see whole."""


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
class Group:
    """Parameters of a bucket that the optimizer steps alike: one slice of the `opt` buffer.

    Args:
        key: what optimizers call it: the bucket, or the bucket and a label.
        unit: the unit of the bucket.
        couples: what the optimizer must see whole: `element`, `tensor` or `tree`.
        start: where the slice begins.
        layout: of the slice.
        work: the dtype that the optimizer computes in: that of the layout, if it is not narrower.
        gather: from the slices of all data ranks to whole blocks; None where this rank has them.
        assembly: from blocks to whole tensors, where tensor axes cut them.
        rests: the tiers of its bucket.
    """

    key: str
    unit: str
    couples: Couples
    start: int
    layout: Layout
    work: torch.dtype
    gather: Regroup | None
    assembly: Assembly | None = None
    rests: Rests = HERE

    @property
    def on_host(self) -> bool:
        """Whether the optimizer runs on the host, where its state is."""
        return self.rests.moments != DEVICE or self.is_streamed

    @property
    def is_here(self) -> bool:
        """Whether all that a step changes rests on the device."""
        return replace(self.rests, grads=DEVICE) == HERE

    @property
    def is_streamed(self) -> bool:
        """Whether it is stepped in chunks, as a part of it is on disk."""
        tiers = (self.rests.params, self.rests.moments, self.rests.masters)
        return self.couples == "element" and any(tier.memory == "disk" for tier in tiers)

    @property
    def blocks(self) -> Layout:
        """The layout that data axes do not cut."""
        return self.gather.coarse if self.gather else self.layout

    @property
    def whole(self) -> Layout:
        """The layout of the whole tensors."""
        return self.assembly.whole if self.assembly else self.blocks

    def working(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the optimizer sees what rests in `dtype`."""
        return self.work if dtype == self.layout.dtype else dtype

    @property
    def paths(self) -> tuple[str, ...]:
        """Its parameters."""
        return tuple(entry.path for entry in self.layout.entries)

    def slice(self, flat: Tensor) -> Tensor:
        """This group's part of the bucket's buffer in the `opt` layout."""
        if flat.numel() == self.layout.length:
            return flat
        return flat[self.start : self.start + self.layout.length]


class Part(NamedTuple):
    """How the optimizer treats one parameter: parameters of one label are stepped alike."""

    label: str = ""
    couples: Couples = "element"


@dataclass(frozen=True)
class Bucket:
    """Parameters of one unit that lie and move together; see [Note: three homes, one bucket].

    `landing` is where reduced gradients rest after a step, `sums` where its passes add them up, and
    `reduced` what the wire carries, all in one layout in three dtypes; `sum_axes` are batch axes
    that do not cut it; `keeps_whole` tells that the passes of a step add up whole gradients, which
    are cut once. `rounds` tells that parameters are rounded stochastically, `work` is the dtype
    that the optimizer computes in, and `rests` has the tiers.
    """

    name: str
    unit: str
    paths: tuple[str, ...]
    trainable: bool
    params: Layout
    wire: Layout
    compute: Layout
    landing: Layout | None
    sums: Layout | None
    reduced: Layout | None
    opt: Layout | None
    work: torch.dtype
    rounds: bool
    has_master: bool
    gather: Regroup | None
    reduce: Regroup | None
    sum_axes: tuple[str, ...]
    keeps_whole: bool = False
    rests: Rests = HERE
    groups: tuple[Group, ...] = ()

    @property
    def in_place(self) -> bool:
        """Whether modules may read the `params` home itself."""
        same = self.gather is None and self.params == self.compute
        return same and self.rests.params == DEVICE

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
    whole = make_layout(tensors, (), mesh, source.dtype, frames_of(source.entries))
    cut = Regroup(whole, target, mesh) if target.axes else None
    return Route(source, target, Regroup(whole, source, mesh), cut)


def make_buckets(
    plan: Plan, parts: Mapping[str, Part] | None = None
) -> dict[str, tuple[Bucket, ...]]:
    """The buckets of every unit, by unit name, in the order of `plan.units`.

    Args:
        plan: the layouts.
        parts: how the optimizer treats each trainable parameter; default: all alike, by element.
    """
    infos = {info.path: info for info in plan.infos}
    known = parts or {}
    return {unit.name: _unit_buckets(plan, unit, infos, known) for unit in plan.units}


def torch_dtype(name: str) -> torch.dtype:
    """`"float32"` -> `torch.float32`."""
    return getattr(torch, name)


def _unit_buckets(
    plan: Plan, unit: Unit, infos: dict[str, ParamInfo], parts: Mapping[str, Part]
) -> tuple[Bucket, ...]:
    groups: dict[tuple[object, ...], list[ParamInfo]] = {}
    for path in unit.params:
        groups.setdefault(_alike(plan, infos[path]), []).append(infos[path])
    # Trainable buckets come first, so that Enter's inputs and outputs are a prefix of the unit's.
    ordered = sorted(groups.values(), key=lambda members: members[0].path not in plan.opt)
    return tuple(
        _make_bucket(plan, unit, f"{unit.name or '(root)'}/{index}", members, parts)
        for index, members in enumerate(ordered)
    )


def _alike(plan: Plan, info: ParamInfo) -> tuple[object, ...]:
    """What parameters of one bucket have in common."""
    homes = [plan.params[info.path], plan.grads.get(info.path), plan.opt.get(info.path)]
    cuts = [_cut(plan, info.path, spec) if spec is not None else (0, ()) for spec in homes]
    nested = [
        inner[0] == outer[0] for n, outer in enumerate(cuts) for inner in cuts[n + 1 :] if outer[1]
    ]
    dtypes = [spec.dtype if spec is not None else "" for spec in [*homes, plan.compute[info.path]]]
    precision, path = plan.precision, info.path
    dtypes += [precision.gather[path], precision.reduce[path] if path in plan.grads else ""]
    rounds = path in precision.stochastic
    frame = plan.tensor.frames.get(path)
    framed = () if frame is None else frame.axes
    rests = plan.rests.get(path, HERE)
    return (tuple(axes for _, axes in cuts), tuple(nested), tuple(dtypes), rounds, framed, rests)


def _cut(plan: Plan, path: str, spec: Spec) -> tuple[int, tuple[str, ...]]:
    """The dimension that data axes cut, and these axes; axes of size 1 cut nothing."""
    cuts = []
    for dim in range(spec.axes.ndim):
        before = plan.compute[path].dim_axes(dim)
        axes = tuple(a for a in spec.dim_axes(dim) if plan.mesh[a] > 1 and a not in before)
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


def _make_bucket(
    plan: Plan,
    unit: Unit,
    name: str,
    members: Sequence[ParamInfo],
    parts: Mapping[str, Part],
) -> Bucket:
    mesh = plan.mesh
    # Parameters of one label lie side by side, so that a group is a slice and costs no collective.
    members = sorted(members, key=lambda member: parts.get(member.path, Part()))
    path = members[0].path
    trainable = path in plan.opt

    def layout(home: str) -> Layout:
        specs = getattr(plan, home)
        cuts = {m.path: _cut(plan, m.path, specs[m.path]) for m in members}
        tensors = [(m.path, plan.tensor.block(m), cuts[m.path][0]) for m in members]
        dtype = torch_dtype(specs[path].dtype)
        return make_layout(tensors, cuts[path][1], mesh, dtype, plan.tensor.frames)

    params = layout("params")
    compute = layout("compute")
    wire = params.cast(torch_dtype(plan.precision.gather[path]))
    landing = sums = reduced = opt = None
    has_master = keeps_whole = False
    rounds = path in plan.precision.stochastic
    work = params.dtype
    if trainable:
        grads, opt = layout("grads"), layout("opt")
        landing = opt.cast(grads.dtype) if opt.refines(grads) else grads
        reduced = landing.cast(torch_dtype(plan.precision.reduce[path]))
        sums = landing.cast(torch.promote_types(reduced.dtype, landing.dtype))
        work = torch.promote_types(opt.dtype, torch.float32) if rounds else opt.dtype
        has_master = not rounds and (opt.dtype != params.dtype or not opt.refines(params))
        keeps_whole = bool(landing.axes) and _keeps_whole(plan.accumulation, grads)
    bucket = Bucket(
        name=name,
        unit=unit.name,
        paths=tuple(m.path for m in members),
        trainable=trainable,
        params=params,
        wire=wire,
        compute=compute,
        landing=landing,
        sums=sums,
        reduced=reduced,
        opt=opt,
        work=work,
        rounds=rounds,
        has_master=has_master,
        gather=Regroup(compute, wire, mesh) if wire.axes else None,
        reduce=Regroup(compute.cast(reduced.dtype), reduced, mesh)
        if reduced is not None and reduced.axes
        else None,
        sum_axes=_sum_axes(plan, path, landing) if landing else (),
        keeps_whole=keeps_whole,
        rests=plan.rests.get(path, HERE),
    )
    return bucket if opt is None else _with_groups(bucket, opt, parts, mesh)


def _with_groups(bucket: Bucket, opt: Layout, parts: Mapping[str, Part], mesh: Mesh) -> Bucket:
    if not bucket.has_master:
        bucket = replace(bucket, rests=replace(bucket.rests, masters=DEVICE))
    return replace(bucket, groups=_groups(bucket, opt, parts, mesh))


def _sum_axes(plan: Plan, path: str, landing: Layout) -> tuple[str, ...]:
    """Axes over whose ranks gradients are summed that do not cut them, in the order of the mesh."""
    copies = copy_axes(plan.tensor.frames.get(path), tuple(plan.tensor.axes.values()))
    axes = {*plan.batch, *copies} - {*landing.axes}
    return tuple(axis for axis in plan.mesh if axis in axes and plan.mesh[axis] > 1)


def _keeps_whole(accumulation: Accumulation, grads: Layout) -> bool:
    """Whether a step of several passes cuts these gradients only in its last one.

    By default where their home is whole, so that whole gradients are what the plan has room for.
    """
    if accumulation.steps == 1 or accumulation.reduce == "each":
        return False
    return accumulation.reduce == "once" or not grads.axes


def _groups(
    bucket: Bucket, opt: Layout, parts: Mapping[str, Part], mesh: Mesh
) -> tuple[Group, ...]:
    by_part = itertools.groupby(opt.entries, key=lambda entry: parts.get(entry.path, Part()))
    runs = [(part, list(entries)) for part, entries in by_part]
    starts = [entries[0].offset for _, entries in runs]
    groups = []
    for (part, entries), start, stop in zip(runs, starts, [*starts[1:], opt.length], strict=True):
        moved = tuple(replace(entry, offset=entry.offset - start) for entry in entries)
        layout = Layout(opt.axes, moved, stop - start, opt.dtype)
        key = f"{bucket.name}:{part.label}" if part.label else bucket.name
        group = Group(
            key,
            bucket.unit,
            part.couples,
            start,
            layout,
            bucket.work,
            None,
            rests=bucket.rests,
        )
        if part.couples != "element":
            if opt.axes:
                tensors = [(e.path, e.shape, e.dim) for e in moved]
                blocks = make_layout(tensors, (), mesh, opt.dtype, frames_of(moved))
                group = replace(group, gather=Regroup(blocks, layout, mesh))
            group = replace(group, assembly=make_assembly(group.blocks, mesh))
        groups.append(group)
    return tuple(groups)
