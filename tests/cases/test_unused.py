"""UNU-1 and UNU-2: parameters that take no part in a step, on one rank or on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.oracles.one_process import assert_same, one_process, sharded

MESH = sw.Mesh(fsdp=2)


class Branches(nn.Module):
    """Two branches; the sign of the first value of the batch chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[int(x[0, 0] > 0)](x)


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    out = model(batch)
    return sw.Mean(out.square().sum(), out.shape[0])


def two_sided(step: int = 0) -> Tensor:
    """Rows of rank 0 choose one branch, rows of rank 1 the other."""
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    batch[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0]) * (-1) ** step
    return batch


@pytest.mark.simulated
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_unu_1_each_branch_has_half_of_the_gradient_of_its_rank(level):
    torch.manual_seed(0)
    module = Branches().double()
    batch = two_sided()
    with sw.simulate(MESH):
        plan = sw.plan(module, MESH, sw.zero(level, "fsdp"))
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        grads, _ = program.grads(state, program.shard_batch(batch))
        got = sw.to_global(grads.leaves)
    for index, rows in enumerate((batch[:2], batch[2:])):
        branch = module.branches[index]
        alone = torch.autograd.grad(branch(rows).square().sum() / 2, list(branch.parameters()))
        for (name, _), grad in zip(branch.named_parameters(), alone, strict=True):
            torch.testing.assert_close(got[f"branches.{index}.{name}"], grad / 2)


def branch_step() -> dict[str, Any]:
    """One of two real ranks: three steps on different branches, which change sides."""
    torch.manual_seed(0)
    module = Branches().double()
    program = sw.lower(
        sw.plan(module, MESH, sw.zero(3, "fsdp")), loss_fn, sw.optim.sgd(0.1, momentum=0.9)
    ).bind()
    state = program.init(sw.from_module(module))
    for step in range(3):
        state, _ = program.step(state, program.shard_batch(two_sided(step)))
        assert program.last_collectives == program.lowered.collectives()
    return sw.to_global(dict(state.params))


@pytest.mark.gloo
@pytest.mark.timeout(60)
def test_unu_1_real_ranks_on_different_branches_do_not_hang():
    ranks = sw.spawn(branch_step, ranks=2, timeout=30)
    torch.manual_seed(0)
    module = Branches().double()
    want = one_process(
        module,
        loss_fn,
        [two_sided(step) for step in range(3)],
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        parts=2,
    )
    for params in ranks:
        for path, value in want.params.items():
            torch.testing.assert_close(params[path], value, rtol=1e-12, atol=1e-14)


class Turns(nn.Module):
    """Two encoders used in turn, and a unit with parameters that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.idle = Idle()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.idle(self.encoders[batch["turn"]](batch["x"]))


class Idle(nn.Module):
    """The identity."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x


def turns(steps: int) -> list[dict[str, Any]]:
    return [{"x": two_sided(step), "turn": step % 2} for step in range(steps)]


@pytest.mark.simulated
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_unu_2_encoders_in_turn_train_as_one_process(level):
    torch.manual_seed(0)
    module = Turns().double()
    plan = sw.plan(module, MESH, sw.zero(level, "fsdp"), units=["encoders.*", "idle"])
    # Momentum and decay would move an unused parameter if its gradient counted as zero.
    settings = {"momentum": 0.9, "weight_decay": 0.5}
    want = one_process(module, loss_fn, turns(4), lambda p: torch.optim.SGD(p, 0.1, **settings))
    assert_same(sharded(module, plan, loss_fn, turns(4), sw.optim.sgd(0.1, **settings)), want)


@pytest.mark.simulated
@pytest.mark.parametrize("level", [0, 3])
def test_unu_2_what_is_unused_stays_bit_for_bit(level):
    module = Turns().double()
    with sw.simulate(MESH):
        plan = sw.plan(module, MESH, sw.zero(level, "fsdp"), units=["encoders.*", "idle"])
        optimizer = sw.optim.adamw(0.1, weight_decay=0.5)
        program = sw.lower(plan, loss_fn, optimizer).bind()
        state = program.init(sw.from_module(module))
        for step, batch in enumerate(turns(4)):
            before = {path: value.clone() for path, value in trained(state).items()}
            grads, _ = program.grads(state, program.shard_batch(batch))
            unused = {p for p in plan.params if p.startswith((f"encoders.{1 - step % 2}", "idle"))}
            assert all(one.used == plan.params.keys() - unused for one in grads.ranks)
            state, _ = program.step(state, program.shard_batch(batch))
            after = trained(state)
            for path, value in after.items():
                kept = path.partition(":")[2] in unused
                assert torch.equal(value, before[path]) == kept, (step, path)


def trained(state: Any) -> dict[str, Tensor]:
    parts = {"params": state.params, "mu": state.opt.mu, "nu": state.opt.nu}
    return {f"{n}:{p}": v for n, part in parts.items() for p, v in sw.to_global(part).items()}
