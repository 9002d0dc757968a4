"""Porting a DeepSpeed script: its config, read by hand into transforms and an optimizer.

`deepspeed.initialize(model=model, config=CONFIG)` becomes plan, lower and bind; then
`engine(batch)`, `engine.backward(loss)` and `engine.step()` become one `program.step`.
"""

from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw

CONFIG: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000},
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2, "total_num_steps": 9},
    },
}


def transform_of(config: dict[str, Any]) -> sw.Transform:
    """Bucket sizes have no counterpart: the parameters of a unit are one bucket."""
    return sw.zero(config["zero_optimization"]["stage"], "fsdp")


def optimizer_of(config: dict[str, Any]) -> sw.optim.GradientTransform:
    options, ramp = config["optimizer"]["params"], config["scheduler"]["params"]
    warmup, steps = ramp["warmup_num_steps"], ramp["total_num_steps"]
    rate = sw.optim.warmup_cosine(ramp["warmup_max_lr"], warmup=warmup, steps=steps)
    clip = sw.optim.clip_by_global_norm(config["gradient_clipping"])
    return sw.optim.chain(clip, sw.optim.adamw(rate, **options))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main(steps: int = 4) -> list[float]:
    """Train and return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    plan = sw.plan(model, sw.Mesh(fsdp=-1), transform_of(CONFIG))
    program = sw.lower(plan, loss_fn, optimizer_of(CONFIG)).bind()
    state, losses = program.init(sw.from_module(model)), list[float]()
    batch = program.shard_batch((torch.eye(16), torch.arange(16) % 8))
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(main())
