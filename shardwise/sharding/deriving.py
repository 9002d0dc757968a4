"""Derive every layout, dtype and wish of a plan from a replayed draft."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.sharding.boundaries import find_casts
from shardwise.sharding.derived import Base, Derived, LossScale, Precision, Remat
from shardwise.sharding.draft import Draft, check_axes
from shardwise.sharding.edits import (
    TreeAtEdit,
)
from shardwise.sharding.failures import Failure, raise_failures
from shardwise.sharding.homes import HOMES, Target, place
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.offload_edit import acts_of, resting, tiers_of
from shardwise.sharding.precision import (
    Asked,
    Dtypes,
    dtypes_of,
    misfit,
)
from shardwise.sharding.spec import Spec
from shardwise.sharding.tensor_replay import derive_tensor
from shardwise.sharding.tiers import DEVICE
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo

_DTYPE_OF_HOME = {"params": "params", "grads": "grads", "opt": "master"}
_PART_OF_HOME = {"params": "params", "grads": "grads", "opt": "moments"}


def derive(draft: Draft, base: Base) -> Derived:
    """What a plan says, of a draft that all edits have been written into.

    Raises:
        PlanError: some parameter cannot have the layout that is asked for; all failures in one.
    """
    dtypes = {p: dtypes_of(info, draft.dtypes.get(p, {})) for p, info in draft.infos.items()}
    marks = draft.tensor.marks
    compute = {
        path: Spec(info.axes, tuple(marks.get(path, {}).items()), dtype=dtypes[path].compute)
        for path, info in draft.infos.items()
    }
    tensor = derive_tensor(draft.tensor, base, draft.infos)
    homes: dict[str, dict[str, Spec]] = {home: {} for home in HOMES}
    failures = list(draft.failures)
    for path, info in draft.infos.items():
        target = Target(info, compute[path], draft.mesh, tensor.block(info))
        owned = HOMES if info.trainable else HOMES[:1]
        requests = draft.requests.get(path, {})
        placed = place(target, {home: requests[home] for home in owned if home in requests})
        for home in owned:
            edit = draft.overrides.get((home, path))
            spec = _override(draft, info, edit) if edit else placed[home]
            if isinstance(spec, Failure):
                failures.append(spec)
            else:
                dtype = spec.dtype if edit else getattr(dtypes[path], _DTYPE_OF_HOME[home])
                asked = draft.placed.get((_PART_OF_HOME[home], path))
                memory = spec.memory if edit or asked is None else asked.tier.memory
                homes[home][path] = spec.with_(dtype=dtype, memory=memory)
    failures += _misfits(draft, homes, dtypes)
    raise_failures(failures, len(draft.infos))
    precision = _make_precision(draft, dtypes, compute)
    return Derived(
        mesh=draft.mesh,
        infos=tuple(draft.infos.values()),
        units=draft.units,
        params=FrozenMap(homes["params"]),
        grads=FrozenMap(homes["grads"]),
        opt=FrozenMap(homes["opt"]),
        compute=FrozenMap(compute),
        batch=tuple(axis for axis in draft.mesh.names if axis not in draft.claimed),
        keep=frozenset(draft.keep),
        prefetch=draft.prefetch,
        accumulation=draft.accumulation,
        precision=precision,
        remat=_remat_in_order(draft),
        loss_scale=draft.loss_scale
        or _default_loss_scale(compute, homes["grads"], precision.reduce),
        tensor=tensor,
        rests=resting({path: tiers_of(draft.placed, homes, path) for path in draft.infos}),
        acts=acts_of(draft.acts, draft.modules),
        fetch_ahead=max(
            (
                one.prefetch
                for (part, _), one in draft.placed.items()
                if part == "params" and one.tier != DEVICE
            ),
            default=0,
        ),
    )


def _misfits(
    draft: Draft, homes: Mapping[str, Mapping[str, Spec]], dtypes: Mapping[str, Dtypes]
) -> list[Failure]:
    """What the dtypes that were asked for, as `tree_at` has left them, do not allow."""
    found: list[Failure | None] = []
    for path, asked in draft.dtypes.items():
        if path in homes["params"] and path in homes["opt"]:
            rest = {"params": homes["params"][path].dtype, "master": homes["opt"][path].dtype}
            found.append(misfit(draft.infos[path], asked, dtypes[path]._replace(**rest)))
    return [failure for failure in found if failure is not None]


def _make_precision(
    draft: Draft, dtypes: Mapping[str, Dtypes], compute: Mapping[str, Spec]
) -> Precision:
    infos = tuple(draft.infos.values())
    own = Asked("nearest")
    return Precision(
        gather=FrozenMap((path, found.gather) for path, found in dtypes.items()),
        reduce=FrozenMap((path, found.reduce) for path, found in dtypes.items()),
        stochastic=frozenset(
            path
            for path, asked in draft.dtypes.items()
            if asked.get("rounding", own).value == "stochastic" and draft.infos[path].trainable
        ),
        casts=find_casts(infos, compute, draft.modules, draft.outputs),
        buffers=FrozenMap(draft.buffer_dtypes),
    )


def _remat_in_order(draft: Draft) -> FrozenMap[str, Remat]:
    """Outer modules first; what the last edit said of a module counts."""
    chosen = draft.remat
    asked = [path for path in draft.modules if path in chosen]
    return FrozenMap((path, chosen[path]) for path in asked if chosen[path].policy != "nothing")


def _default_loss_scale(
    compute: Mapping[str, Spec], grads: Mapping[str, Spec], reduce: Mapping[str, str]
) -> LossScale | None:
    """Without a word from the user, float16 is scaled and nothing else is."""
    return LossScale() if uses_half(compute, grads, reduce) else None


def uses_half(
    compute: Mapping[str, Spec], grads: Mapping[str, Spec], reduce: Mapping[str, str]
) -> bool:
    """Whether float16 computes or carries gradients."""
    specs = (*compute.values(), *grads.values())
    carried = (reduce[path] for path in grads)
    return "float16" in {*(spec.dtype for spec in specs), *carried}


def _override(draft: Draft, info: ParamInfo, edit: TreeAtEdit) -> Spec | Failure:
    spec = Spec.parse(edit.spec)
    check_axes(draft, spec.mesh_axes, edit.by)
    problem, fix = _misfit(spec, info, draft.mesh)
    if not problem:
        return spec
    return Failure(
        by=edit.by or f"tree_at({edit.home!r}, {edit.path!r}, {edit.spec!r})",
        problem=f"gives {{count}} a home {problem}",
        path=info.path,
        tail=f"shape {info.shape}   axes '{info.axes}'",
        why=f"{draft.mesh!r}.",
        fix=fix,
        numbers={"spec": edit.spec, "shape": info.shape},
    )


def _misfit(spec: Spec, info: ParamInfo, mesh: Mesh) -> tuple[str, str]:
    """What is wrong with a spec as a home of this parameter, and the fix; both empty: nothing."""
    if spec.axes != info.axes:
        return f"with the axes '{spec.axes}'", f"write the dimensions as '{info.axes}'"
    if spec.partial:
        return f"with sums pending over {', '.join(spec.partial)}", "leave out the '+' part"
    for dim, size in enumerate(info.shape):
        axes = [axis for axis in spec.dim_axes(dim) if mesh[axis] > 1]
        parts = mesh.product(tuple(axes))
        if len(axes) > 1 and size % parts:
            rest = f"dim {dim} has size {size}; {size} % {parts} == {size % parts}"
            return f"that chunks chunks ({rest})", "cut it unevenly over one axis only"
    return "", ""
