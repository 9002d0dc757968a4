"""Batches along tensor axes: the same on all ranks, of any shape, and failures in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.sharding.errors import BatchError
from shardwise.transforms.shared_batch import digest_of
from tests.laws.tensor_models import Small
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated

SMALL = Small(depth=1, vocab=16)


def bound(mesh: sw.Mesh, *transforms: Any, small: Small = SMALL, debug: bool = False) -> Any:
    model = small.build()
    plan = sw.plan(model, mesh, sw.tensor_parallel("tp"), *transforms)
    return sw.lower(plan, small.loss_fn, sw.optim.sgd(0.1)).bind(debug=debug)


def batch(rows: int, seed: int, length: int = 4) -> dict[str, Tensor]:
    return SMALL.batch(rows, length, seed)


@pytest.mark.parametrize(
    ("other", "says"), [(batch(2, 9), "2x4"), (batch(3, 0), "3x4"), (None, "no batch")]
)
def test_ranks_along_a_tensor_axis_need_one_batch(other: Any, says: str) -> None:
    """Another content, another shape, or none; the other data rank is right."""
    mesh = sw.Mesh(fsdp=2, tp=2)
    with sw.simulate(mesh):
        program = bound(mesh)
        given = sw.Lifted([batch(2, 0), batch(2, 0), batch(2, 1), other])
        with pytest.raises(BatchError) as caught:
            program.step(program.init(0), given)
    check(
        caught.value,
        BatchError,
        "Ranks along 'tp' have different batches: 3 not that of rank 2.",
        "rank 2: 2x4, 2x4, checksum ",
        f"rank 3: {says}",
        "program.shard_batch(global_batch) with the same global batch",
        rank=3,
        ranks=(3,),
        axes=("tp",),
    )
    assert "rank 0:" not in str(caught.value)


def test_a_split_axis_is_one_to_batches() -> None:
    """Two kv heads on four ranks split the axis; any of its ranks may be the odd one."""
    mesh = sw.Mesh(tp=4)
    with sw.simulate(mesh):
        program = bound(mesh, small=Small(depth=1, vocab=16, kv=2))
        given = sw.Lifted([batch(2, 0), batch(2, 1), batch(2, 0), batch(2, 1)])
        with pytest.raises(BatchError) as caught:
            program.step(program.init(0), given)
    check(caught.value, BatchError, "1, 3 not that of rank 0", ranks=(1, 3), axes=("tp",))


def test_data_ranks_may_differ_and_debug_compares_in_every_step() -> None:
    mesh = sw.Mesh(fsdp=2, tp=2)
    good = sw.Lifted([batch(2, 0), batch(2, 0), batch(2, 1), batch(2, 1)])
    late = sw.Lifted([batch(2, 0), batch(2, 5), batch(2, 1), batch(2, 1)])
    with sw.simulate(mesh):
        program = bound(mesh, debug=True)
        state, _ = program.step(program.init(0), good)
        with pytest.raises(BatchError, match="1 not that of rank 0"):
            program.step(state, late)
        program.step(state, good)


def test_what_a_digest_sees() -> None:
    """Every value, dtype and plain leaf; layouts without bytes of their own by their kind."""
    base = {"x": torch.arange(4.0), "n": 1}
    same = {"x": torch.arange(8.0)[:4].clone(), "n": 1}
    assert digest_of([base]) == digest_of([same])
    assert digest_of([base]).startswith("4, checksum ")
    others = [
        {"x": torch.arange(4.0).flip(0), "n": 1},
        {"x": torch.arange(4.0).view(2, 2), "n": 1},
        {"x": torch.arange(4), "n": 1},
        {"x": torch.arange(4.0), "n": 2},
        {"x": torch.arange(4.0).bfloat16(), "n": 1},
        {"x": torch.eye(4).to_sparse(), "n": 1},
    ]
    found = {digest_of([one]) for one in [base, *others]}
    assert len(found) == 1 + len(others)
    assert digest_of([base, base]) not in found


def test_micro_batches_are_compared_one_by_one() -> None:
    mesh = sw.Mesh(tp=2)
    with sw.simulate(mesh):
        program = bound(mesh, sw.accumulate(2))
        ours = sw.MicroBatches([batch(2, 0), batch(2, 1)])
        theirs = sw.MicroBatches([batch(2, 0), batch(2, 2)])
        with pytest.raises(BatchError, match="Ranks along 'tp' have different batches"):
            program.step(program.init(0), sw.Lifted([ours, theirs]))


WITH_SEQUENCE = (sw.sequence_parallel("tp"), sw.remat("layers.*"))


class Tripped:
    """A loss function that fails on some simulated ranks, in the middle of the model or after it.

    A trace does not see it: what fails on one rank alone is memory, or a value.
    """

    def __init__(self, ranks: tuple[int, ...], where: str) -> None:
        self.ranks, self.where = ranks, where
        self.armed = False

    def install(self, program: Any) -> None:
        """Have the second block of a rank's template fail, in forward or in backward."""
        for rank in self.ranks:
            layer = program._ranks[rank].template.module.layers[1]
            layer.register_forward_hook(self._hook)

    def _hook(self, module: Any, args: Any, output: Tensor) -> None:
        if not self.armed:
            return
        if self.where == "forward" or not output.requires_grad:
            raise MemoryError("no memory is left")
        output.register_hook(self._fail)

    def _fail(self, grad: Tensor) -> Tensor:
        raise MemoryError("no memory is left")


