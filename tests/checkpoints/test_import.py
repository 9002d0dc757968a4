"""Weights and optimizer state from safetensors, torch.save and DCP, on any plan."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.read import STAGE_BYTES, THREADS
from shardwise.sharding.checkpoint.safetensors_format import read_tensors
from shardwise.sharding.checkpoint.state_dicts import read_dcp
from shardwise.sharding.errors import CheckpointError
from shardwise.testing.echo import bind_alone
from shardwise.testing.ledger import measure
from tests.fixtures.tied import Tied, batch_of, mean_loss

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=3)


def bound(model: nn.Module, *moves: Any, chosen: Any = None) -> sw.Program:
    plan = sw.plan(model, MESH, *(moves or (sw.zero(3, "fsdp"),)))
    return sw.lower(plan, mean_loss, chosen or sw.optim.adamw(1e-2)).bind()


def other(seed: int = 1) -> Tied:
    """The model with other values, frozen layer and buffer included."""
    model = Tied()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.copy_(torch.randn(value.shape, generator=generator))
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a file holds: the tie once."""
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if name != "head.weight"
    }


def assert_taken(state: Any, want: dict[str, Tensor]) -> None:
    """Parameters and buffers are those of a file, bit for bit."""
    got = dict(sw.to_global(state.params)) | sw.to_global(state.buffers)
    got |= dict(sw.to_global(state.master))
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert torch.equal(got[path].double(), value.double()), path


def test_export_and_import_are_inverse(tmp_path: Path) -> None:
    """From one plan to another through several files."""
    model = other()
    with sw.simulate(MESH):
        state = bound(model).init(sw.from_module(model))
        sw.export_safetensors(state, tmp_path / "out", max_file_bytes=300)
        program = bound(Tied(), sw.zero(1, "fsdp"), sw.precision(params="bfloat16"))
        with pytest.raises(CheckpointError, match=r"layers.1.weight: float32 saved, bfloat16 here"):
            program.init(sw.from_safetensors(tmp_path / "out"))
        back = bound(Tied()).init(sw.from_safetensors(tmp_path / "out"), seed=5)
        assert_taken(back, tensors(model))
        assert int(back.ranks[0].step) == 0
        assert int(back.ranks[0].seed) == 5
        want = bound(model).init(sw.from_module(model), seed=5)
        assert sw.fingerprint(back) == sw.fingerprint(want)


def test_a_file_of_less_precision_is_exact(tmp_path: Path) -> None:
    """bfloat16 into float32 parameters; float32 into bfloat16 ones is asked for by cast=True."""
    half = {name: value.bfloat16() for name, value in tensors(other()).items()}
    save_file(half, tmp_path / "half.safetensors")
    save_file(tensors(other()), tmp_path / "full.safetensors")
    with sw.simulate(MESH):
        assert_taken(bound(Tied()).init(sw.from_safetensors(tmp_path / "half.safetensors")), half)
        with pytest.warns(UserWarning, match="without a master"):
            program = bound(Tied().bfloat16())
        with pytest.raises(CheckpointError, match=r"dtypes lose values: 8(.*\n)*.*cast=True"):
            program.init(sw.from_safetensors(tmp_path / "full.safetensors"))
        state = program.init(sw.from_safetensors(tmp_path / "full.safetensors", cast=True))
        assert_taken(state, half)


def test_one_report_of_all_that_does_not_fit(tmp_path: Path) -> None:
    """Missing, unexpected and misshapen tensors, on all ranks; `partial` allows by name."""
    given = tensors(other())
    del given["norm.bias"]
    given |= {"more": torch.ones(2), "norm.weight": torch.ones(7)}
    save_file(given, tmp_path / "model.safetensors")
    with sw.simulate(MESH):
        program = bound(Tied())
        with pytest.raises(CheckpointError) as caught:
            program.init(sw.from_safetensors(tmp_path))
        text = str(caught.value)
        assert caught.value.numbers["count"] == 3
        assert "missing in the checkpoint: 1\n    params/norm.bias" in text
        assert "unexpected in the checkpoint: 1\n    params/more" in text
        assert "norm.weight: (7,) saved, (6,) here" in text
        given["norm.weight"] = torch.ones(6)
        save_file(given, tmp_path / "model.safetensors")
        source = sw.from_safetensors(tmp_path, partial=["norm.bias", "more"])
        with pytest.warns(UserWarning, match=r"params/norm.bias(.*\n)*.*params/more"):
            state = program.init(source, seed=3)
        del given["more"]
        fresh = sw.to_global(program.init(3).params)["norm.bias"]
        assert_taken(state, given | {"norm.bias": fresh})


