"""The README's script: runs alone, or on several ranks under torchrun or `sw.spawn`."""

import torch
from torch import Tensor, nn

import shardwise as sw


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        layers = (nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(4))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    return sw.Mean(nn.functional.cross_entropy(logits, labels, reduction="sum"), labels.numel())


def main() -> float:
    with torch.device("meta"):  # no memory is touched: each rank makes its own shards
        model = Model()
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"), sw.prefetch(1))
    print(plan)
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-3))
    lowered = sw.lower(plan, loss_fn, optimizer)  # needs no process group and no GPU
    print(lowered.text())
    program = lowered.bind()
    state = program.init(seed=0)  # the same weights, bit for bit, on every mesh
    tokens = torch.arange(8 * 33).view(8, 33) % 251
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    state, metrics = program.step(state, program.shard_batch(batch))
    for _ in range(9):
        state, metrics = program.step(state, program.shard_batch(batch))
    print(f"loss {metrics.loss:.4f}, gradient norm {metrics.grad_norm:.4f}")
    return float(metrics.loss)


if __name__ == "__main__":
    main()
