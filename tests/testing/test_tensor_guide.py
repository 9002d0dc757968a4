"""docs/tensor_parallelism.md is true: its blocks run, and what it prints and claims is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.testing import assert_equivalent

GUIDE = (Path(__file__).parents[2] / "docs" / "tensor_parallelism.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
(PRINTED,) = re.findall(r"```text\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.fixture
def names(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, found)
    found["printed"] = capsys.readouterr().out
    return found


@pytest.mark.abstract
def test_the_table_has_the_lines_that_are_shown(names: dict[str, Any]) -> None:
    printed = [re.split(r" {2,}", line) for line in names["printed"].splitlines()]
    for line in filter(None, PRINTED.splitlines()):
        cells = re.split(r" {2,}", line)
        whole = iter(next(one for one in printed if one[0] == cells[0]))
        assert all(cell in whole for cell in cells), line  # in this order


@pytest.mark.abstract
@pytest.mark.parametrize("sequences", [False, True])
def test_a_layer_moves_what_the_formula_says(names: dict[str, Any], sequences: bool) -> None:
    rows, length, width, ranks, size = 4, 16, 32, 4, 4
    counts = []
    for layers in (2, 3):
        model = names["Model"]()
        model.layers = torch.nn.ModuleList(names["Layer"]() for _ in range(layers))
        chosen = [sw.sequence_parallel("tp")] if sequences else []
        plan = sw.plan(model, sw.Mesh(tp=ranks), sw.tensor_parallel("tp"), *chosen)
        batch = sw.like((rows, length), torch.int64)
        lowered = sw.lower(plan, names["loss_fn"], sw.optim.sgd(0.1), batch=batch)
        items = [item for item in lowered.collectives() if item.reason == "activations"]
        counts.append(sum(item.nbytes for item in items))
    moved = 8 * rows * length * width * size * (ranks - 1) // ranks
    assert counts[1] - counts[0] == moved


@pytest.mark.simulated
def test_its_model_trains_as_in_one_process(names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(97, (4, 7))
    optimizer = sw.optim.adamw(1e-3, eps=1e-4)
    model = names["Model"]()
    assert_equivalent(
        model, names["loss_fn"], [tokens], plan=names["long"], optimizer=optimizer, seed=None
    )