def test_copies_of_a_tie(tmp_path: Path) -> None:
    """TIE-2: equal copies are one; unequal ones are refused; the alias alone serves."""
    given = tensors(other())
    copy = {"head.weight": given["embed.weight"].clone()}
    save_file(given | copy, tmp_path / "equal.safetensors")
    copy["head.weight"][10, 5] += 1
    save_file(given | copy, tmp_path / "unequal.safetensors")
    only = {name: value for name, value in given.items() if name != "embed.weight"}
    save_file(only | {"head.weight": given["embed.weight"]}, tmp_path / "alias.safetensors")
    with sw.simulate(MESH):
        program = bound(Tied())
        for name in ("equal", "alias"):
            assert_taken(program.init(sw.from_safetensors(tmp_path / f"{name}.safetensors")), given)
        source = sw.from_safetensors(tmp_path / "unequal.safetensors")
        with pytest.raises(Exception, match=r"copies that differ") as caught:
            program.init(source)
        assert "params/head.weight differs from params/embed.weight" in str(caught.value)


def test_names_of_the_files(tmp_path: Path) -> None:
    """A first segment too much or too little is said; anything else needs rename=."""
    given = tensors(other())
    long = {f"model.{name}": value for name, value in given.items()}
    save_file(long, tmp_path / "long.safetensors")
    odd = {f"x.{n}" if "layers" in n else f"y.{n}": v for n, v in given.items()}
    save_file(odd, tmp_path / "odd.safetensors")
    with sw.simulate(MESH):
        program = bound(Tied())
        with pytest.warns(UserWarning, match=r"'model.' was left out of all names"):
            assert_taken(program.init(sw.from_safetensors(tmp_path / "long.safetensors")), given)
        with pytest.raises(CheckpointError, match="16 differences"):
            program.init(sw.from_safetensors(tmp_path / "odd.safetensors"))
        renamed = sw.from_safetensors(tmp_path / "odd.safetensors", rename=lambda name: name[2:])
        assert_taken(program.init(renamed), given)
        table = dict(zip(odd, given, strict=True))
        renamed = sw.from_safetensors(tmp_path / "odd.safetensors", rename=table)
        assert_taken(program.init(renamed), given)
        lost = sw.from_safetensors(tmp_path / "odd.safetensors", rename={"z": "norm.bias"})
        with pytest.raises(CheckpointError, match=r"1 tensors that are not there(.*\n)*.*z"):
            program.init(lost)
        twice = sw.from_safetensors(tmp_path / "odd.safetensors", rename=lambda _: "norm.bias")
        with pytest.raises(CheckpointError, match=r"Two tensors would be 'norm.bias'"):
            program.init(twice)


class Rotary(Tied):
    """With a buffer that files do not have, computed when the module is made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(3.0) + 1, persistent=False)


def test_buffers_that_files_do_not_have(tmp_path: Path) -> None:
    """BUF-1: they keep the module's values, and are in no file."""
    model = Rotary()
    with sw.simulate(MESH):
        program = bound(model)
        state = program.init(sw.from_module(model))
        sw.export_safetensors(state, tmp_path / "out")
        assert "inv_freq" not in {one.name for one in read_tensors(tmp_path / "out")}
        back = program.init(sw.from_safetensors(tmp_path / "out"))
        assert sw.fingerprint(back) == sw.fingerprint(state)
        assert torch.equal(sw.to_global(back.buffers)["inv_freq"], model.inv_freq)  # type: ignore[arg-type]


class Wide(nn.Module):
    """One large matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1024, 3072, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Nothing that is run here."""
        return self.body(tokens)


