"""What is exported is what transformers loads: the same logits, names and ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from tests.hf.zoo import ZOO, batches, build, loss_of

transformers = pytest.importorskip("transformers")

PLANS = {"replicated": [], "zero 3": [sw.zero(3, "fsdp")]}


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In eval mode, without the loss."""
    with torch.no_grad():
        given = {name: value for name, value in batch.items() if name != "labels"}
        return model.eval()(**given).logits


def loaded(kind: type[Any], path: Path, **options: Any) -> tuple[Any, Any]:
    """The model, and what transformers says about missing and unexpected names."""
    return kind.from_pretrained(
        path, output_loading_info=True, attn_implementation="eager", **options
    )


def assert_all_known(info: Any) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])


@pytest.mark.simulated
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("name", ZOO)
def test_transformers_loads_an_export(name: str, kind: str, tmp_path: Path) -> None:
    """After a step: no name is missing or left over, logits are equal, and it comes back."""
    model, data = build(name), batches(name)
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        plan = sw.plan(model, mesh, *PLANS[kind])
        program = sw.lower(plan, loss_of(name), sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        state, _ = program.step(state, program.shard_batch(data[0]))
        sw.export_safetensors(
            state, tmp_path / "out", config=model.config, dtype=torch.float64, max_file_bytes=60_000
        )
        trained = sw.to_global(state.params)
        back = program.init(sw.from_safetensors(tmp_path / "out"))
        got = sw.to_global(back.params)
        assert all(torch.equal(got[path], value) for path, value in trained.items())
    with torch.no_grad():
        for path, value in trained.items():
            model.get_parameter(path).copy_(value)
    options = {"experts_implementation": "eager"} if name == "mixtral" else {}
    read, info = loaded(type(model), tmp_path / "out", dtype=torch.float64, **options)
    assert_all_known(info)
    with torch.no_grad():  # tables that files do not have, made in float64 here and float32 there
        for path in read.state_dict().keys() ^ dict(read.named_buffers()).keys():
            if path in dict(read.named_buffers()):
                model.get_buffer(path).copy_(read.get_buffer(path))
    assert torch.equal(logits(read, data[1]), logits(model, data[1]))
    tied = {name for names in plan.infos for name in names.aliases}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert not tied & set(index["weight_map"])


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_transformers_saves_is_taken(name: str, tmp_path: Path) -> None:
    """Files of `save_pretrained`, of the base model too, with its first segment said."""
    model = build(name)
    model.save_pretrained(tmp_path / "whole")
    base = model.base_model
    base.save_pretrained(tmp_path / "base")
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = sw.lower(
            sw.plan(build(name), mesh, sw.zero(3, "fsdp")), loss_of(name), sw.optim.sgd(0.1)
        ).bind()
        got = sw.to_global(program.init(sw.from_safetensors(tmp_path / "whole")).params)
        assert all(torch.equal(value, model.get_parameter(path)) for path, value in got.items())
        partial = [] if "lm_head.weight" not in got else ["lm_head"]
        source = sw.from_safetensors(tmp_path / "base", partial=partial)
        with pytest.warns(UserWarning, match="was added to all names"):
            state = program.init(source, init=model._init_weights)
        got = sw.to_global(state.params)
        for path, value in got.items():
            if path != "lm_head.weight":
                assert torch.equal(value, model.get_parameter(path)), path


@pytest.mark.simulated
def test_a_meta_model_is_filled_from_files(tmp_path: Path) -> None:
    """No rank ever has the whole model: rotary tables are computed, all else is read."""
    model = build("llama").float()
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = ZOO["llama"]()
    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        program = sw.lower(
            sw.plan(empty, mesh, sw.zero(3, "fsdp")), loss_of("llama"), sw.optim.sgd(0.1)
        ).bind()
        state = program.init(sw.from_safetensors(tmp_path), init=empty._init_weights)
        want = sw.lower(
            sw.plan(model, mesh, sw.zero(3, "fsdp")), loss_of("llama"), sw.optim.sgd(0.1)
        ).bind()
        assert sw.fingerprint(state) == sw.fingerprint(want.init(sw.from_module(model)))
