"""Host time of clip, finite check and loss scale, and of AdamW on shards, beside plain torch.

`numerics` is all that a step does between backward and optimizer, on the buckets of a program:
check, normalise, norm, clip factor, the factor applied by the optimizer, and the next loss scale.
Beside it the same on plain local tensors, one per parameter, as people write it
(`GradScaler.unscale_`, `clip_grad_norm_`, `GradScaler.step`, `update`), and with the fewest calls
that torch offers. Each is run with fused AdamW, of which the time of AdamW alone is taken off, as a
system may apply the factor while the optimizer reads gradients. It is measured in a step that clips
and in one that does not: a factor of exactly 1 costs us a look at it, and torch a pass over memory.
`AdamW` is our in-place step on the groups of a program beside `torch.optim.AdamW(fused=True)` on
tensors of the same sizes. Variants run round-robin in one process, one thread; process time, median
of paired per-round ratios with quartiles. The tables are written to `benchmarks/NUMERICS.md`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.host_overhead import Block, measure, ratios
from benchmarks.page import FOLDER, machine, put, table
from shardwise.optim.loss_scale import init_loss_scale, next_loss_scale
from shardwise.optim.norms import Norm, power_sum, root
from shardwise.sharding.derived import LossScale
from shardwise.transforms.finite import nonfinite_flag

BLOCKS = 12
WIDTHS = {"12 x 8 thousand": 32, "12 x 0.5 million": 256}
RANKS = 2
LIMITS = {"nothing is clipped": 1e9, "clipped": 1.0}
SCALES = {1e9: 1.0, 1.0: 0.5}
"""What gradients are divided by: it makes up for the clip, so that every pass clips."""
PAGE = FOLDER / "NUMERICS.md"
ABOUT = "# The numerics of a step beside plain torch\n\nWritten by `make bench`."
_OVERHEAD_TARGET = 1.3
_ADAMW_TARGET = 1.1
Run = Callable[[], object]
Seconds = dict[str, list[float]]


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


class Extra(NamedTuple):
    """A step of an optimizer with what is measured, and without."""

    whole: Run
    alone: Run


def our_numerics(model: nn.Module, limit: float) -> Extra:
    """The functions that a step calls."""
    params, grads, device = flats(model), flats(model), torch.device("cpu")
    settings = LossScale(initial=SCALES[limit], window=10**9)
    state = init_loss_scale(settings)
    clip, optimizer = sw.optim.clip_by_global_norm(limit), sw.optim.adamw(1e-3)
    opt_state = optimizer.init(params)
    count = torch.ones((), dtype=torch.float64)

    def whole() -> None:
        nonlocal state
        flag = nonfinite_flag(grads.values(), device)
        factor = 1.0 / (count * state.scale.item())
        for flat in grads.values():
            flat.mul_(factor)
        finite = not flag.item()
        norm = root(power_sum(list(grads.values())), 2.0)
        assert clip.factor is not None
        scale, _ = clip.factor(grads, sw.optim.EmptyState(), norms={Norm(): norm})
        extra: dict[str, Any] = {"scale": scale, "reuse_grads": True}
        sw.optim.apply_in_place(optimizer, params, grads, opt_state, **extra)
        state = next_loss_scale(settings, state, finite=finite)

    return Extra(whole, lambda: sw.optim.apply_in_place(optimizer, params, grads, opt_state))


def plain_numerics(model: nn.Module, limit: float) -> Extra:
    """The usual loop of torch with a gradient scaler."""
    params, optimizer = with_adamw(pieces(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALES[limit], growth_interval=10**9)
    scaler.scale(torch.ones(()))  # makes its tensors

    def whole() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, limit)
        scaler.step(optimizer)
        scaler.update()

    return Extra(whole, optimizer.step)


def fewest_calls(model: nn.Module, limit: float) -> Extra:
    """Foreach calls on a list, without any bookkeeping."""
    params, optimizer = with_adamw(pieces(model))
    grads = [param.grad for param in params if param.grad is not None]
    scale, tracker = torch.tensor(SCALES[limit]), torch.zeros((), dtype=torch.int32)

    def whole() -> None:
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor)
        if not found.item():
            optimizer.step()
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 10**9)

    return Extra(whole, optimizer.step)


def with_adamw(tensors: list[Tensor]) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    """Parameters with gradients, and torch's fused optimizer of them."""
    params = [nn.Parameter(tensor) for tensor in tensors]
    for param in params:
        param.grad = torch.randn_like(param)
    return params, torch.optim.AdamW(params, 1e-3, fused=True)


def measure_extra(variants: dict[str, Extra], rounds: int, passes: int) -> Seconds:
    """Seconds that each adds to its optimizer's step, round by round."""
    runs = {(name, kind): run for name, two in variants.items() for kind, run in enumerate(two)}
    found = measure({f"{kind}{name}": run for (name, kind), run in runs.items()}, rounds, passes)
    pairs = {name: zip(found[f"0{name}"], found[f"1{name}"], strict=True) for name in variants}
    return {name: [whole - alone for whole, alone in pair] for name, pair in pairs.items()}


def report(title: str, seconds: Seconds, *, target: float, judged: str) -> str:
    """A table of ratios, ours first; the target is for one of the baselines."""
    ours, *others = seconds
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
            measure_extra(
                {
                    "shardwise": our_numerics(model, limit),
                    "GradScaler and clip_grad_norm_": plain_numerics(model, limit),
                    "fewest calls": fewest_calls(model, limit),
                },
                options.rounds,
                options.passes,
            ),
            target=_OVERHEAD_TARGET,
            judged="GradScaler and clip_grad_norm_",
        )
        for size, model in ((size, Model(width)) for size, width in WIDTHS.items())
        for words, limit in LIMITS.items()
    ]
    adamw = [
        report(
            f"Buckets of {size}",
            measure(
                {
                    "shardwise": our_numerics(model, 1.0).alone,
                    "fused, same flat tensors": with_adamw(list(flats(model).values()))[1].step,
                    "fused, a tensor per parameter": with_adamw(pieces(model))[1].step,
                },
                options.rounds,
                options.passes,
            ),
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
