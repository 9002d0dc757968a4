"""What `program.save` leaves on disk on simulated ranks, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwise as sw
from shardwise.sharding.checkpoint import folders
from shardwise.sharding.checkpoint.folders import Draft, Target, resolve
from shardwise.sharding.checkpoint.latest import latest, read_manifest
from shardwise.sharding.checkpoint.verify import verify
from shardwise.sharding.checkpoint.zipped import ALIGN
from shardwise.sharding.errors import CheckpointError, DonatedStateError, StateError
from shardwise.sharding.simulation import Simulated

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

MIXED = sw.precision(params="bfloat16", compute="float32", reduce="float32")
PLANS = {
    "replicated": (sw.Mesh(dp=3), ()),
    "zero3": (sw.Mesh(fsdp=3), (sw.zero(3, "fsdp"),)),
    "hybrid": (sw.Mesh(dp=2, fsdp=2), (sw.zero(3, "fsdp"), sw.zero(1, "dp"))),
    "masters": (sw.Mesh(fsdp=2), (sw.zero(1, "fsdp"), MIXED)),
    "frozen": (sw.Mesh(fsdp=2), (sw.zero(3, "fsdp"), sw.freeze("0"))),
}


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 5), nn.Linear(5, 1))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def trained(name: str = "zero3", steps: int = 1) -> tuple[sw.Program, Any]:
    torch.manual_seed(0)
    mesh, transforms = PLANS[name]
    program = sw.lower(sw.plan(Model(), mesh, *transforms), loss_fn, sw.optim.adamw(0.01)).bind()
    state = program.init(0)
    for _ in range(steps):
        state, _ = program.step(state, program.shard_batch(torch.randn(12, 6)))
    return program, state


def expected(state: Any) -> dict[str, Tensor]:
    """The global tensors behind a lifted state, without the code under test."""
    whole = {f"params/{path}": one for path, one in sw.to_global(state.params).items()}
    whole |= {f"params/{path}": one for path, one in sw.to_global(state.master).items()}
    for moment in ("mu", "nu"):
        moments = sw.to_global(getattr(state.opt, moment))
        whole |= {f"opt/{moment}/{path}": one for path, one in moments.items()}
    first = state.ranks[0]
    whole |= {f"buffers/{path}": one for path, one in first.buffers.items()}
    return whole | {"opt/count": first.opt.count, "step": first.step, "seed": first.seed}


def assembled(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, from `torch.load` of each of its chunks."""
    found: dict[str, Tensor] = {}
    for stored in read_manifest(path).tensors:
        whole = torch.zeros(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            with (path / chunk.file).open("rb") as file:
                file.seek(chunk.entry[0])
                part_path = path.parent / "entry"
                part_path.write_bytes(file.read(chunk.entry[1]))
            part = torch.load(part_path, weights_only=True)
            assert part.dtype == stored.dtype
            assert chunk.start % ALIGN == 0
            spans = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(at, at + size) for at, size in spans)] = part
            part_path.unlink()
        found[stored.name] = whole
    return found


@pytest.mark.parametrize("name", PLANS)
def test_every_global_tensor_is_saved_once_under_its_name(name: str, tmp_path: Path) -> None:
    with sw.simulate(PLANS[name][0]):
        program, state = trained(name)
        program.save(tmp_path / "step-1", state)
        wanted = expected(state)
    found = assembled(tmp_path / "step-1")
    assert verify(tmp_path / "step-1").faults == ()
    assert wanted.keys() <= found.keys()
    for path, value in wanted.items():
        assert found[path].dtype == value.dtype, path
        assert torch.equal(found[path], value), path
    if name == "frozen":
        assert not [one for one in found if one.startswith("opt/") and "/0." in one]
    manifest = read_manifest(tmp_path / "step-1")
    assert manifest.step == 1
    assert sw.Plan.from_json(manifest.plan) == program.lowered.plan
    paths = [info.path for info in program.lowered.plan.infos]
    assert [one.of for one in manifest.tensors[: len(paths)]] == paths


