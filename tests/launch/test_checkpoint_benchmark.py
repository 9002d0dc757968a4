"""The benchmark of checkpoints, small: it runs, and what no machine decides is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.page import sections

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]


def test_the_benchmark_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--mb", "8", "--rounds", "2"]
    command += ["--dir", str(tmp_path / "runs"), "--page", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "runs").iterdir())
    found = sections(page.read_text())
    assert "So a second save has 0 planning collectives" in found["Collectives"]
    beyond = re.findall(r"\| (-?\d+) \| 64 \|", found["Memory of a restore"])
    assert len(beyond) == 2
    assert all(int(mebibytes) <= 64 for mebibytes in beyond)
    ratios = re.findall(r"\| ([\d.]+) \| 1.2 \|", found["From plan to plan in memory"])
    assert len(ratios) == 5
    assert all(float(ratio) <= 1.2 for ratio in ratios)
    for name in ("shardwise", "raw, flushed", "raw, direct", "DCP"):
        assert re.search(rf"^\| {name} \| [\d.]+ \(", found["Saving on two ranks"], re.MULTILINE)
