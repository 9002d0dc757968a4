"""Models of transformers with their layers recomputed, by us and by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.hf.zoo import batches, build, causal_loss

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)


def gpt2_with_dropout() -> nn.Module:
    model = build("gpt2")
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1
    return model


MODELS: dict[str, tuple[Any, str, str]] = {
    "gpt2": (gpt2_with_dropout, "h.*", "attn"),
    "llama": (lambda: build("llama"), "layers.*", "self_attn"),
}


Seen = tuple[Any, dict[str, Any], Any]


def gradients(model: nn.Module, *remats: sw.Transform) -> Seen:
    """Of one step of ZeRO-3 on two ranks; what ran is what was predicted."""
    (batch,) = batches("llama", steps=1)
    with sw.simulate(MESH):
        plan = sw.plan(model, MESH, sw.zero(3, "fsdp"), *remats)
        program = sw.lower(plan, causal_loss, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        grads, metrics = program.grads(state, program.shard_batch(batch))
        assert tuple(program.last_collectives) == tuple(program.lowered.grads_items)
        return metrics.loss, dict(sw.to_global(grads.leaves)), program.lowered.grads_items


def assert_same(
    got: tuple[Any, dict[str, Any], Any], want: tuple[Any, dict[str, Any], Any]
) -> None:
    assert torch.equal(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    assert not [path for path in want[1] if not torch.equal(got[1][path], want[1][path])]


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_recomputed_bit_for_bit(name: str) -> None:
    """With dropout, caches, masks and rotary embeddings passed by keyword, and tied heads."""
    make, layers, attention = MODELS[name]
    model = make()
    want = gradients(model)
    for policy in ("everything", "dots"):
        got = gradients(model, sw.remat(layers, policy))
        assert_same(got, want)
        assert got[2] == want[2]
    whole = [sw.remat(["", layers]), sw.remat(f"{layers}.{attention}", "dots")]
    assert_same(gradients(model, *whole), want)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_checkpoints_its_layers_itself(name: str) -> None:
    """Inside and outside of what we recompute."""
    make, layers, attention = MODELS[name]
    want, model = gradients(make()), make()
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert_same(gradients(model), want)
    assert_same(gradients(model, sw.remat([layers, f"{layers}.{attention}"])), want)
