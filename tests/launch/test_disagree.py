"""HNG-1, HNG-2: ranks that disagree get an exact result or an error on all ranks, never a hang."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import InitError, RankError, ShardwiseError
from shardwise.sharding.job import close_job

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]

MESH = sw.Mesh(fsdp=2)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("sample 17 has no gradient")


class Model(nn.Module):
    """Two branches; what is odd about a run stands in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, odd: str) -> Tensor:
        x = self.layers[0](x)
        if odd != "skip":
            x = x + torch.tanh(self.layers[1](x))
        if odd == "forward" and type(x) is Tensor:
            raise ValueError("sample 17 is broken")
        x = self.layers[2](x)
        return FailsInBackward.apply(x) if odd == "backward" else x


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> sw.Mean:
    out = model(batch["x"], batch["odd"])
    total = out.square().sum() * (float("nan") if batch["odd"] == "nan" else 1.0)
    return sw.Mean(total, out.shape[0])


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def start(optimizer: Any = None, **options: Any) -> tuple[sw.Program, Any, int]:
    plan = sw.plan(build(), MESH, sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, optimizer or sw.optim.adamw(0.01)).bind(**options)
    return program, program.init(0), sw.launch.join_job().rank


def good(program: sw.Program) -> dict[str, Any]:
    return program.shard_batch({"x": rows(), "odd": ""})


def bits(state: Any) -> list[float]:
    """This rank's parameters, moments and counts."""
    flats = [*state.flats.values(), *state.opt_flats.mu.values(), *state.opt_flats.nu.values()]
    return [x for flat in flats for x in flat.tolist()] + [float(state.step)]


def assert_five_parts(error: Any, *texts: str, **numbers: Any) -> None:
    for text in texts:
        assert text in str(error), str(error)
    assert error.where
    assert error.why
    assert error.fix
    assert error.numbers.items() >= numbers.items()


# -- ranks that see different things, in one job ------------------------------------------------


def attempts() -> dict[str, Any]:
    """One job that goes on after each of them, on every rank."""
    program, state, rank = start()
    found: dict[str, Any] = {"rank": rank}
    batch = good(program)
    state, _ = program.step(state, batch)
    before = bits(state)
    for odd in ("forward", "backward"):
        try:
            program.step(state, {**batch, "odd": odd if rank == 1 else ""})
        except ShardwiseError as error:
            found[odd] = (error, bits(state) == before)
    state, metrics = program.step(state, {**batch, "odd": "nan" if rank == 1 else ""})
    found["nan"] = (metrics.applied, metrics.reason, metrics.skipped_steps, bits(state) == before)
    state, metrics = program.step(state, batch)
    found["after nan"] = (metrics.applied, metrics.skipped_steps, int(state.step))
    for odd, given in (("skip", {**batch, "odd": "skip" if rank == 1 else ""}), ("none", batch)):
        grads, metrics = program.grads(state, None if odd == "none" and rank == 1 else given)
        leaves = {path: sw.to_global(leaf) for path, leaf in grads.leaves.items()}
        found[odd] = (metrics.loss.item(), leaves, sw.to_global(state.params))
    try:
        program.init(0, init=broken_init if rank == 1 else None)
    except ShardwiseError as error:
        found["init"] = error
    _, metrics = program.step(state, batch)
    found["end"] = metrics.loss.item()
    return found


def broken_init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        raise ValueError("no values for this layer")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    ranks = sw.spawn(attempts, ranks=2, timeout=60)
    assert [one["rank"] for one in ranks] == [0, 1]
    return ranks


@pytest.mark.parametrize(
    ("odd", "words"),
    [("forward", "sample 17 is broken"), ("backward", "sample 17 has no gradient")],
)
def test_an_exception_on_one_rank_is_an_error_on_all_and_the_state_is_as_before(
    found: list[dict[str, Any]], odd: str, words: str
) -> None:
    for one in found:
        error, same = one[odd]
        assert isinstance(error, RankError)
        assert_five_parts(error, "Rank 1 failed in the step.", words, rank=1, failed=1)
        assert "rank 1 of 2" in error.where
        assert same


def test_a_failing_init_is_an_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert isinstance(one["init"], RankError | InitError)
        assert_five_parts(one["init"], "no values for this layer")
    assert "Rank 1 failed in init" in str(found[0]["init"])


def test_nan_on_one_rank_is_skipped_by_all_and_training_goes_on(
    found: list[dict[str, Any]],
) -> None:
    for one in found:
        applied, reason, skipped, same = one["nan"]
        assert (applied, skipped, same) == (False, 1, True)
        assert "rank 1" in reason
        assert one["after nan"] == (True, 1, 2)
    assert found[0]["nan"] == found[1]["nan"]


