"""Models of transformers as they are, trained by every level, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from tests.hf.zoo import ZOO, batches, build, causal_loss, loss_of
from tests.oracles.one_process import assert_same, one_process, sharded

PLANS = {
    f"zero {level} on {ranks}": (sw.Mesh(fsdp=ranks), [sw.zero(level, "fsdp")])
    for level in range(4)
    for ranks in range(1, 5)
} | {
    "zero 3 on 3, prefetch": (sw.Mesh(fsdp=3), [sw.zero(3, "fsdp"), sw.prefetch(1)]),
    "hybrid": (sw.Mesh(dp=2, fsdp=2), [sw.zero(3, "fsdp")]),
}


@pytest.mark.simulated
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("name", ZOO)
def test_a_model_trains_as_in_one_process(name: str, kind: str) -> None:
    """Losses, gradients, weights, momentum and buffers of three steps."""
    model, data, loss = build(name), batches(name), loss_of(name)
    mesh, transforms = PLANS[kind]
    want = one_process(
        model, loss, data, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), parts=mesh.size
    )
    plan = sw.plan(model, mesh, *transforms)
    got = sharded(model, plan, loss, data, sw.optim.sgd(0.1, momentum=0.9))
    assert_same(got, want)
    assert want.losses[-1] != want.losses[0]


@pytest.mark.simulated
def test_adamw_as_in_one_process() -> None:
    """Llama has no bias on its keys, whose gradient would be rounding noise to Adam."""
    model, data = build("llama"), batches("llama")
    want = one_process(
        model, causal_loss, data, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1), parts=2
    )
    plan = sw.plan(model, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    got = sharded(model, plan, causal_loss, data, sw.optim.adamw(1e-2, weight_decay=0.1))
    assert_same(got, want)


TIED = {
    "gpt2": ["transformer.wte.weight"],
    "gemma": ["model.embed_tokens.weight"],
    "bert": ["bert.embeddings.word_embeddings.weight"],
}


@pytest.mark.abstract
@pytest.mark.parametrize("name", ZOO)
def test_the_layers_are_the_units_and_a_tied_embedding_is_in_the_root(name: str) -> None:
    """Without `units=`: each layer by itself, what two units share for the whole step."""
    plan = sw.plan(build(name), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    layers = [unit.name for unit in plan.units if unit.kind == "unit"]
    assert [layer.rpartition(".")[2] for layer in layers] == ["0", "1"]
    root = next(unit for unit in plan.units if unit.kind == "root")
    assert list(root.params) == TIED.get(name, [])


def llama_on_two() -> list[Any]:
    """Train Llama on this rank of a job and return what can be compared."""
    model = build("llama")
    plan = sw.plan(model, sw.Mesh(fsdp=-1), sw.zero(3, "fsdp"))
    program = sw.lower(plan, causal_loss, sw.optim.sgd(0.1, momentum=0.9)).bind()
    state = program.init(sw.from_module(model))
    losses = []
    for batch in batches("llama"):
        state, metrics = program.step(state, program.shard_batch(batch))
        assert program.last_collectives == program.lowered.collectives()
        losses.append(metrics.loss.item())
    return [losses, {path: value.clone() for path, value in sw.to_global(state.params).items()}]


@pytest.mark.gloo
@pytest.mark.timeout(60)
def test_llama_on_two_processes() -> None:
    """Real ranks do what one process does."""
    want = one_process(
        build("llama"),
        causal_loss,
        batches("llama"),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        parts=2,
    )
    for losses, params in sw.spawn(llama_on_two, ranks=2, timeout=50):
        torch.testing.assert_close(losses, want.losses, rtol=1e-9, atol=0.0)
        torch.testing.assert_close(params, want.params, rtol=1e-9, atol=1e-11)
