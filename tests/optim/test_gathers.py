"""What a program gathers for an optimizer that sees whole tensors, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardwise as sw
from shardwise import optim
from shardwise.optim import GradientTransform
from shardwise.testing import rest_bytes
from tests.laws.test_memory import BATCH, MIB, Big, loss_fn, measured_transient
from tests.optim.test_table import Model, batches
from tests.optim.test_table import loss_fn as small_loss

# Momentum in place, as if it had to see whole tensors: it takes no memory of its own.
MOMENTUM = optim.sgd(0.1, momentum=0.9)._replace(couples="tensor")
MESHES = [sw.Mesh(fsdp=2), sw.Mesh(dp=2, fsdp=4)]


@pytest.mark.abstract
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_the_peak_with_one_group_whole_at_a_time_is_the_predicted_one(
    level: int, mesh: sw.Mesh
) -> None:
    plan = sw.plan(Big(), mesh, sw.zero(level, mesh.names))
    lowered = sw.lower(plan, loss_fn, MOMENTUM, batch=BATCH)
    predicted = lowered.memory().transient
    assert abs(measured_transient(lowered) - predicted) <= 0.05 * predicted + MIB / 4


@pytest.mark.abstract
def test_one_group_whole_at_a_time_holds_less_than_the_whole_tree() -> None:
    plan = sw.plan(Big(), sw.Mesh(fsdp=8), sw.zero(3, "fsdp"))
    by_group, by_tree = (
        sw.lower(plan, loss_fn, MOMENTUM._replace(couples=couples), batch=BATCH).memory()
        for couples in ("tensor", "tree")
    )
    assert by_group.opt == by_tree.opt
    whole = 4 * sum(param.numel() for param in Big().parameters())
    assert by_tree.transient > 3 * whole  # gradient, parameter, momentum
    assert by_group.transient < by_tree.transient / 2


COUPLED: dict[str, Callable[[], GradientTransform]] = {
    "muon": lambda: optim.muon(0.1),
    "lamb": lambda: optim.lamb(0.1),
    "adafactor": lambda: optim.adafactor(0.1),
    "torch adafactor": lambda: optim.from_torch(torch.optim.Adafactor, lr=0.1),
    "inject": lambda: optim.inject(optim.lamb, learning_rate=0.1),
}


@pytest.mark.simulated
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_rest_is_the_predicted_one_on_every_rank(name: str, mesh: sw.Mesh) -> None:
    plan = sw.plan(Model(), mesh, sw.zero(3, mesh.names))
    lowered = sw.lower(plan, small_loss, COUPLED[name]())
    predicted = lowered.memory().rest_bytes
    with sw.simulate(mesh):
        program = lowered.bind()
        state = program.init(0)
        assert [rest_bytes(rank) for rank in state.ranks] == [predicted] * mesh.size
        state, _ = program.step(state, program.shard_batch(batches()[0]))
        assert [rest_bytes(rank) for rank in state.ranks] == [predicted] * mesh.size


@pytest.mark.simulated
def test_state_of_the_parameters_shape_rests_cut_and_other_state_whole() -> None:
    mesh = sw.Mesh(fsdp=2)
    plan = sw.plan(Model(), mesh, sw.zero(3, "fsdp"))
    with sw.simulate(mesh):
        state = sw.lower(plan, small_loss, optim.adafactor(0.1)).bind().init(0)
        opt = state.ranks[1].opt
        rows, columns = opt.rows["embed.weight"], opt.columns["embed.weight"]
        assert (tuple(rows.shape), tuple(columns.shape)) == ((9, 1), (1, 4))
        assert set(opt.rows) == {path for path, p in Model().named_parameters() if p.ndim > 1}
        muon = sw.lower(plan, small_loss, optim.muon(0.1)).bind().init(0).ranks[1].opt
        momentum = muon.parts["muon"].mu["embed.weight"]
        assert tuple(momentum.shape) == (9, 4)
        assert tuple(momentum.to_local().shape) == (9, 2)
        assert set(muon.parts["rest"].mu) | set(muon.parts["muon"].mu) == set(plan.opt)


@pytest.mark.abstract
def test_labels_cost_no_bucket_and_no_collective_of_their_own() -> None:
    plan = sw.plan(Model(), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    parts = {"decay": optim.adamw(0.1), "plain": optim.adamw(0.1, weight_decay=0.0)}
    split = optim.partition(parts, {"plain": ("bias", "norm")}, otherwise="decay")
    one, two = (sw.lower(plan, small_loss, o) for o in (parts["decay"], split))
    assert two.collectives() == one.collectives()
    keys = [group.key for bucket in two.all_buckets for group in bucket.groups]
    assert len(keys) == len(set(keys)) > len(two.all_buckets)
    assert {key.partition(":")[2] for key in keys} == {"decay", "plain"}