def test_a_module_that_one_rank_skips_gets_the_gradient_of_the_others(
    found: list[dict[str, Any]],
) -> None:
    """Unused on rank 1, and no batch on rank 1: both are what one process computes."""
    first, second = rows().chunk(2)
    cases = {"skip": [(first, ""), (second, "skip")], "none": [(first, "")]}
    for name, parts in cases.items():
        loss, grads, params = found[0][name]
        model = build()
        model.load_state_dict(params)
        means = [loss_fn(model, {"x": x, "odd": odd}) for x, odd in parts]
        want = sum(mean.total for mean in means) / sum(mean.count for mean in means)
        want.backward()
        torch.testing.assert_close(loss, want.item(), rtol=1e-12, atol=0)
        for path, parameter in model.named_parameters():
            torch.testing.assert_close(grads[path], parameter.grad, rtol=1e-9, atol=1e-12)
        assert found[1][name][0] == loss


def test_after_all_of_it_ranks_are_still_in_step(found: list[dict[str, Any]]) -> None:
    assert found[0]["end"] == found[1]["end"] > 0


# -- ranks that do different things -------------------------------------------------------------


def other_call(debug: bool, settled: bool) -> Any:
    """Rank 1 evaluates while rank 0 steps; caught, and then all do the same."""
    program, state, rank = start(debug=debug, timeout=20)
    batch = good(program)
    if settled:
        state, _ = program.step(state, batch)
    caught = None
    try:
        program.eval(state, batch) if rank else program.step(state, batch)
    except ShardwiseError as error:
        caught = error
    _, metrics = program.step(state, batch)
    return caught, metrics.applied


@pytest.mark.parametrize(("debug", "settled"), [(True, True), (False, False)])
def test_another_call_is_an_error_on_both_ranks_and_costs_no_state(
    debug: bool, settled: bool
) -> None:
    """In debug mode in every call; without it in the first, where ranks agree on the batch."""
    step = int(settled)
    for error, applied in sw.spawn(other_call, ranks=2, args=(debug, settled), timeout=60):
        assert isinstance(error, RankError)
        assert_five_parts(
            error,
            f"rank 0: program.step {step}",
            f"rank 1: program.eval {step}",
            rank=1,
            calls=(f"step {step}", f"eval {step}"),
        )
        assert applied


def other_call_later() -> None:
    other_call(debug=False, settled=True)


def test_another_call_later_ends_the_job_and_names_the_check() -> None:
    """gloo itself refuses the size that it receives; nothing else is exchanged."""
    with pytest.raises(RankError) as caught:
        sw.spawn(other_call_later, ranks=2, timeout=60)
    assert "bind(debug=True)" in caught.value.fix
    assert caught.value.numbers["rank"] in (0, 1)


def fails_in_update(then: str) -> Any:
    """Rank 1 fails between two collectives of the update, and catches that."""
    plain = sw.optim.adamw(0.01)

    def apply(params: Any, grads: Any, opt_state: Any, **extra: Any) -> Any:
        if rank == 1 and int(opt_state.count) == 1:
            raise ValueError("no memory for a moment")
        return plain.apply(params, grads, opt_state, **extra)

    rank = int(os.environ["RANK"])
    plan = sw.plan(build(), MESH, sw.zero(1, "fsdp"))
    program = sw.lower(plan, loss_fn, plain._replace(apply=apply)).bind(timeout=60)
    state, batch = program.init(0), good(program)
    state, _ = program.step(state, batch)
    # The job has its group by now; a program may still wait for another time.
    program = sw.lower(plan, loss_fn, plain._replace(apply=apply)).bind(timeout=3)
    began = time.monotonic()
    try:
        program.step(state, batch)
    except Exception as error:
        caught: Exception = error.with_traceback(None)
    seconds = time.monotonic() - began
    if rank == 1:
        if then == "leaves":  # as a process that has ended: its connections close
            del program, state
            gc.collect()
            close_job()
        time.sleep(6)  # it is alive all the time that rank 0 waits
    return caught, seconds


