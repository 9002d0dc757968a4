"""Reinforcement learning: two losses on one state, and a decision between `grads` and `update`.

A contextual bandit by REINFORCE: contexts, sampled arms, rewards; a critic gives the baseline.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import shardwise as sw


def policy_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[sw.Mean, dict[str, sw.Mean]]:
    log_p = model(batch["x"])[:, :-1].log_softmax(-1).gather(1, batch["arm"]).squeeze(1)
    change = log_p - batch["log_p"]
    total = -(change.exp() * batch["advantage"]).sum()
    return sw.Mean(total, len(change)), {"kl": sw.Mean(-change.detach().sum(), len(change))}


def value_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"])[:, -1], batch["reward"])


@torch.no_grad()
def play(model: nn.Module, state: Any, dice: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(64, 4, generator=dice)  # every rank has the same dice, so the same batch
    out = functional_call(model, sw.to_global(state.params), (x,))
    log_p = out[:, :-1].log_softmax(-1)
    arm = torch.multinomial(log_p.exp(), 1, generator=dice)
    reward = (arm.squeeze(1) == x.argmax(-1)).to(x.dtype)
    log_p = log_p.gather(1, arm).squeeze(1)
    return {"x": x, "arm": arm, "reward": reward, "log_p": log_p, "advantage": reward - out[:, -1]}


def main(rounds: int = 30) -> list[float]:
    """Play and learn; return the mean reward of every round."""
    dice, rewards = torch.Generator().manual_seed(0), list[float]()
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4 + 1))  # 4 arms, a value
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"))
    losses = (policy_loss, value_loss)  # two programs, which may take turns on one state
    actor, critic = (sw.lower(plan, loss, sw.optim.adamw(1e-2)).bind() for loss in losses)
    state = actor.init(seed=0)
    for _ in range(rounds):
        rollout = play(model, state, dice)
        rewards.append(float(rollout["reward"].mean()))
        batch = actor.shard_batch(rollout)
        for _ in range(4):  # several passes over one rollout, until the policy has moved far
            grads, metrics = actor.grads(state, batch)
            if metrics.aux["kl"] > 0.02:  # the same number on every rank, so the same decision
                break
            state = actor.update(state, grads)
        state, _ = critic.step(state, batch)
    return rewards


if __name__ == "__main__":
    print(main())
