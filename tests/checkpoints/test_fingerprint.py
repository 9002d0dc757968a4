"""One number for a state, whatever its plan: equal for equal states, other for any change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import StateError
from tests.transforms.carried import PLANS, batch, loss_fn, model

pytestmark = pytest.mark.simulated


def trained(plan: str = "zero 3") -> Any:
    lowered = sw.lower(PLANS[plan](model()), loss_fn, sw.optim.adamw(1e-2))
    with sw.simulate(lowered.plan.mesh):
        program = lowered.bind()
        return program.step(program.init(0), program.shard_batch(batch()))[0]


def test_it_is_the_same_on_every_plan() -> None:
    state = trained()
    prints = {sw.fingerprint(state)}
    for make in PLANS.values():
        lowered = sw.lower(make(model()), loss_fn, sw.optim.adamw(1e-2))
        with sw.simulate(lowered.plan.mesh):
            prints.add(sw.fingerprint(lowered.bind().init(sw.from_state(state))))
    assert len(prints) == 1
    assert len(prints.pop()) == 16


def test_masters_count_and_their_roundings_do_not() -> None:
    module, mesh = nn.Linear(8, 8), sw.Mesh(fsdp=2)
    plans = [
        sw.plan(module, mesh, sw.zero(3, "fsdp"), sw.precision(params="bfloat16")),
        sw.plan(module, mesh, sw.zero(1, "fsdp")),
    ]
    with sw.simulate(mesh):
        programs = [sw.lower(p, lambda m, x: m(x).mean(), sw.optim.adamw(1e-2)) for p in plans]
        state = programs[0].bind().init(0)
        assert state.ranks[0].masters
        other = programs[1].bind().init(sw.from_state(state))
    assert sw.fingerprint(state) == sw.fingerprint(other)


def test_any_bit_anywhere_changes_it_and_asking_does_not() -> None:
    state = trained()
    before = sw.fingerprint(state)
    seen = {before}
    flats = [[*one.flats.values(), *optree.tree_leaves(one.opt_flats)] for one in state.ranks]
    everywhere = [same for same in zip(*flats, strict=True) if same[0].ndim]

    def flip(number: int) -> None:
        """On every rank, as some tensors are whole on all."""
        for flat in everywhere[number]:
            flat.view(torch.int64)[0] ^= 1 << number

    for number in range(len(everywhere)):
        flip(number)
        seen.add(sw.fingerprint(state))
        flip(number)
    assert len(seen) == 1 + len(everywhere) > 10
    for name in ("seed", "count"):
        other = state.map(lambda one, name=name: replace(one, **{name: getattr(one, name) + 1}))
        assert sw.fingerprint(other) != before
    assert sw.fingerprint(state) == before


class Named(nn.Module):
    """One parameter, and one buffer of a given dtype."""

    def __init__(self, name: str, values: Tensor, buffer: Tensor) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(values))
        self.register_buffer("extra", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.parameters()).sum()


def of(
    values: Tensor, name: str = "w", buffer: Tensor | None = None, level: int = 3, ranks: int = 2
) -> str:
    module = Named(name, values, torch.zeros(2) if buffer is None else buffer)
    mesh = sw.Mesh(fsdp=ranks)
    plan = sw.plan(module, mesh, sw.zero(level, "fsdp"))
    with sw.simulate(mesh):
        program = sw.lower(plan, lambda m, x: m(x).mean(), sw.optim.sgd(0.1)).bind()
        return sw.fingerprint(program.init(sw.from_module(module)))


def test_names_shapes_dtypes_and_places_count() -> None:
    values = torch.arange(12.0)
    swapped = values.clone()
    swapped[[3, 8]] = values[[8, 3]]
    zero = torch.zeros(12)
    prints = [
        of(values),
        of(values, "v"),
        of(values.view(3, 4)),
        of(values.view(4, 3)),
        of(values.double()),
        of(swapped),
        of(zero),
        of(-zero),
        of(zero, buffer=torch.zeros(2, dtype=torch.complex64)),
        of(zero, buffer=torch.tensor([0, 1j])),
        of(zero, buffer=torch.tensor([True, False])),
        of(zero, buffer=torch.zeros(2).bfloat16()),
        of(zero, buffer=torch.zeros(0)),
    ]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_number_of_ranks_and_any_dtype(dtype: torch.dtype) -> None:
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    prints = {of(values, level=level, ranks=n) for level in (0, 1, 3) for n in (1, 2, 3)}
    assert len(prints) == 1


def test_one_ranks_part_has_none() -> None:
    with pytest.raises(StateError) as caught:
        sw.fingerprint(trained().ranks[2])
    assert "this is the part of rank 2 of 4" in str(caught.value)
    assert "lifted state" in caught.value.fix
    assert caught.value.numbers == {"rank": 2, "size": 4}
