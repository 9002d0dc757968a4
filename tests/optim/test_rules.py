"""The optimizers that are rules: against torch.optim where it has them, else against formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from shardwise import optim
from shardwise.optim import GradientTransform, apply_in_place
from shardwise.optim.whole import orthogonalised
from tests.optim.cases import copied, random_tensors

pytestmark = pytest.mark.abstract

STEPS = 6
SHAPES = {"a": (3, 5), "b": (), "c": (130,), "e": (2, 4, 3)}


class Twin(NamedTuple):
    ours: GradientTransform
    torch: Callable[..., torch.optim.Optimizer]


def twin(ours: GradientTransform, kind: type[torch.optim.Optimizer], **options: Any) -> Twin:
    return Twin(ours, partial(kind, **options))


nadam = {"lr": 0.02, "weight_decay": 0.1}
TWINS = {
    "adam": twin(
        optim.adam(0.02, betas=(0.8, 0.95), weight_decay=0.1),
        torch.optim.Adam,
        lr=0.02,
        betas=(0.8, 0.95),
        weight_decay=0.1,
    ),
    "adagrad": twin(
        optim.adagrad(0.1, initial=0.2, weight_decay=0.1),
        torch.optim.Adagrad,
        lr=0.1,
        initial_accumulator_value=0.2,
        weight_decay=0.1,
    ),
    "rmsprop": twin(optim.rmsprop(0.02, decay=0.9), torch.optim.RMSprop, lr=0.02, alpha=0.9),
    "rmsprop-all": twin(
        optim.rmsprop(0.02, momentum=0.9, centred=True, weight_decay=0.1),
        torch.optim.RMSprop,
        lr=0.02,
        momentum=0.9,
        centered=True,
        weight_decay=0.1,
    ),
    "adafactor": twin(
        optim.adafactor(0.1, weight_decay=0.1), torch.optim.Adafactor, lr=0.1, weight_decay=0.1
    ),
    "adafactor-options": twin(
        optim.adafactor(2.0, decay=0.5, eps=(1e-3, 1e-2), clip=1.01),
        torch.optim.Adafactor,
        lr=2.0,
        beta2_decay=-0.5,
        eps=(1e-3, 1e-2),
        d=1.01,
    ),
    "from-nadam": twin(optim.from_torch(torch.optim.NAdam, **nadam), torch.optim.NAdam, **nadam),
    "from-asgd": twin(optim.from_torch(torch.optim.ASGD, lr=0.1), torch.optim.ASGD, lr=0.1),
    "from-rprop": twin(optim.from_torch(torch.optim.Rprop, lr=0.1), torch.optim.Rprop, lr=0.1),
    "from-adafactor": twin(
        optim.from_torch(torch.optim.Adafactor, lr=0.1), torch.optim.Adafactor, lr=0.1
    ),
    "from-adamw-amsgrad": twin(
        optim.from_torch(torch.optim.AdamW, lr=0.1, amsgrad=True),
        torch.optim.AdamW,
        lr=0.1,
        amsgrad=True,
    ),
}
OURS = {
    **{name: twin.ours for name, twin in TWINS.items()},
    "lion": optim.lion(0.02, weight_decay=0.1),
    "lamb": optim.lamb(0.02),
    "muon": optim.muon(0.02),
    "ema": optim.ema(optim.adamw(0.02), decay=0.9),
    "inject": optim.inject(optim.adamw, learning_rate=0.02, betas=(0.8, 0.9)),
    "partition": optim.partition(
        {"m": optim.sgd(0.1), "v": optim.lion(0.1)}, {"v": ("b", "c")}, otherwise="m"
    ),
    "masked": optim.chain(optim.masked(optim.clip_by_value(0.1), "a"), optim.sgd(0.1)),
}


def gradients(step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return random_tensors(step + 1, dtype, SHAPES)


def train(optimizer: GradientTransform, in_place: bool) -> dict[str, Tensor]:
    params = random_tensors(0, torch.float64, SHAPES)
    state = optimizer.init(params)
    for step in range(STEPS):
        if in_place:
            params, state = apply_in_place(optimizer, params, gradients(step), state)
        else:
            updates, state = optimizer.update(gradients(step), state, params)
            params = {key: params[key] + updates[key] for key in params}
    return params


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", TWINS)
def test_trains_as_torch(name: str, in_place: bool) -> None:
    params = random_tensors(0, torch.float64, SHAPES)
    leaves = {key: torch.nn.Parameter(value) for key, value in params.items()}
    theirs = TWINS[name].torch(list(leaves.values()), foreach=False)
    for step in range(STEPS):
        for key, grad in gradients(step).items():
            leaves[key].grad = grad
        theirs.step()
    expected = {key: leaf.detach() for key, leaf in leaves.items()}
    got = train(TWINS[name].ours, in_place)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OURS)
def test_apply_is_params_plus_update_and_update_is_pure(name: str) -> None:
    optimizer, scale = OURS[name], torch.tensor(0.5, dtype=torch.float64)
    params = random_tensors(0, torch.float64, SHAPES)
    _, state = apply_in_place(optimizer, params, gradients(0), optimizer.init(params))
    grads = gradients(1)
    halves = {key: grad * 0.5 for key, grad in grads.items()}
    before = optree.tree_map(torch.clone, (params, state, halves))
    updates, expected_state = optimizer.update(halves, state, params)
    assert optree.tree_all(optree.tree_map(torch.equal, before, (params, state, halves)))
    expected = {key: params[key] + updates[key] for key in params}
    kept = copied(grads)
    params, state = apply_in_place(optimizer, params, grads, state, scale=scale)
    assert all(torch.equal(grads[key], kept[key]) for key in grads)
    torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-14)
    leaves = zip(optree.tree_leaves(state), optree.tree_leaves(expected_state), strict=True)
    for got, want in leaves:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OURS)
def test_a_key_without_gradient_keeps_value_and_state(name: str) -> None:
    optimizer = OURS[name]
    params = random_tensors(0, torch.float64, SHAPES)
    _, state = apply_in_place(optimizer, params, gradients(0), optimizer.init(params))
    grads = gradients(1)
    del grads["a"]

    def kept(tree: Any) -> dict[str, Tensor]:
        paths, leaves, _ = optree.tree_flatten_with_path(tree)
        found = zip(paths, leaves, strict=True)
        return {str(path): leaf.clone() for path, leaf in found if path and path[-1] == "a"}

    before = kept((params, state))
    params, state = apply_in_place(optimizer, params, grads, state)
    after = kept((params, state))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_lion_is_its_formula() -> None:
    w, m = 2.0, 0.0
    params = {"w": torch.tensor([w], dtype=torch.float64)}
    optimizer = optim.lion(0.1, betas=(0.5, 0.75), weight_decay=0.25)
    state = optimizer.init(params)
    for g in (3.0, -1.0, -4.0):
        params, state = optimizer.apply(params, {"w": torch.tensor([g]).double()}, state)
        w -= 0.1 * (math.copysign(1.0, 0.5 * m + 0.5 * g) + 0.25 * w)
        m = 0.75 * m + 0.25 * g
        assert params["w"].item() == pytest.approx(w, rel=1e-12)
        assert state.mu["w"].item() == pytest.approx(m, rel=1e-12)


def test_lamb_is_its_formula() -> None:
    got = train(optim.lamb(0.1, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.2), True)
    for key, w in random_tensors(0, torch.float64, SHAPES).items():
        m = v = 0.0
        for step in range(STEPS):
            g = gradients(step)[key]
            m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g * g
            t = step + 1
            r = m / (1 - 0.5**t) / ((v / (1 - 0.75**t)) ** 0.5 + 1e-3) + 0.2 * w
            w = w - 0.1 * (w * w).sum() ** 0.5 / (r * r).sum() ** 0.5 * r
        torch.testing.assert_close(got[key], w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(6, 4), (4, 7), (5, 5)])
def test_orthogonalised_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = random_tensors(0, torch.float64, {"w": shape})["w"]
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalised(matrix, 5), u @ s.diag() @ v, rtol=1e-11, atol=1e-12)


def test_muon_is_torchs_to_the_rounding_of_bfloat16_and_the_rest_is_adamw() -> None:
    params = random_tensors(0, torch.float32, {"w": (6, 4), "b": (4,)})
    leaves = {key: torch.nn.Parameter(value.clone()) for key, value in params.items()}
    theirs = [
        torch.optim.Muon([leaves["w"]], lr=0.1, weight_decay=0.1),
        torch.optim.AdamW([leaves["b"]], lr=3e-4),
    ]
    ours = optim.muon(0.1)
    state = ours.init(params)
    for step in range(3):
        grads = random_tensors(step + 1, torch.float32, {"w": (6, 4), "b": (4,)})
        for key in leaves:
            leaves[key].grad = grads[key]
        for one in theirs:
            one.step()
        params, state = ours.apply(params, grads, state)
    torch.testing.assert_close(params["w"], leaves["w"].detach(), rtol=0.02, atol=0.01)
    torch.testing.assert_close(params["b"], leaves["b"].detach())


def test_ema_is_an_averaged_model() -> None:
    params = random_tensors(0, torch.float64, SHAPES)
    module = torch.nn.ParameterDict(copied(params))
    average = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    theirs = torch.optim.SGD(module.parameters(), lr=0.1)
    ours = optim.ema(optim.sgd(0.1), decay=0.9)
    state = ours.init(params)
    for step in range(STEPS):
        for key, grad in gradients(step).items():
            module[key].grad = grad
        theirs.step()
        average.update_parameters(module)
        params, state = ours.apply(params, gradients(step), state)
    want = {key: value.detach() for key, value in average.module.items()}
    torch.testing.assert_close(dict(state.average), want, rtol=1e-12, atol=1e-14)


def test_injected_numbers_are_read_each_step() -> None:
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    optimizer = optim.inject(optim.sgd, learning_rate=1.0, momentum=0.5)
    state = optimizer.init(params)
    grads = {"w": torch.ones(1, dtype=torch.float64)}
    seen = []
    for rate, momentum in ((1.0, 0.5), (0.1, 0.5), (0.1, 0.25)):
        optim.set_hyperparameters(state, learning_rate=rate, momentum=momentum)
        old = params["w"].item()
        params, state = optimizer.apply(params, grads, state)
        seen.append(old - params["w"].item())
    assert seen == pytest.approx([1.0, 0.15, 0.1375], rel=1e-12)
    assert state.hyperparameters["momentum"].item() == 0.25


def test_a_part_of_a_partition_is_that_transform_alone() -> None:
    split = optim.partition(
        {"fast": optim.sgd(0.5), "slow": optim.adamw(0.1)},
        {"fast": ("a", "b")},
        otherwise="slow",
    )
    got = train(split, True)
    fast, slow = train(optim.sgd(0.5), True), train(optim.adamw(0.1), True)
    for key in SHAPES:
        assert torch.equal(got[key], (fast if key in "ab" else slow)[key])
