"""What scripts do with models of transformers: caches, checkpointing, loading, meta, their init."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.sharding.errors import InitError, UnitError
from tests.hf.zoo import DECODER, ZOO, batches, build, causal_loss, llama, transformers
from tests.oracles.one_process import assert_same, one_process, sharded

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)


def check(model: nn.Module, loss: Callable[..., Any] = causal_loss, *more: sw.Transform) -> None:
    """Two steps of ZeRO-3 on two ranks against one process."""
    data = batches("llama", steps=2)
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"), *more)
    plain = copy.deepcopy(model)
    for path, parameter in plain.named_parameters():
        parameter.requires_grad_(path in plan.opt)
    want = one_process(
        plain, loss, data, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), parts=MESH.size
    )
    assert_same(sharded(model, plan, loss, data, sw.optim.sgd(0.1, momentum=0.9)), want)


# -- outputs and caches ---------------------------------------------------------------------------


def loss_on_cache(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    """Uses the keys and values that the layers have left in the cache."""
    out = model(**batch, use_cache=True)
    mean = sw.Mean.of_tokens(out.loss.double(), batch["labels"], shift=True)
    kept = [part for layer in out.cache.layers for part in (layer.keys, layer.values)]
    return sw.Mean(mean.total + 0.1 * sum(part.square().sum() for part in kept), mean.count)


def loss_on_everything(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    """Uses the hidden states and attention weights of all layers."""
    out = model(**batch, output_hidden_states=True, output_attentions=True)
    mean = sw.Mean.of_tokens(out.loss.double(), batch["labels"], shift=True)
    more = [*out.hidden_states, *out.attentions]
    return sw.Mean(mean.total + 0.1 * sum(part.square().sum() for part in more), mean.count)


def loss_from_tuple(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    loss = model(**batch, return_dict=False)[0]
    return sw.Mean.of_tokens(loss.double(), batch["labels"], shift=True)


@pytest.mark.parametrize("loss", [loss_on_cache, loss_on_everything, loss_from_tuple])
def test_what_a_model_returns(loss: Callable[..., Any]) -> None:
    check(build("llama"), loss)


class CacheReturned(nn.Module):
    """A layer as transformers had them: it updates the cache, and returns it beside its output."""

    def __init__(self, index: int, *, make: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.index, self.make = index, make
        self.lin, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        key = torch.tanh(self.key(torch.tanh(self.key(x))))
        _, values = cache.update(key[:, None], x[:, None], self.index)
        out = torch.tanh(self.lin(values[:, 0]))
        return out, cache if self.make is None else self.make(out)


class CacheCarried(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CacheReturned(index, **options) for index in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        cache = transformers.DynamicCache()
        for layer in self.layers:
            x, returned = layer(x, cache)
        return x, returned


def loss_on_returned(model: Any, batch: Tensor) -> sw.Mean:
    """Only the cache leads back to the last layer: its other output is not used."""
    _, cache = model(batch)
    return sw.Mean(sum(layer.keys.square().sum() for layer in cache.layers), len(batch))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_cache_that_every_layer_returns(frozen: bool) -> None:
    torch.manual_seed(0)
    model = CacheCarried().double()
    model.layers[1].requires_grad_(not frozen)
    data = list(torch.randn(2, 4, 3, 4, dtype=torch.float64))
    want = one_process(model, loss_on_returned, data, lambda p: torch.optim.SGD(p, 0.1))
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    got = sharded(model, plan, loss_on_returned, data, sw.optim.sgd(0.1))
    assert_same(got, want)


class Holder:
    """An object that nobody has said how to walk."""

    def __init__(self, value: Any) -> None:
        self.inside = [value]


def test_tensors_deep_in_an_object_are_refused_by_name() -> None:
    model = CacheCarried(make=lambda out: Holder(Holder(out)))
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    with sw.simulate(MESH):
        program = sw.lower(plan, lambda model, x: model(x)[0].mean(), sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        with pytest.raises(UnitError, match=r"'layers\.0' returns a .*Holder that holds tensors"):
            program.step(state, program.shard_batch(torch.ones(4, 3, 4)))


# -- checkpointing and frozen parts ---------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_checkpointing_of_activations_gathers_each_layer_once_more_only(name: str) -> None:
    """It is exact, and the recomputation finds the weights that backward has gathered anyway."""
    model, plain = build(name), build(name)
    model.gradient_checkpointing_enable()
    check(model)
    counts = []
    for one in (model, plain):
        plan = sw.plan(one, MESH, sw.zero(3, "fsdp"))
        with sw.simulate(MESH):
            program = sw.lower(plan, causal_loss, sw.optim.sgd(0.1)).bind()
            state = program.init(sw.from_module(one))
            program.step(state, program.shard_batch(batches(name, 1)[0]))
        counts.append([(c.kind, c.unit, c.reason) for c in program.last_collectives])
    assert counts[0] == counts[1]


def test_the_reentrant_kind_is_refused_by_name() -> None:
    model = build("llama").train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    with sw.simulate(MESH):
        program = sw.lower(plan, causal_loss, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        with pytest.raises(UnitError, match="use_reentrant=True"):
            program.step(state, program.shard_batch(batches("llama", 1)[0]))


class CheckpointedCall(nn.Module):
    """A layer that checkpoints its own call, hooks and all, as transformers 4 did."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_hooks_inside_the_checkpoint() -> None:
    """The recomputation calls the hooks of the unit again, and they know it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(CheckpointedCall() for _ in range(3))).double()
    data = list(torch.randn(2, 4, 4, dtype=torch.float64))
    want = one_process(model, squares, data, lambda p: torch.optim.SGD(p, 0.1))
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    assert_same(sharded(model, plan, squares, data, sw.optim.sgd(0.1)), want)


def squares(model: Any, batch: Tensor) -> sw.Mean:
    return sw.Mean(model(batch).square().sum(), len(batch))


def test_experts_that_cannot_be_traced(caplog: pytest.LogCaptureFixture) -> None:
    """By default all experts are one grouped product, which torch refuses on fake tensors."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, **experts))
    data = batches("mixtral", steps=2)
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    lowered = sw.lower(plan, causal_loss, sw.optim.sgd(0.1), batch=data[0])
    assert "the trace ended at" in lowered.text()
    assert not caplog.records
    want = one_process(model, causal_loss, data, lambda p: torch.optim.SGD(p, 0.1), parts=2)
    got = sharded(model, plan, causal_loss, data, sw.optim.sgd(0.1))
    assert_same(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["embed_tokens", "layers.0", "~q_proj"])
