"""Clipping by kinds of norms, by groups and by value: against torch's, alone and in chains."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from shardwise.optim import (
    EmptyState,
    GradientTransform,
    Norm,
    adamw,
    apply_in_place,
    chain,
    clip_by_global_norm,
    clip_by_group_norm,
    clip_by_value,
    from_torch,
    global_norm,
    inject,
    masked,
    muon,
    partition,
    power_sum,
    set_hyperparameters,
    sgd,
)
from shardwise.optim.norms import PIECE_ELEMENTS, select_all, sum_in_kernels
from shardwise.sharding.errors import OptimError, PatternError

pytestmark = pytest.mark.abstract

ORDS = [1.0, 2.0, math.inf]
SHAPES = {
    "layers.0.weight": (4, 3),
    "layers.0.bias": (4,),
    "layers.1.weight": (2, 4),
    "layers.1.bias": (2,),
    "head.weight": (3, 2),
    "scale": (),
}
GROUPS: dict[str | tuple[str, ...], float] = {("layers.*", "~bias"): 0.3, "layers.*": 0.2}


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        path: torch.randn(shape, generator=generator).to(dtype) for path, shape in SHAPES.items()
    }


def clipped_by_torch(
    grads: Mapping[str, Tensor], limits: Mapping[tuple[str, ...], float], ord: float
) -> dict[str, Tensor]:
    """Each group of paths clipped by `torch.nn.utils.clip_grad_norm_`."""
    leaves = {path: nn.Parameter(torch.zeros_like(grad)) for path, grad in grads.items()}
    for path, leaf in leaves.items():
        leaf.grad = grads[path].clone()
    for paths, limit in limits.items():
        nn.utils.clip_grad_norm_([leaves[path] for path in paths], limit, ord, foreach=False)
    return {path: leaf.grad for path, leaf in leaves.items() if leaf.grad is not None}


BY_HAND = {
    ("layers.0.weight", "layers.1.weight"): 0.3,
    ("layers.0.bias", "layers.1.bias"): 0.2,
}


@pytest.mark.parametrize("ord", ORDS)
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6, math.inf])
def test_every_kind_of_norm_clips_as_torch_does(ord: float, max_norm: float) -> None:
    grads = tensors(1)
    clip = clip_by_global_norm(max_norm, ord)
    clipped, _ = clip.update(grads, clip.init(grads))
    expected = clipped_by_torch(grads, {tuple(SHAPES): max_norm}, ord)
    torch.testing.assert_close(clipped, expected, rtol=1e-12, atol=0)
    assert clip.needs == {Norm(ord)}


@pytest.mark.parametrize("ord", ORDS)
def test_each_group_is_clipped_by_its_own_norm(ord: float) -> None:
    grads = tensors(2)
    clip = clip_by_group_norm(GROUPS, ord)
    clipped, _ = clip.update(grads, clip.init(grads))
    torch.testing.assert_close(clipped, clipped_by_torch(grads, BY_HAND, ord), rtol=1e-12, atol=0)
    assert clipped["head.weight"] is grads["head.weight"]
    assert {str(norm) for norm in clip_by_group_norm(GROUPS).needs} == {
        "norm of 'layers.*, ~bias'",
        "norm of 'layers.*'",
    }


LAST: dict[str, GradientTransform] = {
    "adamw": adamw(0.1, weight_decay=0.1),
    "sgd": sgd(0.1, momentum=0.9),
    "muon": muon(0.1),
    "from_torch": from_torch(torch.optim.RMSprop, lr=0.1),
    "partition": partition({"a": sgd(0.3), "b": adamw(0.1)}, {"a": "head"}, otherwise="b"),
    "inject": inject(adamw, learning_rate=0.1),
}


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_a_folded_group_clip_is_clip_then_update(name: str, scale: float | None) -> None:
    last = LAST[name]
    optimizer = chain(clip_by_global_norm(2.0), clip_by_group_norm(GROUPS), last)
    assert optimizer.apply is not None
    params = tensors(0)
    expected = {path: value.clone() for path, value in params.items()}
    state, expected_state = optimizer.init(params), last.init(expected)
    for step in range(2):
        grads = tensors(step + 1)
        before = {path: grad.clone() for path, grad in grads.items()}
        whole = {path: grad * (scale or 1.0) for path, grad in grads.items()}
        whole = clipped_by_torch(whole, {tuple(SHAPES): 2.0}, 2.0)
        whole = clipped_by_torch(whole, BY_HAND, 2.0)
        updates, expected_state = last.update(whole, expected_state, expected)
        expected = {path: expected[path] + updates[path] for path in expected}
        factor = None if scale is None else torch.tensor(scale, dtype=torch.float64)
        params, state = optimizer.apply(params, grads, state, scale=factor)
        assert all(torch.equal(grads[path], before[path]) for path in grads)
    torch.testing.assert_close(params, expected, rtol=1e-11, atol=1e-13)


def test_given_norms_decide_and_follow_earlier_factors() -> None:
    grads = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([6.0, 8.0]), "c": torch.ones(1)}
    groups = clip_by_group_norm({"a": 1.0, "b": 1.0})
    both = chain(clip_by_global_norm(25.0), groups)
    of_a, of_b = sorted(groups.needs, key=lambda norm: norm.where)
    norms = {Norm(): 50.0, of_a: 10.0, of_b: 1.0}  # not those of these gradients
    given = {norm: torch.tensor(value) for norm, value in norms.items()}
    assert both.factors is not None
    assert both.factor is None
    factors, _ = both.factors(grads, both.init(grads), norms=given)
    assert {key: value.item() for key, value in factors.items()} == pytest.approx(
        {"a": 0.5 / 5, "b": 0.5, "c": 0.5}, rel=1e-5
    )
    clipped, _ = both.update(grads, both.init(grads), grads, norms=given)
    torch.testing.assert_close(clipped["a"], torch.tensor([0.3, 0.4]), rtol=1e-5, atol=0)


def test_a_limit_in_the_state_can_be_changed() -> None:
    clip = inject(clip_by_global_norm, max_norm=1.0)
    optimizer = chain(clip, sgd(1.0))
    assert optimizer.apply is not None
    params = {"w": torch.zeros(2, dtype=torch.float64)}
    expected = torch.tensor([-1.5, -2.0], dtype=torch.float64)
    state = optimizer.init(params)
    set_hyperparameters(state, max_norm=2.5)
    grads = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    apply_in_place(optimizer, params, grads, state)
    torch.testing.assert_close(params["w"], expected, rtol=1e-6, atol=0)


def test_a_group_without_a_gradient_in_this_step_is_no_error() -> None:
    clip = clip_by_group_norm({"layers.*": 0.1, "head": 0.1})
    grads = tensors(1)
    state = clip.init(grads)
    some = {"head.weight": grads["head.weight"]}
    clipped, _ = clip.update(some, state, grads)
    assert clipped["head.weight"].norm().item() == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ord", ORDS)
def test_clipping_never_hides_what_is_not_finite(bad: float, ord: float) -> None:
    grads = {"a": torch.tensor([bad, 1.0]), "b": torch.tensor([2.0])}
    clipped, _ = clip_by_global_norm(1.0, ord).update(grads, EmptyState())
    assert all(grad.isnan().all() for grad in clipped.values())
    in_groups, _ = clip_by_group_norm({"a": 1.0, "b": 1.0}, ord).update(grads, EmptyState())
    assert in_groups["a"].isnan().all()
    assert in_groups["b"].item() == pytest.approx(1.0, rel=1e-5)
    by_value, _ = clip_by_value(1.0).update(grads, EmptyState())
    assert by_value["a"][0].isnan().item() == math.isnan(bad)


def test_clip_by_value_is_that_of_torch() -> None:
    grads = tensors(3)
    leaf = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    leaf.grad = grads["layers.0.weight"].clone()
    nn.utils.clip_grad_value_([leaf], 0.25)
    clipped, _ = clip_by_value(0.25).update(grads, EmptyState())
    assert leaf.grad is not None
    assert torch.equal(clipped["layers.0.weight"], leaf.grad)


@pytest.mark.parametrize("ord", ORDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_power_sums_are_exact_whatever_the_pieces(ord: float, dtype: torch.dtype) -> None:
    sizes = [3, 0, PIECE_ELEMENTS - 1, 5, 2 * PIECE_ELEMENTS + 7, 1]
    mixed = [torch.randn(size).to(dtype) for size in sizes] + [torch.full((2, 2), 1e-30)]
    expected = torch.linalg.vector_norm(
        torch.cat([one.reshape(-1).to(torch.complex128) for one in mixed]), ord
    )
    value = power_sum(mixed, ord)
    assert value.dtype == torch.float64
    by_rows = ord == 2 and dtype in (torch.float32, torch.complex64)  # rows are added in float32
    rel = 1e-7 if by_rows else 1e-12
    assert (value.sqrt() if ord == 2 else value).item() == pytest.approx(expected.item(), rel=rel)


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18, 1e30])
def test_squares_that_float32_would_lose_are_added_in_float64(size: float) -> None:
    values = torch.randn(5000) * size
    expected = values.double().square().sum().item()
    assert power_sum([values]).item() == pytest.approx(expected, rel=1e-7)


def test_kernels_of_other_devices_give_the_same_sums() -> None:
    mixed = [torch.randn(5), torch.randn(70_000)]
    for ord in ORDS:
        other = sum_in_kernels(mixed, ord)
        assert other.item() == pytest.approx(power_sum(mixed, ord).item(), rel=1e-7)


def test_a_parameter_belongs_to_the_first_group_that_selects_it() -> None:
    clip = clip_by_group_norm({"bias": 1.0, "layers.0": 1.0, "**": 1.0})
    found = select_all(sorted(clip.needs, key=lambda norm: len(norm.unless)), list(SHAPES))
    assert [sorted(paths) for paths in found.values()] == [
        ["layers.0.bias", "layers.1.bias"],
        ["layers.0.weight"],
        ["head.weight", "layers.1.weight", "scale"],
    ]


def test_groups_that_select_nothing_are_refused() -> None:
    with pytest.raises(PatternError, match="pattern 'haed' matches none of 6 paths") as missing:
        clip_by_group_norm({"haed": 1.0}).init(tensors(0))
    assert "did you mean 'head'" in str(missing.value)
    with pytest.raises(PatternError) as taken:
        clip_by_group_norm({"layers.*": 1.0, "layers.0": 1.0}).init(tensors(0))
    text = str(taken.value)
    assert "The group 'layers.0' has no parameter left." in text
    assert "4 of 6 parameters belong to groups before it: layers.*" in text
    assert "Fix: put 'layers.0' before the wider groups" in text
    assert taken.value.numbers == {"group": "layers.0", "taken": 4, "num_paths": 6}


def test_arguments_are_checked() -> None:
    with pytest.raises(OptimError, match="has no group") as empty:
        clip_by_group_norm({})
    assert 'Fix: clip_by_group_norm({"layers.*": 1.0})' in str(empty.value)
    with pytest.raises(OptimError, match=r"max_norm=-1\.0") as negative:
        clip_by_group_norm({"a": -1.0})
    assert negative.value.numbers == {"max_norm": -1.0}
    for ord in (3.0, True, "2"):
        with pytest.raises(OptimError, match=r"clip_by_global_norm\(ord=.*is no kind of") as kind:
            clip_by_global_norm(1.0, ord)  # pyright: ignore[reportArgumentType]
        assert "there are: 1, 2, inf." in str(kind.value)
        assert "Fix: clip_by_global_norm(1.0), which takes ord=2; or ord=inf" in str(kind.value)
        assert kind.value.numbers == {"ord": ord}


def test_norms_are_only_read_before_gradients_change() -> None:
    for first in (clip_by_group_norm({"a": 1.0}), clip_by_value(1.0)):
        with pytest.raises(OptimError, match="needs the norm of the gradients") as late:
            chain(first, clip_by_global_norm(1.0), sgd(0.1))
        assert late.value.numbers == {"position": 1, "after": 0}
    with pytest.raises(OptimError, match="part 'inside' needs the norm of") as part:
        masked(clip_by_global_norm(1.0), "a")
    assert "clip_by_group_norm" in part.value.fix
    assert global_norm({}, 1.0).item() == 0
