"""Small models of transformers from configs, their batches, and the loss they compute themselves.

transformers computes norms, softmax and losses in float32 whatever the dtype of the weights. One
process scales the loss by 1 / count before backward, a program afterwards; in float32 that is the
same to the last bit only for a power of two. So every batch here has 16 tokens that count, or 4
images, and the models can be compared as closely as float64 allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

transformers = pytest.importorskip("transformers")

VOCAB, WIDTH, LENGTH, NUM_CLASSES = 97, 32, 7, 5
LENGTHS = (4, 7, 5, 4)  # of the sequences in a batch; what follows is padding
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}
DECODER = SIZES | {
    "vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2() -> nn.Module:
    """GPT-2: fused qkv, the head tied to the embedding."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        loss_type="ForCausalLM",
        **dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**changes: Any) -> nn.Module:
    """Llama: rotary buffers that are not persistent, grouped queries."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER | changes))


def qwen2() -> nn.Module:
    """Qwen2: biases on q, k and v."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER))


def qwen3() -> nn.Module:
    """Qwen3: norms on q and k."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER))


def mistral() -> nn.Module:
    """Mistral: a sliding window."""
    config = transformers.MistralConfig(**DECODER, sliding_window=4)
    return transformers.MistralForCausalLM(config)


def gemma() -> nn.Module:
    """Gemma: tied, its embedding scaled by a buffer."""
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER))


def mixtral() -> nn.Module:
    """Mixtral: all experts of a layer in two parameters, on every rank."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    # The grouped product of torch has no float64.
    config = transformers.MixtralConfig(**DECODER, **experts, experts_implementation="eager")
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    """BERT with its head for masked tokens, tied, with a bias that is tied as well."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **sizes, **NO_DROPOUT))


def vit() -> nn.Module:
    """ViT with a classifier; its class token and positions are bare parameters."""
    image = {"image_size": 8, "patch_size": 4, "num_labels": NUM_CLASSES}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, **image, **NO_DROPOUT)
    )


ZOO: dict[str, Callable[[], nn.Module]] = {
    maker.__name__: maker
    for maker in (gpt2, llama, qwen2, qwen3, mistral, gemma, mixtral, bert, vit)
}


def build(name: str) -> nn.Module:
    """A model in float64, the same in every call."""
    torch.manual_seed(0)
    return ZOO[name]().double()


def batches(name: str, steps: int = 3) -> list[dict[str, Tensor]]:
    """Batches with padding for language models, images for ViT."""
    generator = torch.Generator().manual_seed(0)
    return [_images(generator) if name == "vit" else _text(name, generator) for _ in range(steps)]


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, NUM_CLASSES, (4,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def _text(name: str, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCAB, (len(LENGTHS), LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    labels = tokens.masked_fill(~mask, -100)
    if name == "bert":  # predicts in place: leave as many labels as causal models predict
        labels[:, 0] = -100
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}


def causal_loss(model: Any, batch: dict[str, Tensor], **options: Any) -> sw.Mean:
    """The loss of a causal model, which shifts the labels itself."""
    return sw.Mean.of_tokens(model(**batch, **options).loss.double(), batch["labels"], shift=True)


def masked_loss(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    """The loss of a model that predicts tokens in their place."""
    return sw.Mean.of_tokens(model(**batch).loss.double(), batch["labels"])


def class_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over images."""
    return model(**batch).loss.double()


def loss_of(name: str) -> Callable[..., Any]:
    """How a model's own loss is used."""
    return {"bert": masked_loss, "vit": class_loss}.get(name, causal_loss)
