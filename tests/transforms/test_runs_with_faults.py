"""Runs in micro-steps with loss terms and uneven parts, of which some steps are skipped or fail.

Whatever is drawn: every step that is applied is the step of one process on the whole batch, and a
step that is not changes nothing, on any rank.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import RankError, ShardwiseError
from shardwise.testing.models import Toy
from shardwise.testing.plain import PlainModel
from shardwise.testing.strategies import make_optimizer
from tests.transforms.overflowing import INF, NAN, Break

pytestmark = pytest.mark.simulated

MESHES = [sw.Mesh(fsdp=1), sw.Mesh(fsdp=2), sw.Mesh(fsdp=3), sw.Mesh(dp=2, fsdp=2)]
# With `branch` a layer runs on parts of three rows only, so micro-steps use different parameters.
FEATURES = ("attention", "branch", "frozen", "nested", "scalar", "tied", "twice", "unused")
FAULTS = {"loss": (NAN, INF), "grad": (NAN, INF, -INF), "raise": (1.0,)}
TERMS = ("one mean", "a scalar", "terms", "terms and count_fn")
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """What is wrong with one row of the batch of one step."""

    kind: str = ""
    value: float = 0.0
    row: int = 0


@dataclass(frozen=True)
class Run:
    """A training run."""

    mesh: sw.Mesh
    toy: Toy
    level: int
    hybrid: bool
    prefetch: int
    passes: int
    reduce: str
    gather: str
    remat: tuple[str, ...]
    terms: str
    scale: tuple[tuple[str, float], ...] | None
    parts: tuple[tuple[tuple[int, ...], ...], ...]  # rows of each micro-batch, rank and step
    given: bool  # whether micro-batches are given one by one
    faults: tuple[Fault, ...]
    optimizer: str
    seed: int

    def plan(self, model: nn.Module) -> sw.Plan:
        axes = self.mesh.names[-1:] if self.hybrid else self.mesh.names
        transforms = [
            sw.zero(self.level, axes),
            sw.prefetch(self.prefetch),
            sw.accumulate(self.passes, reduce=self.reduce, gather=self.gather),
            *(sw.remat(pattern) for pattern in self.remat),
            *([] if self.scale is None else [sw.loss_scale(**dict(self.scale))]),
        ]
        return sw.plan(model, self.mesh, *transforms)

    def loss_fn(self, model: nn.Module, batch: Batch) -> Any:
        """The toy's loss in one of the forms a loss may have; rows with faults spoil it."""
        if not isinstance(batch["raise"], torch._subclasses.FakeTensor) and batch["raise"].any():
            raise ValueError("a broken row")
        out = Break.apply(model(batch["inputs"]), batch["grad"])
        counted = batch["counted"]
        if self.toy.vocab:
            ce = nn.functional.cross_entropy(
                out.transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none"
            )
            total, count = (ce.sum(1) * counted).sum(), (batch["labels"] != -100).sum(1) * counted
            total, count = total + batch["loss"].sum(), count.sum()
        else:
            total = (out.squeeze(-1) - batch["labels"]).square().sum() + batch["loss"].sum()
            count = len(out)
        if self.terms == "a scalar":
            return total / len(out)
        if self.terms == "one mean":
            return sw.Mean(total, count), {"size": sw.Mean(out.detach().square().sum(), len(out))}
        flat = out.flatten(1).square().mean(1) * counted
        return {"a": sw.Mean(total, count), "b": sw.Mean(flat.sum(), counted.sum(), weight=0.3)}

    def count_fn(self, batch: Batch) -> dict[str, Any]:
        counted = batch["counted"].sum()
        if not self.toy.vocab:
            return {"a": len(batch["inputs"]), "b": counted}
        labelled = (batch["labels"] != -100).sum(1) * batch["counted"]
        return {"a": labelled.sum(), "b": counted}

    def batch(self, step: int) -> Batch:
        """The global batch of a step, with its fault."""
        rows = sum(sum(rank) for rank in self.parts[step])
        batch = self.toy.batch(rows, self.seed + step)
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        generator = torch.Generator().manual_seed(self.seed + step)
        counted = torch.rand(rows, generator=generator) < 0.7
        counted[0] = True
        batch |= {"counted": counted.double() if not self.toy.vocab else counted.long()}
        batch |= {kind: torch.zeros(rows, dtype=torch.float64) for kind in FAULTS}
        fault = self.faults[step]
        if fault.kind:
            batch[fault.kind][fault.row % rows] = fault.value
        return batch

    def given_parts(self, batch: Batch, step: int) -> Any:
        """Each rank's rows, whole or as micro-batches; None for a rank without any."""
        sizes = self.parts[step]
        split = {k: v.split([sum(rank) for rank in sizes]) for k, v in batch.items()}
        parts: list[Any] = []
        for rank, own in enumerate(sizes):
            mine = {k: v[rank] for k, v in split.items()}
            if not own:
                parts.append(None)
            elif self.given:
                cut = {k: v.split(list(own)) for k, v in mine.items()}
                micros = [{k: v[i] for k, v in cut.items()} for i in range(len(own))]
                parts.append(sw.MicroBatches(micros))
            else:
                parts.append(mine)
        return sw.Lifted(parts)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    mesh = draw(st.sampled_from(MESHES))
    steps = draw(st.integers(1, 4))
    terms = draw(st.sampled_from(TERMS))
    passes = 1 if terms == "terms" else draw(st.integers(1, 4))
    given_one_by_one = draw(st.booleans())
    most = passes if given_one_by_one else 1
    sizes = st.lists(st.integers(1, 4), max_size=most).map(tuple)
    parts = []
    for _ in range(steps):
        ranks = draw(st.lists(sizes, min_size=mesh.size, max_size=mesh.size))
        parts.append(tuple(ranks) if any(ranks) else ((2,), *ranks[1:]))
    features = tuple(sorted(draw(st.sets(st.sampled_from(FEATURES), max_size=4))))
    if "branch" in features:  # the first micro-batch of the first step shows the order of layers
        first = (3, *parts[0][0][1:]) if given_one_by_one else (3 * passes,)
        parts[0] = (first, *parts[0][1:])
    fault = st.sampled_from(sorted(FAULTS)).flatmap(
        lambda kind: st.builds(
            Fault, st.just(kind), st.sampled_from(FAULTS[kind]), st.integers(0, 50)
        )
    )
    depth = draw(st.integers(0, 3))
    scale = st.sampled_from(
        [
            None,
            (("value", 64.0),),
            (("window", 1), ("hysteresis", 1), ("initial_power", 8)),
        ]
    )
    return Run(
        mesh=mesh,
        toy=Toy(
            width=draw(st.sampled_from([3, 4])),
            hidden=5,
            depth=depth,
            vocab=draw(st.sampled_from([0, 7])),
            features=features,
        ),
        level=draw(st.integers(0, 3)),
        hybrid=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        passes=passes,
        reduce=draw(st.sampled_from(["auto", "each", "once"])),
        gather=draw(st.sampled_from(["micro", "step"])),
        remat=draw(st.sampled_from([(), ("**.up",)])) if depth else (),
        terms=terms,
        scale=draw(scale),
        parts=tuple(parts),
        given=given_one_by_one,
        faults=tuple(draw(st.one_of(st.just(Fault()), fault)) for _ in range(steps)),
        optimizer=draw(st.sampled_from(["momentum", "adamw", "clipped sgd"])),
        seed=draw(st.integers(0, 1000)),
    )


