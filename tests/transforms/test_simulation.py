"""Simulated ranks: deterministic, free to differ, and a hang is an error."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import SimulationError
from shardwise.sharding.simulation import Simulated, World, current_world

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(dp=2, fsdp=2)


@pytest.fixture
def world():
    with sw.simulate(MESH) as world:
        yield world


def transports(world: World) -> list[Simulated]:
    return [Simulated(world, rank) for rank in range(world.mesh.size)]


def test_collectives_meet_the_ranks_of_an_axis_in_rank_order(world):
    ranks = transports(world)

    def main(rank: int) -> tuple[list[float], list[float], float]:
        mine = torch.tensor([float(rank)])
        gathered, scattered = torch.empty(2), torch.empty(1)
        ranks[rank].all_gather(gathered, mine, "fsdp")
        ranks[rank].reduce_scatter(scattered, torch.tensor([1.0, 10.0]) * (rank + 1), "dp")
        ranks[rank].all_reduce(mine, "dp")
        return gathered.tolist(), scattered.tolist(), mine.item()

    # Ranks 0..3 are (dp, fsdp) = (0, 0), (0, 1), (1, 0), (1, 1).
    assert world.run(main) == [
        ([0.0, 1.0], [4.0], 2.0),
        ([0.0, 1.0], [6.0], 4.0),
        ([2.0, 3.0], [40.0], 2.0),
        ([2.0, 3.0], [60.0], 4.0),
    ]


def test_objects_and_broadcasts_reach_everybody(world):
    ranks = transports(world)

    def main(rank: int) -> tuple[list[str], float]:
        value = torch.tensor(float(rank + 5))
        ranks[rank].broadcast(value)
        return ranks[rank].gather_objects(f"rank {rank}"), value.item()

    assert world.run(main) == [([f"rank {rank}" for rank in range(4)], 5.0)] * 4


def test_one_rank_runs_at_a_time_in_the_same_order_every_time(world):
    ranks = transports(world)
    running = threading.Semaphore(1)

    def trace() -> list[int]:
        order: list[int] = []

        def main(rank: int) -> None:
            for _ in range(3):
                assert running.acquire(blocking=False)
                order.append(rank)
                running.release()
                ranks[rank].gather_objects(rank)

        world.run(main)
        return order

    first = trace()
    assert sorted(first) == sorted([0, 1, 2, 3] * 3)
    assert trace() == first


def test_every_rank_has_a_stream_of_its_own_and_the_callers_is_untouched(world):
    ranks = transports(world)

    def main(rank: int) -> float:
        torch.manual_seed(rank // 2)
        before = torch.rand(()).item()
        ranks[rank].gather_objects(None)
        return before + 10 * torch.rand(()).item()

    torch.manual_seed(9)
    want = torch.rand(2)
    torch.manual_seed(9)
    values = world.run(main)
    assert torch.equal(torch.rand(2), want)
    assert values[0] == values[1] != values[2] == values[3]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("other collective", ["rank 0 waits in all_reduce", "rank 1 waits in all_gather"]),
        ("other size", ["all_reduce fsdp 1", "all_reduce fsdp 2"]),
        ("other dtype", ["torch.float64", "torch.float32"]),
        ("ended", ["rank 1 has ended", "rank 0 waits in all_reduce"]),
    ],
)
def test_what_would_hang_a_real_job_is_an_error(world, kind, texts):
    ranks = transports(world)

    def main(rank: int) -> None:
        odd = rank == 1
        if kind == "ended" and odd:
            return
        size = 2 if kind == "other size" and odd else 1
        dtype = torch.float64 if kind == "other dtype" and odd else torch.float32
        mine = torch.ones(size, dtype=dtype)
        if kind == "other collective" and odd:
            ranks[rank].all_gather(torch.empty(2), mine, "fsdp")
        else:
            ranks[rank].all_reduce(mine, "fsdp")

    with pytest.raises(SimulationError) as caught:
        world.run(main)
    text = str(caught.value)
    assert "wait for each other for ever" in text
    for part in texts:
        assert part in text
    assert caught.value.why
    assert caught.value.fix


def test_an_exception_ends_all_ranks_and_the_world_can_be_used_again(world):
    ranks = transports(world)
    before = threading.active_count()

    def main(rank: int) -> None:
        if rank == 2:
            raise ValueError("only rank 2")
        ranks[rank].all_reduce(torch.ones(1), "dp")

    with pytest.raises(ValueError, match="only rank 2"):
        world.run(main)
    assert threading.active_count() == before
    assert world.run(lambda rank: rank) == [0, 1, 2, 3]


def test_blocks_are_not_nested_and_end(world):
    assert current_world() is world
    with pytest.raises(SimulationError, match="inside another simulate block"), sw.simulate(MESH):
        pass
    assert current_world() is world


def test_a_block_that_fails_ends():
    with pytest.raises(ValueError, match="inside"), sw.simulate(MESH):
        raise ValueError("inside")
    assert current_world() is None


def test_the_order_of_ranks_does_not_change_a_result():
    """Two by two ranks and four, with the axes in either order, train alike."""

    def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
        out = model(batch)
        return sw.Mean(out.square().sum(), out.shape[0])

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    batch = torch.randn(8, 4, dtype=torch.float64)
    results = []
    for mesh in (sw.Mesh(fsdp=4), sw.Mesh(dp=2, fsdp=2), sw.Mesh(fsdp=2, dp=2)):
        with sw.simulate(mesh):
            plan = sw.plan(module, mesh, sw.zero(3, "fsdp"))
            program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
            state = program.init(sw.from_module(module))
            state, _ = program.step(state, program.shard_batch(batch))
            results.append(sw.to_global(state.params))
    for result in results[1:]:
        for path, value in results[0].items():
            torch.testing.assert_close(result[path], value, rtol=1e-12, atol=1e-14)


def test_lifted_values_map_over_ranks_and_join():
    lifted = sw.Lifted([torch.ones(2), 2 * torch.ones(2)])
    assert [value.tolist() for value in (1 + lifted * 2).ranks] == [[3.0, 3.0], [5.0, 5.0]]
    assert torch.add(lifted, lifted).ranks[1].tolist() == [4.0, 4.0]
    assert lifted.sum().ranks == (torch.tensor(2.0), torch.tensor(4.0))
    assert lifted.shape.ranks == (torch.Size([2]), torch.Size([2]))
    assert torch.equal(sw.to_global(sw.Lifted([torch.ones(2)] * 2)), torch.ones(2))
    with pytest.raises(SimulationError, match="Ranks 0 and 1 hold different values") as caught:
        sw.to_global(lifted)
    assert caught.value.numbers["rank"] == 1
