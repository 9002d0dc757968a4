"""Saved values on tiers under tensor and sequence parallelism: bits of the same plan without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.offload.store import Store
from shardwise.sharding.tiers import Tier
from tests.transforms.cut_models import (
    Attention,
    Block,
    assert_bits,
    plan_of,
    run,
    stack,
    tokens_of,
)

pytestmark = pytest.mark.simulated

PLANS: dict[str, tuple[sw.Mesh, tuple[sw.Transform, ...]]] = {
    "tensor": (sw.Mesh(tp=2), ()),
    "sequence": (sw.Mesh(tp=2), (sw.sequence_parallel("tp"),)),
    "sequence and zero 3": (
        sw.Mesh(fsdp=2, tp=2),
        (sw.zero(3, "fsdp"), sw.sequence_parallel("tp")),
    ),
    "sequence and remat": (
        sw.Mesh(tp=2),
        (sw.sequence_parallel("tp"), sw.remat("layers.1")),
    ),
}


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Counter[Tier]:
    """Bytes that were allocated for saved values, by tier."""
    found: Counter[Tier] = Counter()
    empty = Store.empty

    def count(store: Store, tier: Tier, length: int, dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8:
            found[tier] += length
        return empty(store, tier, length, dtype)

    monkeypatch.setattr(Store, "empty", count)
    return found


def up_and_down(block: Any, x: Tensor) -> Tensor:
    return block.down(block.sw_drop(torch.nn.functional.gelu(block.up(x))))


@pytest.mark.parametrize("where", ["**", "layers.*"])
@pytest.mark.parametrize("name", PLANS)
def test_with_tensor_axes(name: str, where: str, put: Counter[Tier], tmp_path: Path) -> None:
    mesh, more = PLANS[name]
    model = stack(Attention(), Block(up_and_down), Block(up_and_down))
    data = tokens_of(rows=32, length=48)
    want = run(model, plan_of(model, mesh, *more), data)
    assert not put
    for tier in (Tier("pinned_host"), sw.disk(tmp_path)):
        offload = sw.offload("acts", tier, where=where)
        assert_bits(run(model, plan_of(model, mesh, *more, offload), data), want)
        assert put[tier] > 10 * 32 * 48 * 8 * 8
    assert list(tmp_path.iterdir()) == []
