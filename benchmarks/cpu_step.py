"""An AdamW step in host memory: one pass of C beside memory bandwidth, torch's passes, DeepSpeed's.

In float32 our kernel and torch's fused one move 28 bytes per parameter, and are set beside a triad
of as many numbers. In the mixed case gradients are bfloat16 and scaled, masters and moments are
float32, parameters are a bfloat16 copy: unscale, finite check, norm, clip, step, copy. Variants
run round-robin in one process; wall time, medians of paired per-round ratios with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.page import FOLDER, machine, put, table
from shardwise.kernels import recipes
from shardwise.kernels.step import Group, squares, step_
from shardwise.sharding.compat import fused_adamw

PAGE = FOLDER / "OFFLOAD.md"
ABOUT = "# Offload\n\nWritten by `make bench`."
ELEMENTS = 50_000_000
SETTINGS: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
}
RECIPE = recipes.adamw(count=3, **SETTINGS)
UNSCALE = 1 / 1024
BYTES = 28
OURS, TORCH, PEER, TRIAD = "shardwise, one pass", "torch", "DeepSpeed", "triad"


def triad(count: int) -> Callable[[], None]:
    """`a = b + s c` over as many numbers as a step moves: 12 bytes each."""
    length = count * BYTES // 12
    target, one, other = (torch.ones(length) for _ in range(3))

    def run() -> None:
        torch.add(one, other, alpha=0.5, out=target)

    return run


def float32(count: int) -> dict[str, Callable[[], None]]:
    """Steps in float32, and the triad."""
    param, grad, mu, nu = (torch.rand(count) for _ in range(4))
    return {
        TRIAD: triad(count),
        OURS: lambda: step_(RECIPE, [Group(param, grad, (mu, nu))]),
        TORCH: lambda: torch_step(param, grad, mu, nu),
    }


def torch_step(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor) -> None:
    """Torch's fused kernel."""
    count = [torch.tensor(3.0)]
    switches: dict[str, Any] = {"amsgrad": False, "maximize": False}
    fused_adamw([param], [grad], [mu], [nu], [], count, **SETTINGS, **switches)


def mixed(count: int) -> dict[str, Callable[[], None]]:
    """Steps with bfloat16 gradients and parameters."""
    master, mu, nu = (torch.rand(count) for _ in range(3))
    grad = torch.rand(count).to(torch.bfloat16) * 1024
    param = master.to(torch.bfloat16)

    def ours() -> None:
        total = squares(grad)
        norm = total**0.5 * UNSCALE
        if norm == norm and norm < float("inf"):
            scale = UNSCALE * min(1.0, 1.0 / (norm + 1e-6))
            step_(RECIPE, [Group(master, grad, (mu, nu), param)], scale=scale)

    def passes() -> None:
        wide = grad.float().mul_(UNSCALE)
        norm = torch.linalg.vector_norm(wide)
        if torch.isfinite(norm):
            wide.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
            torch_step(master, wide, mu, nu)
            param.copy_(master)

    variants = {OURS: ours, TORCH: passes}
    peer = deepspeed_step(count)
    return variants if peer is None else {**variants, PEER: peer}


def deepspeed_step(count: int) -> Callable[[], None] | None:
    """Unscale and clip as its ZeRO-Offload does, its CPUAdam, and a copy; None: it is not there."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

        master = torch.nn.Parameter(torch.rand(count))
        optimizer = DeepSpeedCPUAdam([master], lr=1e-3)
    except Exception as error:  # it may lack a compiler, a header or a wheel
        print(f"DeepSpeed's CPUAdam is left out: {type(error).__name__}")
        return None
    grad = torch.rand(count).to(torch.bfloat16) * 1024
    param = torch.empty(count, dtype=torch.bfloat16)

    def run() -> None:
        wide = grad.float().mul_(UNSCALE)
        norm = float(wide.norm())
        if norm < float("inf"):
            wide.mul_(min(1.0, 1.0 / (norm + 1e-6)))
            master.grad = wide
            optimizer.step()
            param.copy_(master.data)

    return run


def measure(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Wall seconds by round, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def quartiles(values: list[float], form: str) -> str:
    """Median with quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} - {high:{form}})"


def rows(times: dict[str, list[float]], base: str, threads: int, count: int) -> list[list[str]]:
    """One for each variant: milliseconds, GB/s of the float32 step, and the ratio to `base`."""
    found: list[list[str]] = []
    for name, values in times.items():
        ratios = [mine / theirs for mine, theirs in zip(values, times[base], strict=True)]
        rate = BYTES * count / statistics.median(values) / 1e9
        cells = [quartiles([1e3 * v for v in values], ".0f"), f"{rate:.1f}"]
        found.append([str(threads), name, *cells, quartiles(ratios, ".2f")])
    return found


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    plain: list[list[str]] = []
    narrow: list[list[str]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times = measure(float32(options.elements), options.rounds)
        plain += rows(times, TRIAD, threads, options.elements)
        times = measure(mixed(options.elements), options.rounds)
        narrow += rows(times, OURS, threads, options.elements)
    head = ["threads", "step", "ms", "GB/s", "time / triad"]
    mixed_head = ["threads", "step", "ms", "GB/s of 28 B", "time / ours"]
    text = (
        f"{options.elements:,} parameters on {machine()}; {options.rounds} rounds, wall time.\n\n"
        f"Float32, {BYTES} bytes per parameter; the triad moves as many bytes.\n\n"
        f"{table(head, plain)}\n\n"
        "Bfloat16 gradients, float32 masters and moments: unscale, finite check, norm, clip, step, "
        "bfloat16 copy. Target for the others: at least 1.4.\n\n"
        f"{table(mixed_head, narrow)}"
    )
    print(text)
    put(options.page, ABOUT, {"The optimizer step on the CPU": text})


if __name__ == "__main__":
    main()