@pytest.mark.parametrize(
    ("then", "words"), [("waits", "waited in vain for"), ("leaves", "lost the connection to")]
)
def test_a_rank_that_is_left_alone_says_where(then: str, words: str) -> None:
    """Without debug nothing more is exchanged; the timeout or the connection ends the wait."""
    (first, seconds), (second, _) = sw.spawn(fails_in_update, ranks=2, args=(then,), timeout=60)
    assert isinstance(second, ValueError)
    assert isinstance(first, RankError)
    assert seconds < 15
    assert seconds > 2 or then == "leaves"
    assert_five_parts(
        first,
        f"Rank 0 {words} rank 1 in step 1.",
        "step 1, collective 0 of ",
        "did not complete: all_gather     fsdp",
        "bind(timeout=...) waits longer, bind(debug=True) names calls that differ",
        rank=0,
        peers=(1,),
        timed_out=then == "waits",
    )


# -- ranks that end -----------------------------------------------------------------------------


def note(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))


def gone(folder: Path) -> bool:
    """Whether no rank is left; a process takes a moment to end."""
    pids = [path.read_text() for path in folder.iterdir()]
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(Path("/proc", pid).exists() for pid in pids):
        time.sleep(0.05)
    return len(pids) == 2 and not any(Path("/proc", pid).exists() for pid in pids)


def leaves_early(folder: str) -> None:
    """Rank 1 has three batches and rank 0 five."""
    note(folder)
    program, state, rank = start()
    for _ in range(3 if rank else 5):
        state, _ = program.step(state, good(program))


def fails_outside(folder: str) -> None:
    """Rank 1 fails between two calls: in the cut of its batch."""
    note(folder)
    program, state, rank = start()
    state, _ = program.step(state, good(program))
    batch = {"x": rows(3 if rank else 4), "odd": ""}
    program.step(state, program.shard_batch(batch, uneven="error"))


def test_a_rank_that_leaves_early_ends_the_job_with_an_error(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        sw.spawn(leaves_early, ranks=2, args=(str(tmp_path),), timeout=100)
    assert time.monotonic() - began < 60
    assert_five_parts(
        caught.value,
        "rank 1 of 2 returned while rank 0 waits in a collective.",
        "spawn(leaves_early, ranks=2)",
        "in leaves_early",
        "program.agree(",
        returned=(1,),
        waiting=(0,),
    )
    assert gone(tmp_path)


def test_a_rank_that_fails_between_calls_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        sw.spawn(fails_outside, ranks=2, args=(str(tmp_path),), timeout=60)
    assert_five_parts(caught.value, "rank 1 of 2 failed with BatchError", rank=1)
    assert "in fails_outside" in str(caught.value)
    assert gone(tmp_path)


def to_the(how: str) -> tuple[int, list[float], float]:
    """HNG-2: five batches on rank 0 and three on rank 1, and then an evaluation likewise."""
    program, state, rank = start()
    data = [rows() + number for number in range(3 if rank else 5)]

    def batches() -> Any:
        return iter([{"x": x, "odd": ""} for x in data])

    steps, source = 0, batches()
    more: Callable[[Any], bool] = (
        (lambda one: program.agree(one is not None))
        if how == "shortest"
        else (lambda one: not program.agree(one is None))
    )
    while more(one := next(source, None)):
        state, _ = program.step(state, one)
        steps += 1
    total, tokens, source = 0.0, 0.0, batches()
    while more(one := next(source, None)):
        metrics = program.eval(state, one)
        total += metrics.loss.item() * metrics.tokens.item()
        tokens += metrics.tokens.item()
    return steps, [x for flat in state.flats.values() for x in flat.tolist()], total / tokens


@pytest.mark.parametrize(("how", "steps"), [("shortest", 3), ("longest", 5)])
def test_hng_2_ranks_with_different_numbers_of_batches(how: str, steps: int) -> None:
    first, second = sw.spawn(to_the, ranks=2, args=(how,), timeout=60)
    assert first[0] == second[0] == steps
    assert first[2] == second[2]
    # The mean over all rows that were seen, in one process.
    model = build()
    with sw.simulate(sw.Mesh(fsdp=1)):
        plan = sw.plan(model, sw.Mesh(fsdp=1))
        program = sw.lower(plan, loss_fn, sw.optim.adamw(0.01)).bind()
        state = program.init(0)
        for number in range(steps):
            state, _ = program.step(state, program.shard_batch(both(number)))
        model.load_state_dict(sw.to_global(state.params))
    means = [loss_fn(model, both(number)) for number in range(steps)]
    with torch.no_grad():
        want = sum(mean.total for mean in means) / sum(mean.count for mean in means)
    torch.testing.assert_close(first[2], want.item(), rtol=1e-9, atol=0)


def both(number: int) -> dict[str, Any]:
    """What the two ranks have together in one step; from the third on it is rank 0's alone."""
    one = rows() + number
    return {"x": one if number >= 3 else torch.cat([one, one]), "odd": ""}
