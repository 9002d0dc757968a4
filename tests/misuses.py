"""One misuse for each class of error: what `tests/test_messages.py` does wrong."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.demo.text import standard_library
from shardwise.sharding.errors import ShardwiseError
from shardwise.sharding.pytree import NAMESPACE, tree_map
from shardwise.sharding.spec import local_shape
from shardwise.testing import (
    assert_bitwise,
    assert_comms,
    assert_equivalent,
)

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)
ZERO = sw.zero(3, "fsdp")
SGD = sw.optim.sgd(0.1)


class Model(nn.Module):
    """Two units and a head; a batch may say what is odd about its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x, odd = batch["x"], batch["odd"]
        if odd == "fail":
            raise RuntimeError("sample 17 is broken")
        for layer in reversed(self.layers) if odd == "order" else self.layers:
            x = layer(x)
        if odd == "read":
            x = x + self.layers[1].weight.sum()
        if odd == "reduce":
            dist.all_reduce(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Any:
    out = model(batch)
    return out if batch["odd"] == "loss" else out.square().mean()


def rows(count: int = 4, odd: str = "") -> dict[str, Any]:
    values = torch.arange(4.0 * count).view(count, 4) / 16
    return {"x": values, "odd": odd}


def plan(*transforms: sw.Transform, mesh: sw.Mesh = MESH) -> sw.Plan:
    return sw.plan(Model(), mesh, *(transforms or (ZERO,)))


def train(*odd: str) -> None:
    """One step after the other on two simulated ranks."""
    with sw.simulate(MESH):
        program = sw.lower(plan(), loss_fn, SGD).bind()
        state = program.init(seed=0)
        for one in odd:
            state, _ = program.step(state, program.shard_batch(rows(odd=one)))


def uneven_cut() -> None:
    sw.plan(nn.Linear(4, 5), sw.Mesh(fsdp=4), sw.shard_params("fsdp", on="d0"))


def no_such_folder() -> None:
    on_disk = sw.offload("opt", sw.disk("/no/such/folder"))
    with sw.simulate(MESH):
        sw.lower(plan(ZERO, on_disk), loss_fn, sw.optim.adamw(0.1)).bind().init(seed=0)


def no_own_init() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(4))
    with sw.simulate(MESH):
        sw.lower(sw.plan(model, MESH, ZERO), loss_fn, SGD).bind().init(seed=0)


def other_module() -> None:
    with sw.simulate(MESH):
        sw.lower(plan(), loss_fn, SGD, module=nn.Linear(2, 2)).bind()


def uneven_rows() -> None:
    with sw.simulate(MESH):
        sw.lower(plan(), loss_fn, SGD).bind().shard_batch({"x": rows(3), "y": rows(2)})


def own_collective() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        program = sw.lower(plan(mesh=sw.Mesh(fsdp=1)), loss_fn, SGD).bind()
        program.step(program.init(seed=0), rows(odd="reduce"))
    finally:
        dist.destroy_process_group()


class Both(nn.Linear):
    """Returns a value beside what is computed from it."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(input)
        return y, y.sin()


def kept_value_written() -> None:
    """The function writes a value that remat keeps."""

    def written(model: nn.Module, batch: Tensor) -> Tensor:
        y, z = model(batch)
        return (y.add_(1) + z).mean()

    recomputed = sw.plan(Both(4, 2), sw.Mesh(fsdp=1), sw.remat("", "dots"))
    program = sw.lower(recomputed, written, SGD).bind()
    program.grads(program.init(seed=0), torch.ones(3, 4))


def used_twice() -> None:
    with sw.simulate(MESH):
        program = sw.lower(plan(), loss_fn, SGD).bind()
        state, batch = program.init(seed=0), program.shard_batch(rows())
        program.step(state, batch)
        program.step(state, batch)


def leaves_of_other_shapes() -> None:
    def halve(leaf: Any) -> Any:
        return leaf.to_local()[:1] if leaf.ndim == 2 else leaf

    with sw.simulate(MESH):
        program = sw.lower(plan(), loss_fn, SGD).bind()
        state = program.init(seed=0).map(lambda one: tree_map(halve, one, namespace=NAMESPACE))
        program.step(state, program.shard_batch(rows()))


def mismatched_axes() -> None:
    sw.Axes.parse("embed mlp").check((4,))


def uneven_heads() -> None:
    local_shape(sw.Spec.parse("(heads/tp hd)"), (6,), sw.Mesh(tp=4))


def too_long_a_warmup() -> None:
    sw.optim.warmup_cosine(1.0, warmup=9, steps=5)


def another_rank_fails() -> None:
    """What rank 0 is told of a failure on rank 1."""
    with sw.simulate(MESH) as world:
        program = sw.lower(plan(), loss_fn, SGD).bind()
        state = program.init(seed=0)
        told: list[Exception] = []

        def step(rank: int) -> None:
            try:
                batch = rows(odd="fail" if rank == 1 else "")
                program._ranks[rank].step(state.ranks[rank], batch)
            except ShardwiseError as error:
                told.append(error)

        world.run(step)
    raise min(told, key=lambda error: "sample 17" not in str(error))


def ranks_that_differ() -> None:
    sw.to_global(sw.Lifted([torch.zeros(1), torch.ones(1)]))


def wrong_rank() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "5")
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("MASTER_ADDR", "localhost")
        patch.setenv("MASTER_PORT", "1")
        sw.lower(plan(), loss_fn, SGD).bind()


def careless_mean() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return model(batch)[batch["x"][:, 0] > 0.6].mean()

    assert_equivalent(Model(), loss, [rows(8)], plan=plan(), optimizer=SGD)


def tight_budget() -> None:
    assert_comms(sw.lower(plan(), loss_fn, SGD), all_gather=1, max_bytes=10)


def bits_of_a_norm() -> None:
    clipped = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), SGD)
    assert_bitwise(Model(), loss_fn, [rows()], plan=plan(), optimizer=clipped)


def stripped_python() -> None:
    with TemporaryDirectory() as folder:
        standard_library(Path(folder))


def overflow_at_the_minimum() -> None:
    """One inf in a batch, with a scale that has nowhere to go."""
    scale = sw.loss_scale(initial_power=0, hysteresis=1)
    with sw.simulate(MESH):
        program = sw.lower(plan(ZERO, scale), loss_fn, SGD).bind()
        batch = {"x": torch.full((4, 4), torch.inf), "odd": ""}
        program.step(program.init(seed=0), program.shard_batch(batch))


def another_optimizer_restored() -> None:
    """A state without moments, for a program that has them."""
    with TemporaryDirectory() as folder, sw.simulate(MESH):
        program = sw.lower(plan(ZERO), loss_fn, SGD).bind()
        program.save(Path(folder) / "saved", program.init(0))
        sw.lower(plan(ZERO), loss_fn, sw.optim.adamw(0.1)).bind().restore(Path(folder) / "saved")