def test_frozen_parts(where: str) -> None:
    check(build("llama"), causal_loss, sw.freeze(where))


# -- where values come from -----------------------------------------------------------------------


def test_a_pretrained_model_is_a_source(tmp_path: Any) -> None:
    """Saved, loaded, and given to a plan that was made from the config on the meta device."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.device("meta"):
        empty = llama().double()
    with sw.simulate(MESH):
        plan = sw.plan(empty, MESH, sw.zero(3, "fsdp"))
        program = sw.lower(plan, causal_loss, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(loaded))
        params, buffers = sw.to_global(state.params), sw.to_global(state.buffers)
        metrics = program.eval(state, program.shard_batch(batches("llama", 1)[0]))
    assert all(torch.equal(params[n], p) for n, p in model.named_parameters())
    assert all(torch.equal(buffers[n], b) for n, b in model.named_buffers())
    with torch.no_grad():
        want = [causal_loss(model.eval(), part) for part in halves(batches("llama", 1)[0])]
    torch.testing.assert_close(metrics.loss, sum(m.total for m in want) / 16)


def halves(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v.tensor_split(2)[half] for k, v in batch.items()} for half in range(2)]


def initial(model: nn.Module, mesh: sw.Mesh) -> dict[str, Tensor]:
    with sw.simulate(mesh):
        plan = sw.plan(model, mesh, sw.zero(3, "fsdp"))
        program = sw.lower(plan, causal_loss, sw.optim.sgd(0.1)).bind()
        state = program.init(seed=3, init=model._init_weights)
        return {**sw.to_global(state.params), **sw.to_global(state.buffers)}


@pytest.mark.parametrize("name", ZOO)
def test_the_init_of_a_model_on_meta_is_the_same_on_every_mesh(name: str) -> None:
    real = build(name)
    with torch.device("meta"):
        empty = ZOO[name]().double()
    want = initial(real, MESH)
    for mesh in (sw.Mesh(fsdp=1), sw.Mesh(dp=2, fsdp=2)):
        got = initial(empty, mesh)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[path], want[path]) for path in want)
    for path, value in {**dict(real.named_parameters()), **dict(real.named_buffers())}.items():
        same_distribution(path, want[path], value.detach())


def same_distribution(path: str, got: Tensor, built: Tensor) -> None:
    """Constants are equal in float32, in which they are built; draws have the same spread."""
    many = built.is_floating_point() and built.numel() > 1
    if many and "rotary" not in path and built.std() > 0:
        ratio = float(got.std() / built.std())
        assert abs(ratio - 1) < 5 / built.numel() ** 0.5, path  # 5 standard errors
    else:
        torch.testing.assert_close(got, built, rtol=1e-6, atol=0.0)


def test_an_init_may_look_below_the_module_it_is_called_for() -> None:
    """GPT-2 scales the projections back to the residual when it meets the attention around them."""
    model = build("gpt2")
    got = initial(model, MESH)
    for layer in range(2):
        scaled = got[f"transformer.h.{layer}.mlp.c_proj.weight"].std()
        plain = got[f"transformer.h.{layer}.mlp.c_fc.weight"].std()
        assert float(scaled / plain) == pytest.approx(0.5, rel=0.1)  # 1 / sqrt(2 * 2 layers)


def test_an_init_that_reaches_into_another_unit_is_refused_by_name() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, transformers.LlamaModel):
            nn.init.ones_(module.layers[0].mlp.up_proj.weight)
        model._init_weights(module)

    model = build("llama")
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    with sw.simulate(MESH):
        program = sw.lower(plan, causal_loss, sw.optim.sgd(0.1)).bind()
        with pytest.raises(InitError, match="called for a module outside its unit") as caught:
            program.init(seed=0, init=init)
    path = "model.layers.0.mlp.up_proj.weight"
    assert caught.value.numbers == {"path": path, "unit": "model.layers.0"}
    assert f"init= uses the parameter '{path}'" in str(caught.value)
    assert "init(LlamaModel 'model')" in str(caught.value)


def test_a_model_is_left_as_it_was() -> None:
    model = build("llama")
    before = copy.deepcopy(model.state_dict())
    initial(model, MESH)
    check(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
