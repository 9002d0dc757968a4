"""`shardwise checkpoint`: what each command prints and returns, on checkpoints that were saved."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import shardwise as sw
from shardwise.cli import app
from shardwise.sharding.checkpoint.differences import PIECE_BYTES, boxes, differences
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.checkpoint.manifest import MANIFEST
from tests.checkpoints import runs

pytestmark = pytest.mark.simulated


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, args)])


def output(*args: str | Path, code: int = 0) -> str:
    result = call(*args)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 on two ranks, and step 2 on three ranks of another level."""
    root = tmp_path_factory.mktemp("saved")
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = runs.lowered(mesh).bind()
        state = program.init(0)
        for step in range(2):
            state = runs.train(program, state, range(step, step + 1))
            program.save(str(root / f"step-{step + 1}"), state)
    mesh = sw.Mesh(dp=3)
    with sw.simulate(mesh):
        program = runs.lowered(mesh, 1).bind()
        program.save(str(root / "other"), program.restore(str(root / "step-2")))
    return root


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def damage(path: Path, name: str) -> None:
    """Change the last element of a tensor's first chunk."""
    chunk = read_manifest(path).by_name[name].chunks[0]
    with (path / chunk.file).open("r+b") as file:
        file.seek(chunk.start + chunk.box.numel * 8 - 1)
        old = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old[0] ^ 1]))


def test_ls_lists_checkpoints_and_why_others_are_none(copy: Path) -> None:
    (copy / "step-1" / "__0_0.distcp").unlink()
    (copy / "torn").mkdir()
    (copy / ".step-3.saving-ab.1").mkdir()
    lines = output("ls", copy).splitlines()
    rows = {line.split()[0]: line for line in lines[1:]}
    assert list(rows) == ["other", "step-1", "step-2", "step-3", "torn"]
    nbytes = f"{read_manifest(copy / 'step-2').nbytes:,}"
    assert re.search(rf" 2  .* {nbytes} +2  complete", rows["step-2"])
    assert re.search(rf" 2  .* {nbytes} +3  complete", rows["other"])
    assert sum("newest" in row for row in rows.values()) == 1
    assert "incomplete: __0_0.distcp is missing" in rows["step-1"]
    assert f"incomplete: it has no {MANIFEST}" in rows["torn"]
    assert "a save that is running, or was cut off" in rows["step-3"]


def test_ls_of_one_checkpoint_of_none_and_of_no_directory(saved: Path, tmp_path: Path) -> None:
    assert "step-2" in output("ls", saved / "step-2")
    assert "There is no checkpoint" in output("ls", tmp_path)
    said = output("ls", tmp_path / "nowhere", code=1)
    assert "There is no such directory." in said
    assert "sw.Checkpointer" in said


def test_ls_shows_a_checkpoint_that_was_set_aside(copy: Path) -> None:
    (copy / "step-2").rename(copy / ".step-2.old-ab.1")
    shutil.rmtree(copy / "other")
    assert re.search(r"step-2 .*complete, newest", output("ls", copy))


def test_show_prints_the_plan_and_every_tensor(saved: Path) -> None:
    said = output("show", saved / "step-2")
    manifest = read_manifest(saved / "step-2")
    assert "Mesh(fsdp=2)" in said
    for stored in manifest.tensors:
        row = rf"{re.escape(stored.name)} +{re.escape(str(stored.shape))} .* {stored.nbytes:,} +\d"
        assert re.search(row, said), stored.name
    total = f"{len(manifest.tensors)} tensors, {manifest.nbytes:,} bytes"
    assert "step 2, saved " in said
    assert total in said


def test_show_of_what_is_no_checkpoint_is_a_message(tmp_path: Path) -> None:
    said = output("show", tmp_path, code=1)
    assert f"it has no {MANIFEST}" in said
    assert "Traceback" not in said


def test_verify_finds_one_changed_bit(copy: Path) -> None:
    assert "no fault" in output("verify", copy / "step-2")
    damage(copy / "step-2", "params/0.weight")
    said = output("verify", copy / "step-2", code=1)
    assert "params/0.weight" in said
    assert "checksum" in said


def test_checkpoints_of_one_state_do_not_differ_on_other_plans(saved: Path) -> None:
    count = len(read_manifest(saved / "other").tensors)
    assert f"{count} names, no difference" in output("diff", saved / "step-2", saved / "other")


def test_diff_gives_the_largest_difference_of_each_tensor(saved: Path) -> None:
    said = output("diff", saved / "step-1", saved / "step-2", code=1)
    assert re.search(r"^step +1 of 1 elements +1\b", said, re.MULTILINE)
    assert re.search(r"^params/3.weight +45 of 45 elements +\d", said, re.MULTILINE)
    assert "seed" not in said  # it is equal


def test_diff_names_what_only_one_has_and_what_is_of_another_kind(tmp_path: Path) -> None:
    def save(name: str, model: nn.Module, value: Tensor) -> Path:
        mesh = sw.Mesh(fsdp=1)
        program = sw.lower(sw.plan(model, mesh), runs.loss_fn, sw.optim.sgd(0.1))
        with sw.simulate(mesh):
            bound = program.bind()
            state = bound.init(0)
            states = [replace(one, extra_value={"at": value}) for one in state.ranks]
            bound.save(str(tmp_path / name), sw.Lifted(states))
        return tmp_path / name

    one = save("one", nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)), torch.tensor(1))
    other = save("other", nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2).double()), torch.tensor(2))
    found = {each.name: each for each in differences(one, other)}
    assert found["params/0.weight"].what == "shapes (9, 6) and (7, 6)"
    assert found["params/1.bias"].what.startswith("dtypes float32 and float64; ")
    assert found["extra"].what == "the values beside the tensors differ"
    assert not found["step"].what


