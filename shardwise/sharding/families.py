"""Families of models: what the dimensions of their parameters are, by `config.model_type`.

A family is a table. Its integers are attributes of modules that a forward reads and that count
something which tensor axes cut: on every rank they must be its own part. Those that a forward reads
from a configuration are written as such (`self_attn.config.num_attention_heads`). A table may name
attributes and parameters that only some versions or configurations have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.sharding.tree import FrozenMap


@dataclass(frozen=True, slots=True)
class Family:
    """The dimensions of the parameters of alike models.

    Args:
        axes: axes pattern by path pattern, the first match counts.
        ints: what an attribute of a module counts, by path pattern.
    """

    axes: FrozenMap[str, str]
    ints: FrozenMap[str, str]


def _layer(name: str, rows: str, columns: str) -> dict[str, str]:
    """A linear layer with or without a bias."""
    return {f"{name}.weight": f"{rows} {columns}", f"{name}.bias": rows}


def _transposed(name: str, columns: str, rows: str) -> dict[str, str]:
    """A layer that keeps its weight as input by output."""
    return {f"{name}.weight": f"{columns} {rows}", f"{name}.bias": rows}


def _norms(*names: str, axes: str = "norm") -> dict[str, str]:
    return {f"{name}.{kind}": axes for name in names for kind in ("weight", "bias")}


_HEADS, _KV = "(heads hd)", "(kv hd)"

_LLAMA_AXES = {
    "embed_tokens.weight": "vocab embed",
    **_layer("lm_head", "vocab", "embed"),
    **_layer("self_attn.q_proj", _HEADS, "embed"),
    **_layer("self_attn.k_proj", _KV, "embed"),
    **_layer("self_attn.v_proj", _KV, "embed"),
    **_layer("self_attn.o_proj", "embed", _HEADS),
    **_layer("mlp.gate_proj", "mlp", "embed"),
    **_layer("mlp.up_proj", "mlp", "embed"),
    **_layer("mlp.down_proj", "embed", "mlp"),
    **_norms("self_attn.q_norm", "self_attn.k_norm", axes="hd"),
    **_norms("*layernorm", "norm"),
}
_LLAMA_INTS = {
    "self_attn.num_key_value_groups": "heads // kv",
    "self_attn.num_heads": "heads",
    "self_attn.num_key_value_heads": "kv",
}

LLAMA = Family(FrozenMap(_LLAMA_AXES), FrozenMap(_LLAMA_INTS))
"""Separate projections, grouped queries, a gated MLP."""

PHI3 = Family(
    FrozenMap(
        {
            **_layer("self_attn.qkv_proj", "((heads + kv + kv) hd)", "embed"),
            **_layer("mlp.gate_up_proj", "(2 mlp)", "embed"),
            **_LLAMA_AXES,
        }
    ),
    FrozenMap(_LLAMA_INTS | {"self_attn.config.num_attention_heads": "heads"}),
)
"""Llama with q, k and v in one weight, one after the other, and gate and up in another."""

GPT2 = Family(
    FrozenMap(
        {
            "wte.weight": "vocab embed",
            "wpe.weight": "pos embed",
            **_layer("lm_head", "vocab", "embed"),
            **_transposed("attn.c_attn", "embed", "(3 heads hd)"),
            **_transposed("attn.c_proj", _HEADS, "embed"),
            **_transposed("crossattention.c_attn", "embed", "(2 heads hd)"),
            **_transposed("crossattention.q_attn", "embed", _HEADS),
            **_transposed("crossattention.c_proj", _HEADS, "embed"),
            **_transposed("mlp.c_fc", "embed", "mlp"),
            **_transposed("mlp.c_proj", "mlp", "embed"),
            **_norms("ln_*"),
        }
    ),
    FrozenMap(
        {
            "attn.c_attn.nf": "(3 heads hd)",
            "crossattention.c_attn.nf": "(2 heads hd)",
            "crossattention.q_attn.nf": _HEADS,
            "mlp.c_fc.nf": "mlp",
        }
        | {
            f"{module}.{name}": text
            for module in ("attn", "crossattention")
            for name, text in (("split_size", _HEADS), ("num_heads", "heads"))
        }
    ),
)
"""Weights kept as input by output (`Conv1D`, which knows its output size), all q, all k, all v."""

GPT_NEOX = Family(
    FrozenMap(
        {
            "embed_in.weight": "vocab embed",
            **_layer("embed_out", "vocab", "embed"),
            **_layer("lm_head", "vocab", "embed"),
            **_layer("attention.query_key_value", "(heads 3 hd)", "embed"),
            **_layer("attention.dense", "embed", _HEADS),
            **_layer("mlp.dense_h_to_4h", "mlp", "embed"),
            **_layer("mlp.dense_4h_to_h", "embed", "mlp"),
            **_norms("*layernorm", "final_layer_norm"),
        }
    ),
    FrozenMap({"attention.num_attention_heads": "heads"}),
)
"""q, k and v of one head lie side by side."""

BERT = Family(
    FrozenMap(
        {
            "word_embeddings.weight": "vocab embed",
            "position_embeddings.weight": "pos embed",
            "token_type_embeddings.weight": "types embed",
            **_layer("self.query", _HEADS, "embed"),
            **_layer("self.key", _HEADS, "embed"),
            **_layer("self.value", _HEADS, "embed"),
            **_layer("attention.output.dense", "embed", _HEADS),
            **_layer("crossattention.output.dense", "embed", _HEADS),
            **_layer("intermediate.dense", "mlp", "embed"),
            **_layer("output.dense", "embed", "mlp"),
            **_layer("pooler.dense", "embed", "embed"),
            **_layer("transform.dense", "embed", "embed"),
            **_layer("predictions.decoder", "vocab", "embed"),
            "predictions.bias": "vocab",
            **_norms("LayerNorm"),
        }
    ),
    FrozenMap({"self.num_attention_heads": "heads", "self.all_head_size": _HEADS}),
)
"""An encoder; its head for tokens has a layer of its own before the vocabulary."""

FAMILIES: FrozenMap[str, Family] = FrozenMap(
    {
        **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), LLAMA),
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), LLAMA),
        "phi3": PHI3,
        "gpt2": GPT2,
        "gpt_neox": GPT_NEOX,
        "bert": BERT,
    }
)
"""Tables by `config.model_type`."""


def sizes_of(config: Any) -> dict[str, int]:
    """Sizes of names, as far as a configuration of transformers tells them.

    >>> from types import SimpleNamespace
    >>> sizes_of(SimpleNamespace(hidden_size=32, num_attention_heads=4, vocab_size=97))
    {'vocab': 97, 'embed': 32, 'heads': 4, 'kv': 4, 'hd': 8}
    """
    embed, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    mlp = _number(config, "intermediate_size")
    if mlp is None and embed is not None and hasattr(config, "n_inner"):
        mlp = _number(config, "n_inner") or 4 * embed
    found = {
        "vocab": _number(config, "vocab_size"),
        "embed": embed,
        "heads": heads,
        "kv": _number(config, "num_key_value_heads") or heads,
        "hd": _number(config, "head_dim") or (embed // heads if embed and heads else None),
        "mlp": mlp,
    }
    return {name: size for name, size in found.items() if size is not None}


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
