"""Offload as a transform of plans: which memory the parts of a training state rest in.

[Note: tiers]
A plan says for every part where it rests: on the device, in pinned host memory, or in files on a
local drive. What that means for a step follows from it:

- `opt` (moments and masters) off the device: the optimizer runs on the host, where its state is,
  in one pass over memory; gradients go there and new parameters come back. From disk it is
  streamed in chunks: one is read while another is stepped and a third is written.
- `params` off the device: a unit's shard is fetched before its gather, `prefetch` units ahead, and
  is never whole on the device.
- `grads` off the device: landed gradients wait for the update on their tier.
- `acts`: what modules save for backward is copied there as it is made, and fetched module by module
  in backward, `prefetch` modules ahead.

Numbers do not change: the same kernels see the same elements, in whatever chunks.
"""

from __future__ import annotations

from typing import Any

from shardwise.sharding.edits import Edit
from shardwise.sharding.errors import PlanError, nearest, strict_keywords
from shardwise.sharding.modules import ROOT
from shardwise.sharding.offload_edit import PARTS, OffloadEdit
from shardwise.sharding.plan import Plan, Transform, named
from shardwise.sharding.scope import call_site
from shardwise.sharding.tiers import Tier
from shardwise.sharding.tree import Where

_PARTS_OF = {**{part: (part,) for part in PARTS}, "opt": ("moments", "masters")}


@strict_keywords
def offload(
    home: str, to: str | Tier, *, where: Where = "**", fraction: float = 1.0, prefetch: int = 1
) -> Transform:
    """Put what rests, or what waits for backward, in host memory or on disk; see [Note: tiers].

    Of several calls the last one counts, per part and parameter; `to="device"` takes it back.

    Args:
        home: `"params"`, `"grads"`, `"opt"`, or of `opt` only `"moments"` or `"masters"`; or
            `"acts"`, what is saved for backward.
        to: `"pinned_host"`, `disk(path)`, or `"device"`.
        where: which parameters; for `acts` which modules, by their own path, each fetched as one:
            by default the model and each of its units.
        fraction: the part of all selected elements (for `acts`, of the modules) that is put there;
            whole tensors, spread evenly over the model.
        prefetch: units (for `acts`, modules) that are fetched ahead; each adds its own bytes. One
            distance for all `params` of the plan, the largest.

    Raises:
        PlanError: an unknown home, tier, fraction or distance.
        PatternError: when applied: a pattern matches nothing.

    References:
        ZeRO-Offload: Democratizing Billion-Scale Model Training, sections 4 and 5.
        ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning, section 5.

    >>> offload("opt", to="pinned_host").__name__
    "offload('opt', to='pinned_host')"
    """
    tier = _tier(home, to)
    by = _written(home, tier, where=where, fraction=fraction, prefetch=prefetch)
    site = call_site()
    if home not in _PARTS_OF:
        raise PlanError(
            f"{by} names the unknown home {home!r}.",
            facts=f"homes: {', '.join(('params', 'grads', 'opt', 'moments', 'masters', 'acts'))}",
            why="These are what a training step keeps.",
            fix=nearest(home, _PARTS_OF),
            home=home,
        )
    settings: dict[str, Any] = {"tier": str(tier), "fraction": fraction, "prefetch": prefetch}
    for part in _PARTS_OF[home]:
        OffloadEdit(part=part, by=by, **settings)

    def apply(plan: Plan) -> Plan:
        edits: list[Edit] = []
        for part in _PARTS_OF[home]:
            if part == "acts":
                modules = _modules(plan, where)
                edits.append(OffloadEdit(part=part, modules=modules, by=by, **settings))
            else:
                clauses = plan.clauses(where)
                edits.append(OffloadEdit(part=part, where=clauses, by=by, **settings))
        return plan.edit(*edits, site=site)

    return named(apply, by)


def _modules(plan: Plan, where: Where) -> tuple[str, ...]:
    if where != "**":
        return plan.module_patterns(where)
    return (ROOT, *(f"^{unit.name}" for unit in plan.units if unit.kind == "unit"))


def _tier(home: str, to: Any) -> Tier:
    if isinstance(to, Tier):
        return to
    if to == "disk":
        raise PlanError(
            f"offload({home!r}, to='disk') names no folder.",
            where="argument to of offload(home, to)",
            why="Files need a folder on every rank's machine.",
            fix=f"offload({home!r}, to=sw.disk('/local/scratch'))",
            to=to,
        )
    return Tier(str(to))


def _written(home: str, tier: Tier, **options: Any) -> str:
    """A call as its user wrote it: options at their defaults are left out."""
    defaults = {"where": "**", "fraction": 1.0, "prefetch": 1}
    to = f"disk({tier.path!r})" if tier.path else repr(tier.memory)
    shown = [f"{k}={_argument(v)}" for k, v in options.items() if v != defaults[k]]
    return f"offload({', '.join([repr(home), f'to={to}', *shown])})"


def _argument(value: Any) -> str:
    return getattr(value, "__name__", "predicate") if callable(value) else repr(value)
