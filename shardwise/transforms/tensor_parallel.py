"""Layers cut over a mesh axis, by the names of the dimensions of their weights.

[Note: tensor parallelism]
A plan says which parts of which weights an axis cuts; nothing says how modules talk. That follows
when a program is lowered: one forward pass on fake tensors gives every activation a type (see
`activation_types`), modules with cut weights are *boundaries* that bring inputs and outputs to the
types that fit, and what does not fit is a `PlanError`, never a wrong number. For a column-parallel
layer (its output is cut) that is an all-reduce in backward, for a row-parallel one (its input is
cut) an all-reduce in forward; with `sequence_parallel` an all-gather and a reduce-scatter each.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.sharding.edits import SequenceEdit, TensorEdit
from shardwise.sharding.errors import PlanError, strict_keywords
from shardwise.sharding.plan import Plan, Transform, named
from shardwise.sharding.scope import call_site
from shardwise.sharding.tree import Where


@strict_keywords
def tensor_parallel(
    axis: str,
    where: Where = "**",
    *,
    names: Sequence[str] | None = None,
    logits: str = "auto",
) -> Transform:
    """Cut layers over a mesh axis: heads, hidden units of an MLP, vocabulary.

    Every rank along the axis gets the same batch and computes a part of each layer. What is cut
    follows from the names of dimensions: those in the plan's `rules` whose mesh axis this is, else
    `heads`, `kv`, `mlp` and `vocab`. Names come from `axes=`, from modules, or from the family of a
    Hugging Face model; what was guessed is marked in the table.

    Args:
        axis: of the mesh; ranks along it need the same batch.
        where: which parameters.
        names: of dimensions that are cut, instead of those by the rules.
        logits: what the last layer gives if the vocabulary is cut: `"cut"` (for
            `sw.cross_entropy`), `"gathered"`, or `"auto"`: cut if that is all the loss needs.

    Raises:
        PlanError: when applied: a size that does not divide, a name without a rule, or a mode of
            logits that is none.

    References:
        Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism,
        section 3.

    >>> tensor_parallel("tp", "layers.*").__name__
    "tensor_parallel('tp', where='layers.*')"
    """
    _check_axis("tensor_parallel", axis)
    shown = [repr(axis)]
    if where != "**":
        place = getattr(where, "__name__", "predicate") if callable(where) else repr(where)
        shown.append(f"where={place}")
    shown += [f"names={list(names)!r}"] if names is not None else []
    shown += [f"logits={logits!r}"] if logits != "auto" else []
    by, site = f"tensor_parallel({', '.join(shown)})", call_site()
    chosen = None if names is None else tuple(names)
    TensorEdit(axis=axis, names=chosen, logits=logits, by=by)

    def apply(plan: Plan) -> Plan:
        clauses = plan.clauses(where)
        edit = TensorEdit(axis=axis, names=chosen, logits=logits, where=clauses, by=by)
        return plan.edit(edit, site=site)

    return named(apply, by)


@strict_keywords
def sequence_parallel(axis: str, *, active: bool = True) -> Transform:
    """Cut activations along the sequence between the layers that `tensor_parallel` cuts.

    Norms, dropouts and what they save take `1 / size` of the memory; an all-reduce becomes a
    reduce-scatter and an all-gather of the same bytes. A length that does not divide is padded
    where it is cut; nothing that a model sees has padding in it.

    Args:
        axis: that cuts layers.
        active: False takes it back.

    Raises:
        PlanError: when applied: the axis cuts no layers.

    References:
        Reducing Activation Recomputation in Large Transformer Models, section 4.2.2.

    >>> sequence_parallel("tp").__name__
    "sequence_parallel('tp')"
    """
    _check_axis("sequence_parallel", axis)
    by, site = f"sequence_parallel({axis!r}{'' if active else ', active=False'})", call_site()
    edit = SequenceEdit(axis=axis, active=active, by=by)
    return named(lambda plan: plan.edit(edit, site=site), by)


def _check_axis(call: str, axis: object) -> None:
    if not isinstance(axis, str):
        raise PlanError(
            f"{call}({axis!r}) names no mesh axis.",
            where=f"argument axis of {call}(axis)",
            why="One axis by its name; several cut different names in a call each.",
            fix=f"{call}('tp')",
            axis=axis,
        )
