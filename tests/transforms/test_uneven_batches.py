"""Global batches whose rows do not divide: split exactly, dropped, filled up, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import BatchError

pytestmark = pytest.mark.simulated

MESHES = [sw.Mesh(fsdp=1), sw.Mesh(fsdp=2), sw.Mesh(fsdp=3), sw.Mesh(dp=2, fsdp=2)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def per_row(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum(-1)


def unweighted(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    loss = per_row(model, batch)
    return sw.Mean(loss.sum(), loss.numel())


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    return sw.Mean((per_row(model, batch) * batch["weight"]).sum(), batch["weight"].sum())


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return {"x": values[:, :3], "y": values[:, 3:]}


def by_hand(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = per_row(model, batch).mean()
    named = dict(model.named_parameters())
    return loss, dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def program_for(mesh: sw.Mesh, model: nn.Module, loss_fn: Any, steps: int = 1) -> Any:
    plan = sw.plan(model, mesh, sw.zero(3, mesh.names), sw.accumulate(steps))
    return sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()


@given(
    mesh=st.sampled_from(MESHES),
    rows=st.integers(1, 9),
    steps=st.integers(1, 3),
    uneven=st.sampled_from(["split", "pad", "drop"]),
)
def test_every_way_gives_the_mean_of_the_rows_it_names(
    mesh: sw.Mesh, rows: int, steps: int, uneven: str
) -> None:
    model, batch = Model().double(), batch_of(rows)
    kept = rows - rows % mesh.size if uneven == "drop" else rows
    with sw.simulate(mesh):
        program = program_for(mesh, model, weighted if uneven == "pad" else unweighted, steps)
        if not kept:
            with pytest.raises(BatchError, match="Nothing is left"):
                program.shard_batch(batch, uneven=uneven)
            return
        mine = program.shard_batch(batch, uneven=uneven)
        sizes = [len(part["x"]) if part is not None else 0 for part in mine.ranks]
        grads, metrics = program.grads(program.init(sw.from_module(model)), mine)
        found = sw.to_global(grads.leaves)
    if uneven == "split":
        assert sum(sizes) == rows
        assert max(sizes) - min(sizes) <= 1
        assert [part is None for part in mine.ranks] == [size == 0 for size in sizes]
    else:
        assert len(set(sizes)) == 1
    loss, want = by_hand(model, {name: value[:kept] for name, value in batch.items()})
    torch.testing.assert_close(metrics.loss, loss.detach(), rtol=1e-12, atol=0.0)
    assert metrics.tokens == kept
    for path, grad in want.items():
        torch.testing.assert_close(found[path], grad, rtol=1e-9, atol=1e-12)


def test_filling_up_repeats_rows_and_marks_them() -> None:
    mesh = sw.Mesh(fsdp=4)
    with sw.simulate(mesh):
        program = program_for(mesh, Model(), weighted)
        for rows in (1, 2, 3, 4, 5):
            batch = {"x": torch.arange(rows), "name": "run"}
            parts = program.shard_batch(batch, uneven="pad", weight="real").ranks
            whole = torch.cat([part["x"] for part in parts])
            real = torch.cat([part["real"] for part in parts])
            assert real.dtype == torch.float32
            assert whole.tolist() == [i % rows for i in range(len(whole))]
            assert real.tolist() == [1.0] * rows + [0.0] * (len(whole) - rows)
            assert len(whole) == 4 * -(-rows // 4)
            assert {part["name"] for part in parts} == {"run"}
            assert set(batch) == {"x", "name"}  # the caller's dict is left alone


def test_error_names_the_rows_and_the_parts() -> None:
    mesh = sw.Mesh(dp=2, fsdp=2)
    with sw.simulate(mesh):
        program = program_for(mesh, Model(), unweighted)
        program.shard_batch(batch_of(8), uneven="error")
        with pytest.raises(BatchError) as caught:
            program.shard_batch(batch_of(7), uneven="error")
    error = caught.value
    assert "The global batch does not divide over the ranks." in str(error)
    assert "rows: 7; 7 % 4 == 3" in str(error)
    assert "parts: 4 (axes dp fsdp of Mesh(dp=2, fsdp=2))" in str(error)
    assert error.numbers == {"rows": 7, "parts": 4, "rest": 3}
    assert error.fix.startswith("a batch of 4 or 8 rows, or uneven='split'")


@pytest.mark.parametrize(
    ("batch", "uneven", "texts"),
    [
        (torch.ones(3), "pad", ("cannot be filled up", "a Tensor of 3 rows", "a dict of tensors")),
        (
            {"x": torch.ones(3), "weight": torch.ones(3)},
            "pad",
            ("a dict of 3 rows and has a 'weight'", "another name with weight=..."),
        ),
        ({"x": torch.ones(0)}, "pad", ("a dict of 0 rows", "at least one row")),
        (
            torch.ones(1),
            "drop",
            ("Nothing is left", "rows: 1; 1 % 2 == 1", "uneven='split', which leaves ranks"),
        ),
        (
            [torch.ones(3), torch.ones(4)],
            "split",
            ("cannot be cut into the parts", "3, 4", "parts: 2", "the same number of rows"),
        ),
        ("text", "split", ("holds no tensor with rows", "parts: 2", "a dict of tensors")),
        (
            torch.ones(4),
            "halve",
            ("uneven='halve'", "'split', 'drop', 'pad', 'error'", "split"),
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, uneven: str, texts: tuple[str, ...]) -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = program_for(mesh, Model(), unweighted)
        with pytest.raises(BatchError) as caught:
            program.shard_batch(batch, uneven=uneven)
    for text in texts:
        assert text in str(caught.value)


def test_training_goes_on_where_a_rank_has_no_row() -> None:
    """Fewer rows than ranks, then more again: exact in both, with the planned collectives."""
    mesh = sw.Mesh(fsdp=3)
    model = Model().double()
    with sw.simulate(mesh):
        program = program_for(mesh, model, unweighted)
        state = program.init(sw.from_module(model))
        for step, rows in enumerate((5, 1, 2, 7)):
            batch = batch_of(rows, step)
            loss, want = by_hand(model, batch)
            state, metrics = program.step(state, program.shard_batch(batch))
            assert program.last_collectives == program.lowered.collectives()
            torch.testing.assert_close(metrics.loss, loss.detach(), rtol=1e-12, atol=0.0)
            with torch.no_grad():
                for path, parameter in model.named_parameters():
                    parameter -= 0.1 * want[path]
            for path, value in sw.to_global(state.params).items():
                torch.testing.assert_close(value, model.get_parameter(path).detach())
