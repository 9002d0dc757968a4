"""`sw.dropout` outside of a program, and where it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.sharding.errors import RandomError
from tests.transforms.dropping import Output, Plain, ones, program_of
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated


def test_outside_of_a_program_it_is_torchs_dropout() -> None:
    x = torch.randn(50)
    torch.manual_seed(0)
    want = nn.functional.dropout(x, 0.3)
    torch.manual_seed(0)
    assert torch.equal(sw.dropout(x, 0.3), want)
    torch.manual_seed(0)
    assert torch.equal(sw.Dropout(0.3)(x), want)
    assert sw.Dropout(0.3).eval()(x) is x
    assert sw.dropout(x, 0.0) is x
    assert torch.equal(sw.dropout(x, 1.0), torch.zeros(50))


def test_no_probability() -> None:
    for make in (sw.Dropout, lambda p: sw.dropout(torch.ones(2), p)):
        with pytest.raises(RandomError) as caught:
            make(-0.5)
        check(caught.value, RandomError, "-0.5 is no probability", "from 0 to 1", p=-0.5)


def failure(forward: Callable[[Plain, Tensor], Tensor], x: Tensor | None = None) -> RandomError:
    """What the second step raises, if the first one has gone well."""
    program, _ = program_of(Plain(forward))
    state, _ = program.step(program.init(seed=0), ones())
    with pytest.raises(RandomError) as caught:
        program.step(state, ones(rows=5) if x is None else x)
    return caught.value


def test_all_of_the_mask_can_be_dropped() -> None:
    program, seen = program_of(Plain(lambda module, x: x + sw.dropout(x / 0, 1.0)))
    program.step(program.init(seed=0), ones())
    assert torch.equal(seen.outputs[0], ones())


def test_an_evaluation_drops_nothing_and_refuses_to() -> None:
    program, seen = program_of(Plain(lambda module, x: module.drop(x)))
    program.eval(program.init(seed=0), ones())
    assert torch.equal(seen.outputs[0], ones())
    program, _ = program_of(Plain(lambda module, x: sw.dropout(x, 0.5)))
    with pytest.raises(RandomError) as caught:
        program.eval(program.init(seed=0), ones())
    check(caught.value, RandomError, "program.eval", "(4, 6)", "self.training", shape=(4, 6))


def test_rows_that_are_none_of_the_batch() -> None:
    def forward(module: Plain, x: Tensor) -> Tensor:
        return x + sw.dropout(x[:4], 0.5).sum()

    error = failure(forward)
    text = "x has shape (4, 6); 4 % 5 rows == 4"
    check(error, RandomError, text, "batch_dim=None", rows=5, shape=(4, 6))


def test_a_batch_that_does_not_tell_its_rows() -> None:
    def loss_fn(model: Any, batch: list[Tensor]) -> sw.Mean:
        return sw.Mean(model(batch[0]).sum(), 4)

    plan = sw.plan(Plain(lambda module, x: sw.dropout(x, 0.5)), sw.Mesh(fsdp=1))
    program = sw.lower(plan, loss_fn, sw.optim.sgd(0.0)).bind()
    with pytest.raises(RandomError) as caught:
        program.step(program.init(seed=0), [ones(), ones(3)])
    check(caught.value, RandomError, "cannot tell the rows", "module (root)", "batch_dim=None")


def test_dropout_that_the_first_pass_has_not_met() -> None:
    def forward(module: Plain, x: Tensor) -> Tensor:
        return x if len(x) == 4 else sw.dropout(x, 0.5, name="late")

    error = failure(forward)
    check(error, RandomError, "the first pass over the model met none", "'late'", "sw.Dropout(p)")


def test_where_the_trace_ends_early_modules_are_known_all_the_same() -> None:
    def forward(module: Plain, x: Tensor) -> Tensor:
        assert x.sum().item() > 0
        return sw.dropout(module.drop(x), 0.5)

    program, seen = program_of(Plain(forward))
    program.step(program.init(seed=0), ones())
    assert "trace ended" in program.lowered.notes[0]
    other, twin = program_of(Plain(lambda module, x: sw.dropout(module.drop(x), 0.5)))
    other.step(other.init(seed=0), ones())
    assert torch.equal(seen.outputs[0], twin.outputs[0])


def test_a_recomputation_that_does_not_restore_the_random_state_is_refused() -> None:
    def forward(module: Plain, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(sw.dropout(torch.tanh(x), 0.5))

        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=len(x) == 4)

    check(failure(forward), RandomError, "other random numbers", "preserve_rng_state=True")


@pytest.mark.gpu
def test_a_gpu_draws_the_masks_of_the_cpu_also_in_a_recomputation() -> None:
    def forward(module: Plain, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(sw.dropout(torch.tanh(module.drop(x)), 0.5))

        return checkpoint(run, x, use_reentrant=False)

    found = []
    for device in ("cpu", "cuda"):
        plan = sw.plan(Plain(forward), sw.Mesh(fsdp=1))
        program = sw.lower(plan, Output(), sw.optim.sgd(0.0)).bind(device=device)
        grads, _ = program.grads(program.init(seed=0), ones(300, 400).to(device))
        found.append(grads["weight"].to_local().cpu())
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0)
