"""Optimizers that must see whole tensors, where tensor axes cut them: exact on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import optim
from shardwise.testing import assert_equivalent, rest_bytes
from tests.hf.zoo import batches as texts
from tests.hf.zoo import loss_of
from tests.laws.test_memory import BATCH, MIB, Big, measured_transient
from tests.transforms.carried import whole
from tests.transforms.test_tensor_copies import Grouped, count_copies, phi3, squares

AXES = {
    "embed.weight": "vocab embed",
    "layers.*.up.weight": "mlp embed",
    "layers.*.up.bias": "mlp",
    "layers.*.down.weight": "embed mlp",
    "head.weight": "vocab embed",
}

BIG = {path: axes for path, axes in AXES.items() if "bias" not in path}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A vocabulary of 11, columns, rows, biases and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, tokens: Tensor) -> sw.Mean:
    loss = sw.cross_entropy(model(tokens), tokens.roll(1, 1), reduction="sum")
    return sw.Mean(loss, tokens.numel())


def batches(steps: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 11, (4, 3), generator=generator) for _ in range(steps)]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def adamw() -> Any:
    return optim.adamw(1e-2, eps=1e-4)


COUPLED: dict[str, Callable[[], Any]] = {
    "lamb": lambda: optim.lamb(1e-2, eps=1e-4),
    "adafactor": lambda: optim.adafactor(1e-2, weight_decay=0.1),
    "muon": lambda: optim.muon(1e-2, rest=adamw()),
    "clipped muon of some": lambda: optim.chain(
        optim.clip_by_global_norm(0.1),
        optim.muon(1e-2, where=("up.weight", "down.weight"), rest=optim.lion(1e-3)),
    ),
    "ema of muon": lambda: optim.ema(optim.muon(1e-2, rest=adamw()), decay=0.9),
    "torch adafactor": lambda: optim.from_torch(torch.optim.Adafactor, lr=1e-2),
    "injected lamb": lambda: optim.inject(optim.lamb, learning_rate=1e-2, eps=1e-4),
    "whole tree": lambda: optim.lamb(1e-2, eps=1e-4)._replace(couples="tree"),
}
PLANS: dict[str, tuple[dict[str, int], list[sw.Transform]]] = {
    "alone": ({"tp": 4}, []),
    "zero 1": ({"fsdp": 2, "tp": 2}, [sw.zero(1, "fsdp")]),
    "zero 3, tensor first": ({"tp": 2, "fsdp": 2}, [sw.zero(3, "fsdp", on=0, pad=True)]),
    "hybrid": ({"dp": 2, "fsdp": 2, "tp": 2}, [sw.zero(3, "fsdp")]),
}
SOME = [(name, "alone" if name in ("lamb", "muon") else "zero 1") for name in COUPLED]
ALL = [*SOME, ("adafactor", "hybrid"), ("muon", "zero 3, tensor first"), ("lamb", "hybrid")]


def plan_of(module: nn.Module, kind: str) -> sw.Plan:
    axes, more = PLANS[kind]
    return sw.plan(module, sw.Mesh(**axes), sw.tensor_parallel("tp"), *more, axes=AXES)


@pytest.mark.simulated
@pytest.mark.parametrize(("name", "kind"), ALL)
def test_coupled_optimizers_are_exact_under_tensor_axes(name: str, kind: str) -> None:
    module = net()
    plan = plan_of(module, kind)
    assert_equivalent(module, loss_fn, batches(), plan=plan, optimizer=COUPLED[name]())


@pytest.mark.simulated
def test_muon_on_fused_weights_with_copies_is_exact() -> None:
    """Of rows that two ranks hold the first copy counts, and both stay the same in bits."""
    model, data, loss = phi3(2), texts("llama", 2), loss_of("phi3")
    one, cut = sw.Mesh(tp=1), sw.Mesh(fsdp=2, tp=4)
    found: list[Any] = []
    for mesh, level in ((one, 0), (cut, 3)):
        plan = sw.plan(model, mesh, sw.tensor_parallel("tp"))
        plan = sw.zero(level, "fsdp")(plan) if level else plan
        muon = optim.muon(1e-2, where="*_proj*", rest=adamw())
        with sw.simulate(mesh):
            program = sw.lower(plan, loss, muon).bind()
            state = program.init(sw.from_module(model))
            for batch in data:
                state, _ = program.step(state, program.shard_batch(batch))
            assert program.last_collectives == program.lowered.collectives()
            found.append(whole(state))
    parameter_and_momentum = [name for name in found[0] if name.endswith("qkv_proj.weight")]
    assert len(parameter_and_momentum) == 2
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-11, msg=name)
    assert count_copies(state, "qkv_proj") > 0


@pytest.mark.abstract
def test_what_an_update_gathers_over_data_and_tensor_axes() -> None:
    """Half of each shard over `fsdp`, then whole blocks over `tp`; nothing for what is not cut."""
    plan = sw.plan(
        net(),
        sw.Mesh(fsdp=2, tp=2),
        sw.tensor_parallel("tp"),
        sw.zero(3, "fsdp"),
        axes=AXES,
    )
    muon = optim.muon(1e-2, where=("up.weight",), rest=adamw())
    moved = [i for i in sw.lower(plan, loss_fn, muon).collectives() if i.reason == "update"]
    shard = 4 * 32  # a block of (4, 4) in two parts of 8 elements, each in 32
    block = 4 * 32
    assert [(i.unit, i.axis, i.nbytes) for i in moved] == [
        (f"layers.{layer}", axis, nbytes)
        for layer in range(2)
        for _ in ("gradient", "parameter", "momentum")
        for axis, nbytes in (("fsdp", shard), ("tp", block))
    ]


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_what_rests_is_the_predicted_and_whole_tensors_do_not(name: str) -> None:
    plan = plan_of(net(), "hybrid")
    lowered = sw.lower(plan, loss_fn, COUPLED[name]())
    predicted = lowered.memory().rest_bytes
    with sw.simulate(plan.mesh):
        program = lowered.bind()
        state = program.init(0)
        for batch in batches(1):
            state, _ = program.step(state, program.shard_batch(batch))
        assert [rest_bytes(rank) for rank in state.ranks] == [predicted] * plan.mesh.size
        if name == "adafactor":
            assert tuple(state.ranks[1].opt.rows["embed.weight"].shape) == (11, 1)


@pytest.mark.abstract
@pytest.mark.parametrize("axes", [{"tp": 2}, {"fsdp": 2, "tp": 4}])
def test_the_peak_with_one_group_whole_at_a_time_is_the_predicted_one(axes: dict[str, int]) -> None:
    """Blocks are gathered over data axes, then put together; both stages are counted."""
    steps = [sw.tensor_parallel("tp")] + ([sw.zero(3, "fsdp")] if "fsdp" in axes else [])
    plan = sw.plan(Big(), sw.Mesh(**axes), *steps, axes=BIG)
    momentum = optim.sgd(0.1, momentum=0.9)
    coupled, plain = (
        sw.lower(plan, loss_fn, momentum._replace(couples=couples), batch=BATCH)
        for couples in ("tensor", "element")
    )
    predicted = coupled.memory().transient
    assert abs(measured_transient(coupled) - predicted) <= 0.05 * predicted + MIB / 4
    assert predicted > plain.memory().transient + 3 * MIB


def two_steps() -> dict[str, Any]:
    """Muon on a fused weight with copies along one of two axes, and clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(Grouped(2, 4)).double()
    plan = sw.plan(model, sw.Mesh(tp=4), sw.tensor_parallel("tp"), sizes={"heads": 8})
    clipped = optim.chain(optim.clip_by_global_norm(0.1), optim.muon(1e-2, rest=adamw()))
    program = sw.lower(plan, squares, clipped).bind()
    state = program.init(sw.from_module(model))
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randn(4, 3, 8, dtype=torch.float64, generator=generator)
        state, metrics = program.step(state, program.shard_batch(batch))
        assert program.last_collectives == program.lowered.collectives()
    return whole(state) | {"norm": metrics.grad_norm}


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_on_real_ranks_copies_and_assembled_tensors_are_those_of_the_simulation() -> None:
    told = sw.spawn(two_steps, ranks=4, timeout=90)
    with sw.simulate(sw.Mesh(tp=4)):
        want = two_steps()
    for found in told:
        assert found.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
            assert torch.equal(found[name], told[0][name]), name
