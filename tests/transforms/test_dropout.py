"""`sw.dropout`: one mask for a global batch, whatever cuts it and however often it is drawn."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.sharding.bits import squares_key
from shardwise.sharding.errors import RankError
from shardwise.sharding.pytree import NAMESPACE
from shardwise.sharding.rng import key
from shardwise.transforms.draws import Draw
from shardwise.transforms.dropout import _Dropped, masked
from tests.transforms.dropping import Output, Plain, ones, program_of

pytestmark = pytest.mark.simulated

WIDTH, LENGTH = 4, 3
MESHES = [sw.Mesh(fsdp=1), sw.Mesh(fsdp=2), sw.Mesh(fsdp=3), sw.Mesh(dp=2, fsdp=2)]


class Block(nn.Module):
    """Drops by a module, by calls with and without a name, and over several layouts of rows."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = sw.Dropout(0.3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, taps: list[Tensor]) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.checkpointed:
            return checkpoint(self.dropped, x, taps, use_reentrant=False)
        return self.dropped(x, taps)

    def dropped(self, x: Tensor, taps: list[Tensor]) -> Tensor:
        ones = torch.ones_like(x)
        first = sw.dropout(ones, 0.5)
        second = sw.dropout(ones.transpose(0, 1), 0.4, batch_dim=1, name="t").transpose(0, 1)
        third = sw.dropout(ones.flatten(0, 1), 0.2).view_as(x)
        fourth = sw.dropout(ones[0, 0], 0.5, batch_dim=None)
        if self.training and type(x) is Tensor:
            taps += [first, second, third, fourth.expand_as(x)]
        return self.dropout(x * first * second * third + x * fourth)


