"""States of plans with tensor axes: from any plan to any other in bits, and each element once."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.sharding.state import adopt
from shardwise.transforms.rounding import Rounding
from tests.transforms.carried import assert_bits, square, whole
from tests.transforms.named_trees import ALONE, Drawn, assert_padding_is_zero, kinds, plans, tree

pytestmark = pytest.mark.simulated

OPTIMIZER = sw.optim.adamw(1e-2)
OPTIMIZERS = {
    "adamw": OPTIMIZER,
    "adafactor": sw.optim.adafactor(1e-2),
    "lamb": sw.optim.lamb(1e-2),
    "momentum": sw.optim.sgd(1e-2, momentum=0.9),
}


def lowered(module: nn.Module, drawn: Drawn, optimizer: Any = OPTIMIZER) -> sw.Lowered:
    return sw.lower(drawn.plan(module), square, optimizer)


def trained_alone(module: nn.Module, directory: Path, program: sw.Lowered) -> dict[str, Any]:
    """Everything in the state of one rank after two steps, which is saved and exported too."""
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
    half, frozen = draw(st.booleans()), draw(st.booleans())
    first = replace(draw(plans(half=half)), frozen=frozen)
    other = replace(draw(plans(half=half, ranks=first.mesh.size)), frozen=frozen)
    return draw(kinds), first, other


@settings(max_examples=8)
@example((("column",), Drawn(sw.Mesh(tp=2)), Drawn(sw.Mesh(fsdp=2), 1, ("fsdp",))), "adafactor")
@given(journeys(), st.sampled_from(sorted(OPTIMIZERS)))
def test_from_any_plan_to_any_plan(drawn: tuple[tuple[str, ...], Drawn, Drawn], name: str) -> None:
    """By files, by a live state and by `reshard`; exported files and fingerprints are the same."""
    names, one, other = drawn
    module, optimizer = tree(names), OPTIMIZERS[name]
    a, b = (lowered(module, each, optimizer) for each in (one, other))
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        alone = replace(ALONE, half=one.half, frozen=one.frozen)
        whole_program = lowered(module, alone, optimizer)
        want = trained_alone(module, directory, whole_program)
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
            again = whole_program.bind().restore(directory / "a")
        assert len({sw.fingerprint(each) for each in (state, read, again)}) == 1
        files = [directory / f"{name} export" / "model.safetensors" for name in ("a", "alone")]
        assert files[0].read_bytes() == files[1].read_bytes()


@settings(max_examples=8)
@given(kinds, st.booleans().flatmap(lambda half: plans(half=half)))
def test_initial_values_are_those_of_one_rank(names: tuple[str, ...], drawn: Drawn) -> None:
    """From a seed, and from a module; padding is 0."""
    module = tree(names)
    made = [replace(ALONE, half=drawn.half), drawn]
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


def has_placements(path: str, drawn: Drawn, plan: sw.Plan) -> bool:
    """Whether DTensor can say what tensor axes leave of a parameter."""
    kind = path.split(".")[-2]
    if "tp" not in drawn.mesh or drawn.mesh["tp"] == 1 or kind in ("norm", "gain", "row_bias"):
        return True
    if kind == "vocabulary":  # uneven: over one axis, on a dimension that no other cuts
        return "tp" in plan.mesh.names and drawn.on != 0
    if kind == "grouped":  # kv is the first part of the product, until ranks share one of two
        return "tp" in plan.mesh.names
    return not ("fused" in kind or kind in ("transposed", "gated"))


@settings(max_examples=10)
@given(kinds, plans(half=False))
def test_leaves_are_dtensors_wherever_torch_has_placements(
    names: tuple[str, ...], drawn: Drawn
) -> None:
    """Each leaf alone is whole again then; a state built leaf by leaf is taken in, padding not."""
    module = tree(names)
    with sw.simulate(drawn.mesh):
        program = lowered(module, drawn).bind()
        state = program.init(sw.from_module(module))
        for path, value in module.named_parameters():
            leaf = state.params[path]
            plain = [not isinstance(one, DTensor) for one in leaf.ranks]
            assert len(set(plain)) == 1
            if has_placements(path, drawn, program.lowered.plan):
                assert not plain[0], path
                assert torch.equal(sw.to_global(leaf), value), path
            elif drawn.on != 0 or "vocabulary" not in path:
                assert plain[0], path
        more = state.map(
            lambda one: optree.tree_map(
                lambda leaf: leaf + 1 if leaf.is_floating_point() else leaf,
                one,
                namespace="shardwise",
            )
        )
        before = sw.to_global(state.params)
        adopted = more.map(adopt)
    assert_padding_is_zero(adopted)
    for part in ("mu", "nu"):
        for path, value in sw.to_global(getattr(adopted.opt, part)).items():
            assert torch.equal(value, torch.ones_like(value)), path
    for path, value in sw.to_global(adopted.params).items():
        assert torch.equal(value, before[path] + 1), path


@settings(max_examples=4)
@given(kinds, plans(half=False), plans(half=False))
def test_averages_of_the_user_come_back_on_any_plan(
    names: tuple[str, ...], one: Drawn, other: Drawn
) -> None:
    """What lies in `extra` under the path of a parameter, as its leaf does, is a whole tensor."""
    module = tree(names)

    def averages(state: Any, part: str) -> dict[str, Any]:
        return {path: leaf.clone() for path, leaf in getattr(state, part).items()}

    with tempfile.TemporaryDirectory() as place:
        with sw.simulate(one.mesh):
            program = lowered(module, one).bind()
            state = program.init(sw.from_module(module))
            state = state.map(lambda s: s.with_extra({"ema": averages(s, "params")}))
            program.save(Path(place) / "saved", state)
        with sw.simulate(other.mesh):
            program = lowered(module, other).bind()
            state = program.restore(Path(place) / "saved")
            for rank in state.ranks:
                for path, leaf in rank.params.items():
                    mine = rank.extra["ema"][path]
                    assert type(mine) is type(leaf)
                    local = [x.to_local() if isinstance(x, DTensor) else x for x in (mine, leaf)]
                    assert torch.equal(*local), path


@settings(max_examples=10)
@given(kinds, plans(half=False), st.integers(0, 99))
def test_stochastic_rounding_of_a_block_is_that_of_the_whole_tensor(
    names: tuple[str, ...], drawn: Drawn, seed: int
) -> None:
    """In bits, copies and padded rows included: the noise goes by the place in the tensor."""
    module, found = tree(names), []
    for each in (ALONE, drawn):
        with sw.simulate(each.mesh):
            program = lowered(module, each).bind()
            state = program.init(sw.from_module(module))
        for rank, one in enumerate(state.ranks):
            mesh = one.home.mesh
            rounding = Rounding(seed, 7, mesh, mesh.coords(rank))
            for bucket in one.home.buckets:
                flat = one.flats[bucket.name]
                flat.copy_(rounding.flat(flat, bucket.params, torch.bfloat16, "params"))
        found.append(sw.to_global(state.params))
        assert_padding_is_zero(state)
    for path, value in found[0].items():
        assert torch.equal(found[1][path], value), path
        assert not torch.equal(value, dict(module.named_parameters())[path])
