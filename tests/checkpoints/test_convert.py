"""`shardwise checkpoint convert`, from what others have saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import shardwise as sw
from shardwise.cli import app
from shardwise.sharding.checkpoint.latest import read_manifest
from tests.checkpoints.test_deepspeed import FIXTURES, PLANS, bound, optimizer, truth
from tests.fixtures.tied import Tied

pytestmark = pytest.mark.simulated

COPIES = ("embed.weight", "head.weight")


def convert(*args: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", "convert", *map(str, args)])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def start(path: Path) -> Path:
    """A template: step 0 of the program that the fixtures were trained by."""
    with sw.simulate(PLANS["one rank"][0]):
        program = bound("one rank")
        program.save(path, program.init(7))
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("template") / "start")


def restored(path: Path, plan: str = "zero3") -> tuple[str, dict[str, Any]]:
    """Fingerprint and parameters after a restore."""
    with sw.simulate(PLANS[plan][0]):
        state = bound(plan).restore(path)
        return sw.fingerprint(state), dict(sw.to_global(state.params))


@pytest.mark.parametrize("case", ["zero1", "zero2_bf16", "zero3"])
def test_a_run_of_deepspeed_becomes_what_init_takes_from_it(
    case: str, template: Path, tmp_path: Path
) -> None:
    options = ("--from", "deepspeed", "--to", "shardwise", "--template", template)
    said = convert(FIXTURES / case, tmp_path / "out", *options)
    with sw.simulate(PLANS["zero3"][0]):
        state = bound("zero3").init(sw.from_deepspeed(FIXTURES / case), seed=7)
        want = sw.fingerprint(state)
    assert read_manifest(tmp_path / "out").step == 3
    assert restored(tmp_path / "out")[0] == want
    lines = [line for line in said.splitlines() if line.startswith("from the template")]
    assert len(lines) == 2
    assert all(line.endswith("/learning_rate") for line in lines)
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output


def test_masters_of_deepspeed_become_safetensors(tmp_path: Path) -> None:
    """What is looked at tells that it is DeepSpeed's."""
    convert(FIXTURES / "zero3_bf16", tmp_path / "out", "--to", "safetensors")
    have = load_file(tmp_path / "out" / "model.safetensors")
    saved, frozen = truth("zero3_bf16", "saved"), truth("zero3_bf16", "frozen")
    want = {k.removeprefix("params/"): v for k, v in saved.items() if k.startswith("params/")}
    assert want.keys() | frozen.keys() <= have.keys()
    for name, value in want.items():
        assert have[name].dtype == torch.float32
        assert torch.equal(have[name], value), name
    for name, value in frozen.items():
        assert torch.equal(have[name], value.to(have[name].dtype)), name


def test_weights_alone_start_the_optimizer_afresh(template: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    values = {n: torch.randn_like(p) for n, p in Tied().named_parameters()}
    save_file(values, tmp_path / "in.safetensors")
    options = ("--to", "shardwise", "--template", template)
    said = convert(tmp_path / "in.safetensors", tmp_path / "out", *options)
    assert "from the template: " in said
    with sw.simulate(PLANS["zero3"][0]):
        program = bound("zero3")
        source = sw.from_safetensors(tmp_path / "in.safetensors", partial="table")
        with pytest.warns(UserWarning, match="1 keep the values of init"):
            want = sw.fingerprint(program.init(source, seed=7))
    found, params = restored(tmp_path / "out")
    assert found == want
    for name, value in values.items():
        assert torch.equal(params[name], value), name


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_state_dicts_become_safetensors_and_checkpoints(
    kind: str, template: Path, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    model = Tied()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    values = {name: value for name, value in model.state_dict().items() if name != COPIES[1]}
    if kind == "torch":
        torch.save(values, tmp_path / "in")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.save({"model": values}, checkpoint_id=tmp_path / "in", no_dist=True)
    convert(tmp_path / "in", tmp_path / "plain", "--to", "safetensors")
    have = load_file(tmp_path / "plain" / "model.safetensors")
    assert have.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(have[name], value), name
    convert(tmp_path / "in", tmp_path / "out", "--to", "shardwise", "--template", template)
    params = restored(tmp_path / "out")[1]
    for name in params:
        assert torch.equal(params[name], values[name]), name


def test_copies_of_a_tie_that_differ_are_refused(template: Path, tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in Tied().state_dict().items()}
    values[COPIES[1]][0, 0] += 1
    save_file(values, tmp_path / "in.safetensors")
    options = ("--to", "shardwise", "--template", template)
    said = convert(tmp_path / "in.safetensors", tmp_path / "out", *options, code=1)
    assert "1 tied tensors are stored in copies that differ." in said
    assert COPIES[1] in said
    assert "Fix: store them once, or make the copies equal" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors"]


def test_what_is_missing_is_an_error(template: Path, tmp_path: Path) -> None:
    values = {n: p.detach().clone() for n, p in Tied().named_parameters() if n != "norm.bias"}
    save_file(values, tmp_path / "in.safetensors")
    options = ("--to", "shardwise", "--template", template)
    said = convert(tmp_path / "in.safetensors", tmp_path / "out", *options, code=1)
    assert "params/norm.bias" in said
    assert not (tmp_path / "out").exists()


def test_a_template_is_needed_and_is_of_step_0(tmp_path: Path) -> None:
    case = FIXTURES / "zero1"
    said = convert(case, tmp_path / "out", "--to", "shardwise", code=1)
    assert "A shardwise checkpoint needs a --template." in said
    assert "Fix: program.save(path, program.init(0)), then --template path" in said
    mesh = PLANS["one rank"][0]
    with sw.simulate(mesh):
        program = bound("one rank", optimizer())
        program.save(tmp_path / "late", program.init(sw.from_deepspeed(case)))
    options = ("--to", "shardwise", "--template", tmp_path / "late")
    said = convert(case, tmp_path / "out", *options, code=1)
    assert "The template is not the start of a program." in said
    assert "it is of step 3" in said
    assert "Fix: save program.init(0) and pass that" in said
    assert not (tmp_path / "out").exists()
