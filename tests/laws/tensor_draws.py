"""Draws of tensor-parallel training, and law 1 for one of them.

To run many by hand, with a number of draws and a seed: `python -m tests.laws.tensor_draws 500 0`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise.sharding.lying import grids_of, lying_of, rectangle
from shardwise.sharding.state import State
from shardwise.testing.case import make_case
from shardwise.testing.compare import Judge, tolerance
from shardwise.testing.equivalence import Run, same_collectives
from shardwise.testing.oracles import unsharded_run
from tests.laws.tensor_models import Small

# An axis of size 1 is normal; those above divide the heads.
_MESHES = (
    {"tp": 2},
    {"tp": 4},
    {"tp": 8},
    {"fsdp": 2, "tp": 2},
    {"tp": 2, "fsdp": 2},
    {"tp": 2, "fsdp": 3},
    {"fsdp": 2, "tp": 4},
    {"tp": 4, "fsdp": 2},
    {"replica": 2, "tp": 2},
    {"replica": 2, "fsdp": 2, "tp": 2},
    {"replica": 2, "tp": 2, "fsdp": 2},
    {"tp": 2, "fsdp": 2, "replica": 2},
    {"fsdp": 4, "tp": 1},
)


@dataclass(frozen=True)
class Training:
    """All that one draw is made of.

    Args:
        mesh: names and sizes of axes.
        small: the model.
        level: of ZeRO over `over`, if there are such axes.
        over: data axes that cut homes; others replicate them.
        sequence: whether the sequence is cut between layers.
        remat: pattern of modules that are recomputed, or "".
        passes: micro-batches of a step.
        clip: whether gradients are clipped.
        rows: of each global batch.
        length: of its sequences.
        seed: of weights and batches.
    """

    mesh: tuple[tuple[str, int], ...]
    small: Small
    level: int
    over: tuple[str, ...]
    sequence: bool
    remat: str
    passes: int
    clip: bool
    rows: int
    length: int
    seed: int

    def plan(self, model: torch.nn.Module) -> sw.Plan:
        """The plan for a model that `small` has built."""
        moves = [sw.tensor_parallel("tp")]
        moves += [sw.sequence_parallel("tp")] if self.sequence else []
        moves += [sw.zero(self.level, self.over)] if self.over else []
        moves += [sw.remat(self.remat)] if self.remat else []
        moves += [sw.accumulate(self.passes)] if self.passes > 1 else []
        return sw.plan(model, sw.Mesh(**dict(self.mesh)), *moves)

    @property
    def optimizer(self) -> Any:
        """AdamW whose eps hides the rounding of gradients that are mathematically zero."""
        adamw = sw.optim.adamw(1e-2, eps=1e-4)
        return sw.optim.chain(sw.optim.clip_by_global_norm(0.5), adamw) if self.clip else adamw


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    """Models whose heads the mesh can cut, with whatever plan."""
    mesh = draw(st.sampled_from(_MESHES))
    small, sequence = draw(smalls(mesh["tp"])), draw(st.booleans())
    if sequence and small.twice:
        small = replace(small, depth=3)  # where the sequence is cut, a stack begins and ends once
    data = [axis for axis in ("replica", "fsdp") if axis in mesh]
    return Training(
        tuple(mesh.items()),
        small,
        level=draw(st.integers(0, 3)),
        over=tuple(draw(st.sampled_from([data, data[-1:]]))),
        sequence=sequence,
        remat=draw(st.sampled_from(["", "layers.*", "layers.0", "layers.*.mlp"])),
        passes=draw(st.integers(1, 2)),
        clip=draw(st.booleans()),
        rows=draw(st.integers(1, 7)),
        length=draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def smalls(draw: st.DrawFn, tp: int) -> Small:
    """Models that `tp` ranks can cut."""
    heads = draw(st.sampled_from([n for n in (4, 8) if n % tp == 0]))
    rows = draw(st.sampled_from(["apart", "blocks", "heads", "groups"]))
    kvs = [n for n in (1, 2, 4, 8) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    if rows == "groups":
        kvs = [n for n in kvs if n % tp == 0]
    return Small(
        heads=heads,
        kv=heads if rows == "heads" else draw(st.sampled_from(kvs)),
        hd=draw(st.sampled_from([2, 3])),
        width=draw(st.sampled_from([4, 8, 10])),
        hidden=8 * draw(st.integers(1, 2)),
        vocab=draw(st.sampled_from([33, 16, 5])),
        depth=draw(st.sampled_from([3, 2])),
        rows=rows,
        mlp=draw(st.sampled_from(["plain", "gated", "fused"])),
        norm=draw(st.sampled_from(["layer", "rms"])),
        loss=draw(st.sampled_from(["cut", "whole", "tiled"])),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        twice=draw(st.booleans()),
    )


def check(training: Training, *, steps: int = 2) -> None:
    """Laws 1 and 3 in float64, on every rank, and equal bits wherever ranks hold copies."""
    small = training.small
    model = small.build()
    batches = [
        small.batch(training.rows, training.length, training.seed + step) for step in range(steps)
    ]
    case = make_case(
        model,
        small.loss_fn,
        batches,
        plan=training.plan(model),
        optimizer=training.optimizer,
        mesh=None,
        dtype=torch.float64,
        seed=training.seed,
    )
    judge = Judge(case.plan, tolerance(torch.float64, case.depth), "the unsharded model")
    params, buffers = case.initial()
    oracle = unsharded_run(
        case.model, case.loss_fn, batches, case.optimizer, params=params, buffers=buffers
    )
    even = case.is_even(batches[0])
    with sw.simulate(case.plan.base.mesh):
        run = Run(case, judge, params)
        for theirs in oracle:
            run.step(theirs)
            for rank in run.program._ranks:
                predicted = rank.lowering.collectives()
                assert same_collectives(rank.mover.executed, predicted, even=even)
            check_copies(run.state.ranks)
    if even:
        parts = case.plan.mesh.product(case.plan.batch)
        first = {name: rows[: len(rows) // parts] for name, rows in batches[0].items()}
        traced = sw.lower(case.plan, case.loss_fn, case.optimizer, batch=first)
        assert traced.collectives() == run.program.lowered.collectives()


def check_copies(states: tuple[State, ...]) -> None:
    """Whatever several ranks hold of a parameter has the same bits on all of them."""
    grids = grids_of(states[0].home.mesh)
    for bucket in states[0].home.buckets:
        layout = bucket.params
        for entry in layout.entries:
            lying = lying_of(grids, layout, entry)
            seen: dict[Any, Tensor] = {}
            for rank, state in enumerate(states):
                block = entry.view(state.flats[bucket.name])
                for tile in lying.tiles(lying.grid.part_of[rank]):
                    mine = rectangle(block, tile.at, tile.sizes)
                    first = seen.setdefault((tile.offsets, tile.sizes), mine)
                    assert torch.equal(first, mine), (entry.path, rank)


def main() -> None:
    """Read the number of draws, and optionally a seed, from the command line."""
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    first_seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    covered: Counter[str] = Counter()
    start = time.perf_counter()

    @seed(first_seed)
    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(trainings())
    def many(training: Training) -> None:
        note(repr(training))
        covered["draws"] += 1
        covered[f"{sw.Mesh(**dict(training.mesh))}"] += 1
        covered[f"rows {training.small.rows}, loss {training.small.loss}"] += 1
        covered["sequence"] += training.sequence
        covered[f"level {training.level}"] += 1
        check(training)

    many()
    print(
        f"{count} draws, seed {first_seed}: no law is broken ({time.perf_counter() - start:.0f} s)"
    )
    for what, number in sorted(covered.items()):
        print(f"  {number:6}  {what}")


if __name__ == "__main__":
    main()
