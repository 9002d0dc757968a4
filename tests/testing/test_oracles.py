"""The oracles against torch itself: losses, optimizers, and sums in a given order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import StateError
from shardwise.testing import split_reference, unsharded_run
from shardwise.testing.models import EXACT, SPLIT, Toy
from shardwise.testing.split import Split, addition_order

pytestmark = pytest.mark.abstract

TOY = Toy(width=4, hidden=6, depth=2, vocab=9, features=("attention", "tied", "scalar"))


def test_unsharded_run_is_torch_with_torch_optim() -> None:
    model = TOY.build().double()
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.1, eps=1e-4)
    batches = [TOY.batch(6, seed) for seed in range(4)]
    adamw = sw.optim.adamw(1e-2, weight_decay=0.1, eps=1e-4)
    ours = unsharded_run(model, TOY.loss_fn, batches, adamw)
    for batch, step in zip(batches, ours, strict=True):
        mean, aux = TOY.loss_fn(theirs, batch)
        loss = mean.total / mean.count
        optimizer.zero_grad()
        loss.backward()
        grads = {path: p.grad for path, p in theirs.named_parameters()}
        torch.testing.assert_close(step.grads, grads, rtol=1e-12, atol=1e-14)
        optimizer.step()
        assert float(step.loss) == pytest.approx(float(loss.detach()), rel=1e-12)
        accuracy = float(aux["accuracy"].total) / float(aux["accuracy"].count)
        assert float(step.aux["accuracy"]) == pytest.approx(accuracy)
        params = {path: p.detach() for path, p in theirs.named_parameters()}
        torch.testing.assert_close(step.params, params, rtol=1e-10, atol=1e-12)


def test_oracles_never_modify_the_model() -> None:
    toy = Toy(width=4, depth=2, features=(*EXACT, *SPLIT))
    model = toy.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = sw.plan(model, sw.Mesh(fsdp=2))
    batches = [toy.batch(8, 0)] * 2
    list(unsharded_run(model, toy.loss_fn, batches, sw.optim.sgd(0.1)))
    list(split_reference(model, toy.loss_fn, batches, plan=plan, optimizer=sw.optim.sgd(0.1)))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_one_data_rank_is_the_unsharded_model() -> None:
    model = TOY.build().double()  # weights are drawn anew: some are ill-conditioned in float32
    optimizer, batches = sw.optim.sgd(0.1), [TOY.batch(5, seed) for seed in range(2)]
    plan = sw.plan(model, sw.Mesh(fsdp=1))
    ours = split_reference(model, TOY.loss_fn, batches, plan=plan, optimizer=optimizer)
    theirs = unsharded_run(model, TOY.loss_fn, batches, optimizer)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(a.grads, b.grads)
        torch.testing.assert_close(a.params, b.params)


def test_values_are_needed_for_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = TOY.build()
    batches, optimizer = [TOY.batch(5, 0)], sw.optim.sgd(0.1)
    with pytest.raises(StateError, match=r"no value for 'scale'[\s\S]*pass params="):
        next(unsharded_run(model, TOY.loss_fn, batches, optimizer))
    values = {path: p.detach() for path, p in TOY.build().named_parameters()}
    (step,) = unsharded_run(model, TOY.loss_fn, batches, optimizer, params=values)
    assert step.params.keys() == values.keys()


def test_what_no_part_uses_has_no_gradient_and_keeps_its_state() -> None:
    toy = Toy(width=3, features=("unused", "branch"))
    model = toy.build()
    plan = sw.plan(model, sw.Mesh(fsdp=2))
    optimizer = sw.optim.adamw(0.1, weight_decay=0.5)
    # Five rows: a part of three, which takes the branch, and one of two, which does not.
    (step,) = split_reference(model, toy.loss_fn, [toy.batch(5, 0)], plan=plan, optimizer=optimizer)
    assert "spare.weight" not in step.grads
    assert torch.equal(step.params["spare.weight"], model.get_parameter("spare.weight"))
    assert step.grads["extra.weight"].abs().sum() > 0
    whole = unsharded_run(model, toy.loss_fn, [toy.batch(2, 0)], optimizer)
    assert "extra.weight" not in next(whole).grads


ORDERS = [
    ((), ("fsdp", "node", "dp")),
    ((sw.zero(1, "dp"),), ("dp", "fsdp", "node")),
    ((sw.zero(2, "node"),), ("node", "fsdp", "dp")),
    ((sw.zero(3, ("fsdp", "dp")),), ("fsdp", "dp", "node")),
    ((sw.shard_grads("fsdp"), sw.shard_optimizer("dp")), ("fsdp", "node", "dp")),
    ((sw.shard_grads("fsdp"), sw.shard_optimizer(("fsdp", "dp"))), ("fsdp", "dp", "node")),
    ((sw.shard_params("dp"),), ("fsdp", "node", "dp")),
]


@pytest.mark.parametrize(("transforms", "order"), ORDERS)
def test_gradients_are_added_first_over_what_cuts_them_and_innermost_first(
    transforms: tuple[sw.Transform, ...], order: tuple[str, ...]
) -> None:
    plan = sw.plan(nn.Linear(8, 8), sw.Mesh(dp=2, node=2, fsdp=2), *transforms)
    assert addition_order(plan, "weight") == order


def test_sums_have_the_order_that_was_asked_for() -> None:
    """1e16 + 1 - 1e16 is 0 or 1, depending on what meets first."""
    split = Split(sw.plan(nn.Linear(2, 2), sw.Mesh(dp=2, fsdp=2)))
    values = dict(zip(split.places, torch.tensor([1e16, 1.0, -1e16, 0.0]).double(), strict=True))
    first = next(iter(values))
    assert {place: float(sums) for place, sums in split.add(values, ("fsdp", "dp")).items()} == {
        first: 0.0
    }
    assert float(split.add(values, ("dp", "fsdp"))[first]) == 1.0


def test_a_batch_is_cut_like_shard_batch() -> None:
    mesh = sw.Mesh(dp=2, fsdp=3)
    plan = sw.plan(nn.Linear(2, 2), mesh)
    batch = {"x": torch.arange(13.0), "note": "same for all"}
    with sw.simulate(mesh):
        program = sw.lower(plan, lambda m, b: m(b), sw.optim.sgd(0.1)).bind()
        lifted: Any = program.shard_batch(batch)
    ours = list(Split(plan).cut(batch).values())
    for (part,), theirs in zip(ours, lifted.ranks, strict=True):
        assert torch.equal(part["x"], theirs["x"])
        assert part["note"] == "same for all"


def test_buffers_are_averaged_and_counters_are_not() -> None:
    toy = Toy(width=2, features=("batchnorm",))
    model = toy.build()
    plan = sw.plan(model, sw.Mesh(fsdp=2))
    batch = toy.batch(8, 0)
    (step,) = split_reference(model, toy.loss_fn, [batch], plan=plan, optimizer=sw.optim.sgd(0.1))

    def statistics(rows: Tensor) -> Tensor:
        part = copy.deepcopy(model)
        part(rows)
        return part.get_buffer("statistics.running_mean")

    first, second = batch["inputs"].chunk(2)
    expected = (statistics(first) + statistics(second)) / 2
    torch.testing.assert_close(step.buffers["statistics.running_mean"], expected)
    assert int(step.buffers["statistics.num_batches_tracked"]) == 1
