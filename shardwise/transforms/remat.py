"""Remat as a transform of plans: which modules compute their forward again in backward.

[Note: remat]
A recomputed module saves its inputs instead of what its operations would save; when backward
reaches it, its forward runs once more and saves what the gradients need. Policies are values by
name, so a plan stays data:

- `"everything"`: all is computed again. Backward stops as soon as it has what was saved.
- `"dots"`: results of matrix products, convolutions and fused attention are kept, and these
  operations do not run again; the cheap rest does.
- `save(names)`: what the module marks with `name(x, "attn_out")` is kept, and the operation that
  made it does not run again; everything else does. A mark keeps the whole result of that
  operation, also where `x` is a view of a part of it.
- `offload_to(tier, names)`: the same, and what is kept waits for backward on a tier.
- `"nothing"`: undoes an earlier `remat` of the module.

Exact in any case: random streams are set back, buffers are those that forward has read and are
written once, and units inside of a recomputed module are gathered again. A unit, or a module inside
of one, costs no collective: backward gathers the unit anyway. A module around units costs one more
gather of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.sharding.derived import Remat
from shardwise.sharding.edits import REMAT_POLICIES, RematEdit
from shardwise.sharding.errors import PlanError, strict_keywords
from shardwise.sharding.plan import Plan, Transform, named
from shardwise.sharding.scope import call_site
from shardwise.sharding.tiers import DEVICE, Tier
from shardwise.sharding.tree import Where
from shardwise.transforms.replaying import recordings


@strict_keywords
def remat(where: Where, policy: str | Remat = "everything") -> Transform:
    """Compute modules again in backward instead of keeping what they save; see [Note: remat].

    Saves the module's activations but for its inputs, at the cost of its forward flops; both are
    in `lowered.text()` when `lower` has a batch. Of several calls the last one counts, per module.

    Args:
        where: which modules, by their own path (`"layers.*"`, not what lies below); `""` is the
            model itself. Modules inside of each other are all recomputed, inner ones twice.
        policy: `"everything"`, `"dots"`, `save("attn_out", ...)`,
            `offload_to("pinned_host", "attn_out", ...)`, or `"nothing"`.

    Raises:
        PlanError: an unknown policy.
        PatternError: when applied: a pattern matches no module.

    References:
        Training Deep Nets with Sublinear Memory Cost, section 4.

    >>> remat("layers.*", save("attn_out")).__name__
    "remat('layers.*', save('attn_out'))"
    """
    if not isinstance(policy, str | Remat):
        raise _no_policy(policy)
    chosen = policy if isinstance(policy, Remat) else Remat(policy)
    shown = _shown(chosen)
    place = getattr(where, "__name__", "predicate") if callable(where) else repr(where)
    by = f"remat({place})" if chosen.policy == "everything" else f"remat({place}, {shown})"
    site = call_site()
    about: dict[str, Any] = {
        "policy": chosen.policy,
        "names": chosen.names,
        "tier": chosen.tier,
        "by": by,
    }
    RematEdit(modules=("",), **about)

    def apply(plan: Plan) -> Plan:
        return plan.edit(RematEdit(modules=plan.module_patterns(where), **about), site=site)

    return named(apply, by)


def save(*names: str) -> Remat:
    """The policy that keeps what `name` marks with one of these names.

    Args:
        names: as given to `name`.

    Raises:
        PlanError: there is none, or one is no string.

    >>> print(save("attn_out"))
    save attn_out
    """
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None or not names:
        raise PlanError(
            f"{_call(names)} names no value.",
            where="save(*names)",
            facts=f"{len(names)} names" + (f", one of them {odd!r}" if odd is not None else ""),
            why="Values are kept by the names that the module gives them.",
            fix="save('attn_out'), with sw.name(x, 'attn_out') in the module",
            names=names,
        )
    return Remat("save", tuple(sorted(set(names))))


def offload_to(to: str | Tier, *names: str) -> Remat:
    """The policy that keeps what `name` marks on a tier, and recomputes everything else.

    Costs a copy of what is kept to the tier in forward and one back before the recomputation, which
    is begun when that of the module after it is reached.

    Args:
        to: `"pinned_host"` or `disk(path)`.
        names: as given to `name`.

    Raises:
        PlanError: an unknown tier, no name, or one that is no string.

    >>> print(offload_to("pinned_host", "attn_out"))
    offload attn_out on pinned_host
    """
    kept, tier = save(*names), to if isinstance(to, Tier) else Tier.parse(to)
    return Remat("save" if tier == DEVICE else "offload", kept.names, _text(tier))


def _text(tier: Tier) -> str:
    return "" if tier == DEVICE else str(tier)


def _shown(policy: Remat) -> str:
    if policy.tier:
        return f"offload_to({', '.join(map(repr, (policy.tier, *policy.names)))})"
    return _call(policy.names) if policy.names else repr(policy.policy)


def name(x: Tensor, label: str, /) -> Tensor:
    """`x` itself, marked for the policy `save(label)`; does nothing anywhere else.

    Args:
        x: any tensor; best the result of a costly operation.
        label: the name.

    >>> import torch
    >>> x = torch.ones(2)
    >>> name(x, "attn_out") is x
    True
    """
    for recording in recordings():
        recording.keep(x, label)
    return x


def _no_policy(given: object) -> PlanError:
    kind = getattr(given, "__name__", type(given).__name__)
    return PlanError(
        f"remat(where, policy) was given {kind!r} as its policy.",
        where="argument policy of remat(where, policy)",
        facts=f"policies by name: {', '.join(REMAT_POLICIES)}",
        why="No function can live in a plan, which is data and travels as JSON.",
        fix="'dots', or sw.save('name') with sw.name(x, 'name') in the module",
        policy=given,
    )


def _call(names: Sequence[object]) -> str:
    return f"save({', '.join(map(repr, names))})"
