"""A Hugging Face model, untouched, under ZeRO-3: its own loss, exact over uneven token counts.

Run it with `python examples/hf_zero3.py`, or with `torchrun --nproc-per-node 2` for more ranks.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    use_cache=False,
)


def loss_fn(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    # The model shifts its labels by one: the first label of a row is never predicted.
    return sw.Mean.of_tokens(model(**batch).loss, batch["labels"][:, 1:])


def make_batch(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(seed))
    lengths = torch.arange(rows) + length - rows
    mask = (torch.arange(length) < lengths[:, None]).long()  # rows are padded on the right
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def main(steps: int = 4) -> list[float]:
    """Train a small Llama on padded rows and return the losses."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)  # or LlamaForCausalLM.from_pretrained(...)
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"), sw.prefetch(1))
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-2, eps=1e-6))
    program = sw.lower(plan, loss_fn, optimizer).bind()
    state, losses = program.init(sw.from_module(model)), list[float]()
    for _ in range(steps):
        state, metrics = program.step(state, program.shard_batch(make_batch(8, 16, seed=0)))
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    print(" ".join(f"{loss:.4f}" for loss in main()))