def test_a_rank_holds_its_shard_and_a_buffer(tmp_path: Path) -> None:
    """12 MB in the file, 4 MB of it on each of three ranks."""
    save_file({"body.weight": torch.ones(3072, 1024)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Wide()
    plan = sw.plan(model, MESH, sw.zero(3, "fsdp"))
    rank = bind_alone(sw.lower(plan, mean_loss, sw.optim.sgd(0.1)))
    state, used = measure(lambda: rank.init(sw.from_safetensors(tmp_path)))
    shard, stages = 4 * 2**20, THREADS * STAGE_BYTES
    assert state.nbytes >= shard
    assert shard <= used.peak <= shard + stages + 2**20


# -- damaged files ------------------------------------------------------------------------------


def header(path: Path, text: str, body: bytes = b"") -> Path:
    """A file with this header."""
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + body)
    return path


def test_damaged_safetensors(tmp_path: Path) -> None:
    """Nothing outside of a file or of its directory is read, and sizes are what shapes say."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"3 bytes cannot hold a header"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match=r"header cannot be read"):
        read_tensors(header(path, "[1, 2]"))
    entry = '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, %d]}}'
    with pytest.raises(CheckpointError, match=r"w of shape \(2,\) and torch.float32 has 12 bytes"):
        read_tensors(header(path, entry % 12, bytes(12)))
    with pytest.raises(CheckpointError, match=r"w would end at byte \d+ of \d+"):
        read_tensors(header(path, entry % 8, bytes(4)))
    with pytest.raises(CheckpointError, match=r"header cannot be read.*F99"):
        read_tensors(header(path, entry.replace("F32", "F99") % 8, bytes(8)))
    read_tensors(header(path, entry % 8, bytes(8)))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"not the name of a file in the directory"):
        read_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": path.name, "v": path.name}}))
    with pytest.raises(CheckpointError, match=r"1 tensors are listed, but not in their files"):
        read_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {}, "metadata": {}}))
    assert read_tensors(tmp_path) == ()
    index.write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone.safetensors(.*\n)*.*No such file"):
        read_tensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"can be told apart(.*\n)*.*found none"):
        read_tensors(tmp_path.parent)


# -- state dicts of torch -----------------------------------------------------------------------


def trained(steps: int = 2) -> tuple[Tied, torch.optim.AdamW]:
    """One process of plain torch."""
    model = other()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        mean_loss(model, batch_of(step)).backward()
        optimizer.step()
    return model, optimizer


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter, as `get_state_dict` of torch has it."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param)]: dict(state) for param, state in optimizer.state.items()}


def assert_goes_on(state: Any, program: sw.Program) -> None:
    """The next two steps are those of plain torch."""
    model, optimizer = trained()
    assert int(state.ranks[0].opt.count) == 2
    opt = sw.to_global(state.opt)
    for path, one in named(model, optimizer).items():
        assert torch.equal(opt.mu[path], one["exp_avg"])
        assert torch.equal(opt.nu[path], one["exp_avg_sq"])
    for step in (2, 3):
        state, _ = program.step(state, program.shard_batch(batch_of(step)))
    model, _ = trained(4)
    for path, value in sw.to_global(state.params).items():
        torch.testing.assert_close(value, model.get_parameter(path), rtol=1e-5, atol=1e-6)


def test_torch_save_with_an_optimizer(tmp_path: Path) -> None:
    """By number with an order, and by name; training goes on as torch's own would."""
    model, optimizer = trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(tree, tmp_path / "run.pt")
    tree["optimizer"] = {"state": named(model, optimizer)}
    torch.save(tree, tmp_path / "named.pt")
    order = [name for name, param in model.named_parameters() if param.requires_grad]
    with sw.simulate(MESH):
        program = bound(Tied())
        with pytest.raises(CheckpointError, match=r"0 names are known for number 0(.*\n)*.*order="):
            program.init(sw.from_torch_save(tmp_path / "run.pt"))
        assert_goes_on(program.init(sw.from_torch_save(tmp_path / "run.pt", order=order)), program)
        assert_goes_on(program.init(sw.from_torch_save(tmp_path / "named.pt")), program)


def test_torch_save_of_weights(tmp_path: Path) -> None:
    """A plain state dict; what cannot be read says why."""
    model = other()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    torch.save(model, tmp_path / "module.pt")
    torch.save({"w": torch.ones(2, 3).T}, tmp_path / "view.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with sw.simulate(MESH):
        program = bound(Tied())
        assert_taken(program.init(sw.from_torch_save(tmp_path / "weights.pt")), tensors(model))
        for name, text in {
            "list": r"holds no state dict(.*\n)*.*it holds list",
            "numbers": r"its keys are a",
            "module": r"without running code(.*\n)*.*tests.fixtures.tied.Tied",
            "view": r"do not lie in a row(.*\n)*.*strides \(1, 3\)",
            "old": r"not in torch.save's zip format(.*\n)*.*weights_only=True",
            "none": r"cannot be read(.*\n)*.*No such file",
        }.items():
            with pytest.raises(CheckpointError, match=text):
                program.init(sw.from_torch_save(tmp_path / f"{name}.pt"))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_dcp(tmp_path: Path) -> None:
    """What torch's DCP has written, with an optimizer by name; and weights alone."""
    model, optimizer = trained()
    optim = {"state": named(model, optimizer), "param_groups": [{"lr": 0.1}]}
    dcp.save({"model": model.state_dict(), "optim": optim}, checkpoint_id=tmp_path / "run")
    dcp.save(other().state_dict(), checkpoint_id=tmp_path / "weights")
    with sw.simulate(MESH):
        program = bound(Tied())
        assert_goes_on(program.init(sw.from_dcp(tmp_path / "run")), program)
        state = program.init(sw.from_dcp(tmp_path / "weights"))
        assert_taken(state, tensors(other()))


class Evil:
    """Runs when it is unpickled."""

    ran: list[int] = []  # noqa: RUF012 - what a test looks at

    def __reduce__(self) -> Any:
        return Evil.ran.append, (1,)


def test_metadata_of_dcp_runs_nothing(tmp_path: Path) -> None:
    """Its pickle may name the classes of DCP only."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"it needs (builtins.getattr|tests)"):
        read_dcp(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(torch.Size([1])))
    with pytest.raises(CheckpointError, match=r"state_dict_metadata"):
        read_dcp(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"No such file"):
        read_dcp(tmp_path)
    assert Evil.ran == []