@pytest.mark.parametrize(
    ("sizes", "transforms", "where", "passes"),
    [
        ({"tp": 2}, (), "forward", 1),
        ({"tp": 2}, WITH_SEQUENCE, "backward", 2),
        ({"fsdp": 2, "tp": 2}, (), "backward", 1),
        ({"fsdp": 2, "tp": 2}, WITH_SEQUENCE, "forward", 2),
    ],
)
def test_one_rank_fails_in_a_step_of_another_shape(
    sizes: dict[str, int], transforms: tuple[Any, ...], where: str, passes: int
) -> None:
    """It joins in the sizes of its own batch, all ranks raise, and the next step is as ever."""
    mesh = sw.Mesh(**sizes)
    small = Small(depth=3, vocab=16)
    more = () if passes == 1 else (sw.accumulate(2),)
    zero = (sw.zero(3, "fsdp"),) if "fsdp" in sizes else ()
    wide = SMALL.batch(9, 5, 1)  # parts and micro-batches of unlike sizes
    with sw.simulate(mesh):
        program = bound(mesh, *zero, *transforms, *more, small=small)
        tripped = Tripped((mesh.size - 1,), where)
        state, _ = program.step(program.init(0), program.shard_batch(batch(4, 0)))
        tripped.install(program)
        tripped.armed = True
        with pytest.raises(sw.errors.RankError, match="MemoryError: no memory is left"):
            program.step(state, program.shard_batch(wide))
        if where == "forward":
            with pytest.raises(sw.errors.RankError, match="MemoryError: no memory is left"):
                program.eval(state, program.shard_batch(wide))
        tripped.armed = False
        state, metrics = program.step(state, program.shard_batch(wide))
    with sw.simulate(sw.Mesh(fsdp=1, tp=1)):
        alone = bound(sw.Mesh(fsdp=1, tp=1), small=small)
        whole, _ = alone.step(alone.init(0), batch(4, 0))
        _, want = alone.step(whole, wide)
    torch.testing.assert_close(metrics.loss, want.loss, rtol=1e-9, atol=0)


def test_a_data_rank_without_a_micro_batch_fails_with_its_peers() -> None:
    """One micro-batch for two passes: in the second one there are no activations to join."""
    mesh = sw.Mesh(tp=2)
    with sw.simulate(mesh):
        program = bound(mesh, sw.accumulate(2), small=Small(depth=3, vocab=16))
        state, _ = program.step(program.init(0), program.shard_batch(batch(4, 0)))
        tripped = Tripped((1,), "forward")
        tripped.install(program)
        tripped.armed = True
        with pytest.raises(sw.errors.RankError, match="no memory is left"):
            program.step(state, sw.MicroBatches([batch(3, 0)]))
        tripped.armed = False
        program.step(state, sw.MicroBatches([batch(3, 0)]))
