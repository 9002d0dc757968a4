"""Hypothesis profiles, and what a test may not leave behind for the next one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# One thread: the machines that run tests have few cores, and tests start ranks of their own.
torch.set_num_threads(1)

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=20, **_COMMON)
settings.register_profile("ci", max_examples=50, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process group, a changed default dtype or grad mode behind."""
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left, f"{request.node.nodeid} left a process group open"
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
