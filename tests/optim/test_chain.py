"""Clipping and chains: against torch's clipping, and the folded form against the plain one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.optim import (
    EmptyState,
    GradientTransform,
    Norm,
    adamw,
    apply_in_place,
    chain,
    clip_by_global_norm,
    from_factor,
    global_norm,
    sgd,
    squared_norm,
)
from shardwise.sharding.errors import OptimError
from tests.optim.cases import CASES, Case, copied, random_tensors

pytestmark = pytest.mark.abstract

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def float64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def doubled() -> GradientTransform:
    """A transform that is no factor as far as a chain can know."""
    return GradientTransform(
        init=lambda params: EmptyState(),
        update=lambda grads, state, params=None, **extra: (
            {key: 2 * grad for key, grad in grads.items()},
            state,
        ),
        couples="tensor",
    )


def clipped_by_torch(grads: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    leaves = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
    for leaf, grad in zip(leaves, grads.values(), strict=True):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(leaves, max_norm, foreach=False)
    return {
        key: leaf.grad for key, leaf in zip(grads, leaves, strict=True) if leaf.grad is not None
    }


@given(
    size=st.floats(0.0, 1e6),
    max_norm=st.sampled_from([1e-3, 1.0, 50.0, float("inf")]),
    seed=st.integers(0, 100),
)
def test_clip_is_torch_clip(size: float, max_norm: float, seed: int) -> None:
    grads = {key: size * grad for key, grad in random_tensors(seed, torch.float64).items()}
    clip = clip_by_global_norm(max_norm)
    clipped, _ = clip.update(grads, clip.init(grads))
    torch.testing.assert_close(clipped, clipped_by_torch(grads, max_norm), rtol=1e-12, atol=0)


def test_squared_norm_keeps_what_float32_loses() -> None:
    groups = {
        "tiny": torch.full((4,), 1e-30),
        "huge": torch.full((4,), 1e30),
        "half": torch.full((10,), 300.0, dtype=torch.float16),
        "empty": torch.zeros(0),
        "long": torch.full((200_000,), 0.1),
    }
    squares = squared_norm(groups)
    assert {square.dtype for square in squares.values()} == {torch.float64}
    for key, group in groups.items():
        expected = math.fsum(value * value for value in group.double().tolist())
        # Long float32 tensors are added in rows of float32.
        rel = 1e-7 if key == "long" else 1e-12
        assert squares[key].item() == pytest.approx(expected, rel=rel, abs=0)
    assert global_norm({}).item() == 0


def test_clip_takes_the_norm_it_is_given() -> None:
    grads, clip = {"w": torch.tensor([3.0, 4.0])}, clip_by_global_norm(1.0)
    clipped, _ = clip.update(grads, EmptyState(), norms={Norm(): float64(50.0)})
    torch.testing.assert_close(clipped["w"], torch.tensor([0.06, 0.08]))
    assert clip.needs == {Norm()}
    assert clip.couples == "element"


def test_clipping_keeps_shapes_and_dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grads = random_tensors(1, dtype)
        clipped, _ = clip_by_global_norm(1.0).update(grads, EmptyState())
        assert {key: (value.shape, value.dtype) for key, value in clipped.items()} == {
            key: (value.shape, value.dtype) for key, value in grads.items()
        }


def test_norm_is_that_of_the_scaled_gradients() -> None:
    grads, clip = {"w": torch.tensor([3.0, 4.0])}, clip_by_global_norm(1.0)
    assert clip.factor is not None
    alone, _ = clip.factor(grads, EmptyState(), scale=float64(0.5))
    given_norm, _ = clip.factor(
        grads, EmptyState(), scale=float64(0.5), norms={Norm(): float64(2.5)}
    )
    assert alone.item() == given_norm.item() == pytest.approx(0.4, rel=1e-6)


def test_a_norm_that_is_not_a_number_reaches_every_update() -> None:
    grads = {"a": torch.tensor([float("nan")]), "b": torch.ones(2)}
    clipped, _ = clip_by_global_norm(1.0).update(grads, EmptyState())
    assert clipped["b"].isnan().all()


@cases
@pytest.mark.parametrize("give_norm", [False, True])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_folded_chain_is_clip_then_update(case: Case, give_norm: bool, scale: float | None) -> None:
    optimizer = chain(clip_by_global_norm(3.0), clip_by_global_norm(1.0), case.ours)
    assert optimizer.apply is not None
    params = random_tensors(0, torch.float64)
    expected, expected_state = copied(params), case.ours.init(params)
    state = optimizer.init(params)
    for step in range(3):
        grads = random_tensors(step + 1, torch.float64)
        true_grads = {key: grad * (scale or 1.0) for key, grad in grads.items()}
        clipped = clipped_by_torch(clipped_by_torch(true_grads, 3.0), 1.0)
        updates, expected_state = case.ours.update(clipped, expected_state, expected)
        expected = {key: expected[key] + updates[key] for key in expected}
        extra = {"norms": {Norm(): global_norm(true_grads)}} if give_norm else {}
        params, state = optimizer.apply(
            params, grads, state, scale=None if scale is None else float64(scale), **extra
        )
    torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("give_norm", [False, True])
def test_chain_update_and_apply_agree(give_norm: bool) -> None:
    optimizer = chain(clip_by_global_norm(3.0), clip_by_global_norm(1.0), adamw(0.1))
    params = random_tensors(0, torch.float64)
    grads = random_tensors(1, torch.float64)
    extra = {"norms": {Norm(): global_norm(grads)}} if give_norm else {}
    updates, _ = optimizer.update(grads, optimizer.init(params), params, **extra)
    expected = {key: params[key] + updates[key] for key in params}
    apply_in_place(optimizer, params, grads, optimizer.init(params), **extra)
    torch.testing.assert_close(params, expected, rtol=1e-13, atol=1e-15)


def test_a_factor_in_a_chain_follows_the_earlier_ones() -> None:
    both = chain(clip_by_global_norm(10.0), clip_by_global_norm(1.0))
    grads = {"w": torch.tensor([30.0, 40.0], dtype=torch.float64)}
    assert both.factor is not None
    for extra in ({}, {"norms": {Norm(): float64(50.0)}}):
        factor, _ = both.factor(grads, both.init(grads), **extra)
        assert factor.item() == pytest.approx(1 / 50, rel=1e-6)


def test_empty_chain_is_the_identity() -> None:
    nothing = chain()
    grads = random_tensors(1, torch.float32)
    updates, state = nothing.update(grads, nothing.init(grads), grads)
    assert updates == grads
    assert state == ()
    assert (nothing.apply, nothing.couples, nothing.needs) == (None, "element", frozenset())


@pytest.mark.parametrize(
    ("build", "has_apply", "has_factor", "couples"),
    [
        (lambda: chain(adamw(0.1)), True, False, "element"),
        (lambda: chain(clip_by_global_norm(1.0), sgd(0.1)), True, False, "element"),
        (lambda: chain(clip_by_global_norm(1.0)), False, True, "element"),
        (lambda: chain(doubled(), sgd(0.1)), False, False, "tensor"),
        (lambda: chain(chain(clip_by_global_norm(1.0)), chain(sgd(0.1))), True, False, "element"),
    ],
)
def test_a_chain_knows_its_forms(
    build: Callable[[], GradientTransform], has_apply: bool, has_factor: bool, couples: str
) -> None:
    optimizer = build()
    assert (optimizer.apply is not None) == has_apply
    assert (optimizer.factor is not None) == has_factor
    assert optimizer.couples == couples


def test_without_an_in_place_form_the_update_is_added() -> None:
    optimizer = chain(clip_by_global_norm(5.0), doubled(), sgd(0.1))
    params = {"w": torch.zeros(2, dtype=torch.float64)}
    same = params["w"]
    grads = {"w": torch.tensor([60.0, 80.0], dtype=torch.float64)}
    apply_in_place(optimizer, params, grads, optimizer.init(params), scale=float64(0.5))
    assert params["w"] is same
    torch.testing.assert_close(same, torch.tensor([-0.6, -0.8], dtype=torch.float64))


def test_states_of_a_chain_advance() -> None:
    optimizer = chain(clip_by_global_norm(1.0), chain(sgd(0.1, momentum=0.9)))
    params = random_tensors(0, torch.float32)
    state = optimizer.init(params)
    params, state = optimizer.apply(params, random_tensors(1, torch.float32), state)
    _, state = optimizer.update(random_tensors(2, torch.float32), state, params)
    assert state[0] == EmptyState()
    assert state[1][0].count.item() == 2


def test_a_factor_with_state_keeps_it() -> None:
    def factor(grads: object, state: int, **extra: object) -> tuple[Tensor, int]:
        return float64(1 / (state + 1)), state + 1

    optimizer = chain(from_factor(lambda params: 0, factor), sgd(1.0))
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    state = optimizer.init(params)
    for _ in range(3):
        grads = {"w": torch.ones(1, dtype=torch.float64)}
        params, state = optimizer.apply(params, grads, state)
    assert state[0] == 3
    assert params["w"].item() == pytest.approx(-(1 + 1 / 2 + 1 / 3))


def test_an_optimizer_behind_a_clip_is_given_the_clipped_norm() -> None:
    seen = []

    def apply(
        params: dict[str, Tensor],
        grads: object,
        state: EmptyState,
        *,
        norms: dict[Norm, Tensor],
        **_: object,
    ) -> tuple[dict[str, Tensor], EmptyState]:
        seen.append(norms[Norm()].item())
        return params, state

    norm_reader = sgd(0.1)._replace(
        init=lambda params: EmptyState(), apply=apply, needs=frozenset({Norm()})
    )
    optimizer = chain(clip_by_global_norm(1.0), norm_reader)
    params = {"w": torch.zeros(1)}
    assert optimizer.apply is not None
    optimizer.apply(params, params, optimizer.init(params), norms={Norm(): float64(50.0)})
    assert seen == pytest.approx([1.0], rel=1e-6)


def test_clipping_after_the_optimizer_is_refused() -> None:
    with pytest.raises(OptimError) as caught:
        chain(clip_by_global_norm(1.0), sgd(0.1), clip_by_global_norm(1.0))
    text = str(caught.value)
    assert "transform 2 after transform 1" in text
    assert "needs the norm of the gradients" in text
    assert "Fix: move transform 2 before transform 1" in text
    assert caught.value.numbers == {"position": 2, "after": 1}
