"""Clipping is linear in the number of parameters: microseconds per parameter, up to 20,000.

One rank of a job of eight, whose collectives answer at once, with mixed homes: some parameters over
both axes, some over one, some whole. Tiny tensors, so that all is Python and dispatch. A column
that grows with the number of parameters is a fault. `norms` is what a step does for clipping by the
global norm and by two groups, factors included; beside it torch's `clip_grad_norm_` over as many
tensors. `step` is a whole step of a program, with its traced first step, and needs minutes for the
largest model: its size is limited by `--steps-to`. The table is written to
`benchmarks/NUMERICS.md`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.numerics import ABOUT, PAGE
from benchmarks.page import machine, put, table
from shardwise.sharding.movement import Mover
from shardwise.testing.echo import Echo, bind_alone
from shardwise.transforms.lower import Lowered
from shardwise.transforms.norms import run_norms

T = TypeVar("T")

COUNTS = (1_000, 5_000, 20_000)
WIDTH = 8
MESH = sw.Mesh(dp=4, ep=2)
COLUMNS = ("plan", "lower", "memory", "norms", "torch", "first", "step")
Row = dict[str, float]


class Model(nn.Module):
    """Layers in a list: each is a unit with two parameters."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_parameters // 2))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """A scalar loss."""
    return model(batch).square().mean()


def optimizer() -> sw.optim.GradientTransform:
    """Three norms, of which one is that of the tenth part of all parameters."""
    return sw.optim.chain(
        sw.optim.clip_by_global_norm(1.0),
        sw.optim.clip_by_group_norm({"layers.*0": 1.0, "bias": 1.0}),
        sw.optim.sgd(0.1),
    )


def seconds(run: Callable[[], T]) -> tuple[float, T]:
    """Process time of one call without the garbage collector, and what it returns."""
    gc.disable()  # as timeit does: it looks at all objects of the process, now and then
    start = time.process_time()
    result = run()
    elapsed = time.process_time() - start
    gc.enable()
    return elapsed, result


def median(run: Callable[[], object], repeats: int = 5) -> float:
    """Median process time of a call, after one that warms up."""
    run()
    return statistics.median(seconds(run)[0] for _ in range(repeats))


def norms_of(lowered: Lowered) -> Callable[[], object]:
    """The norms and the factors of a step, on random gradients."""
    mover = Mover(MESH, 0, Echo(MESH))
    members = [bucket for bucket in lowered.all_buckets if bucket.opt]
    flats = {b.name: torch.randn(b.opt.length) for b in members if b.opt}
    groups = {g.key: g.slice(flats[b.name]) for b in members for g in b.groups}
    clips = sw.optim.chain(*_clips(lowered))
    state = clips.init(groups)

    def run() -> object:
        mover.begin(lowered.norm_items)
        norms = run_norms(mover, lowered.norms, flats)
        mover.end()
        assert clips.factors is not None
        return clips.factors(groups, state, norms=norms)

    return run


def _clips(lowered: Lowered) -> list[sw.optim.GradientTransform]:
    """The clips of `optimizer`, told which parameters the keys of groups stand for."""
    shapes = {info.path: info.shape for info in lowered.plan.infos}
    groups = [group for bucket in lowered.all_buckets for group in bucket.groups]
    keys = {group.key: group.paths[0] for group in groups}
    by_group = sw.optim.clip_by_group_norm({"layers.*0": 1.0, "bias": 1.0})
    assert by_group.over is not None
    return [sw.optim.clip_by_global_norm(1.0), by_group.over(shapes, keys)]


def torch_norms(model: nn.Module) -> Callable[[], object]:
    """What people call, on whole gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def measure(num_parameters: int, *, steps: bool) -> Row:
    """Microseconds per parameter of every column."""
    model = Model(num_parameters)
    row: Row = {}
    row["plan"], plan = seconds(
        lambda: sw.plan(
            model,
            MESH,
            sw.zero(3, ("dp", "ep"), where="weight"),
            sw.zero(1, "ep", where="bias"),
        )
    )
    row["lower"], lowered = seconds(lambda: sw.lower(plan, mean_square, optimizer()))
    row["memory"], _ = seconds(lambda: (lowered.memory(), lowered.collectives()))
    row["norms"] = median(norms_of(lowered))
    row["torch"] = median(torch_norms(model))
    if steps:
        program = bind_alone(lowered)
        state, batch = program.init(0), torch.randn(2, WIDTH)
        row["first"], (state, _) = seconds(lambda: program.step(state, batch))
        row["step"], (state, _) = seconds(lambda: program.step(state, batch))
    return {name: 1e6 * value / num_parameters for name, value in row.items()}


def main() -> None:
    """Print a row for each number of parameters, and the growth from the first to the last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--steps-to", type=int, default=1_000)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("us per parameter" + "".join(f"{name:>10}" for name in COLUMNS))
    rows: list[Row] = []
    cells: list[list[str]] = []
    for count in options.counts:
        row = measure(count, steps=count <= options.steps_to)
        rows.append(row)
        cells.append([f"{count:,}", *(_cell(row, name, ".1f") for name in COLUMNS)])
        print(f"{cells[-1][0]:>16}" + "".join(f"{cell:>10}" for cell in cells[-1][1:]), flush=True)
    growth = {name: value / rows[0][name] for name, value in rows[-1].items()}
    cells.append(["last / first", *(_cell(growth, name, ".2f") for name in COLUMNS)])
    print(f"{cells[-1][0]:>16}" + "".join(f"{cell:>10}" for cell in cells[-1][1:]))
    said = (
        f"Microseconds of process time per parameter on one thread of {machine()}; one rank of "
        "eight, tiny tensors. `norms` and `torch` are medians of 5 calls; a column that grows is a "
        "fault."
    )
    grid = table(["parameters", *COLUMNS], cells)
    put(options.page, ABOUT, {"Clipping by the number of parameters": f"{said}\n\n{grid}"})


def _cell(row: Row, name: str, how: str) -> str:
    return format(row[name], how) if name in row else "-"


if __name__ == "__main__":
    main()