class Reference:
    """Plain training on whole batches, part by part where the model looks at the rows of a part."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.run = run
        self.model = PlainModel(model)
        self.optimizer = make_optimizer(run.optimizer)
        self.opt = self.optimizer.init(self.model.trainable)

    def grads(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Loss and gradients of the mean over all rows, with counts of the whole batch."""
        run, model = self.run, self.model
        whole = run.count_fn(batch)
        if run.terms == "a scalar":
            whole = {"a": len(batch["inputs"]), "b": 1}
        total = torch.zeros((), dtype=torch.float64)
        for part in self.pieces(batch, step):
            found = run.loss_fn(model.module, part)
            if run.terms == "a scalar":
                found = found * len(part["inputs"]) / whole["a"]
            elif run.terms == "one mean":
                found = found[0].total / whole["a"]
            else:
                means = [(found["a"].total, whole["a"]), (0.3 * found["b"].total, whole["b"])]
                found = sum(t / c for t, c in means if c)
            total = total + found
        leaves = {path: leaf for path, leaf in model._leaves.items() if leaf.requires_grad}
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return total.detach(), dict(zip(leaves, grads, strict=True))

    def pieces(self, batch: Batch, step: int) -> list[Batch]:
        """All micro-batches of all ranks."""
        sizes: list[int] = []
        for own in self.run.parts[step]:
            if self.run.given or not own:
                sizes += own
            else:
                cut = torch.arange(own[0]).tensor_split(min(self.run.passes, own[0]))
                sizes += [len(part) for part in cut]
        split = {k: v.split(sizes) for k, v in batch.items()}
        return [{k: v[i] for k, v in split.items()} for i in range(len(sizes))]

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor | None]) -> None:
        """Parameters without a gradient keep value and optimizer state."""
        used = {path: grad for path, grad in grads.items() if grad is not None}
        params = self.model.trainable
        updates, self.opt = self.optimizer.update(used, self.opt, params)
        for path, update in updates.items():
            params[path].add_(update)


