"""ZeRO-1 and ZeRO-3 in eighty lines, every collective written by hand: the oracle of the engine.

One process group, SGD with momentum, parameters cut along dimension 0 by the `torch.chunk` rule
and padded to equal length. Nothing here imports shardwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

Loss = Callable[[Callable[..., Tensor], Tensor], Tensor]


def shard_rows(full: Tensor, rank: int, world: int) -> Tensor:
    """This rank's rows, padded with zeros to the same count on every rank."""
    rows = -(-full.shape[0] // world)
    padded = full.new_zeros((rows * world, *full.shape[1:]))
    padded[: full.shape[0]] = full
    return padded[rank * rows : (rank + 1) * rows].clone()


def gather_rows(shard: Tensor, shape: torch.Size, world: int) -> Tensor:
    """All-gather the shards of one parameter and drop the padding."""
    parts = [torch.empty_like(shard) for _ in range(world)]
    dist.all_gather(parts, shard)
    return torch.cat(parts)[: shape[0]]


def reduce_scatter_rows(full: Tensor, rank: int, world: int) -> Tensor:
    """This rank's rows of the sum over ranks, added in rank order."""
    send = torch.cat([shard_rows(full, r, world) for r in range(world)])
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    total, *rest = received.chunk(world)
    total = total.clone()
    for part in rest:
        total += part
    return total


def train(
    module: nn.Module,
    loss_sum: Loss,
    batches: Sequence[Tensor],
    *,
    level: int,
    lr: float,
    momentum: float = 0.9,
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Train on this rank's `batches`; return losses, full parameters and full momentum buffers.

    `loss_sum(module, batch)` is the sum over rows; gradients are means over all ranks' rows.
    Level 3 keeps only shards between steps, level 1 keeps full parameters and shards the momentum.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    full = {name: p.detach().clone() for name, p in module.named_parameters()}
    shapes = {name: p.shape for name, p in full.items()}
    shards = {name: shard_rows(p, rank, world) for name, p in full.items()}
    buffers = {name: torch.zeros_like(s) for name, s in shards.items()}
    losses = []
    for batch in batches:
        if level == 3:
            full = {n: gather_rows(s, shapes[n], world) for n, s in shards.items()}
        leaves = {name: p.requires_grad_() for name, p in full.items()}
        total = functional_call_loss(module, loss_sum, leaves, batch)
        grads = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
        packed = torch.stack([total.detach(), total.new_tensor(float(len(batch)))])
        parts = [torch.empty_like(packed) for _ in range(world)]
        dist.all_gather(parts, packed)
        loss, count = sum(parts[1:], parts[0])
        losses.append(loss / count)
        for name, grad in grads.items():
            mean = reduce_scatter_rows(grad, rank, world).mul_(1.0 / count)
            buffers[name].mul_(momentum).add_(mean)
            shards[name].add_(buffers[name], alpha=-lr)
        if level == 1:
            full = {n: gather_rows(s, shapes[n], world) for n, s in shards.items()}
    params = {n: gather_rows(s, shapes[n], world) for n, s in shards.items()}
    return losses, params, {n: gather_rows(b, shapes[n], world) for n, b in buffers.items()}


def functional_call_loss(
    module: nn.Module, loss_sum: Loss, params: dict[str, Tensor], batch: Tensor
) -> Tensor:
    """The loss of the module with `params` in the place of its own."""
    return loss_sum(lambda *args: functional_call(module, params, args), batch)
