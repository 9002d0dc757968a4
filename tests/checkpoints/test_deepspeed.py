"""Runs that a real DeepSpeed has saved, taken up on other plans; see `tests/fixtures`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import shardwise as sw
from shardwise.sharding.checkpoint.deepspeed_files import read_deepspeed
from shardwise.sharding.errors import CheckpointError
from shardwise.transforms.importing import FromFiles
from tests.fixtures.tied import LEARNING_RATE, Tied, batch_of, mean_loss

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
CASES = sorted(path.name for path in FIXTURES.iterdir())
PLANS: dict[str, Any] = {
    "one rank": (sw.Mesh(fsdp=1), []),
    "zero3": (sw.Mesh(fsdp=3), [sw.zero(3, "fsdp")]),
    "masters": (sw.Mesh(dp=2, fsdp=2), [sw.zero(1, "fsdp"), sw.precision(params="bfloat16")]),
}

pytestmark = pytest.mark.simulated


def optimizer() -> Any:
    """As the fixtures were trained: no weight decay for vectors."""
    parts = {
        "matrices": sw.optim.adamw(LEARNING_RATE, weight_decay=0.1),
        "vectors": sw.optim.adamw(LEARNING_RATE, weight_decay=0.0),
    }
    return sw.optim.partition(
        parts, {"vectors": lambda path, shape: len(shape) == 1}, otherwise="matrices"
    )


def bound(name: str, chosen: Any = None, dtype: torch.dtype = torch.float32) -> sw.Program:
    mesh, moves = PLANS[name]
    plan = sw.plan(Tied().to(dtype), mesh, *moves)
    return sw.lower(plan, mean_loss, chosen or optimizer()).bind()


def weights(state: Any) -> dict[str, Tensor]:
    """The true values of parameters."""
    return dict(sw.to_global(state.params)) | dict(sw.to_global(state.master))


def moments(state: Any) -> dict[str, Tensor]:
    """Moments by torch's name and parameter, from a state of `optimizer()`."""
    found = {}
    for part in sw.to_global(state.opt).parts.values():
        for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            found |= {f"{theirs}/{path}": value for path, value in getattr(part, ours).items()}
    return found


def truth(case: str, when: str) -> dict[str, Tensor]:
    """What DeepSpeed says of a fixture: `saved`, `next` or `frozen`."""
    found = load_file(FIXTURES / case / "truth.safetensors")
    return {k.partition("/")[2]: v for k, v in found.items() if k.startswith(f"{when}/")}


