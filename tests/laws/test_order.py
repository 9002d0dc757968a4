"""Law 5: the order in which transforms are written does not matter across phases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.sharding.errors import PlanError
from shardwise.testing.models import Toy
from shardwise.testing.strategies import Move, axes_of, meshes, toys

pytestmark = pytest.mark.abstract


@st.composite
def one_of_each(draw: st.DrawFn) -> tuple[sw.Mesh, Toy, list[Move]]:
    """Transforms that set different things, so that any two of them must commute."""
    mesh, toy = draw(meshes()), draw(toys())
    paths = [path for path, _ in toy.build().named_parameters()]
    homes = [
        Move(call, (draw(axes_of(mesh)),), (("where", "**"),))
        for call in ("shard_params", "shard_grads", "shard_optimizer")
    ]
    rest = [Move("prefetch", (draw(st.integers(0, 2)),))]
    rest.append(Move("freeze", (f"^{draw(st.sampled_from(paths))}",)))
    if toy.depth > 2:
        rest.append(Move("keep_gathered", ()))
    return mesh, toy, [*homes, *rest]


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).sum()


@given(one_of_each(), st.randoms(use_true_random=False))
def test_transforms_of_different_phases_commute(
    drawn: tuple[sw.Mesh, Toy, list[Move]], random: Any
) -> None:
    mesh, toy, moves = drawn
    model = toy.build()
    shuffled = list(moves)
    random.shuffle(shuffled)
    a = sw.plan(model, mesh, *(move.transform() for move in moves))
    b = sw.plan(model, mesh, *(move.transform() for move in shuffled))
    assert a == b
    assert hash(a) == hash(b)
    assert a.same_layout(b)
    optimizer = sw.optim.sgd(0.1)
    lowered = [sw.lower(plan, loss_fn, optimizer) for plan in (a, b)]
    assert lowered[0].collectives() == lowered[1].collectives()
    assert lowered[0].memory() == lowered[1].memory()


@given(one_of_each())
def test_of_two_that_set_the_same_home_the_last_counts(
    drawn: tuple[sw.Mesh, Toy, list[Move]],
) -> None:
    """Within a phase the order is the user's: no conflict, no merging."""
    mesh, toy, moves = drawn
    model = toy.build()
    cut, *_ = moves
    last = sw.plan(model, mesh, cut.transform(), sw.shard_params(None))
    assert last.same_layout(sw.plan(model, mesh))
    back = sw.plan(model, mesh, sw.shard_params(None), cut.transform())
    assert back.same_layout(sw.plan(model, mesh, cut.transform()))


def test_a_home_that_cannot_be_names_its_transform_in_any_order() -> None:
    model = Toy(width=5, depth=2).build()
    wrong, right = sw.shard_params("fsdp", on=0), sw.shard_optimizer("fsdp")
    for transforms in ((wrong, right), (right, wrong)):
        with pytest.raises(PlanError, match=r"shard_params\('fsdp', on=0\) cannot shard"):
            sw.plan(model, sw.Mesh(fsdp=2), *transforms)
