"""A model, batches and programs in which one rank's loss or gradient is not finite."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw

WIDTH = 4
MESHES = {
    1: sw.Mesh(fsdp=1),
    2: sw.Mesh(fsdp=2),
    3: sw.Mesh(fsdp=3),
    4: sw.Mesh(dp=2, fsdp=2),
}
NAN, INF = float("nan"), float("inf")


class Break(torch.autograd.Function):
    """The identity; puts a value into one element of the gradient where `bad` is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (bad,) = ctx.saved_tensors
        grad = grads[0].clone()
        grad[0, 0] += torch.where(bad.isfinite().all(), 0.0, bad.sum()).to(grad.dtype)
        return grad, None


class Model(nn.Module):
    """Two units with batch statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    """`loss` joins the loss, `grad` only what flows back."""
    out = Break.apply(model(batch["x"]), batch["grad"])
    return sw.Mean(out.square().sum() + batch["loss"].sum(), out.shape[0])


def batch(ranks: int, seed: int = 0, *, rank: int = -1, loss: float = 0.0, grad: float = 0.0):
    """A global batch; `loss` and `grad` are put into the part of one rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * ranks, WIDTH, generator=generator, dtype=torch.float64)
    parts = {"x": x, "loss": torch.zeros(2 * ranks), "grad": torch.zeros(2 * ranks)}
    if rank >= 0:
        parts["loss"][2 * rank] = loss
        parts["grad"][2 * rank] = grad
    return parts


def rate() -> sw.optim.Schedule:
    return sw.optim.warmup_cosine(1e-2, warmup=2, steps=20, start=1e-3)


def start(ranks: int, *transforms: sw.Transform, optimizer: Any = None) -> tuple[sw.Program, Any]:
    torch.manual_seed(0)
    module = Model().double()
    plan = sw.plan(module, MESHES[ranks], *transforms)
    optimizer = optimizer or sw.optim.adamw(rate())
    program = sw.lower(plan, loss_fn, optimizer).bind()
    return program, program.init(sw.from_module(module))


def leaves(state: Any) -> list[list[Tensor]]:
    """Copies of all leaves of all ranks but those of the loss scale."""

    def local(leaf: Any) -> Tensor:
        return (leaf.to_local() if isinstance(leaf, DTensor) else leaf).clone()

    parts = ("params", "master", "opt", "buffers", "step", "seed")
    found = []
    for one in state.ranks:
        tree = [getattr(one, part) for part in parts]
        flat = optree.tree_leaves(tree, namespace="shardwise")
        values = [
            tensor
            for leaf in flat
            for tensor in (
                leaf.values()
                if hasattr(leaf, "values") and not isinstance(leaf, Tensor)
                else [leaf]
            )
        ]
        found.append([local(value) for value in values])
    return found


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    assert len(pairs) > 10
    return all(torch.equal(a, b) for a, b in pairs)