def test_the_fixtures_are_there() -> None:
    """Nothing below runs on an empty list."""
    stages = ["zero1", "zero2", "zero2_bf16", "zero3", "zero3_bf16", "zero3_groups"]
    assert stages == CASES
    assert json.loads((FIXTURES / "zero3" / "about.json").read_text())["deepspeed"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_taken_up(case: str, plan: str) -> None:
    """Masters, moments and counts are DeepSpeed's own, bit for bit; so is the next step."""
    with sw.simulate(PLANS[plan][0]):
        program = bound(plan)
        cast = plan == "masters"  # the frozen layer, which has no master, rests in bfloat16
        state = program.init(sw.from_deepspeed(FIXTURES / case, cast=cast))
        got, saved = weights(state), truth(case, "saved")
        for path in ("embed.weight", "layers.0.weight", "layers.0.bias", "norm.weight"):
            assert torch.equal(got[path], saved[f"params/{path}"]), path
        found = moments(state)
        assert found.keys() == {name for name in saved if not name.startswith("params/")}
        assert all(torch.equal(value, saved[name]) for name, value in found.items())
        for path, value in truth(case, "frozen").items():
            half = cast or case.endswith("bf16")
            assert torch.equal(got[path].float(), value.bfloat16().float() if half else value)
        table = sw.to_global(state.buffers)["table"]
        assert torch.equal(table, Tied().table)
        first = state.ranks[0]
        assert [int(part.count) for part in first.opt.parts.values()] == [3, 3]
        assert int(first.step) == 3
        state, metrics = program.step(state, program.shard_batch(batch_of(3)))
        assert metrics.applied
        if plan == "masters" or case.endswith("bf16"):
            return  # DeepSpeed computes in bfloat16 where this program does not, or the reverse
        after = truth(case, "next")
        got = weights(state) | moments(state)
        for name, value in after.items():
            close = got[name.removeprefix("params/")]
            torch.testing.assert_close(close, value, rtol=1e-5, atol=1e-6)


def test_a_bf16_run_goes_on_in_bf16() -> None:
    """The same step up to the rounding of gradients, which have 8 bits."""
    with sw.simulate(sw.Mesh(fsdp=2)):
        plan = sw.plan(Tied(), sw.Mesh(fsdp=2), sw.zero(2, "fsdp"), sw.precision(params="bfloat16"))
        program = sw.lower(plan, mean_loss, optimizer()).bind()
        state = program.init(sw.from_deepspeed(FIXTURES / "zero2_bf16"))
        before = weights(state)
        state, _ = program.step(state, program.shard_batch(batch_of(3)))
        got, after = weights(state), truth("zero2_bf16", "next")
        for path, value in before.items():
            if f"params/{path}" in after:
                change, want = got[path] - value, after[f"params/{path}"] - value
                assert (change - want).norm() <= 0.05 * want.norm(), path


def test_torch_own_optimizer_takes_it() -> None:
    """`from_torch` keeps torch's names, and counts the steps of each parameter."""
    with sw.simulate(sw.Mesh(fsdp=3)):
        chosen = sw.optim.from_torch(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1)
        program = bound("zero3", chosen)
        state = program.init(sw.from_deepspeed(FIXTURES / "zero1"))
        opt, saved = sw.to_global(state.opt), truth("zero1", "saved")
        assert {int(value) for value in opt.steps.values()} == {3}
        for kind in ("exp_avg", "exp_avg_sq"):
            for path, value in opt.slots[kind].items():
                assert torch.equal(value, saved[f"{kind}/{path}"])


def test_another_optimizer_is_an_error_or_starts_fresh() -> None:
    """Momentum is not Adam's second moment; `partial` leaves out what it names."""
    with sw.simulate(sw.Mesh(fsdp=3)):
        program = bound("zero3", sw.optim.sgd(0.1))
        with pytest.raises(
            CheckpointError, match=r"does not fit(.*\n)*.*unexpected.*10(.*\n)*.*exp_avg"
        ):
            program.init(sw.from_deepspeed(FIXTURES / "zero3"))
        with pytest.warns(UserWarning, match=r"10 are not in the program"):
            state = program.init(sw.from_deepspeed(FIXTURES / "zero3", partial="opt/**"))
        assert torch.equal(weights(state)["norm.bias"], truth("zero3", "saved")["params/norm.bias"])


def counts(state: Any) -> list[int]:
    """Steps of the optimizer's parts, and of the state."""
    first = state.ranks[0]
    return [*(int(part.count) for part in first.opt.parts.values()), int(first.step)]


def test_weights_only() -> None:
    """The optimizer starts fresh, at step 0."""
    with sw.simulate(sw.Mesh(fsdp=3)):
        program = bound("zero3")
        state = program.init(sw.from_deepspeed(FIXTURES / "zero3", optimizer=False))
        assert counts(state) == [0, 0, 0]
        assert not any(value.any() for value in moments(state).values())
        saved = truth("zero3", "saved")
        assert all(torch.equal(weights(state)[p], saved[f"params/{p}"]) for p in ["norm.weight"])


def test_fresh_moments_have_no_steps() -> None:
    """Without its moments, Adam's count would correct a bias that is not there."""

    def read(path: Path) -> Any:
        return replace(read_deepspeed(path), slots={})

    with sw.simulate(sw.Mesh(fsdp=3)):
        program = bound("zero3")
        with pytest.raises(CheckpointError, match="missing in the checkpoint: 10"):
            program.init(FromFiles(FIXTURES / "zero3", read))
        with pytest.warns(UserWarning, match="10 keep the values of init"):
            state = program.init(FromFiles(FIXTURES / "zero3", read, partial=("opt/**",)))
        assert counts(state) == [0, 0, 3]


@pytest.mark.parametrize(("moves", "scale"), [([sw.loss_scale(64.0)], 512.0), ([], 1.0)])
def test_the_loss_scale(moves: list[Any], scale: float) -> None:
    """Of float16, into a program that scales; DeepSpeed trains in float16 on GPUs only."""

    def read(path: Path) -> Any:
        return replace(read_deepspeed(path), loss_scale=512.0)

    mesh = sw.Mesh(fsdp=3)
    with sw.simulate(mesh):
        plan = sw.plan(Tied(), mesh, sw.zero(3, "fsdp"), *moves)
        program = sw.lower(plan, mean_loss, optimizer()).bind()
        state = program.init(FromFiles(FIXTURES / "zero1", read))
        assert float(state.ranks[0].loss_scale.scale) == scale


# -- refusals -----------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A checkpoint that may be damaged."""
    return Path(shutil.copytree(FIXTURES / "zero3", tmp_path / "zero3"))


def test_a_missing_rank(copied: Path) -> None:
    """As many files as ranks, or none is read."""
    (copied / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 files(.*\n)*.*Fix: copy the files of all"):
        read_deepspeed(copied)


def test_a_missing_tag(copied: Path) -> None:
    """The tags that are there are named; one outside of the directory is none."""
    with pytest.raises(CheckpointError, match=r"no tag 'step9'; there are \['step3'\]"):
        read_deepspeed(copied, "step9")
    with pytest.raises(CheckpointError, match=r"no tag '\.\./zero3'"):
        read_deepspeed(copied, "../zero3")
    (copied / "latest").unlink()
    with pytest.raises(CheckpointError, match="no file `latest`"):
        read_deepspeed(copied)
    assert read_deepspeed(copied / "step3").step == 3


def test_a_part_of_tensor_parallelism(copied: Path) -> None:
    """Its files hold parts of parameters that this does not put together."""
    one = copied / "step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(one, one.with_name("zero_pp_rank_0_mp_rank_01_optim_states.pt"))
    with pytest.raises(CheckpointError, match=r"second tensor-parallel rank(.*\n)*.*universal"):
        read_deepspeed(copied)


class Evil:
    """Runs when it is unpickled."""

    ran: list[int] = []  # noqa: RUF012 - what a test looks at

    def __reduce__(self) -> Any:
        return Evil.ran.append, (1,)


def test_loading_runs_nothing(copied: Path) -> None:
    """A class in the way is named, on every rank, and not made."""
    path = copied / "step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({"module": {}, "client": Evil()}, path)
    with (
        sw.simulate(sw.Mesh(fsdp=3)),
        pytest.raises(CheckpointError, match=r"without running code"),
    ):
        bound("zero3").init(sw.from_deepspeed(copied))
    assert Evil.ran == []


def test_a_truncated_file(copied: Path) -> None:
    """What ends early is no zip file."""
    path = copied / "step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(
        CheckpointError, match=r"not in torch.save's zip format(.*\n)*.*3,000 bytes"
    ):
        read_deepspeed(copied)
