"""The first state: where its values come from, and that ranks agree on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import InitError, RankError

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture
def program():
    """A program of a model with dropout and running statistics."""
    torch.manual_seed(0)
    module = Model()
    with sw.simulate(MESH):
        plan = sw.plan(module, MESH, sw.zero(3, "fsdp"))
        yield sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()


def whole(state: Any) -> dict[str, Tensor]:
    return {**sw.to_global(state.params), **sw.to_global(state.buffers)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(program: sw.Program, state: Any) -> Any:
    batch = program.shard_batch(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    return program.step(state, batch)[0]


@pytest.mark.parametrize("from_seed", [True, False])
def test_a_program_starts_again_from_the_beginning(program, from_seed):
    source = 3 if from_seed else sw.from_module(Model())
    first = whole(program.init(source))
    train(program, program.init(source))
    assert same(whole(program.init(source)), first)


def test_parameters_and_buffers_come_from_the_module_that_is_given(program):
    other = Model()
    other(torch.randn(8, 4))  # moves its running statistics
    state = program.init(sw.from_module(other))
    assert same(whole(state), {**dict(other.named_parameters()), **dict(other.named_buffers())})


def test_a_seed_beside_a_module_is_the_seed_of_dropout(program):
    source = sw.from_module(Model())
    runs = [whole(train(program, program.init(source, seed=seed))) for seed in (1, 1, 2)]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_an_init_beside_a_module_warns(program):
    with pytest.warns(UserWarning, match="init= has no effect"):
        program.init(sw.from_module(Model()), init=lambda module: None)


def test_rank_0_decides(program):
    """Ranks may pass other seeds or modules; all start from those of rank 0."""
    modules = [Model(), Model()]
    state = program.init(sw.Lifted(sw.from_module(module) for module in modules))
    assert same(whole(state), whole(program.init(sw.from_module(modules[0]))))
    assert same(whole(program.init(sw.Lifted([7, 8]))), whole(program.init(7)))


def test_a_module_without_the_values_is_refused_by_name(program):
    lacking = nn.Linear(4, 4)
    with pytest.raises(InitError) as caught:
        program.init(sw.from_module(lacking))
    text = str(caught.value)
    assert "no values for 14 of 14 tensors" in text
    assert "layers.0.0.weight: needs shape (4, 4); the module gives nothing" in text
    assert caught.value.numbers["count"] == 14
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(InitError, match="the module gives \\(4, 4\\) on meta"):
        program.init(sw.from_module(empty))


def test_an_init_that_fails_on_one_rank_fails_on_all(program):
    """Rank 1 is not left waiting, nor does it go on alone."""
    found = program._world.run(lambda rank: attempt(program, rank))
    assert isinstance(found[0], RankError)
    assert "Rank 1 failed in init" in str(found[0])
    assert isinstance(found[1], InitError)


def attempt(program: sw.Program, rank: int) -> Exception | None:
    module = nn.Linear(4, 4) if rank else Model()
    try:
        program._ranks[rank].init(sw.from_module(module))
    except Exception as error:
        return error
    return None


def test_an_exception_in_reset_parameters_names_its_rank():
    class Broken(nn.Linear):
        is_built = False

        def reset_parameters(self) -> None:
            if self.is_built:
                raise ValueError("no entropy")

    module = Broken(4, 5)
    module.is_built = True
    with sw.simulate(MESH):
        program = sw.lower(sw.plan(module, MESH), loss_fn, sw.optim.sgd(0.1)).bind()
        with pytest.raises(RankError, match="no entropy") as caught:
            program.init(seed=0)
    assert caught.value.numbers["rank"] == 0


def test_frozen_and_half_precision_parameters_are_initialised():
    module = Model().bfloat16()
    module.layers[0].requires_grad_(False)
    with sw.simulate(MESH):
        plan = sw.plan(module, MESH, sw.zero(3, "fsdp"))
        with pytest.warns(UserWarning, match="without a master copy"):
            lowered = sw.lower(plan, loss_fn, sw.optim.sgd(0.1))
        values = sw.to_global(lowered.bind().init(seed=0).params)
    assert all(value.dtype == torch.bfloat16 for value in values.values())
    assert all(value.isfinite().all() for value in values.values())
    assert values["layers.0.0.weight"].std() > 0.1
