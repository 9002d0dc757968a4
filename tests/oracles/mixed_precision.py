"""One step under a dtype policy, by hand: one process, casts written out where the rules put them.

Nothing here reads a plan: a policy is a list of `(pattern, settings)`, and what is left out of the
settings follows from the rules in the documentation of `sw.precision`, written down once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw

WIDTH, HIDDEN, DEPTH = 6, 10, 2
MODULES = ("first", "layers.0.up", "layers.0.norm", "layers.0.down", "layers.1.up", "head")
Settings = Mapping[str, str]
Policy = Sequence[tuple[str | None, Settings]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.norm(self.up(x))))


class Net(nn.Module):
    """Its forward says nothing of dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: Any, batch: Mapping[str, Tensor]) -> sw.Mean:
    found, wanted = model(batch["x"]).squeeze(-1).double(), batch["y"].double()
    return sw.Mean((found - wanted).square().sum(), len(wanted))


@dataclass(frozen=True)
class Dtypes:
    """All dtypes of one parameter."""

    params: torch.dtype
    master: torch.dtype
    compute: torch.dtype
    gather: torch.dtype
    reduce: torch.dtype
    grads: torch.dtype
    stochastic: bool

    @property
    def sums(self) -> torch.dtype:
        return torch.promote_types(self.reduce, self.grads)

    @property
    def work(self) -> torch.dtype:
        return torch.promote_types(self.master, torch.float32) if self.stochastic else self.master


def dtypes_of(path: str, policy: Policy, own: str) -> Dtypes:
    asked: dict[str, str] = {}
    for pattern, settings in policy:
        if pattern is None or _selects(pattern, path):
            asked |= {k: v for k, v in settings.items() if k not in ("outputs", "buffers")}

    def get(name: str, default: torch.dtype) -> torch.dtype:
        return getattr(torch, asked[name]) if name in asked else default

    mine = getattr(torch, own)
    if not asked:
        return Dtypes(*[mine] * 6, stochastic=False)
    params = get("params", mine)
    compute = get("compute", params)
    reduce = get("reduce", torch.promote_types(compute, torch.float32))
    return Dtypes(
        params=params,
        master=get("master", torch.promote_types(params, torch.float32)),
        compute=compute,
        gather=get("gather", compute),
        reduce=reduce,
        grads=get("grads", reduce),
        stochastic=asked.get("rounding") == "stochastic",
    )


def _selects(pattern: str, path: str) -> bool:
    """For the patterns that the tests draw: one name in full, or with stars around it."""
    names = path.split(".")[:-1]
    return any(pattern.strip("*.") in name for name in names)


def forward(seen: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The model with its casts: to the dtype of most elements, and around modules of another.

    What does not require a gradient is not counted.
    """
    count: Counter[torch.dtype] = Counter()
    for value in seen.values():
        count[value.dtype] += value.numel() if value.requires_grad else 0
    most = max(count, key=lambda dtype: (count[dtype], dtype.itemsize))

    def linear(path: str, x: Tensor) -> Tensor:
        weight, bias = seen[f"{path}.weight"], seen[f"{path}.bias"]
        return functional.linear(x.to(weight.dtype), weight, bias).to(most)

    def norm(path: str, x: Tensor) -> Tensor:
        weight, bias = seen[f"{path}.weight"], seen[f"{path}.bias"]
        return functional.layer_norm(x.to(weight.dtype), (HIDDEN,), weight, bias).to(most)

    x = linear("first", x.to(most))
    for layer in range(DEPTH):
        inner = functional.gelu(norm(f"layers.{layer}.norm", linear(f"layers.{layer}.up", x)))
        x = x + linear(f"layers.{layer}.down", inner)
    return linear("head", x)


def gradients(
    params: Mapping[str, Tensor],
    dtypes: Mapping[str, Dtypes],
    cut: Iterable[str],
    parts: Sequence[Mapping[str, Tensor]],
    *,
    trainable: Iterable[str],
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Mean loss, gradients, and the size of what was added up for each, part after part.

    Args:
        params: whole values of the `params` home.
        dtypes: of each.
        cut: parameters that are gathered, and so pass through the dtype of the wire.
        parts: what each rank sees in each of its passes.
        trainable: parameters that have a gradient.
    """
    cut, trainable = set(cut), set(trainable)
    total = torch.zeros((), dtype=torch.float64)
    sums = {
        path: torch.zeros_like(p, dtype=dtypes[path].sums)
        for path, p in params.items()
        if path in trainable
    }
    sizes = dict.fromkeys(sums, 0.0)
    for part in parts:
        seen: dict[str, Tensor] = {}
        for path, value in params.items():
            wire = value.to(dtypes[path].gather) if path in cut else value
            seen[path] = wire.to(dtypes[path].compute).clone().requires_grad_(path in trainable)
        loss = (forward(seen, part["x"]).squeeze(-1).double() - part["y"].double()).square().sum()
        total += loss.detach()
        leaves = [seen[path] for path in sums]
        for path, grad in zip(sums, torch.autograd.grad(loss, leaves), strict=True):
            sums[path] += grad.to(dtypes[path].reduce)
            sizes[path] += grad.double().abs().max().item()
    count = sum(len(part["y"]) for part in parts)
    means = {path: (one / count).to(dtypes[path].grads) for path, one in sums.items()}
    return total / count, means, {path: size / count for path, size in sizes.items()}


def updated(
    optimizer: Any, truth: Mapping[str, Tensor], grads: Mapping[str, Tensor], opt: Any
) -> tuple[dict[str, Tensor], Any]:
    """What an optimizer makes of masters (or parameters), in their dtype, by its definition."""
    values = {path: value.clone() for path, value in truth.items()}
    cast = {path: grads[path].to(value.dtype) for path, value in values.items()}
    updates, new = optimizer.update(cast, opt, values)
    return {path: value + updates[path] for path, value in values.items()}, new
