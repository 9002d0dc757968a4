"""`examples/resume.py`, stopped and started again, on other numbers of ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from examples import resume

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]


def run(folder: str, stop_after: int = resume.STEPS) -> list[float]:
    torch.set_default_dtype(torch.float64)
    return resume.main(folder, stop_after)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return sw.spawn(run, 1, args=(str(tmp_path_factory.mktemp("straight")),), timeout=60)[0]


def test_it_trains(straight: list[float]) -> None:
    assert len(straight) == resume.STEPS
    assert straight[-1] < 0.8 * straight[0]


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 2)])
def test_stopped_and_started_again(
    first: int, second: int, straight: list[float], tmp_path: Path
) -> None:
    """Stopped between two checkpoints, so that one step is taken again."""
    folder = str(tmp_path)
    for losses in sw.spawn(run, first, args=(folder, 7), timeout=60):
        assert losses == pytest.approx(straight[:7], rel=1e-9)
    for losses in sw.spawn(run, second, args=(folder,), timeout=60):
        assert losses == pytest.approx(straight, rel=1e-9)
    for losses in sw.spawn(run, first, args=(folder,), timeout=60):
        assert losses == pytest.approx(straight, rel=1e-9)  # nothing is left to do


def test_in_a_simulation(
    straight: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    torch.set_default_dtype(torch.float64)
    try:
        with sw.simulate(sw.Mesh(fsdp=3)):
            resume.main(str(tmp_path), 4)
            losses = resume.main(str(tmp_path))
    finally:
        torch.set_default_dtype(torch.float32)
    assert losses == pytest.approx(straight, rel=1e-9)
