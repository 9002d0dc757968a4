"""Run a plan on simulated ranks and compare every step with the model it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.optim.base import GradientTransform, Tensors
from shardwise.sharding.collectives import Collective
from shardwise.sharding.errors import ShardwiseError
from shardwise.sharding.lifted import to_global
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan
from shardwise.sharding.simulation import simulate
from shardwise.testing.case import Case, cast_floats, make_case, whole
from shardwise.testing.compare import Judge, distances, tolerance
from shardwise.testing.oracles import Step, split_reference, unsharded_run
from shardwise.testing.plain import LossFunction
from shardwise.transforms.lower import lower
from shardwise.transforms.program import Program

_NO_NOISE: Mapping[str, float] = {}


def assert_equivalent(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    plan: Plan,
    optimizer: GradientTransform,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int | None = 0,
) -> None:
    """Check that a plan trains as the unsharded model does; use it in tests of your own models.

    All ranks are simulated; each batch is one step. In float64 losses, gradients, parameters and
    optimizer state must agree to 1e-9 after every step. In other dtypes both sides start each step
    from the same state, and losses and gradients are compared: weights would not tell, as Adam
    turns the rounding of a zero gradient into a whole step. Allowed is what dtype and depth of sums
    explain, and 16 times what the unsharded model is off from its own float64. Checked on the way:
    the collectives that ran are the predicted ones, `step` agrees with `grads`, and initial weights
    do not depend on the mesh. Costs the work of all ranks, twice.

    Args:
        model: never modified. Rows of a batch must not see each other (no batch statistics), and
            there must be no dropout.
        loss_fn: as for `lower`.
        batches: global batches.
        plan: made for this model.
        optimizer: any gradient transform. Adam turns the rounding of a gradient that is
            mathematically zero into a change of `lr * noise / eps`: for models that have such
            parameters (a key's bias) take `eps=1e-4` in the test.
        mesh: run the plan's edits on another, smaller mesh with the same axes.
        dtype: in which both sides compute.
        seed: of the initial weights; None: start from the values the model has.

    Raises:
        EquivalenceError: names the law, the parameter, the difference, the mesh and the plan.

    >>> import shardwise as sw
    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    >>> assert_equivalent(
    ...     model, lambda m, x: m(x).square().mean(), [torch.ones(4, 3)] * 2,
    ...     plan=sw.plan(model, sw.Mesh(fsdp=2), sw.zero(3, "fsdp")),
    ...     optimizer=sw.optim.adamw(1e-3))
    """
    case = make_case(
        model,
        loss_fn,
        batches,
        plan=plan,
        optimizer=optimizer,
        mesh=mesh,
        dtype=dtype,
        seed=seed,
    )
    judge = Judge(case.plan, tolerance(dtype, case.depth), "the unsharded model")
    if dtype == torch.float64:
        _compare_runs(case, judge)
    else:
        _compare_single_steps(case, judge)


def assert_bitwise(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    plan: Plan,
    optimizer: GradientTransform,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int | None = 0,
) -> None:
    """Check that a plan gives the bits of its split reference; see [Note: the split reference].

    Arguments as for `assert_equivalent`; batch statistics and dropout are allowed here.

    Raises:
        EquivalenceError: some bits differ.
        ShardwiseError: bits are not promised for this optimizer or this model.

    >>> import shardwise as sw
    >>> model = nn.Linear(5, 3)
    >>> assert_bitwise(
    ...     model, lambda m, x: m(x).square().mean(), [torch.ones(4, 5)] * 2,
    ...     plan=sw.plan(model, sw.Mesh(dp=2, fsdp=2), sw.zero(2, "fsdp")),
    ...     optimizer=sw.optim.sgd(0.1, momentum=0.9))
    """
    if optimizer.couples != "element" or optimizer.needs:
        raise _no_bits(
            "The optimizer reads the norm of all gradients or couples whole tensors.",
            couples=optimizer.couples,
            needs=tuple(sorted(map(str, optimizer.needs))),
        )
    case = make_case(
        model,
        loss_fn,
        batches,
        plan=plan,
        optimizer=optimizer,
        mesh=mesh,
        dtype=dtype,
        seed=seed,
    )
    judge = Judge(case.plan, 0.0, "the split reference")
    params, buffers = case.initial()
    steps = split_reference(
        case.model,
        loss_fn,
        case.batches,
        plan=case.plan,
        optimizer=optimizer,
        params=params,
        buffers=buffers,
        seed=seed or 0,
    )
    with simulate(case.plan.mesh):
        run = Run(case, judge, params)
        for theirs in steps:
            run.step(theirs)


def _compare_runs(case: Case, judge: Judge) -> None:
    """Both sides train on; everything is compared."""
    params, buffers = case.initial()
    with simulate(case.plan.mesh):
        run = Run(case, judge, params)
        for theirs in _unsharded(case, case.batches, params, buffers):
            run.step(theirs)


def _compare_single_steps(case: Case, judge: Judge) -> None:
    """Both sides start every step from the program's state; losses and gradients are compared.

    How much rounding a gradient takes depends on the model: behind a LayerNorm of few channels most
    of it cancels. So the unsharded model tells by how much it is off from its own float64.
    """
    params, buffers = case.initial()
    with simulate(case.plan.mesh):
        run = Run(case, judge, params)
        for batch in case.batches:
            (theirs,) = _unsharded(case, [batch], params, buffers)
            wide = cast_floats([batch, params, buffers], torch.float64)
            (exact,) = _unsharded(case, wide[:1], *wide[1:])
            run.step_by_gradients(theirs, noise=distances(theirs.grads, exact.grads))
            params, buffers = whole(run.state.params), whole(run.state.buffers)


def _unsharded(
    case: Case, batches: Iterable[Any], params: Tensors, buffers: Tensors
) -> Iterator[Step]:
    return unsharded_run(
        case.model,
        case.loss_fn,
        batches,
        case.optimizer,
        params=params,
        buffers=buffers,
        frozen=case.frozen,
    )


class Run:
    """A program in training beside an oracle; to be used inside `simulate`.

    Args:
        case: what to train.
        judge: how to compare.
        initial: what the initial weights must be, bit for bit.
    """

    def __init__(self, case: Case, judge: Judge, initial: Tensors) -> None:
        self._case = case
        self._judge = judge
        self._number = 0
        self.program: Program = lower(case.plan, case.loss_fn, case.optimizer).bind()
        self.state: Any = self.program.init(case.source)
        for path, value in whole(self.state.params).items():
            if not torch.equal(value, initial[path]):
                raise judge.broken(6, "initial weights differ", path, step=0)

    def step(self, theirs: Step) -> None:
        """Take a step and compare loss, gradients, parameters, optimizer state and buffers."""
        self.step_by_gradients(theirs)
        judge, number = self._judge, self._number - 1
        judge.same_tensors("parameters", whole(self.state.params), theirs.params, step=number)
        judge.same_tree("optimizer states", to_global(self.state.opt), theirs.opt, step=number)
        judge.same_tensors("buffers", whole(self.state.buffers), theirs.buffers, step=number)

    def step_by_gradients(self, theirs: Step, noise: Mapping[str, float] = _NO_NOISE) -> None:
        """Take a step and compare loss, auxiliary means and gradients."""
        judge, number, program = self._judge, self._number, self.program
        batch = program.shard_batch(self._case.batches[number])
        grads, seen = program.grads(self.state, batch)
        self._check_collectives(program.lowered.grads_items)
        if judge.relative == 0.0:
            self._check_single_entries()
        judge.same_tensors("losses", {"loss": seen.loss}, {"loss": theirs.loss}, step=number)
        judge.same_tensors("metrics", seen.aux, theirs.aux, step=number)
        used = to_global(grads.used)
        found = whole(grads.leaves)
        ours = {path: grad for path, grad in found.items() if path in used}
        judge.same_tensors("gradients", ours, theirs.grads, step=number, noise=noise)
        self.state, metrics = program.step(self.state, batch)
        self._check_collectives(program.lowered.collectives())
        if not torch.equal(metrics.loss, seen.loss):
            raise judge.broken(1, "the loss of step differs from that of grads,", "", step=number)
        self._number += 1

    def _check_single_entries(self) -> None:
        """Refuse models for which bits are not promised."""
        entries = Counter(e.unit for e in self.program.lowered.events if e.kind == "enter")
        repeated = [unit for unit, count in entries.items() if count > 1]
        if repeated:
            fact = f"Unit {repeated[0]!r} is gathered several times in one forward pass."
            raise _no_bits(fact, unit=repeated[0])

    def _check_collectives(self, predicted: Sequence[Collective]) -> None:
        ran = self.program.last_collectives
        case = self._case
        even = case.is_even(case.batches[self._number])
        if not same_collectives(ran, predicted, even=even):
            pairs = enumerate(zip(ran, predicted, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(ran), len(predicted)))
            raise self._judge.broken(
                3, "collectives differ", f"collective {at}", step=self._number, ran=len(ran)
            )


def same_collectives(
    ran: Sequence[Collective], predicted: Sequence[Collective], *, even: bool
) -> bool:
    """Whether what ran is what was predicted: kinds, axes, bytes, order.

    Args:
        ran: on one rank.
        predicted: of a step whose micro-batches are all like the one that was traced.
        even: whether they are. If not, activations move the bytes of their own micro-batch, and
            none where a rank has no micro-batch in a pass.
    """
    if even:
        return tuple(ran) == tuple(predicted)
    rest = [[item for item in items if item.reason != _MOVED] for items in (ran, predicted)]
    own, all_of_them = (
        [replace(item, nbytes=0) for item in items if item.reason == _MOVED]
        for items in (ran, predicted)
    )
    left = iter(all_of_them)
    return rest[0] == rest[1] and all(item in left for item in own)


_MOVED = "activations"


def _no_bits(fact: str, **numbers: Any) -> ShardwiseError:
    return ShardwiseError(
        "assert_bitwise compares what is not promised to be equal bits.",
        facts=fact,
        why="The order of addition would differ from that of the split reference.",
        fix="use assert_equivalent",
        **numbers,
    )