def test_plain_dcp_reads_it(tmp_path: Path) -> None:
    with sw.simulate(PLANS["masters"][0]):
        program, state = trained("masters")
        program.save(tmp_path / "step-1", state)
        master = sw.to_global(state.master)
        moments = sw.to_global(state.opt.mu)
    target = {
        "params": {path: torch.zeros_like(one) for path, one in master.items()},
        "opt": {"mu": {path: torch.zeros_like(one) for path, one in moments.items()}},
    }
    dcp.load(target, checkpoint_id=str(tmp_path / "step-1"), no_dist=True)
    assert all(torch.equal(target["params"][path], one) for path, one in master.items())
    assert all(torch.equal(target["opt"]["mu"][path], one) for path, one in moments.items())
    dcp_to_torch_save(str(tmp_path / "step-1"), str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = Model()
    model.load_state_dict({**whole["params"], **whole["buffers"]}, strict=True)
    assert torch.equal(model[0].weight, master["0.weight"])
    assert int(whole["step"]) == 1


def test_files_are_as_large_as_the_tensors(tmp_path: Path) -> None:
    """CKP-9: parts are views of flat buckets, and are not saved with the whole bucket."""
    with sw.simulate(sw.Mesh(fsdp=2)):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        plan = sw.plan(model, sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        program.save(tmp_path / "step-0", program.init(0))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-0").iterdir()}
    assert nbytes < sum(sizes.values()) < 1.1 * nbytes
    assert sizes["__0_0.distcp"] < 0.55 * nbytes


def test_a_second_save_has_two_votes_and_no_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes: list[int] = []
    gather = Simulated.gather_objects

    def counted(self: Simulated, value: Any) -> list[Any]:
        votes.append(self.rank)
        return gather(self, value)

    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        before = [(*program.last_collectives,), expected(state)]
        monkeypatch.setattr(Simulated, "gather_objects", counted)
        program.save(tmp_path / "a", state)
        assert sorted(votes) == sorted([0, 1, 2] * 3)
        votes.clear()
        program.save(tmp_path / "b", state)
        assert sorted(votes) == sorted([0, 1, 2] * 2)
        assert program.last_collectives == before[0]
        after = expected(state)
    assert all(torch.equal(after[path], one) for path, one in before[1].items())
    one, other = (assembled(tmp_path / name) for name in "ab")
    assert all(torch.equal(other[path], value) for path, value in one.items())


# -- what is in the way -------------------------------------------------------------------------


def test_a_complete_checkpoint_is_kept_unless_told(tmp_path: Path) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(tmp_path / "one", state)
        state, _ = program.step(state, program.shard_batch(torch.randn(12, 6)))
        with pytest.raises(CheckpointError, match="There is a complete checkpoint") as caught:
            program.save(tmp_path / "one", state)
        assert str(tmp_path / "one") in str(caught.value)
        assert "Fix: save under another name, or save(..., overwrite=True)" in str(caught.value)
        assert caught.value.numbers["files"] == 5
        assert (read_manifest(tmp_path / "one").step, os.listdir(tmp_path)) == (1, ["one"])
        program.save(tmp_path / "one", state, overwrite=True)
        assert (read_manifest(tmp_path / "one").step, os.listdir(tmp_path)) == (2, ["one"])
        assert verify(tmp_path / "one").faults == ()


def test_overwriting_works_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(tmp_path / "one", state)
        state, _ = program.step(state, program.shard_batch(torch.randn(12, 6)))
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
        program.save(tmp_path / "one", state, overwrite=True)
        assert (read_manifest(tmp_path / "one").step, os.listdir(tmp_path)) == (2, ["one"])


def test_a_crash_between_two_renames_leaves_the_old_one_to_be_found(tmp_path: Path) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(tmp_path / "one", state)
        (tmp_path / "one").rename(tmp_path / ".one.old-dead.1")
        assert resolve(tmp_path / "one") == tmp_path / ".one.old-dead.1"
        found = latest(tmp_path)
        assert (found.step, found.path) == (1, tmp_path / ".one.old-dead.1")
        assert program.restore(tmp_path / "one").step.ranks[0] == 1
        program.save(tmp_path / "one", state)
    assert os.listdir(tmp_path) == ["one"]
    assert resolve(tmp_path / "one") == tmp_path / "one"


def test_a_leftover_is_replaced_and_files_of_others_are_not(tmp_path: Path) -> None:
    """CKP-7a: the same on all ranks; no rank waits."""
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "__0_0.distcp").write_bytes(b"torn")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter-1.tex").write_text("It was a dark night")
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(tmp_path / "partial", state)
        assert verify(tmp_path / "partial").faults == ()
        with pytest.raises(CheckpointError, match="it holds 1 files of others") as caught:
            program.save(tmp_path / "thesis", state, overwrite=True)
    assert "chapter-1.tex" in str(caught.value)
    assert "Fix: save under another name, or move these files away" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["partial", "thesis"]
    assert os.listdir(tmp_path / "thesis") == ["chapter-1.tex"]


def test_what_dead_jobs_left_is_removed_and_what_live_ones_write_is_not(tmp_path: Path) -> None:
    dead, live = (Target(tmp_path / "one", token) for token in ("dead.1", "live.1"))
    Draft(dead).release()
    (dead.temporary / "__0_0.distcp").write_bytes(b"torn")
    writing = Draft(live)
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(tmp_path / "one", state)
    assert sorted(os.listdir(tmp_path)) == [".one.saving-live.1", "one"]
    writing.discard()
    assert os.listdir(tmp_path) == ["one"]


def test_a_link_is_not_saved_over(tmp_path: Path) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(tmp_path / "one", state)
        (tmp_path / "link").symlink_to("one")
        with pytest.raises(CheckpointError, match="is a symbolic link") as caught:
            program.save(tmp_path / "link", state, overwrite=True)
    assert "it points to one" in str(caught.value)
    assert "Fix: save under a name of its own" in str(caught.value)
    assert verify(tmp_path / "one").faults == ()
    assert sorted(os.listdir(tmp_path)) == ["link", "one"]


# -- disks that are full, and that nobody may write ---------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KiB, where this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    """CKP-8: the older checkpoint stays, nothing else does, and the next save works."""
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(small_disk / "old", state)
        (small_disk / "others").write_bytes(bytes(shutil.disk_usage(small_disk).free - 20_000))
        with pytest.raises(
            CheckpointError, match=r"write of \d+ bytes failed with ENOSPC"
        ) as caught:
            program.save(small_disk / "new", state)
        assert "No space left on device" in str(caught.value)
        assert str(small_disk / ".new.saving-") in str(caught.value)
        assert "free space, or save elsewhere; then save again" in str(caught.value)
        assert caught.value.numbers["cause"] == "ENOSPC"
        assert sorted(os.listdir(small_disk)) == ["old", "others"]
        assert latest(small_disk).path == small_disk / "old"
        assert verify(small_disk / "old").faults == ()
        (small_disk / "others").unlink()
        program.save(small_disk / "new", state)
    assert verify(small_disk / "new").faults == ()


def test_a_file_system_that_is_read_only(small_disk: Path) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(small_disk / "old", state)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(CheckpointError, match="create of 0 bytes failed with EROFS") as caught:
            program.save(small_disk / "new", state)
        assert "save to a file system that is not mounted read-only" in str(caught.value)
        assert program.restore(small_disk / "old").step.ranks[0] == 1


# -- what is wrong with a save ------------------------------------------------------------------


def test_a_dead_or_foreign_state_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.step(state, program.shard_batch(torch.randn(12, 6)))
        with pytest.raises(DonatedStateError):
            program.save(tmp_path / "one", state)
        plan = sw.plan(Model(), PLANS["zero3"][0])
        other = sw.lower(plan, loss_fn, sw.optim.adamw(0.01)).bind()
        with pytest.raises(StateError):
            program.save(tmp_path / "one", other.init(0))
    assert os.listdir(tmp_path) == []


def test_one_rank_that_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        program.save(tmp_path / "old", state)
        ranks = [one.with_extra(object() if r == 1 else None) for r, one in enumerate(state.ranks)]
        with pytest.raises(CheckpointError) as caught:
            program.save(tmp_path / "new", sw.Lifted(ranks))
        assert "extra" in str(caught.value)
        assert os.listdir(tmp_path) == ["old"]
        program.save(tmp_path / "new", state)
    assert verify(tmp_path / "new").faults == ()


def test_states_of_different_steps_are_not_one_checkpoint(tmp_path: Path) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        program, state = trained()
        kept = state.clone()
        later, _ = program.step(state, program.shard_batch(torch.randn(12, 6)))
        mixed = sw.Lifted([kept.ranks[0], later.ranks[1], kept.ranks[2]])
        with pytest.raises(CheckpointError, match="Ranks do not save the same") as caught:
            program.save(tmp_path / "one", mixed)
    assert caught.value.numbers == {"rank": 1, "steps": (1, 2, 1)}
    assert "step 2" in str(caught.value)
    assert "Fix: pass the same path, the state of the same step" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_an_interrupted_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is no vote: it ends the job, and the directory of the draft goes."""
    with sw.simulate(sw.Mesh(fsdp=1)):
        plan = sw.plan(Model(), sw.Mesh(fsdp=1))
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(0)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.save(tmp_path / "one", state)
        assert os.listdir(tmp_path) == []


def test_debug_mode_saves_too(tmp_path: Path) -> None:
    with sw.simulate(PLANS["zero3"][0]):
        mesh, transforms = PLANS["zero3"]
        plan = sw.plan(Model(), mesh, *transforms)
        program = sw.lower(plan, loss_fn, sw.optim.adamw(0.01)).bind(debug=True)
        program.save(tmp_path / "one", program.init(0))
    assert verify(tmp_path / "one").faults == ()


@pytest.mark.gpu
def test_a_state_on_a_device_is_saved_through_pinned_blocks(tmp_path: Path) -> None:
    plan = sw.plan(Model(), sw.Mesh(fsdp=1), sw.zero(3, "fsdp"))
    program = sw.lower(plan, loss_fn, sw.optim.adamw(0.01)).bind(device="cuda")
    state, _ = program.step(program.init(0), torch.randn(12, 6, device="cuda"))
    program.save(tmp_path / "one", state)
    found = assembled(tmp_path / "one")
    assert verify(tmp_path / "one").faults == ()
    for path, value in state.params.items():
        assert torch.equal(found[f"params/{path}"], value.to_local().cpu())
