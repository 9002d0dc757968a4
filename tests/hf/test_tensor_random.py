"""Dropout inside of the attentions of transformers, cut over a tensor axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.hf.zoo import batches, loss_of, transformers
from tests.oracles.one_process import sharded
from tests.transforms.cut_models import assert_bits

pytestmark = pytest.mark.simulated

SIZES: dict[str, Any] = {"vocab_size": 97, "num_hidden_layers": 1, "num_attention_heads": 4}


def gpt2() -> Any:
    drops = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=32, **drops, **tokens
    )


def llama() -> Any:
    return transformers.LlamaConfig(
        **SIZES, hidden_size=32, intermediate_size=48, num_key_value_heads=2, attention_dropout=0.3
    )


def bert() -> Any:
    return transformers.BertConfig(
        **SIZES, hidden_size=32, intermediate_size=48, max_position_embeddings=32,
        hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3,
    )  # fmt: skip


CONFIGS = {"gpt2": gpt2, "llama": llama, "bert": bert}
LAYERS = {"gpt2": "transformer.h.0", "llama": "model.layers.0", "bert": "bert.encoder.layer.0"}
APART = {
    ("gpt2", "sdpa"): {"transformer.h.0.attn": "scaled_dot_product_attention"},
    ("gpt2", "eager"): {"transformer.h.0.attn": "dropout"},
    ("llama", "sdpa"): {"model.layers.0.self_attn": "scaled_dot_product_attention"},
    ("llama", "eager"): {"model.layers.0.self_attn": "dropout"},
    ("bert", "sdpa"): {"bert.encoder.layer.0.attention.self": "scaled_dot_product_attention"},
    ("bert", "eager"): {"bert.encoder.layer.0.attention.self": "dropout"},
}


def build(name: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = attention
    kind = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM"}[name]
    return getattr(transformers, kind)(config).double()


def data_of(name: str, steps: int) -> list[dict[str, Tensor]]:
    return batches("bert" if name == "bert" else "llama", steps)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_heads_draw_apart_and_again(name: str, attention: str) -> None:
    """Which calls draw apart; the same in a recomputation; not as if no heads were cut."""
    model, data, loss = build(name, attention), data_of(name, 1), loss_of(name)
    mesh = sw.Mesh(tp=2)
    plan = sw.plan(model, mesh, sw.tensor_parallel("tp"))
    lowered = sw.lower(plan, loss, sw.optim.sgd(0.1), batch=data[0])
    found = {path: {fn for fn, _ in calls} for path, calls in lowered.facts.apart.items()}
    assert found == {path: {fn} for path, fn in APART[name, attention].items()}
    plain = sharded(model, plan, loss, data, sw.optim.sgd(0.1))
    again = sw.plan(model, mesh, sw.tensor_parallel("tp"), sw.remat(LAYERS[name]))
    assert_bits(sharded(model, again, loss, data, sw.optim.sgd(0.1)), plain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_equal_heads_on_two_ranks_lose_other_probabilities(attention: str) -> None:
    """All heads have the same weights: without dropout ranks compute the same, with it they do not.

    The output projection's rows are the same for all heads too, so that gradients of the query's
    rows tell heads apart by their masks only.
    """
    model: Any = build("llama", attention)
    layer = model.model.layers[0].self_attn
    with torch.no_grad():
        for one, heads in ((layer.q_proj, 4), (layer.k_proj, 2), (layer.v_proj, 2)):
            rows = one.weight.view(heads, -1, one.weight.shape[1])
            rows.copy_(rows[:1].expand_as(rows).clone())
        columns = layer.o_proj.weight.view(32, 4, -1)
        columns.copy_(columns[:, :1].expand_as(columns).clone())
    plan = sw.plan(model, sw.Mesh(tp=2), sw.tensor_parallel("tp"))
    data, loss = data_of("llama", 1), loss_of("llama")
    for dropped in (True, False):
        layer.attention_dropout = 0.3 if dropped else 0.0
        run = sharded(model, plan, loss, data, sw.optim.sgd(0.1))
        grad = run.grads[0]["model.layers.0.self_attn.q_proj.weight"]
        assert grad is not None
        heads = grad.view(4, -1)
        others = [torch.allclose(heads[0], head, rtol=1e-9, atol=1e-14) for head in heads[1:]]
        assert others == [not dropped] * 3
