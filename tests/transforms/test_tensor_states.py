"""States of plans with tensor axes: from any plan to any other in bits, and each element once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from tests.transforms.carried import assert_bits, square, whole
from tests.transforms.named_trees import ALONE, Drawn, assert_padding_is_zero, kinds, plans, tree

pytestmark = pytest.mark.simulated

OPTIMIZER = sw.optim.adamw(1e-2)


def lowered(module: nn.Module, drawn: Drawn, optimizer: Any = OPTIMIZER) -> sw.Lowered:
    return sw.lower(drawn.plan(module), square, optimizer)


def trained_alone(module: nn.Module, directory: Path, *, half: bool) -> dict[str, Any]:
    """Everything in the state of one rank after two steps, which is saved and exported too."""
    program = lowered(module, Drawn(ALONE.mesh, half=half))
    with sw.simulate(ALONE.mesh):
        bound = program.bind()
        state = bound.init(0)
        for step in range(2):
            batch = torch.linspace(-1, 1, 8).view(8, 1).to(next(module.parameters()).dtype) + step
            state, _ = bound.step(state, bound.shard_batch(batch))
        bound.save(directory / "alone", state)
        sw.export_safetensors(state, directory / "alone export")
    return truth(state)


def truth(state: Any) -> dict[str, Any]:
    """All whole values by name; parameters from their masters where there are any."""
    found = whole(state)
    masters = {
        name.replace("master.", "params."): value
        for name, value in found.items()
        if name.startswith("master.")
    }
    kept = {name: value for name, value in found.items() if not name.startswith("master.")}
    return {**kept, **masters}


def assert_same(state: Any, want: dict[str, Any]) -> None:
    got = truth(state)
    assert got.keys() == want.keys()
    for name, value in want.items():
        same = torch.equal(got[name], value) if isinstance(value, Tensor) else got[name] == value
        assert same, name
    assert_padding_is_zero(state)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[tuple[str, ...], Drawn, Drawn]:
    half = draw(st.booleans())
    first = draw(plans(half=half))
    return draw(kinds), first, draw(plans(half=half, ranks=first.mesh.size))


@settings(max_examples=8)
@given(journeys())
def test_from_any_plan_to_any_plan(drawn: tuple[tuple[str, ...], Drawn, Drawn]) -> None:
    """By files, by a live state and by `reshard`; exported files and fingerprints are the same."""
    names, one, other = drawn
    module = tree(names)
    a, b = lowered(module, one), lowered(module, other)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        want = trained_alone(module, directory, half=one.half)
        with sw.simulate(a.plan.mesh):
            program = a.bind()
            state = program.restore(directory / "alone")
            program.save(directory / "a", state)
            sw.export_safetensors(state, directory / "a export")
            there = sw.reshard(state, a.plan, b.plan)
        assert_same(state, want)
        with sw.simulate(b.plan.mesh):
            program = b.bind()
            read = program.restore(directory / "a")
            assert_bits(program.init(sw.from_state(state)), read)
        assert_same(read, want)
        assert_bits(there, read)
        with sw.simulate(ALONE.mesh):
            program = lowered(module, Drawn(ALONE.mesh, half=one.half)).bind()
            alone = program.restore(directory / "a")
        assert len({sw.fingerprint(each) for each in (state, read, alone)}) == 1
        files = [directory / f"{name} export" / "model.safetensors" for name in ("a", "alone")]
        assert files[0].read_bytes() == files[1].read_bytes()


@settings(max_examples=8)
@given(kinds, st.booleans().flatmap(lambda half: plans(half=half)))
def test_initial_values_are_those_of_one_rank(names: tuple[str, ...], drawn: Drawn) -> None:
    """From a seed, and from a module; padding is 0."""
    module = tree(names)
    made = [Drawn(ALONE.mesh, half=drawn.half), drawn]
    found = []
    for each in made:
        with sw.simulate(each.mesh):
            program = lowered(module, each).bind()
            states = [program.init(3), program.init(sw.from_module(module))]
            found.append([truth(state) for state in states])
            for state in states:
                assert_padding_is_zero(state)
    for alone, cut in zip(*found, strict=True):
        assert alone.keys() == cut.keys()
        for name, value in alone.items():
            assert torch.equal(cut[name], value), name
