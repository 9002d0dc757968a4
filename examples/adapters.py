"""Adapters on a frozen base, then both together in another plan, and in the end one merged weight.

The frozen base has no gradients and no optimizer state. When it begins to train, the state of the
first program is carried over: adapters keep values, moments and count; the base starts anew.
"""

import torch
from torch import Tensor, nn

import shardwise as sw


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16, bias=False)
        self.a = nn.Linear(16, 2, bias=False)
        self.b = nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + 0.5 * self.b(self.a(x)))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def train(program: sw.Program, state: sw.State, losses: list[float]) -> sw.State:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    batch = program.shard_batch({"x": x, "y": x.sin()})
    for _ in range(3):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics.loss))
    return state


def main() -> list[float]:
    """Train in two plans; the losses, and then those of the merged weights."""
    layers, mesh, losses = [Adapted(), Adapted()], sw.Mesh(fsdp=-1), list[float]()
    model = nn.Sequential(*layers)
    # The base is a part of its own, so that its count starts when it does.
    parts = {"adapters": sw.optim.adamw(1e-2), "base": sw.optim.adamw(1e-3)}
    optimizer = sw.optim.partition(parts, {"adapters": ("*.a", "*.b")}, otherwise="base")
    frozen = sw.plan(model, mesh, sw.zero(1, "fsdp"), sw.freeze("*.base"))
    first = sw.lower(frozen, loss_fn, optimizer).bind()
    state = train(first, first.init(seed=0), losses)
    second = sw.lower(sw.plan(model, mesh, sw.zero(3, "fsdp")), loss_fn, optimizer).bind()
    state = train(second, second.init(sw.from_state(state)), losses)
    model.load_state_dict(sw.to_global(state.params))
    for layer in layers:
        layer.base.weight.data += 0.5 * layer.b.weight.data @ layer.a.weight.data
        layer.b.weight.data.zero_()
    train(second, second.init(sw.from_module(model)), losses)
    return losses


if __name__ == "__main__":
    print(main())
