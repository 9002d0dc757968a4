"""Families of transformers cut over a tensor axis: as one process, and back into transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import PlanError
from tests.hf.test_export import assert_all_known, loaded, logits
from tests.hf.test_families import MODELS
from tests.hf.zoo import DECODER, batches, loss_of, transformers
from tests.oracles.one_process import Run, assert_same, one_process, sharded

pytestmark = pytest.mark.simulated

WITH_ZERO = ("llama", "gpt2", "phi3", "bert")
ROUNDING = ("qwen3", "gemma3_text")
"""Their norms of single heads compute in float32, whatever the dtype of the weights.

Inside of a layer that is cut a rank has a part of a gradient, and the sum of rounded parts is not
the rounded sum. So these are compared twice: exactly, with norms that keep the dtype, and as they
are, as closely as float32 allows.
"""


RENAMED = {"gpt_neox": {"embed_out.weight": "lm_head.weight"}}
"""What transformers calls otherwise in files than in the model."""


class ExactNorm(nn.Module):
    """A norm of transformers in the dtype of its weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.is_gemma = "Gemma" in type(norm).__name__
        self.eps = norm.eps if self.is_gemma else norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return scaled * (self.weight + 1.0 if self.is_gemma else self.weight)


def with_exact_norms(model: nn.Module) -> nn.Module:
    """The model with other norms, which give the same to the rounding of float32."""
    norms = [path for path, one in model.named_modules() if type(one).__name__.endswith("RMSNorm")]
    for path in norms:
        norm = model.get_submodule(path)
        exact = ExactNorm(norm)
        x = torch.randn(3, norm.weight.shape[0], dtype=torch.float64)
        torch.testing.assert_close(exact(x), norm(x), rtol=1e-5, atol=1e-6)
        model.set_submodule(path, exact)
    return model


def build(name: str) -> nn.Module:
    """A model in float64 with weights that are far from symmetric, biases and norms included."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def data_of(name: str, steps: int) -> list[dict[str, Tensor]]:
    """Batches for language models; BERT predicts in place."""
    return batches("bert" if name == "bert" else "llama", steps)


@functools.cache
def alone(name: str) -> Run:
    """Two steps in one process, with norms that keep the dtype where the others would not."""
    return one_process(exact(name), loss_of(name), data_of(name, 2), momentum)


def exact(name: str) -> nn.Module:
    return with_exact_norms(build(name)) if name in ROUNDING else build(name)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


SGD = sw.optim.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_family_trains_as_in_one_process(name: str, ranks: int, tmp_path: Path) -> None:
    """From the safetensors of transformers, and back into it: two steps in parts.

    Two kv heads on four ranks are copied; a vocabulary of 97 divides by neither.
    """
    model: Any = exact(name)
    model.save_pretrained(tmp_path / "before")
    plan = sw.plan(model, sw.Mesh(tp=ranks), sw.tensor_parallel("tp"))
    cut = {path for path, spec in plan.compute.items() if spec.mesh_axes}
    assert bool(cut) == (ranks > 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # so that all values are those of the files

    def export(state: Any) -> None:
        path = tmp_path / "after"
        sw.export_safetensors(state, path, config=model.config, dtype=torch.float64)

    source = sw.from_safetensors(tmp_path / "before", rename=RENAMED.get(name))
    data = data_of(name, 2)
    got = sharded(model, plan, loss_of(name), data, SGD, source=source, after=export)
    assert_same(got, alone(name))
    check_export(type(model), tmp_path / "after", alone(name), data[1])


def check_export(kind: type[Any], path: Path, want: Run, batch: dict[str, Tensor]) -> None:
    """transformers finds all it needs, and gives the logits of the trained weights."""
    again, info = loaded(kind, path, dtype=torch.float64)
    assert_all_known(info)
    got = logits(again, batch)
    # Of the model as loaded: Gemma rounds the scale of its embedding to the dtype it is made in.
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            torch.testing.assert_close(parameter, want.params[name], rtol=1e-9, atol=1e-11)
            parameter.copy_(want.params[name])
    # Norms in float32 round what differs in the last bit of float64 to neighbours at times.
    torch.testing.assert_close(got, logits(again, batch), rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.mul_(1.001)
    assert (got - logits(again, batch)).abs().max() > 1e-5


def check(
    name: str,
    plan: sw.Plan,
    model: nn.Module,
    *,
    parts: int = 1,
    steps: int = 2,
    rtol: float = 1e-9,
    atol: float = 1e-11,
) -> None:
    """Losses, gradients, weights and momentum, against one process."""
    data, loss = data_of(name, steps), loss_of(name)
    want = one_process(model, loss, data, momentum, parts=parts)
    assert_same(sharded(model, plan, loss, data, SGD), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ROUNDING)
def test_norms_in_float32_inside_of_what_is_cut(name: str, ranks: int) -> None:
    """As they are: a part of a gradient has the rounding of float32, relative to the largest."""
    model = build(name)
    plan = sw.plan(model, sw.Mesh(tp=ranks), sw.tensor_parallel("tp"))
    check(name, plan, model, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("name", WITH_ZERO)
def test_a_family_with_data_axes(name: str, level: int) -> None:
    model = build(name)
    mesh = sw.Mesh(fsdp=2, tp=2)
    plan = sw.plan(model, mesh, sw.tensor_parallel("tp"), sw.zero(level, "fsdp"))
    check(name, plan, model, parts=2)


@pytest.mark.parametrize("kind", ["Llama", "Gemma", "Phi3"])
def test_one_kv_head_for_all(kind: str) -> None:
    """As in the small Gemma: every rank uses the one head, alone or fused with its part of q."""
    torch.manual_seed(0)
    sizes = DECODER | {"num_key_value_heads": 1, "num_hidden_layers": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    # Norms in float32 would turn the last bit of a float64 weight into one of theirs.
    model = with_exact_norms(getattr(transformers, f"{kind}ForCausalLM")(config).double())
    plan = sw.plan(model, sw.Mesh(tp=2), sw.tensor_parallel("tp"), sw.sequence_parallel("tp"))
    check("llama", plan, model)


def test_the_module_and_its_configuration_are_left_as_they_were() -> None:
    """Phi-3 reads its number of heads from a configuration that all modules share."""
    model: Any = build("phi3")
    before = model.config.to_dict()
    plan = sw.plan(model, sw.Mesh(tp=2), sw.tensor_parallel("tp"))
    check("phi3", plan, model, steps=1)
    assert model.config.to_dict() == before
    layer = model.model.layers[0].self_attn
    assert layer.config is model.config
    assert (layer.num_key_value_heads, layer.num_key_value_groups) == (2, 2)


def test_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    """Three kv heads on four ranks, or six heads."""
    config = transformers.LlamaConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=33,
    )
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(PlanError) as caught:
        sw.plan(model, sw.Mesh(tp=4), sw.tensor_parallel("tp"))
    text = str(caught.value)
    assert "heads is 6; mesh axis 'tp' has 4 ranks; 6 % 4 == 2." in text
    assert "kv is 3; mesh axis 'tp' has 4 ranks; 3 % 4 == 3." in text
