"""Whole models with hand-cut attention and MLP blocks have types from end to end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.sharding.compat import FakeTensorMode
from shardwise.transforms.activation_types import (
    Free,
    Invariant,
    Partial,
    Replicated,
    Sharded,
    Type,
    Types,
)
from shardwise.transforms.typing_mode import TypingMode


def _boundaries(types: Types, module: nn.Module, found: list[Type]) -> None:
    """Enter a module replicated and leave it invariant, as all-reduces around it would."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = kwargs.get("hidden_states", args[0] if args else None)
        types.use(source, "tp", "invariant")
        whole = source.clone()
        types.set(whole, "tp", Replicated())
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": whole}
        return (whole, *args[1:]), kwargs

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        found.append(types.of(first, "tp"))
        summed = first.clone()
        types.set(summed, "tp", Invariant())
        return (summed, *output[1:]) if isinstance(output, tuple) else summed

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _cut(types: Types, layer: nn.Module, name: str, dim: int, num: int, ranks: int) -> None:
    value = getattr(layer, name)
    size = value.shape[dim] // ranks
    local = nn.Parameter(value.detach().narrow(dim, 0, size).clone())
    setattr(layer, name, local)
    types.set(local, "tp", Sharded(dim, (size // num,) * num))


LLAMA = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cut_llama_types(attention: str, ranks: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if ranks == 4 else 2,
        intermediate_size=48,
    )
    config._attn_implementation = attention
    types, found = Types(axes=("tp",)), list[Type]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.LlamaForCausalLM(config)
        for name, layer in model.named_modules():
            if name.rsplit(".", 1)[-1] in LLAMA:
                _cut(types, layer, "weight", LLAMA[name.rsplit(".", 1)[-1]], 1, ranks)
            if name.endswith(("self_attn", "mlp")):
                _boundaries(types, layer, found)
        for name, value in model.named_parameters():
            if types.raw(value, "tp") == Free(()):
                types.set(value, "tp", Free((name,)))
        ids = torch.zeros(3, 8, dtype=torch.int64)
        with TypingMode(types):
            loss = model(ids, labels=ids).loss
        assert types.of(loss, "tp") == Invariant()
    assert found == [Partial()] * 4
    uncut = {name for name, value in model.named_parameters() if "proj" not in name}
    assert types.used["tp"] == {path: {"invariant"} for path in uncut}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_cut_gpt2_with_fused_heads_types(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = attention
    types, found = Types(axes=("tp",)), list[Type]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.GPT2LMHeadModel(config)
        for block in model.transformer.h:
            for layer, num in ((block.attn.c_attn, 3), (block.mlp.c_fc, 1)):
                _cut(types, layer, "weight", 1, num, 2)
                _cut(types, layer, "bias", 0, num, 2)
                layer.nf //= 2
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                _cut(types, layer, "weight", 0, 1, 2)
                layer.bias = None
                layer.forward = lambda x, layer=layer: x @ layer.weight
            block.attn.split_size //= 2
            block.attn.num_heads //= 2
            _boundaries(types, block.attn, found)
            _boundaries(types, block.mlp, found)
        for name, value in model.named_parameters():
            if types.raw(value, "tp") == Free(()):
                types.set(value, "tp", Free((name,)))
        ids = torch.zeros(3, 8, dtype=torch.int64)
        with TypingMode(types, where=lambda: "block"):
            loss = model(ids, labels=ids).loss
        assert types.of(loss, "tp") == Invariant()
    assert found == [Partial()] * 4
    drawn = [
        kinds["tp"] for op, kinds, _ in types.random if "attention" in op or attention == "eager"
    ]
    assert drawn.count(Sharded(1, (2,))) == 2
    assert set(types.used["tp"]["transformer.wte.weight"]) == {"invariant"}


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "Phi3": {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1},
    "GPTNeoX": {},
    "Bert": {},
    "GPT2": {"bos_token_id": 0, "eos_token_id": 1},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_uncut_model_is_free_and_uses_all_parameters(family: str, attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        **FAMILIES[family],
    )
    config._attn_implementation = attention
    ending = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel"}.get(family, "ForCausalLM")
    types = Types(axes=("tp",))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = getattr(transformers, f"{family}{ending}")(config)
        for name, value in model.named_parameters():
            types.set(value, "tp", Free((name,)))
        ids = torch.zeros(2, 8, dtype=torch.int64)
        with TypingMode(types):
            loss = model(ids, labels=ids).loss
        assert types.of(loss, "tp") == Free(tuple(name for name, _ in model.named_parameters()))
