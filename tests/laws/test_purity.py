"""Law 2: the module is never modified, states are values, donation is the one exception."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import DonatedStateError
from shardwise.testing.models import EXACT, SPLIT, Toy
from shardwise.testing.strategies import Training, make_optimizer, trainings

pytestmark = pytest.mark.simulated

ALL = (*EXACT, *SPLIT)


def training_with(*features: str) -> Training:
    toy = Toy(width=3, hidden=4, depth=2, features=features)
    return Training(sw.Mesh(fsdp=2), toy, (), None, "adamw", 6, 2, 0)


def fingerprint(module: nn.Module) -> list[Any]:
    """Everything of a module that a program might touch, by identity where it is an object."""
    found: list[Any] = []
    for path, part in module.named_modules():
        hooks = [len(value) for key, value in vars(part).items() if key.endswith("_hooks")]
        plain = {k: id(v) for k, v in vars(part).items() if not isinstance(v, dict)}
        tables = [dict(part._parameters), dict(part._buffers), dict(part._modules)]
        identities = [{key: id(value) for key, value in table.items()} for table in tables]
        found.append((path, type(part), part.training, hooks, sorted(plain), identities))
    values = [*module.named_parameters(), *module.named_buffers()]
    found += [(p, v._version, v.requires_grad, v.grad, v.detach().tolist()) for p, v in values]
    return found


def copies(value: Any) -> list[Tensor]:
    leaves = [
        leaf for rank in value.ranks for leaf in optree.tree_leaves(rank, namespace="shardwise")
    ]
    return [
        leaf.to_local().clone() if hasattr(leaf, "to_local") else torch.as_tensor(leaf).clone()
        for leaf in leaves
        if leaf is not None
    ]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@given(trainings(features=ALL))
@example(training_with("batchnorm", "dropout"))
def test_the_module_is_never_modified(training: Training) -> None:
    model = training.model
    before = fingerprint(model)
    with sw.simulate(training.mesh):
        optimizer = make_optimizer(training.optimizer)
        program = sw.lower(training.plan(model), training.toy.loss_fn, optimizer).bind()
        state = program.init(sw.from_module(model))
        part = program.shard_batch(training.batches[0])
        program.eval(state, part)
        program.step(state, part)
    assert fingerprint(model) == before


@given(trainings(features=ALL))
@example(training_with("batchnorm"))
def test_grads_eval_and_a_step_without_donation_leave_the_state(training: Training) -> None:
    model = training.model
    with sw.simulate(training.mesh):
        optimizer = make_optimizer(training.optimizer)
        program = sw.lower(training.plan(model), training.toy.loss_fn, optimizer).bind()
        state = program.init(training.seed)
        before = copies(state)
        part = program.shard_batch(training.batches[0])
        program.eval(state, part)
        grads, _ = program.grads(state, part)
        given_grads = copies(grads)
        after, metrics = program.step(state, part, donate=False)
        assert_same(copies(state), before)
        split = program.update(state, grads, donate=False)
        assert_same(copies(state), before)
        assert_same(copies(grads), given_grads)
        again, repeated = program.step(state, part)
        assert torch.equal(metrics.loss, repeated.loss)
        assert_same(copies(again), copies(after))
        assert_same(copies(split), copies(after))
        with pytest.raises(DonatedStateError, match="donated"):
            program.step(state, part)


@settings(max_examples=15)
@given(trainings())
def test_two_programs_share_one_module(training: Training) -> None:
    """Interleaved or one after the other, two programs of one module do the same."""
    model, loss_fn = training.model, training.toy.loss_fn
    optimizer = make_optimizer(training.optimizer)
    plans = [training.plan(model), sw.plan(model, training.mesh)]

    def losses(order: list[int]) -> dict[int, list[float]]:
        with sw.simulate(training.mesh):
            programs = [sw.lower(plan, loss_fn, optimizer).bind() for plan in plans]
            states = [program.init(0) for program in programs]
            found: dict[int, list[float]] = {0: [], 1: []}
            for which in order:
                part = programs[which].shard_batch(training.batches[0])
                states[which], metrics = programs[which].step(states[which], part)
                found[which].append(float(metrics.loss))
        return found

    assert losses([0, 1, 0, 1]) == losses([0, 0, 1, 1])
