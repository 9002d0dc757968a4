"""Steps off the CPU: the plain form computes the same, and nothing waits for the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import optree
import pytest
import torch
from torch import Tensor

from shardwise.optim import GradientTransform, adamw, chain, clip_by_global_norm, sgd, warmup_cosine
from tests.optim.cases import CASES, Case, copied, random_tensors

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SCHEDULE = warmup_cosine(0.1, warmup=2, steps=5, start=0.05)
OPTIMIZERS = [
    pytest.param(lambda: adamw(SCHEDULE), id="adamw"),
    pytest.param(lambda: sgd(SCHEDULE, weight_decay=0.1), id="sgd"),
    pytest.param(lambda: sgd(SCHEDULE, momentum=0.9, nesterov=True), id="sgd-nesterov"),
]


def module_of(case: Case) -> ModuleType:
    # The package face has functions of the same names as its modules.
    return importlib.import_module(f"shardwise.optim.{case.name.partition('-')[0]}")


def use_plain_steps(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(module_of(case), "_has_fused", lambda _param: False)


def three_steps(case: Case, params: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    state = case.ours.init(params)
    for step in range(3):
        case.ours.apply(params, random_tensors(step + 1, dtype), state)
    return [leaf.double() for leaf in optree.tree_leaves((params, state))]


@pytest.mark.abstract
@cases
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 5e-6)], ids=str
)
def test_plain_steps_are_fused_steps(
    case: Case, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = random_tensors(0, dtype)
    fused = three_steps(case, copied(params), dtype)
    use_plain_steps(monkeypatch, case)
    plain = three_steps(case, params, dtype)
    torch.testing.assert_close(plain, fused, rtol=tolerance, atol=tolerance)


@pytest.mark.abstract
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_steps_do_not_show_cuts_either(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_plain_steps(monkeypatch, case)
    generator = torch.Generator().manual_seed(0)
    param, grad = (torch.randn(200, generator=generator).to(dtype) for _ in range(2))
    for start, stop in [(0, 1), (1, 16), (3, 50), (17, 200), (63, 64), (5, 133)]:
        whole, part = {"w": param.clone()}, {"w": param[start:stop].clone()}
        case.ours.apply(whole, {"w": grad}, case.ours.init(whole))
        case.ours.apply(part, {"w": grad[start:stop]}, case.ours.init(part))
        assert torch.equal(part["w"], whole["w"][start:stop])


@pytest.mark.abstract
@pytest.mark.parametrize("build", OPTIMIZERS)
def test_no_step_reads_a_value_back(build: Callable[[], GradientTransform]) -> None:
    """A meta tensor raises where a tensor on a device would wait for its value."""
    optimizer = chain(clip_by_global_norm(1.0), build())
    params = {"w": torch.zeros(100, device="meta"), "b": torch.zeros((), device="meta")}
    grads = {key: torch.zeros_like(value) for key, value in params.items()}
    scale = torch.ones((), dtype=torch.float64, device="meta")
    state = optimizer.init(params)
    assert optimizer.apply is not None
    optimizer.apply(params, grads, state, scale=scale)
    updates, state = optimizer.update(grads, state, params, norm=scale)
    leaves = optree.tree_leaves((updates, state))
    assert {leaf.device.type for leaf in leaves} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):
        state[1].count.item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("build", OPTIMIZERS)
def test_cuda_steps_are_cpu_steps_and_never_wait(build: Callable[[], GradientTransform]) -> None:
    optimizer = chain(clip_by_global_norm(1.0), build())
    assert optimizer.apply is not None
    here = random_tensors(0, torch.float64)
    there = {key: value.cuda() for key, value in here.items()}
    states = [optimizer.init(here), optimizer.init(there)]
    for step in range(3):
        grads = random_tensors(step + 1, torch.float64)
        moved = {key: grad.cuda() for key, grad in grads.items()}
        optimizer.apply(here, grads, states[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.apply(there, moved, states[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    got = {key: value.cpu() for key, value in there.items()}
    torch.testing.assert_close(got, here, rtol=1e-12, atol=1e-14)
