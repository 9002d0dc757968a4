"""Exports: what transformers and plain safetensors read back, and what refuses to be written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.safetensors_format import read_tensors
from shardwise.sharding.errors import CheckpointError, PatternError, StateError
from shardwise.testing.strategies import plans
from shardwise.transforms import exporting
from tests.fixtures.tied import Tied, batch_of, mean_loss

pytestmark = pytest.mark.simulated

PLANS: dict[str, Any] = {
    "replicated": (sw.Mesh(fsdp=2), []),
    "zero3": (sw.Mesh(fsdp=3), [sw.zero(3, "fsdp")]),
    "bf16": (sw.Mesh(fsdp=2), [sw.zero(2, "fsdp"), sw.precision(params="bfloat16")]),
    "hybrid": (sw.Mesh(dp=2, fsdp=2), [sw.zero(3, "fsdp")]),
}


def bound(model: nn.Module, name: str = "zero3") -> sw.Program:
    mesh, moves = PLANS[name]
    plan = sw.plan(model, mesh, *moves)
    return sw.lower(plan, mean_loss, sw.optim.adamw(1e-2)).bind()


def truth(state: Any) -> dict[str, Tensor]:
    """Masters where there are any, and buffers, gathered by other means."""
    first = state.ranks[0]
    found = {path: sw.to_global(state.params)[path] for path in first.params}
    if any(bucket.has_master for bucket in first.home.buckets):
        found |= dict(sw.to_global(state.master))
    return found | dict(first.buffers)


@pytest.mark.parametrize("name", PLANS)
def test_every_export_of_a_run_is_whole(name: str, tmp_path: Path) -> None:
    """CKP-10, TIE-2: at steps 1, 2 and 3, each key once, true shapes, the tie once, bits equal."""
    model = Tied()
    with sw.simulate(PLANS[name][0]):
        program = bound(model, name)
        state = program.init(sw.from_module(model))
        other = program.init(sw.from_module(model))
        for step in (1, 2, 3):
            state, _ = program.step(state, program.shard_batch(batch_of(step)))
            other, _ = program.step(other, program.shard_batch(batch_of(step)))
            out = tmp_path / f"out-{step}"
            sw.export_safetensors(state, out)
            want = truth(state)
            got = load_file(out / "model.safetensors")
            assert sorted(got) == sorted(want)
            assert "head.weight" not in got
            for path, value in want.items():
                assert got[path].dtype == value.dtype
                assert torch.equal(got[path], value), path
            missing, unexpected = Tied().load_state_dict(got, strict=False)
            assert (missing, unexpected) == (["head.weight"], [])
        assert sw.fingerprint(state) == sw.fingerprint(other)
    assert sorted(os.listdir(tmp_path)) == ["out-1", "out-2", "out-3"]


def test_files_are_cut_by_size_and_indexed(tmp_path: Path, monkeypatch: Any) -> None:
    """Several files, an index whose size is that of the tensors, many rounds; bits are the same."""
    monkeypatch.setattr(exporting, "ROUND_BYTES", 64)
    model = Tied()
    with sw.simulate(PLANS["zero3"][0]):
        state = bound(model).init(sw.from_module(model))
        sw.export_safetensors(state, tmp_path / "cut", max_file_bytes=200, dtype=torch.bfloat16)
        want = truth(state)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.numel() * 2 for value in want.values())
    assert list(index["weight_map"]) == list(want)
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    got: dict[str, Tensor] = {}
    for file in files:
        loaded = load_file(tmp_path / "cut" / file)
        assert sum(v.nbytes for v in loaded.values()) <= 200 or len(loaded) == 1
        got |= loaded
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value.bfloat16()) for name, value in want.items())
    assert {s.name: s.shape for s in read_tensors(tmp_path / "cut")} == {
        name: tuple(value.shape) for name, value in want.items()
    }


class Adapter(nn.Module):
    """A frozen matrix with a low-rank adapter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False).requires_grad_(requires_grad=False)
        self.A = nn.Parameter(torch.randn(2, 8))
        self.B = nn.Parameter(torch.randn(8, 2))
        self.register_buffer("inv_freq", torch.ones(3), persistent=False)
        self.register_buffer("seen", torch.tensor(7), persistent=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + x @ self.A.T @ self.B.T) * self.inv_freq.mean()  # type: ignore[operator]


