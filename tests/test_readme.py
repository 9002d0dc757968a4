"""The README is true: its script is the example, its blocks run, its output is what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shardwise as sw
from examples import quickstart

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
PRINTED = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)


def lowered() -> sw.Lowered:
    with torch.device("meta"):
        model = quickstart.Model()
    plan = sw.plan(model, sw.Mesh(fsdp=4), sw.zero(3, "fsdp"), sw.prefetch(1))
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), sw.optim.adamw(1e-3))
    return sw.lower(plan, quickstart.loss_fn, optimizer)


@pytest.mark.abstract
def test_script_is_the_example() -> None:
    source = (Path(__file__).parent.parent / "examples" / "quickstart.py").read_text()
    assert PYTHON[0].strip() in source


@pytest.mark.abstract
def test_printed_plan_and_report() -> None:
    program = lowered()
    assert PRINTED[0].strip() == str(program.plan).strip()
    assert PRINTED[1].strip() == program.text().strip()


@pytest.mark.abstract
def test_second_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = quickstart.Model()
    exec(PYTHON[1], {"sw": sw, "model": model})
    assert "embed.weight" in capsys.readouterr().out


@pytest.mark.abstract
def test_error_is_the_one_shown() -> None:
    with pytest.raises(sw.errors.PlanError) as caught:
        sw.plan(
            quickstart.Model(),
            sw.Mesh(fsdp=48),
            sw.shard_params("fsdp", on=1, where="layers.*.self_attn.in_proj_weight"),
        )
    assert str(caught.value).strip() == PRINTED[2].strip()


@pytest.mark.gloo
def test_script_on_one_rank_and_on_two() -> None:
    (alone,) = sw.spawn(quickstart.main, ranks=1, timeout=60)
    both = sw.spawn(quickstart.main, ranks=2, timeout=60)
    assert both[0] == both[1]
    assert both[0] == pytest.approx(alone, abs=1e-3)