class Model(nn.Module):
    """Two blocks, of which the second is called twice."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, taps: list[Tensor]) -> Tensor:
        return self.blocks[1](self.blocks[1](self.blocks[0](x, taps), taps), taps)


class Seen:
    """A loss function that remembers the masks of each row of the global batch."""

    def __init__(self) -> None:
        self.masks: dict[int, list[Tensor]] = {}

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> sw.Mean:
        taps: list[Tensor] = []
        output = model(batch["x"], taps)
        if type(output) is Tensor:
            for place, row in enumerate(batch["row"].tolist()):
                self.masks[row] = [tap[place].detach().clone() for tap in taps]
        return sw.Mean((output**2).sum(), batch["x"].shape[0])


def batch_of(rows: int) -> dict[str, Tensor]:
    x = torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    return {"x": x, "row": torch.arange(rows)}


def run(
    mesh: sw.Mesh, *transforms: Any, rows: int, steps: int = 1, checkpointed: bool = False
) -> tuple[list[Tensor], dict[str, Tensor], dict[int, list[Tensor]]]:
    """Losses, gradients of the first step, masks of the last one."""
    seen = Seen()
    with sw.simulate(mesh):
        plan = sw.plan(Model(checkpointed=checkpointed), mesh, *transforms)
        program = sw.lower(plan, seen, sw.optim.sgd(0.1)).bind()
        state = program.init(seed=5)
        batch = program.shard_batch(batch_of(rows))
        grads, _ = program.grads(state, batch)
        assert program.last_collectives == program.lowered.grads_items
        whole = {path: grad.clone() for path, grad in sw.to_global(grads.leaves).items()}
        losses: list[Tensor] = []
        for _ in range(steps):
            state, metrics = program.step(state, batch)
            losses.append(metrics.loss)
        assert program.last_collectives == program.lowered.collectives()
    return losses, whole, seen.masks


def check_equal(ours: Any, theirs: Any) -> None:
    (our_losses, our_grads, our_masks), (losses, grads, masks) = ours, theirs
    assert our_masks.keys() == masks.keys()
    for row, taps in masks.items():
        assert len(taps) == len(our_masks[row]) == 12
        for mine, other in zip(our_masks[row], taps, strict=True):
            assert torch.equal(mine, other)
    torch.testing.assert_close(our_losses, losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(our_grads, grads, rtol=1e-9, atol=1e-12)


@settings(max_examples=4)
@example(mesh=MESHES[3], level=3, rows=6, passes=2, remat="everything", checkpointed=False)
@example(mesh=MESHES[2], level=1, rows=4, passes=1, remat="", checkpointed=True)
@given(
    mesh=st.sampled_from(MESHES),
    level=st.integers(0, 3),
    rows=st.integers(1, 7),
    passes=st.integers(1, 3),
    remat=st.sampled_from(["", "everything", "dots"]),
    checkpointed=st.booleans(),
)
def test_any_layout_draws_the_masks_of_one_process(
    mesh: sw.Mesh, level: int, rows: int, passes: int, remat: str, checkpointed: bool
) -> None:
    transforms = [sw.zero(level, mesh.names), sw.accumulate(passes)]
    if remat and not checkpointed:
        transforms.append(sw.remat("blocks.*", remat))
    theirs = run(sw.Mesh(fsdp=1), rows=rows, steps=2)
    ours = run(mesh, *transforms, rows=rows, steps=2, checkpointed=checkpointed)
    check_equal(ours, theirs)


# -- what a mask is ------------------------------------------------------------------------------


def squares_of_the_paper(ctr: int, key: int) -> int:
    """Squares32, line by line."""
    low = (1 << 64) - 1
    x = y = ctr * key & low
    z = y + key & low
    for add in (y, z, y):
        x = x * x + add & low
        x = x >> 32 | x << 32 & low
    return (x * x + z & low) >> 32


def test_a_mask_is_the_one_that_the_note_describes() -> None:
    def forward(module: Plain, x: Tensor) -> Tensor:
        x = sw.dropout(x, 0.25, name="a")
        return sw.dropout(module.drop(x), 0.25, name="a")

    program, seen = program_of(Plain(forward))
    state, _ = program.step(program.init(seed=3), ones())
    program.step(state, ones())
    golden = 0x9E3779B97F4A7C15
    for step, output in enumerate(seen.outputs):
        want = ones()
        for place in (("", "a", 0), ("drop", "", 0), ("", "a", 1)):
            own = squares_key(key(3, step, "dropout", *place))
            for row in range(4):
                for column in range(6):
                    ctr = (row * golden + column) % (1 << 64)
                    kept = squares_of_the_paper(ctr, own) >= (1 << 30)
                    want[row, column] *= kept / 0.75
        assert torch.equal(output, want)
    assert len(seen.outputs) == 2


def test_longer_rows_keep_the_masks_of_the_elements_that_are_there() -> None:
    outputs = []
    for width in (5, 9):
        program, seen = program_of(Plain(lambda module, x: sw.dropout(x, 0.5)))
        program.step(program.init(seed=0), ones(width=width))
        outputs.append(seen.outputs[0])
    assert torch.equal(outputs[0], outputs[1][:, :5])


def test_masks_of_large_rows_and_of_many_are_cut_alike() -> None:
    for rows, width in ((3, 50_000), (9_000, 11)):
        own = squares_key(5)
        whole = masked(torch.ones(rows, width), Draw(own, rows, 0), 0.1)
        one = masked(torch.ones(1, width), Draw(own, 1, torch.tensor(rows - 1)), 0.1)
        assert torch.equal(whole[-1:], one)
        assert abs((whole == 0).double().mean().item() - 0.1) < 0.003
        assert whole.unique().tolist() == pytest.approx([0.0, 1 / 0.9])


def test_backward_masks_as_forward_did_and_can_be_differentiated() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return _Dropped.apply(x, Draw(9, 4, 2), 0.5, 1)

    assert 0 < int((run(x) == 0).sum()) < 12
    torch.autograd.gradcheck(run, [x])
    torch.autograd.gradgradcheck(lambda x: run(x) ** 2, [x])


def test_nothing_is_saved_for_backward() -> None:
    def lowered(p: float) -> sw.Lowered:
        def forward(module: Plain, x: Tensor) -> Tensor:
            return sw.dropout(torch.relu(x), p)

        plan = sw.plan(Plain(forward), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
        return sw.lower(plan, Output(), sw.optim.sgd(0.1), batch=ones(512, 512))

    assert lowered(0.5).activation_bytes == lowered(0.0).activation_bytes

    def forward(module: Plain, x: Tensor) -> Tensor:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
            return sw.dropout(x, 0.5)

    saved: list[Tensor] = []
    program, seen = program_of(Plain(forward))
    program.step(program.init(seed=0), ones())
    assert seen.outputs
    assert not saved


# -- randomness is state -------------------------------------------------------------------------


def test_a_continued_state_draws_what_the_uninterrupted_run_draws() -> None:
    torch.manual_seed(1)
    model = Plain(lambda module, x: sw.dropout(module.drop(x), 0.5) + nn.functional.dropout(x))
    program, seen = program_of(model)
    state = program.init(seed=4)
    for _ in range(4):
        state, _ = program.step(state, ones())
    straight = seen.outputs
    torch.manual_seed(2)
    program, seen = program_of(model)
    state = program.init(seed=4)
    for _ in range(2):
        state, _ = program.step(state, ones())
    halfway = optree.tree_map(torch.clone, state, namespace=NAMESPACE)  # all there is, as leaves
    for _ in range(2):
        state, _ = program.step(state, ones())
    torch.randn(7)
    other, again = program_of(model)
    for _ in range(2):
        halfway, _ = other.step(halfway, ones())
    assert all(map(torch.equal, seen.outputs, straight))
    assert all(map(torch.equal, again.outputs, straight[2:]))
    assert not any(torch.equal(straight[i], straight[j]) for i in range(4) for j in range(i))


def test_micro_batches_of_any_sizes_are_cut_from_the_mask_of_the_whole() -> None:
    model = Plain(lambda module, x: sw.dropout(module.drop(x), 0.5))
    program, seen = program_of(model)
    program.step(program.init(seed=4), ones(6))
    whole = seen.outputs[0]
    program, seen = program_of(model, sw.accumulate(3))
    program.step(program.init(seed=4), sw.MicroBatches([ones(1), ones(3), ones(2)]))
    assert [len(output) for output in seen.outputs] == [1, 3, 2]
    assert torch.equal(torch.cat(seen.outputs), whole)


# -- collectives ---------------------------------------------------------------------------------


def row_items(program: sw.Lowered) -> list[tuple[str, str, int]]:
    return [(c.kind, c.axis, c.nbytes) for c in program.collectives() if c.reason == "rows"]


def test_only_a_program_with_dropout_tells_rows_one_number_along_each_axis() -> None:
    plan = sw.plan(Block(), sw.Mesh(dp=2, fsdp=3), sw.zero(3, ("dp", "fsdp")))
    known = sw.lower(plan, Output(), sw.optim.sgd(0.1))
    assert row_items(known) == [("all_gather", "fsdp", 16), ("all_gather", "dp", 8)]
    assert not [c for c in known.eval_items if c.reason == "rows"]

    class Calls(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return sw.dropout(super().forward(x), 0.5)

    for model, number in ((nn.Linear(6, 6), 0), (Calls(6, 6), 1)):
        plan = sw.plan(model, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
        assert not row_items(sw.lower(plan, Output(), sw.optim.sgd(0.1)))
        traced = sw.lower(plan, Output(), sw.optim.sgd(0.1), batch=sw.like((2, 6)))
        assert len(row_items(traced)) == number


def test_rows_are_told_before_the_counts_of_loss_terms_and_debug_mode_agrees() -> None:
    def loss_fn(model: Any, batch: Tensor) -> dict[str, sw.Mean]:
        output = model(batch)
        return {"a": sw.Mean(output.sum(), 5), "b": sw.Mean(output.square().sum(), len(batch))}

    def count_fn(batch: Tensor) -> dict[str, float]:
        return {"a": 5, "b": len(batch)}

    mesh = sw.Mesh(fsdp=2)
    model = Plain(lambda module, x: sw.dropout(module.drop(x), 0.5))
    for passes, count in ((1, None), (2, count_fn)):
        with sw.simulate(mesh):
            plan = sw.plan(model, mesh, sw.accumulate(passes))
            lowered = sw.lower(plan, loss_fn, sw.optim.sgd(0.1), count_fn=count)
            program = lowered.bind(debug=True)
            state = program.init(seed=0)
            for _ in range(2):
                state, _ = program.step(state, program.shard_batch(ones(5)))
            ran = [item.reason for item in program.last_collectives]
        assert program.last_collectives == program.lowered.collectives()
        assert ran.index("rows") == 0
        assert ran.count("rows") == 1
        assert "counts" in ran


def test_a_rank_that_fails_before_it_tells_its_rows_leaves_nobody_waiting() -> None:
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        plan = sw.plan(Plain(lambda module, x: module.drop(x)), mesh)
        program = sw.lower(plan, Output(), sw.optim.sgd(0.1)).bind()
        state, _ = program.step(program.init(seed=0), program.shard_batch(ones(5)))
        two = sw.MicroBatches([ones(), ones()])
        with pytest.raises(RankError, match="2 micro-batches for a step of 1"):
            program.step(state, sw.Lifted([ones(), two]))
        program.step(state, program.shard_batch(ones(5)))