def adapted() -> tuple[Adapter, sw.Program]:
    model = Adapter()
    plan = sw.plan(model, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    return model, sw.lower(plan, loss, sw.optim.sgd(0.1)).bind()


def test_what_is_exported(tmp_path: Path) -> None:
    """Trained parameters only; by pattern; by another name; buffers that modules save (BUF-1)."""
    with sw.simulate(sw.Mesh(fsdp=2)):
        model, program = adapted()
        state = program.init(sw.from_module(model))
        sw.export_safetensors(state, tmp_path / "all", names={"base.weight": "model.base.weight"})
        sw.export_safetensors(state, tmp_path / "adapter", trained=True)
        sw.export_safetensors(state, tmp_path / "b", where="B", names=lambda path: f"lora.{path}")
    whole = load_file(tmp_path / "all" / "model.safetensors")
    assert sorted(whole) == ["A", "B", "model.base.weight", "seen"]
    assert whole["seen"].item() == 7
    got = load_file(tmp_path / "adapter" / "model.safetensors")
    assert sorted(got) == ["A", "B"]
    assert torch.equal(got["A"], model.A)
    assert torch.equal(got["B"], model.B)
    with safe_open(tmp_path / "b" / "model.safetensors", "pt") as file:
        assert list(file.keys()) == ["lora.B"]
        assert file.metadata() == {"format": "pt"}


def test_refusals(tmp_path: Path) -> None:
    """Each leaves nothing behind, and no directory is touched that exists."""
    with sw.simulate(sw.Mesh(fsdp=2)):
        model, program = adapted()
        state = program.init(sw.from_module(model))
        (tmp_path / "there").mkdir()
        with pytest.raises(CheckpointError, match=r"something where.*(\n.*)*overwrite=True"):
            sw.export_safetensors(state, tmp_path / "there")
        with pytest.raises(CheckpointError, match=r"as 'x'.*(\n.*)*A and B"):
            sw.export_safetensors(state, tmp_path / "out", names=lambda _: "x")
        with pytest.raises(PatternError, match="matches no"):
            sw.export_safetensors(state, tmp_path / "out", where="nothing.here")
        with pytest.raises(CheckpointError, match=r"config= cannot.*(\n.*)*int"):
            sw.export_safetensors(state, tmp_path / "out", config=3)
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match=r"ENOTDIR|EEXIST"):
            sw.export_safetensors(state, tmp_path / "file" / "out")
        part = state.ranks[0]
        with pytest.raises(StateError, match=r"parts of all ranks(.*\n)*.*rank 0 of 2"):
            sw.export_safetensors(part, tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["file", "there"]
        sw.export_safetensors(state, tmp_path / "there", overwrite=True, config={"a": 1})
    assert json.loads((tmp_path / "there" / "config.json").read_text()) == {"a": 1}
    assert sorted(os.listdir(tmp_path)) == ["file", "there"]


def test_leftovers_of_dead_exports(tmp_path: Path) -> None:
    """What a killed process has left goes; what one that lives is writing stays."""
    host = socket.gethostname()
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (f"{host}-{dead.pid}", f"{host}-{os.getppid()}", f"other-{dead.pid}"):
        (tmp_path / f".out.exporting-{name}").mkdir()
    model = Tied()
    with sw.simulate(PLANS["zero3"][0]):
        sw.export_safetensors(bound(model).init(sw.from_module(model)), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == sorted(
        [f".out.exporting-{host}-{os.getppid()}", f".out.exporting-other-{dead.pid}", "out"]
    )


def test_ranks_that_export_different_things(tmp_path: Path) -> None:
    """The state of another step on one rank."""
    model = Tied()
    with sw.simulate(PLANS["zero3"][0]):
        program = bound(model)
        state = program.init(sw.from_module(model))
        newer, _ = program.step(
            program.init(sw.from_module(model)), program.shard_batch(batch_of(0))
        )
        mixed = sw.Lifted([*state.ranks[:2], newer.ranks[2]])
        with pytest.raises(CheckpointError, match=r"different things(.*\n)*.*rank 2: step 1"):
            sw.export_safetensors(mixed, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: Any) -> None:
    """Rank 0 fails in the middle; the others take part to the end and raise too."""
    model = Tied()

    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with sw.simulate(PLANS["zero3"][0]):
        state = bound(model).init(sw.from_module(model))
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"ENOSPC"):
            sw.export_safetensors(state, tmp_path / "out")
        monkeypatch.undo()
        assert os.listdir(tmp_path) == []
        sw.export_safetensors(state, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


# -- properties ---------------------------------------------------------------------------------


@settings(max_examples=15)
@given(plans(Tied()), plans(Tied()), st.sampled_from([1, 100, 10_000]), st.sampled_from([32, 4096]))
def test_any_plan_exports_to_any_plan(
    first: sw.Plan, second: sw.Plan, file_bytes: int, round_bytes: int
) -> None:
    """What one plan exports another one imports, bit for bit, however files and rounds are cut."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        with sw.simulate(first.mesh):
            program = sw.lower(first, mean_loss, sw.optim.sgd(0.1)).bind()
            state = program.init(sw.from_module(Tied()))
            with mock.patch.object(exporting, "ROUND_BYTES", round_bytes):
                sw.export_safetensors(state, out, max_file_bytes=file_bytes)
        with sw.simulate(second.mesh):
            program = sw.lower(second, mean_loss, sw.optim.sgd(0.1)).bind()
            got = program.init(sw.from_safetensors(out))
            assert sw.fingerprint(got) == sw.fingerprint(program.init(sw.from_module(Tied())))
