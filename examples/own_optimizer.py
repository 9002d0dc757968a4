"""An optimizer of your own: two pure functions; a third one, in place, makes it fast."""

from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.optim import GradientTransform, Tensors


def sign_momentum(rate: float, beta: float = 0.9, *, in_place: bool = True) -> GradientTransform:
    """Step by the sign of a running mean of gradients; `update` alone would do."""

    def init(params: Tensors) -> Tensors:
        return {key: torch.zeros_like(value) for key, value in params.items()}

    def update(grads: Tensors, mu: Tensors, params: Tensors, **_: Any) -> tuple[Tensors, Tensors]:
        mu = {key: torch.lerp(grad, mu[key], beta) for key, grad in grads.items()}
        return {key: -rate * torch.sign(mean) for key, mean in mu.items()}, mu

    @torch.no_grad()
    def apply(
        params: Tensors, grads: Tensors, mu: Tensors, *, scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensors, Tensors]:
        for key, grad in grads.items():
            mu[key].lerp_(grad if scale is None else grad * scale, 1 - beta)
            params[key].sub_(torch.sign(mu[key]), alpha=rate)
        return params, mu

    return GradientTransform(init, update, apply=apply if in_place else None)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def main(steps: int = 4, *, in_place: bool = True) -> list[float]:
    """Train and return the losses."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(2, "fsdp"))
    clip = sw.optim.clip_by_global_norm(1.0)
    optimizer = sw.optim.chain(clip, sign_momentum(0.01, in_place=in_place))
    program = sw.lower(plan, loss_fn, optimizer).bind()
    state, losses = program.init(seed=0), list[float]()
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    batch = program.shard_batch((inputs, inputs.sum(-1, keepdim=True)))
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(main())
