"""Porting an FSDP2 script: `fsdp2_main` is the script, `main` is what it becomes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.demo.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=3, width=32, heads=4, context=16, vocab=64)
TOKENS = torch.arange(8 * 17).view(8, 17) * 7 % 61


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def fsdp2_main(steps: int = 4) -> list[float]:
    """Before: return the losses of this rank's rows."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, losses = GPT(CONFIG), list[float]()
    for module in (*model.layers, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    tokens = TOKENS.tensor_split(dist.get_world_size())[dist.get_rank()]
    for _ in range(steps):
        loss = loss_fn(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    dist.destroy_process_group()
    return losses


def main(steps: int = 4) -> list[float]:
    """After: return the losses of all rows; `model` is not touched and nothing is wrapped."""
    torch.manual_seed(0)
    model, losses = GPT(CONFIG), list[float]()
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"))
    adamw = sw.optim.adamw(1e-2, weight_decay=0.1)
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), adamw)
    program = sw.lower(plan, loss_fn, optimizer).bind()
    state = program.init(sw.from_module(model))
    tokens = program.shard_batch(TOKENS)
    for _ in range(steps):
        state, metrics = program.step(state, tokens)
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(main())
