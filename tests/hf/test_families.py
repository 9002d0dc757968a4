"""Families of models of transformers: names for all parameters, and integers that are theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.sharding.axes import Axes
from shardwise.sharding.axes_sources import evaluate, names_in
from shardwise.sharding.families import FAMILIES
from shardwise.sharding.naming import Named, name_parameters
from shardwise.sharding.tensor_cuts import CUT, WHOLE
from shardwise.sharding.units import param_infos
from tests.hf.zoo import DECODER, NO_DROPOUT, SIZES, VOCAB, ZOO, transformers

pytestmark = pytest.mark.abstract

WITHOUT_HEAD_DIM = {name: size for name, size in DECODER.items() if name != "head_dim"}
NEOX = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": 64}


def gemma(number: int) -> nn.Module:
    """Gemma 2 or 3, whose heads are wider than the width by the number of heads."""
    config = {2: "Gemma2Config", 3: "Gemma3TextConfig"}[number]
    sizes = DECODER | {"head_dim": 16}
    return getattr(transformers, f"Gemma{number}ForCausalLM")(
        getattr(transformers, config)(**sizes)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: ZOO[name] for name in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "bert")},
    "gemma2": lambda: gemma(2),
    "gemma3_text": lambda: gemma(3),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**NEOX)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**DECODER)),
}
BIASED = {"attention_bias": True, "mlp_bias": True}
VARIANTS: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "llama with biases": lambda: ZOO["llama"](**BIASED),
    "llama, bare": lambda: transformers.LlamaModel(transformers.LlamaConfig(**DECODER)),
    "bert to pretrain": lambda: transformers.BertForPreTraining(bert_config()),
    "bert decoder": lambda: transformers.BertLMHeadModel(
        bert_config(is_decoder=True, add_cross_attention=True)
    ),
    "gpt2 decoder": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, add_cross_attention=True)
    ),
}
UNNAMED = {"bert to pretrain": {"cls.seq_relationship.weight", "cls.seq_relationship.bias"}}


def bert_config(**more: Any) -> Any:
    """Of a small BERT."""
    return transformers.BertConfig(**SIZES, **NO_DROPOUT, vocab_size=VOCAB, **more)


def named(model: nn.Module, **sizes: int) -> Named:
    """What all sources say of a model."""
    return name_parameters(model, param_infos(model), {}, sizes)


def at(model: Any, path: str) -> Any:
    """The value of an attribute by its path."""
    for name in path.split("."):
        model = getattr(model, name)
    return model


def test_every_table_has_a_model_here() -> None:
    assert set(MODELS) == set(FAMILIES)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_has_names_that_fit(name: str) -> None:
    """Names with a rule, sizes of a configuration that the shapes confirm."""
    with torch.device("meta"):
        model = VARIANTS[name]()
    found = named(model)
    infos = param_infos(model)
    assert {info.path for info in infos} - set(found.axes) == UNNAMED.get(name, set())
    assert {found.source[path] for path in found.axes} == {
        f"family {at(model, 'config.model_type')}"
    }
    for info in infos:
        if info.path not in found.axes:
            continue
        axes = Axes.parse(found.axes[info.path])
        assert set(axes.names) <= {*CUT, *WHOLE}
        given = {known: found.sizes[known] for known in axes.names if known in found.sizes}
        sizes = axes.sizes(info.shape, **given)
        assert sizes.items() >= given.items()
    assert found.sizes["heads"] == 4
    assert not found.guesses


@pytest.mark.parametrize("name", VARIANTS)
def test_integers_are_those_of_the_modules_if_nothing_is_cut(name: str) -> None:
    with torch.device("meta"):
        model = VARIANTS[name]()
    found = named(model)
    for path, text in found.local_ints.items():
        assert evaluate(text, found.sizes) == at(model, path), path
        assert set(names_in(text)) <= set(found.sizes)


INTEGERS = {
    "llama": {"num_key_value_groups"},
    "gpt2": {"nf", "split_size", "num_heads"},
    "phi3": {"num_key_value_groups", "num_key_value_heads", "config.num_attention_heads"},
    "bert": {"num_attention_heads", "all_head_size"},
}


@pytest.mark.parametrize("name", INTEGERS)
def test_which_integers_a_family_has(name: str) -> None:
    with torch.device("meta"):
        found = named(MODELS[name]())
    ends = [path.split(".") for path in found.local_ints]
    got = {".".join(part[-2:]) if part[-2] == "config" else part[-1] for part in ends}
    assert got == INTEGERS[name]


def test_a_model_inside_of_a_module_of_the_user() -> None:
    model = nn.ModuleDict({"policy": ZOO["llama"](), "value": nn.Linear(32, 1)})
    found = named(model)
    assert found.axes["policy.lm_head.weight"] == "vocab embed"
    assert "policy.model.layers.1.self_attn.num_key_value_groups" in found.local_ints
    assert "value.weight" not in {**found.axes, **found.guesses}


def test_two_families_in_one_model_keep_to_themselves() -> None:
    found = named(nn.ModuleList([ZOO["gpt2"](), ZOO["bert"]()]))
    assert found.source["0.transformer.h.0.attn.c_attn.weight"] == "family gpt2"
    assert found.axes["0.transformer.h.0.attn.c_attn.weight"] == "embed (3 heads hd)"
    assert found.source["1.bert.encoder.layer.0.output.dense.weight"] == "family bert"


def test_models_with_unlike_heads_share_no_names_of_heads() -> None:
    """A teacher beside its student, of which only one can say how large a head is."""
    found = named(nn.ModuleList([ZOO["llama"](), ZOO["llama"](head_dim=4)]))
    assert found.sizes == {"heads": 4, "kv": 2, "hd": 8}
    ends = {path[2:] for path in found.axes if path.startswith("1.")}
    assert "model.layers.0.mlp.up_proj.weight" in ends
    assert not any("_proj" in path and "self_attn" in path for path in ends)
    assert found.axes["0.model.layers.0.self_attn.q_proj.weight"] == "(heads hd) embed"
    assert "0.model.layers.0.self_attn.num_key_value_groups" in found.local_ints


def test_the_plan_of_an_unknown_family() -> None:
    """Projections that fit the configuration by heads, others by plain cuts, experts whole."""
    found = named(ZOO["mixtral"]())
    assert found.axes["model.layers.0.self_attn.k_proj.weight"] == "(kv hd) embed"
    assert found.source["model.layers.0.self_attn.k_proj.weight"] == "tp plan"
    assert found.axes["lm_head.weight"] == "vocab embed"
    assert "model.layers.0.mlp.experts.gate_up_proj" not in {**found.axes, **found.guesses}
    assert found.local_ints["model.layers.1.self_attn.num_key_value_groups"] == "heads // kv"
    model = nn.ModuleDict({"first": nn.Linear(4, 6), "second": nn.Linear(6, 4)})
    model.config = transformers.PretrainedConfig()  # type: ignore[assignment]
    model.config.model_type = "of my own"  # type: ignore[union-attr]
    model._tp_plan = {"first": "colwise", "second": "rowwise"}  # type: ignore[assignment]
    assert dict(named(model).axes) == {
        "first.weight": "tp_out embed",
        "first.bias": "tp_out",
        "second.weight": "embed tp_in",
        "second.bias": "embed",
    }


def test_a_fused_projection_that_is_gathered_at_once_is_not_cut_blindly() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(4, 6), "head": nn.Linear(4, 9)})
    model.config = transformers.PretrainedConfig()  # type: ignore[assignment]
    model.config.model_type, model.config.vocab_size = "of my own", 9  # type: ignore[union-attr]
    model._tp_plan = dict.fromkeys(("qkv", "head"), "colwise_gather_output")  # type: ignore[assignment]
    assert dict(named(model).axes) == {"head.weight": "vocab embed", "head.bias": "vocab"}


def test_a_table_that_does_not_fit_names_nothing_but_is_kept_as_a_guess() -> None:
    model: Any = ZOO["llama"]()
    model.model.layers[0].self_attn.q_proj = nn.Linear(32, 24, bias=False)
    found = named(model)
    path = "model.layers.0.self_attn.q_proj.weight"
    assert path not in found.axes
    assert found.guesses == {path: "(heads hd) embed"}
    assert found.source[path] == "family llama"


def test_sizes_of_the_user_go_before_the_configuration() -> None:
    assert named(ZOO["llama"](), hd=4).sizes["hd"] == 4


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_follow_the_layers_of_a_family(name: str) -> None:
    """Wrapped as peft does it; integers of the layer are found below the wrapper."""
    model: Any = MODELS[name]()
    block, layer = {
        "llama": (model.model.layers[0].self_attn if name == "llama" else None, "q_proj"),
        "gpt2": (model.transformer.h[0].attn if name == "gpt2" else None, "c_attn"),
    }[name]
    base = getattr(block, layer)
    inputs, outputs = base.weight.shape if name == "gpt2" else reversed(base.weight.shape)
    pair = {
        "lora_A": nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)}),
        "lora_B": nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)}),
    }
    plain = named(copy.deepcopy(model))
    setattr(block, layer, nn.ModuleDict({"base_layer": base, **pair}))
    found = named(model)
    rows = {"llama": "(heads hd)", "gpt2": "(3 heads hd)"}[name]
    ends = {"A": "rank embed", "B": f"{rows} rank"}
    for kind, text in ends.items():
        path = next(p for p in found.axes if p.endswith(f"lora_{kind}.default.weight"))
        assert found.axes[path] == text
        assert found.source[path] == f"family {name}"
    assert len(found.axes) == len(plain.axes) + 2
    without = {path.replace(".base_layer", ""): text for path, text in found.local_ints.items()}
    assert without == plain.local_ints