def test_diff_tells_bits_and_numbers_apart(copy: Path) -> None:
    """A damaged element is not compared: the checksum says so."""
    damage(copy / "other", "params/0.weight")
    said = output("diff", copy / "step-2", copy / "other", code=1)
    assert "params/0.weight cannot be read: the checksum" in said


def test_a_long_tensor_is_compared_in_pieces(saved: Path) -> None:
    stored = read_manifest(saved / "step-2").by_name["params/0.weight"]
    rows = 3 * PIECE_BYTES // 800
    long = replace(stored, shape=(rows, 100), chunks=())
    parts = list(boxes(long))
    assert sum(box.numel for box in parts) == rows * 100
    assert max(box.numel * 8 for box in parts) <= PIECE_BYTES


def weights(path: Path) -> dict[str, Any]:
    """What the run of `saved` ends with, by restoring it."""
    mesh = sw.Mesh(fsdp=1)
    with sw.simulate(mesh):
        (state,) = runs.lowered(mesh, 0).bind().restore(str(path)).ranks
    found = {name: value.to_local() for name, value in state.params.items()}
    return {**found, **state.buffer_values}


def test_convert_to_safetensors(saved: Path, tmp_path: Path) -> None:
    said = output("convert", saved / "other", tmp_path / "out", "--to", "safetensors")
    have, want = load_file(tmp_path / "out" / "model.safetensors"), weights(saved / "step-2")
    assert have.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(have[name], value), name
    assert f"{len(want)} tensors" in said


def test_convert_casts_and_selects(saved: Path, tmp_path: Path) -> None:
    options = ("--to", "safetensors", "--dtype", "bfloat16", "--where", "3")
    output("convert", saved / "other", tmp_path / "out", *options)
    have, want = load_file(tmp_path / "out" / "model.safetensors"), weights(saved / "step-2")
    assert set(have) == {"3.weight", "3.bias"}
    for name, value in have.items():
        assert torch.equal(value, want[name].bfloat16()), name


def test_convert_to_a_state_dict_that_the_model_loads(saved: Path, tmp_path: Path) -> None:
    output("convert", saved / "other", tmp_path / "out.pt", "--to", "torch")
    have = torch.load(tmp_path / "out.pt", weights_only=True)
    runs.model().double().load_state_dict(have)
    for name, value in weights(saved / "step-2").items():
        assert torch.equal(have[name], value), name
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.pt"]


def test_tied_weights_are_in_a_state_dict_by_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, batch: Tensor) -> Tensor:
            return self.head(self.embed(batch))

    mesh = sw.Mesh(fsdp=2)
    lowered = sw.lower(sw.plan(Tied(), mesh, sw.zero(3, "fsdp")), runs.loss_fn, sw.optim.sgd(0.1))
    with sw.simulate(mesh):
        program = lowered.bind()
        program.save(str(tmp_path / "in"), program.init(0))
    output("convert", tmp_path / "in", tmp_path / "out.pt", "--to", "torch")
    have = torch.load(tmp_path / "out.pt", weights_only=True)
    Tied().load_state_dict(have)
    assert have["head.weight"].data_ptr() == have["embed.weight"].data_ptr()
    output("convert", tmp_path / "in", tmp_path / "out", "--to", "safetensors")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 1


def test_a_conversion_replaces_nothing(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "out.pt").write_text("mine")
    said = output("convert", saved / "other", tmp_path / "out.pt", "--to", "torch", code=1)
    assert "There is something where the state dict would be." in said
    assert "it has 4 bytes" in said
    assert "Fix: choose another name, or remove it" in said
    assert (tmp_path / "out.pt").read_text() == "mine"


def test_a_damaged_checkpoint_is_not_converted(copy: Path, tmp_path: Path) -> None:
    damage(copy / "other", "params/3.weight")
    for kind in ("torch", "safetensors"):
        said = output("convert", copy / "other", tmp_path / "out", "--to", kind, code=1)
        assert "params/3.weight cannot be read: the checksum" in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]


def test_a_full_disk_is_a_message_and_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    run = "from shardwise.cli import app; app()"
    args = ["checkpoint", "convert", str(saved / "other"), str(tmp_path / "out"), "--to", "torch"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", sys.executable, "-Bc", run, *args],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "failed with EFBIG" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--to", "dcp"), "There is no conversion from shardwise to dcp."),
        (("--to", "shardwise"), "There is no conversion from shardwise to shardwise."),
        (("--to", "torch", "--dtype", "int8"), "--dtype int8 is no floating-point dtype."),
        (("--to", "torch", "--dtype", "nothing"), "torch has no such dtype: nothing"),
        (("--to", "torch", "--where", "nowhere"), "nowhere"),
    ],
)
def test_what_convert_refuses(
    saved: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    said = output("convert", saved / "other", tmp_path / "out", *options, code=1)
    assert words in said
    assert "Fix: " in said
    assert not (tmp_path / "out").exists()


def test_convert_says_what_it_cannot_recognise(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "weights.bin").write_bytes(b"1")
    said = output("convert", tmp_path / "in", tmp_path / "out", "--to", "torch", code=1)
    assert "It cannot be told what is to be converted." in said
    assert "weights.bin" in said
    assert "Fix: say what it is with --from" in said
