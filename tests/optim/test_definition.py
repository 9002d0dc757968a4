"""What an optimizer computes: `update` against torch.optim, `apply` against `update`."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from shardwise.optim import adamw, apply_in_place, sgd, warmup_cosine
from shardwise.optim import adamw as public_adamw
from tests.optim.cases import CASES, Case, copied, random_tensors

pytestmark = pytest.mark.abstract

STEPS = 10
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def train_with_torch(case: Case, params: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {key: torch.nn.Parameter(value.clone()) for key, value in params.items()}
    optimizer = case.torch(list(leaves.values()), foreach=False)
    for step in range(STEPS):
        for key, grad in random_tensors(step + 1, torch.float64).items():
            leaves[key].grad = grad
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


@cases
def test_update_trains_as_torch(case: Case) -> None:
    params = random_tensors(0, torch.float64)
    expected = train_with_torch(case, params)
    state = case.ours.init(params)
    for step in range(STEPS):
        grads = random_tensors(step + 1, torch.float64)
        updates, state = case.ours.update(grads, state, params)
        params = {key: params[key] + updates[key] for key in params}
    torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-14)


@cases
def test_apply_trains_as_torch(case: Case) -> None:
    params = random_tensors(0, torch.float64)
    expected = train_with_torch(case, params)
    state = case.ours.init(params)
    for step in range(STEPS):
        params, state = apply_in_place(
            case.ours, params, random_tensors(step + 1, torch.float64), state
        )
    torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-14)


@cases
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 0.04)],
    ids=str,
)
def test_apply_is_params_plus_update(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    params, scale = random_tensors(0, dtype), torch.tensor(0.5, dtype=torch.float64)
    state = case.ours.init(params)
    # One step first, so that the moments are not zero.
    case.ours.apply(params, random_tensors(1, dtype), state)
    grads = random_tensors(2, dtype)
    halves = {key: grad * 0.5 for key, grad in grads.items()}  # exact, as is scale
    updates, expected_state = case.ours.update(halves, state, params)
    expected = {key: params[key] + updates[key] for key in params}
    case.ours.apply(params, grads, state, scale=scale)
    torch.testing.assert_close(params, expected, rtol=tolerance, atol=tolerance)
    for got, want in zip(
        optree.tree_leaves(state), optree.tree_leaves(expected_state), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@cases
def test_update_is_pure(case: Case) -> None:
    params, grads = random_tensors(0, torch.float32), random_tensors(1, torch.float32)
    state = case.ours.init(params)
    case.ours.apply(params, grads, state)
    before = [leaf.clone() for leaf in optree.tree_leaves((params, grads, state))]
    updates, new_state = case.ours.update(grads, state, params)
    after = optree.tree_leaves((params, grads, state))
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    ours = {leaf.data_ptr() for leaf in optree.tree_leaves((updates, new_state)) if leaf.numel()}
    assert ours.isdisjoint(leaf.data_ptr() for leaf in after)


@cases
def test_apply_writes_in_place_and_only_reads_gradients(case: Case) -> None:
    params, grads = random_tensors(0, torch.float32), random_tensors(1, torch.float32)
    state = case.ours.init(params)
    before = copied(grads)
    leaves = optree.tree_leaves((params, state))
    versions = {key: grad._version for key, grad in grads.items()}
    scale = torch.tensor(0.3, dtype=torch.float64)
    new_params, new_state = case.ours.apply(params, grads, state, scale=scale)
    assert new_params is params
    after = optree.tree_leaves((new_params, new_state))
    assert all(old is new for old, new in zip(leaves, after, strict=True))
    assert all(torch.equal(grads[key], before[key]) for key in grads)
    assert {key: grad._version for key, grad in grads.items()} == versions


@cases
def test_state_has_the_promised_structure(case: Case) -> None:
    params = random_tensors(0, torch.float32)
    state = case.ours.init(params)
    assert (state.count.dtype, state.count.shape, state.count.item()) == (torch.int64, (), 0)
    assert (state.learning_rate.dtype, state.learning_rate.shape) == (torch.float64, ())
    moments = [field for field in state[2:] if field]
    assert all(list(field) == list(params) for field in moments)
    for field in moments:
        assert all(not value.any() and value.dtype == torch.float32 for value in field.values())
    assert case.ours.couples == "element"
    assert case.ours.needs == frozenset()
    leaves, structure = optree.tree_flatten(state)
    assert type(optree.tree_unflatten(structure, leaves)) is type(state)


def test_sgd_without_momentum_keeps_nothing() -> None:
    assert sgd(0.1).init(random_tensors(0, torch.float32)).mu == {}


@pytest.mark.parametrize("in_place", [False, True])
def test_state_holds_the_rate_of_the_last_step(in_place: bool) -> None:
    schedule = warmup_cosine(1.0, warmup=4, steps=8, start=0.2)
    optimizer = public_adamw(schedule)
    params = random_tensors(0, torch.float64)
    state: Any = optimizer.init(params)
    rates = [state.learning_rate.item()]
    for step in range(3):
        grads = random_tensors(step, torch.float64)
        if in_place:
            params, state = optimizer.apply(params, grads, state)
        else:
            _, state = optimizer.update(grads, state, params)
        rates.append(state.learning_rate.item())
    assert rates == pytest.approx([0.2, 0.2, 0.4, 0.6])
    assert state.count.item() == 3


@cases
def test_a_key_without_gradient_keeps_value_and_state(case: Case) -> None:
    params = random_tensors(0, torch.float32)
    state = case.ours.init(params)
    case.ours.apply(params, random_tensors(1, torch.float32), state)
    grads = random_tensors(2, torch.float32)
    del grads["a"]
    kept = [params["a"].clone(), *(field["a"].clone() for field in state[2:] if field)]
    moved = params["c"].clone()
    updates, updated = case.ours.update(grads, state, params)
    assert "a" not in updates
    case.ours.apply(params, grads, state)
    for after in (state, updated):
        got = [params["a"], *(field["a"] for field in after[2:] if field)]
        assert all(torch.equal(old, new) for old, new in zip(kept, got, strict=True))
    assert not torch.equal(params["c"], moved)


def test_gradients_of_another_dtype_are_cast_before_they_are_scaled() -> None:
    scale = torch.tensor(1 / 3, dtype=torch.float64)
    grads = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)}
    first, second = {"w": torch.ones(3)}, {"w": torch.ones(3)}
    optimizer = sgd(1.0)
    optimizer.apply(first, grads, optimizer.init(first), scale=scale)
    wide = {"w": grads["w"].float()}
    optimizer.apply(second, wide, optimizer.init(second), scale=scale)
    assert torch.equal(first["w"], second["w"])
    assert grads["w"].dtype == torch.bfloat16


def test_params_that_require_grad_are_stepped_too() -> None:
    params = {"w": torch.ones(3, requires_grad=True)}
    optimizer = adamw(0.1)
    grads = {"w": torch.ones(3)}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert not updates["w"].requires_grad
    optimizer.apply(params, grads, optimizer.init(params))
    assert (params["w"] < 1).all()
