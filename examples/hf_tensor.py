"""A Hugging Face Llama over `fsdp x tp`: its layers cut by names that its family has, untouched.

Run it with `python examples/hf_tensor.py`, or `torchrun --nproc-per-node 4` for two by two ranks.
"""

import os
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

CONFIG = LlamaConfig(
    vocab_size=97,  # odd: two ranks hold 49 rows each, one of them padding
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    use_cache=False,
)


def loss_fn(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    logits = model(batch["tokens"]).logits  # a rank has a part of the vocabulary
    labels = sw.shift_labels(batch["tokens"])
    return sw.Mean(sw.cross_entropy(logits, labels), (labels != -100).sum())


def make_plan(model: Any, mesh: sw.Mesh) -> sw.Plan:
    layers = sw.tensor_parallel("tp"), sw.sequence_parallel("tp")
    return sw.plan(model, mesh, *layers, sw.zero(3, "fsdp"), sw.remat("layers.*"))


def main(steps: int = 4) -> list[float]:
    """Train a small Llama and return the losses."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)  # or LlamaForCausalLM.from_pretrained(...)
    world = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    plan = make_plan(model, sw.Mesh(fsdp=-1, tp=1 + (world % 2 == 0)))
    print(plan)
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-2, eps=1e-6))
    program = sw.lower(plan, loss_fn, optimizer).bind()
    state, losses = program.init(sw.from_module(model)), list[float]()
    tokens = torch.randint(97, (8, 15), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        state, metrics = program.step(state, program.shard_batch({"tokens": tokens}))
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(" ".join(f"{loss:.4f}" for loss in main()))