def snapshot(state: Any) -> list[Tensor]:
    """Copies of all that a step may change, on all ranks, but the loss scale."""
    found: list[Tensor] = []
    for one in state.ranks:
        opt = optree.tree_leaves(one.opt_flats)
        found += [leaf.clone() for leaf in (*one.flats.values(), *opt, one.step)]
    return found


def close(mine: Any, theirs: dict[str, Tensor]) -> None:
    for path, value in theirs.items():
        torch.testing.assert_close(mine[path], value, rtol=1e-9, atol=1e-11)


@given(runs())
def test_every_applied_step_is_exact_and_every_other_changes_nothing(run: Run) -> None:
    torch.manual_seed(run.seed)
    model = run.toy.build().double()
    count_fn = run.count_fn if run.terms == "terms and count_fn" else None
    skipped = row = 0
    with sw.simulate(run.mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        optimizer = make_optimizer(run.optimizer)
        lowered = sw.lower(run.plan(model), run.loss_fn, optimizer, count_fn=count_fn)
        program = lowered.bind()
        state: Any = program.init(sw.from_module(model))
        reference = Reference(run, model)
        for step, fault in enumerate(run.faults):
            batch = run.batch(step)
            mine = run.given_parts(batch, step)
            before = snapshot(state)
            if fault.kind == "raise":
                with pytest.raises((RankError, ShardwiseError, ValueError), match="a broken row"):
                    program.step(state, mine)
                assert all(map(torch.equal, snapshot(state), before))
                continue
            want_loss, want = reference.grads(batch, step)
            bad = not all(g.isfinite().all() for g in want.values() if g is not None)
            bad |= not bool(want_loss.isfinite())
            grads, seen = program.grads(state, mine)
            assert program.last_collectives == program.lowered.grads_items
            state, metrics = program.step(state, mine)
            assert metrics.applied == seen.applied == (not bad), metrics.reason
            if bad:
                skipped, row = skipped + 1, row + 1
                assert program.last_collectives == program.lowered.grads_items
                assert all(map(torch.equal, snapshot(state), before))
            else:
                row = 0
                assert program.last_collectives == program.lowered.collectives()
                torch.testing.assert_close(metrics.loss, want_loss, rtol=1e-9, atol=1e-12)
                full = {
                    path: torch.zeros_like(reference.model.params[path]) if g is None else g
                    for path, g in want.items()
                }
                close(sw.to_global(grads.leaves), full)
                used = {path for path, g in want.items() if g is not None}
                assert grads.ranks[0].used == used
                reference.step(want)
                close(sw.to_global(state.params), reference.model.params)
                for name in ("mu", "nu"):
                    if hasattr(reference.opt, name):
                        close(sw.to_global(getattr(state.opt, name)), getattr(reference.opt, name))
            assert metrics.skipped_steps == skipped
            scaling = state.ranks[0].loss_scale
            assert (scaling.skipped, scaling.skipped_in_a_row) == (skipped, row)
