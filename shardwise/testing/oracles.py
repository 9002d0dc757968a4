"""What a sharded program must agree with: the unsharded model, and the split reference.

[Note: the split reference]
One process that runs each data rank's micro-batches in turn and adds the gradients in the order in
which the plan moves them: the axes that cut the landed gradient first, then the other batch axes,
each time from the innermost axis of the mesh to the outermost, and along an axis in rank order; the
passes of a step between the two groups of axes, or first of all where whole gradients are kept.
Addition of floating point numbers depends on nothing but that order, and the optimizers' bits do
not depend on how a group is cut, so on the CPU a program and its split reference agree bit for bit.
Exceptions: optimizers that read the norm of all gradients, and units that are gathered several
times in one forward pass (a program adds what each of these calls finds by itself).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.optim.base import GradientTransform, Tensors, apply_in_place
from shardwise.sharding.errors import LossError
from shardwise.sharding.plan import Plan
from shardwise.sharding.rng import key, keyed
from shardwise.testing.plain import LossFunction, Part, PlainModel
from shardwise.testing.split import Place, Split
from shardwise.transforms.loss import Loss

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """One step of an oracle. Tensors are live: copy what must outlast the next step.

    Args:
        loss: mean over the global batch, 0-dim float64.
        count: elements in that mean.
        grads: gradients of the mean by path; parameters that no part used are absent.
        params: all parameters by path, after the update.
        opt: optimizer state over the trainable paths, after the update.
        buffers: the module's buffers after the step.
        aux: means of the auxiliary metrics.
    """

    loss: Tensor
    count: Tensor
    grads: Tensors
    params: Tensors
    opt: Any
    buffers: Tensors
    aux: Mapping[str, Tensor]


def unsharded_run(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    optimizer: GradientTransform,
    *,
    params: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    frozen: Sequence[str] = (),
) -> Iterator[Step]:
    """Train the unsharded model on whole batches, by plain autograd and `optimizer.update`.

    Args:
        model: never modified.
        loss_fn: as for `lower`.
        batches: global batches.
        optimizer: its definition (`update`) is used, never its in-place form.
        params: initial values; default: the model's own.
        buffers: initial values; default: the model's own.
        frozen: paths that do not train.

    >>> import shardwise as sw
    >>> model, batch = nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [3.0]])
    >>> steps = unsharded_run(model, lambda m, x: m(x).mean(), [batch] * 2, sw.optim.sgd(0.1))
    >>> [sorted(step.grads.items()) for step in steps]
    [[('weight', tensor([[2.]]))], [('weight', tensor([[2.]]))]]
    """
    plain = PlainModel(model, params=params, buffers=buffers, frozen=frozen)
    opt = optimizer.init(plain.trainable)
    for batch in batches:
        part = plain.run(loss_fn, batch)
        count = part.loss.count.double()
        found = {path: grad for path, grad in part.grads.items() if grad is not None}
        grads = {path: (grad / count).to(grad.dtype) for path, grad in found.items()}
        with torch.no_grad():
            updates, opt = optimizer.update(grads, opt, plain.trainable)
            for path, update in updates.items():
                plain.params[path].add_(update)
        loss = part.loss.total.detach().double() / count
        aux = {
            name: mean.total.detach().double() / mean.count for name, mean in part.loss.aux.items()
        }
        yield Step(loss, count, grads, plain.params, opt, part.buffers, aux)


def split_reference(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    plan: Plan,
    optimizer: GradientTransform,
    params: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Iterator[Step]:
    """Train as the plan's ranks do, in one process and without sharding; see the note above.

    Costs the work of all data ranks, one after the other, and memory for the gradients of all.

    Args:
        model: the plan's module, or one like it; never modified.
        loss_fn: as for `lower`.
        batches: global batches; each is cut as `program.shard_batch` does.
        plan: says which axes split the batch, and in which order gradients are added.
        optimizer: its in-place form is used, as in a program.
        params: initial values, for example `sw.to_global(state.params)`; default: the model's own.
        buffers: initial values; default: the model's own.
        seed: of `program.init`; keys dropout.

    >>> import shardwise as sw
    >>> model, batch = nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [3.0]])
    >>> plan = sw.plan(model, sw.Mesh(fsdp=2), sw.zero(2, "fsdp"))
    >>> steps = split_reference(
    ...     model, lambda m, x: m(x).mean(), [batch], plan=plan, optimizer=sw.optim.sgd(0.1))
    >>> next(steps).grads
    {'weight': tensor([[2.]])}
    """
    frozen = [info.path for info in plan.infos if not info.trainable]
    plain = PlainModel(model, params=params, buffers=buffers, frozen=frozen)
    opt = optimizer.init(plain.trainable)
    split = Split(plan)
    for number, batch in enumerate(batches):
        before = plain.buffers()
        parts: dict[Place, list[Part]] = {}
        for place, micros in split.cut(batch).items():
            plain.write_buffers(before)
            parts[place] = []
            for micro, rows in enumerate(micros):
                place_of_pass = [*place, micro] if split.steps > 1 else place
                with keyed(key(seed, number, "step", *place_of_pass), _CPU):
                    part = plain.run(loss_fn, rows)
                if part.loss.terms:
                    raise _terms(tuple(part.loss.terms))
                parts[place].append(part)
        losses = {place: [part.loss for part in mine] for place, mine in parts.items()}
        count = split.add_scalars({p: [one.count for one in mine] for p, mine in losses.items()})
        loss = split.add_scalars({p: [one.total for one in mine] for p, mine in losses.items()})
        grads = split.add_gradients(parts, 1.0 / count)
        _, opt = apply_in_place(optimizer, plain.trainable, grads, opt)
        after = split.average_buffers(before, parts)
        plain.write_buffers(after)
        aux = _aux_means(split, losses)
        yield Step(loss / count, count, grads, plain.params, opt, after, aux)


def _aux_means(split: Split, losses: Mapping[Place, Sequence[Loss]]) -> dict[str, Tensor]:
    names = next(mine[0].aux for mine in losses.values() if mine)

    def added(name: str, part: str) -> Tensor:
        values = {p: [getattr(one.aux[name], part) for one in mine] for p, mine in losses.items()}
        return split.add_scalars(values)

    return {name: added(name, "total") / added(name, "count") for name in names}


def _terms(names: tuple[str, ...]) -> LossError:
    return LossError(
        f"The loss has {len(names)} terms, which the split reference does not divide.",
        where="split_reference",
        facts=f"terms: {', '.join(names)}",
        why="Each part is run once, and the counts of all parts would be needed before.",
        fix="use assert_equivalent, or a loss of one term",
        terms=names,
    )
