"""Host time of clip, finite check and loss scale, and of AdamW on shards, beside plain torch.

`numerics` is all that a step does between backward and optimizer, on the buckets of a program:
check, normalise, norm, clip factor, the factor applied as the optimizer applies it, and the next
loss scale. Beside it the same on plain local tensors, one per parameter, as people write it
(`GradScaler.unscale_`, `clip_grad_norm_`, `GradScaler.step` without an optimizer, `update`), and
with the fewest calls that torch offers. It is measured in a step that clips and in one that does
not: a factor of exactly 1 costs us a look at it, and torch a pass over memory. `AdamW` is our
in-place step on the groups of a program beside `torch.optim.AdamW(fused=True)` on tensors of the
same sizes. Variants run round-robin in one process, one thread; process time, median of paired
per-round ratios with quartiles. The tables are written to `benchmarks/NUMERICS.md`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.host_overhead import Block, measure, ratios
from benchmarks.page import FOLDER, machine, put, table
from shardwise.optim.flat import Row, on_rows
from shardwise.optim.loss_scale import init_loss_scale, next_loss_scale
from shardwise.optim.norms import Norm, power_sum, root
from shardwise.sharding.derived import LossScale
from shardwise.transforms.finite import nonfinite_flag

BLOCKS = 12
WIDTHS = {"12 x 8 thousand": 32, "12 x 0.5 million": 256}
RANKS = 2
LIMITS = {"nothing is clipped": 1e9, "clipped": 1.0}
PAGE = FOLDER / "NUMERICS.md"
ABOUT = "# The numerics of a step beside plain torch\n\nWritten by `make bench`."
_OVERHEAD_TARGET = 1.3
_ADAMW_TARGET = 1.1
Run = Callable[[], object]


class Model(nn.Module):
    """Blocks in a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def flats(model: nn.Module) -> dict[str, Tensor]:
    """What one rank holds of a parameter or gradient in ZeRO-3: a flat tensor per bucket."""
    plan = sw.plan(model, sw.Mesh(fsdp=RANKS), sw.zero(3, "fsdp"))
    lowered = sw.lower(plan, lambda module, batch: module(batch).sum(), sw.optim.adamw(1e-3))
    groups = [group for bucket in lowered.all_buckets for group in bucket.groups]
    return {group.key: torch.randn(group.layout.length) for group in groups}


def pieces(model: nn.Module) -> list[Tensor]:
    """The same bytes as plain tensors: a half of each parameter."""
    return [torch.randn(-(-p.numel() // RANKS)) for p in model.parameters()]


def our_numerics(model: nn.Module, limit: float) -> Run:
    """The functions that a step calls. Gradients keep their values: all other factors are 1."""
    grads, device = flats(model), torch.device("cpu")
    settings = LossScale(initial=1.0, window=10**9)
    state = init_loss_scale(settings)
    clip = sw.optim.clip_by_global_norm(limit)
    count = torch.ones((), dtype=torch.float64)

    def run() -> None:
        nonlocal state
        flag = nonfinite_flag(grads.values(), device)
        factor = 1.0 / (count * state.scale.item())
        for flat in grads.values():
            flat.mul_(factor)
        finite = not flag.item()
        norm = root(power_sum(list(grads.values())), 2.0)
        assert clip.factor is not None
        scale, _ = clip.factor(grads, sw.optim.EmptyState(), norms={Norm(): norm})
        on_rows(no_kernel, [Row([flat], flat, scale) for flat in grads.values()])
        state = next_loss_scale(settings, state, finite=finite)

    return run


def no_kernel(*lists: list[Tensor]) -> None:
    """Does nothing, so that only what is around it is measured."""


class NoOptimizer(torch.optim.SGD):
    """Its step does nothing, so that only what is around it is measured."""

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def plain_numerics(model: nn.Module, limit: float) -> Run:
    """The usual loop of torch with a gradient scaler."""
    params = [nn.Parameter(torch.empty_like(piece)) for piece in pieces(model)]
    for param in params:
        param.grad = torch.randn_like(param)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    scaler.scale(torch.ones(()))  # makes its tensors
    optimizer = NoOptimizer(params, lr=0.1)

    def run() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, limit)
        scaler.step(optimizer)
        scaler.update()

    return run


def fewest_calls(model: nn.Module, limit: float) -> Run:
    """Foreach calls on a list, without any bookkeeping."""
    grads = pieces(model)
    scale, tracker = torch.ones(()), torch.zeros((), dtype=torch.int32)

    def run() -> None:
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor)
        _ = found.item()
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 10**9)

    return run


def our_adamw(model: nn.Module) -> Run:
    """In place, on the groups of a program."""
    params, grads = flats(model), flats(model)
    optimizer = sw.optim.adamw(1e-3)
    state = optimizer.init(params)
    return lambda: sw.optim.apply_in_place(optimizer, params, grads, state)


def torch_adamw(tensors: list[Tensor]) -> Run:
    """Fused."""
    params = [nn.Parameter(tensor) for tensor in tensors]
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, 1e-3, fused=True).step


def report(
    title: str,
    variants: dict[str, Run],
    options: argparse.Namespace,
    *,
    target: float,
    judged: str,
) -> str:
    """Measure, ours first, and print; the target is for one of the baselines."""
    seconds = measure(variants, options.rounds, options.passes)
    ours, *others = variants
    rows: list[list[str]] = []
    for name in (ours, *others):
        lower, median, upper = (1e6 * value for value in statistics.quantiles(seconds[name], n=4))
        time = f"{median:.0f} ({lower:.0f} - {upper:.0f})"
        rows.append([name, time, "", ""])
        if name != ours:
            lower, median, upper = ratios(seconds[ours], seconds[name])
            rows[-1][2:] = [f"{median:.2f} ({lower:.2f} - {upper:.2f})", ""]
            rows[-1][3] = f"{target}" if name == judged else ""
    text = f"{title}:\n\n{table(['', 'us', 'ours / this', 'target'], rows)}"
    print(f"\n{text}", flush=True)
    return text


def main() -> None:
    """Print and write the tables for both sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    numerics = [
        report(
            f"Buckets of {size}, {words}",
            {
                "shardwise": our_numerics(model, limit),
                "GradScaler and clip_grad_norm_": plain_numerics(model, limit),
                "fewest calls": fewest_calls(model, limit),
            },
            options,
            target=_OVERHEAD_TARGET,
            judged="GradScaler and clip_grad_norm_",
        )
        for size, model in ((size, Model(width)) for size, width in WIDTHS.items())
        for words, limit in LIMITS.items()
    ]
    adamw = [
        report(
            f"Buckets of {size}",
            {
                "shardwise": our_adamw(model),
                "fused, same flat tensors": torch_adamw(list(flats(model).values())),
                "fused, a tensor per parameter": torch_adamw(pieces(model)),
            },
            options,
            target=_ADAMW_TARGET,
            judged="fused, same flat tensors",
        )
        for size, model in ((size, Model(width)) for size, width in WIDTHS.items())
    ]
    said = (
        f"Process time, one thread, medians and quartiles of {options.rounds} rounds; {machine()}."
    )
    put(
        options.page,
        ABOUT,
        {
            "Clip, finite check and loss scale": "\n\n".join([said, *numerics]),
            "AdamW on shards": "\n\n".join([said, *adamw]),
        },
    )


if __name__ == "__main__":
    main()
