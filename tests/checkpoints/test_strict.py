"""What does not fit is refused in one report; what is named in `partial` may be missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.checkpoint.latest import read_manifest
from shardwise.sharding.errors import CheckpointError, PatternError
from tests.transforms.carried import square

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    """Some layers of one size, a head, and a buffer."""

    def __init__(self, count: int = 2, head: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(count))
        self.head = nn.Linear(4, head, dtype=dtype)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.head(x)


def program(
    module: nn.Module, *moves: sw.Transform, optimizer: Any = None, mesh: sw.Mesh = MESH
) -> sw.Program:
    plan = sw.plan(module, mesh, sw.zero(3, "fsdp"), *moves)
    return sw.lower(plan, square, optimizer or sw.optim.adamw(1e-2)).bind()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two layers, one step of AdamW."""
    with sw.simulate(MESH):
        made = program(Layers())
        state, _ = made.step(made.init(7), made.shard_batch(X))
        made.save(tmp_path / "saved", state)
    return tmp_path / "saved"


def test_more_and_fewer_layers_are_told_both_ways(saved: Path) -> None:
    with sw.simulate(MESH):
        for count, kind in ((3, "missing"), (1, "unexpected")):
            with pytest.raises(CheckpointError) as caught:
                program(Layers(count)).restore(saved)
            error = caught.value
            layer = "2" if count == 3 else "1"
            names = {
                f"{at}/layers.{layer}.{leaf}"
                for at in ("params", "opt/mu", "opt/nu")
                for leaf in ("weight", "bias")
            }
            assert set(error.numbers[kind]) == names
            assert error.numbers["count"] == 6
            assert error.numbers["step"] == 1
            assert f"{kind} in the checkpoint: 6" in str(error)
            assert f"params/layers.{layer}.weight" in str(error)
            assert "partial=[" in error.fix


def test_a_report_lists_everything_at_once(saved: Path) -> None:
    class Other(Layers):
        def __init__(self) -> None:
            super().__init__(1, head=5)
            self.more = nn.Linear(4, 4)
            self.shift = torch.ones(4, dtype=torch.int64)

    with sw.simulate(MESH), pytest.raises(CheckpointError) as caught:
        program(Other()).restore(saved)
    numbers = caught.value.numbers
    assert len(numbers["missing"]) == len(numbers["unexpected"]) == 6
    assert numbers["shapes"][0] == "params/head.weight: (3, 4) saved, (5, 4) here"
    assert len(numbers["shapes"]) == 6
    assert numbers["dtypes"] == ("buffers/shift: float32 saved, int64 here",)
    text = str(caught.value)
    assert f"{numbers['count']} differences; nothing was loaded" in text
    for line in ("shapes differ: 6", "dtypes lose values: 1", "and 1 more", str(saved)):
        assert line in text
    assert "cast=True" in caught.value.fix


def test_the_same_report_on_every_rank(saved: Path) -> None:
    """All ranks fail in the same words; each has its own exception."""
    with sw.simulate(MESH) as world:
        made = program(Layers(3))
        ranks = made._ranks

        def attempt(rank: int) -> str:
            with pytest.raises(CheckpointError) as caught:
                ranks[rank].init(sw.from_checkpoint(saved))
            return str(caught.value)

        first, second = world.run(attempt)
    assert first == second


def test_partial_keeps_the_programs_own_values(saved: Path) -> None:
    with sw.simulate(MESH):
        larger = program(Layers(3))
        fresh = larger.init(11)
        with pytest.warns(UserWarning, match=r"restored in part(.*\n)*.*6 are missing and keep"):
            state = larger.init(sw.from_checkpoint(saved, partial="layers.2"), seed=11)
        old = program(Layers()).restore(saved)
        params, mu = sw.to_global(state.params), sw.to_global(state.opt.mu)
        for path, value in params.items():
            source = fresh if path.startswith("layers.2") else old
            assert torch.equal(value, sw.to_global(source.params)[path]), path
        assert not mu["layers.2.weight"].any()
        assert mu["layers.1.weight"].any()
        assert sw.to_global(state.step) == 1
        # Fewer layers: what is too much stays on disk.
        with pytest.warns(UserWarning, match="6 are not in the program and are ignored"):
            small = program(Layers(1)).restore(saved, partial=["layers.1"])
        assert "layers.1.weight" not in small.ranks[0].params
        # The saved seed is the seed, and makes what is missing, if none is given.
        with pytest.warns(UserWarning, match="restored in part"):
            again = larger.restore(saved, partial="layers.2")
        assert torch.equal(
            sw.to_global(again.params)["layers.2.weight"],
            sw.to_global(larger.init(7).params)["layers.2.weight"],
        )


def test_patterns_of_names_negation_and_nothing(saved: Path) -> None:
    with sw.simulate(MESH):
        sgd = program(Layers(), optimizer=sw.optim.sgd(0.1))
        with pytest.raises(CheckpointError, match="unexpected in the checkpoint: 12"):
            sgd.restore(saved)
        with pytest.warns(UserWarning, match="12 are not in the program"):
            state = sgd.restore(saved, partial="opt/**")
        assert sw.to_global(state.step) == 1
        with pytest.raises(CheckpointError) as caught:
            sgd.restore(saved, partial=("opt/**", "~opt/mu/head.*"))
        assert set(caught.value.numbers["unexpected"]) == {
            "opt/mu/head.weight",
            "opt/mu/head.bias",
        }
        with pytest.raises(PatternError, match=r"'layer\.7' matches no name") as wrong:
            sgd.restore(saved, partial="layer.7")
        assert wrong.value.numbers["pattern"] == "layer.7"
        assert "'opt/\\*\\*'".replace("\\", "") in str(wrong.value)


def test_dtypes_widen_freely_and_narrow_on_request(saved: Path, tmp_path: Path) -> None:
    with sw.simulate(MESH):
        wide = program(Layers(dtype=torch.float64))
        state = wide.restore(saved)
        old = program(Layers()).restore(saved)
        for path, value in sw.to_global(state.params).items():
            assert torch.equal(value, sw.to_global(old.params)[path].double())
        state, _ = wide.step(state, wide.shard_batch(X.double()))
        wide.save(tmp_path / "wide", state)
        with pytest.raises(CheckpointError, match="dtypes lose values: 18") as caught:
            program(Layers()).restore(tmp_path / "wide")
        assert caught.value.numbers["dtypes"][0].endswith("float64 saved, float32 here")
        there = program(Layers()).restore(tmp_path / "wide", cast=True)
        for path, value in sw.to_global(there.params).items():
            assert torch.equal(value, sw.to_global(state.params)[path].float())


def test_what_the_report_says_before_anything_is_read(saved: Path) -> None:
    plan = sw.plan(Layers(), sw.Mesh(fsdp=4), sw.zero(3, "fsdp"), sw.freeze("head"))
    lowered = sw.lower(plan, square, sw.optim.adamw(1e-2))
    report = sw.from_checkpoint(saved).into(lowered)
    assert report.step == 1
    assert set(report.left) == {
        f"opt/{at}/head.{leaf}" for at in ("mu", "nu") for leaf in ("weight", "bias")
    }
    # A row of 4 and a bias of 1, three times, of two layers; of the head a column of 3, and one of
    # three biases; the rest whole.
    whole = 4 * 4 + 8 + 8 + 8 + 8 + 6 * 8  # buffer, count, rate, seed, step, loss scale
    layers = 2 * 3 * (4 * 4 + 4)
    assert report.read_bytes == whole + layers + 3 * 4 + 4
    assert sw.from_checkpoint(saved).into(lowered, rank=3).read_bytes == whole + layers + 3 * 4
    text = str(report)
    assert f"reads {report.read_bytes:,}" in text
    assert "4 are left behind" in text


def test_no_checkpoint_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with sw.simulate(MESH), pytest.raises(CheckpointError, match="no complete") as caught:
        program(Layers()).restore(missing)
    assert str(missing) in caught.value.where


def test_damage_is_an_error_on_all_ranks(saved: Path) -> None:
    """Of what rank 1 alone reads."""
    manifest = read_manifest(saved)
    chunk = manifest.by_name["params/head.weight"].chunks[-1]
    file = saved / chunk.file
    with file.open("r+b") as out:
        out.seek(chunk.start + 2)
        out.write(b"\xff\xff")
    with sw.simulate(MESH) as world:
        ranks = program(Layers())._ranks

        def attempt(rank: int) -> str:
            with pytest.raises(CheckpointError) as caught:
                ranks[rank].init(sw.from_checkpoint(saved))
            return str(caught.value)

        first, second = world.run(attempt)
    assert first == second
    assert "params/head.weight cannot be read: the checksum of its block 0 is" in first
    assert f"{file}, byte {chunk.start:,}" in first


def counting(first: Any) -> Any:
    """SGD that counts in Python."""
    plain = sw.optim.sgd(0.1)

    def init(params: dict[str, Tensor]) -> Any:
        return {"plain": plain.init(params), "calls": first}

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        updates, inner = plain.update(grads, state["plain"], params, **extra)
        return updates, {"plain": inner, "calls": state["calls"] + 1}

    return sw.optim.GradientTransform(init, update)


def test_python_values_of_an_optimizer_are_restored_or_refused(tmp_path: Path) -> None:
    with sw.simulate(MESH):
        made = program(Layers(), optimizer=counting(0))
        state = made.init(0)
        for _ in range(3):
            state, _ = made.step(state, made.shard_batch(X))
        made.save(tmp_path / "saved", state)
        assert made.restore(tmp_path / "saved").ranks[1].opt["calls"] == 3
        with pytest.raises(CheckpointError) as caught:
            program(Layers(), optimizer=counting(0.5)).restore(tmp_path / "saved")
        assert caught.value.numbers["values"] == ("opt/calls: saved as int, here float",)
        assert "values differ in kind: 1" in str(caught.value)
        with pytest.raises(
            CheckpointError, match=r"unexpected in the checkpoint: 3(.*\n)*.*opt/calls"
        ):
            program(Layers(), optimizer=sw.optim.sgd(0.1)).restore(tmp_path / "saved")


def test_fewer_groups_than_were_saved_are_told(tmp_path: Path) -> None:
    def grouped(*labels: str) -> Any:
        parts = {label: sw.optim.adamw(1e-2) for label in labels}
        return sw.optim.partition(parts, {"head": "head"}, otherwise=labels[-1])

    with sw.simulate(MESH):
        made = program(Layers(), optimizer=grouped("head", "rest"))
        made.save(tmp_path / "saved", made.init(0))
        with pytest.raises(CheckpointError) as caught:
            program(Layers(), optimizer=grouped("head")).restore(tmp_path / "saved")
        lost = caught.value.numbers["unexpected"]
        assert any("rest" in name and name.endswith("layers.0.weight") for name in lost)
        missing = caught.value.numbers["missing"]
        assert any("head" in name and name.endswith("layers.0.weight") for name in missing)


class Pair(nn.Module):
    """Two layers that are one unit or two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_counts_that_differ_cannot_become_the_count_of_one_group(tmp_path: Path) -> None:
    """One layer begins to train later; then both are to be stepped as one group."""
    adam = sw.optim.from_torch(torch.optim.Adam, lr=1e-2)
    module = nn.Sequential(Pair(), nn.Linear(4, 2))

    def made(*moves: sw.Transform, units: list[str] | None = None) -> sw.Program:
        plan = sw.plan(module, MESH, sw.zero(3, "fsdp"), *moves, units=units)
        return sw.lower(plan, square, adam).bind()

    def steps(state: Any) -> list[float]:
        told = sw.to_global(state.opt.steps)
        return [float(told[f"{path}.weight"]) for path in ("0.a", "0.b", "1")]

    with sw.simulate(MESH):
        first, apart, one = made(sw.freeze("0.a")), made(units=["0.a", "0.b"]), made()
        state, _ = first.step(first.init(0), first.shard_batch(X))
        first.save(tmp_path / "1", state)
        state = apart.restore(tmp_path / "1")
        assert steps(state) == [0, 1, 1]
        state, _ = apart.step(state, apart.shard_batch(X))
        apart.save(tmp_path / "2", state)
        assert steps(apart.restore(tmp_path / "2")) == [1, 2, 2]
        with pytest.raises(CheckpointError, match="2 tensors are stored in copies") as caught:
            one.restore(tmp_path / "2")
        assert "and 3 more: one number of ['1.0', '2.0']" in str(caught.value)
        # Where they agree one number stands for all.
        assert steps(one.restore(tmp_path / "1")) == [1, 1, 1]


class Positions(nn.Module):
    """A table that follows from the model, and is not saved by it."""

    def __init__(self, length: int, *, persistent: bool = False) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        table = torch.arange(float(length))
        self.register_buffer("table", table, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) + self.table[1]


def test_a_table_that_modules_do_not_save_may_be_longer(tmp_path: Path) -> None:
    with sw.simulate(MESH):
        made = program(Positions(3))
        state, _ = made.step(made.init(0), made.shard_batch(X))
        made.save(tmp_path / "saved", state)
        with pytest.warns(UserWarning, match=r"1 are missing and keep(.*\n)*.*buffers/table"):
            there = program(Positions(5)).restore(tmp_path / "saved")
        assert sw.to_global(there.buffers)["table"].tolist() == [0, 1, 2, 3, 4]
        want = sw.to_global(state.params)
        assert all(torch.equal(v, want[p]) for p, v in sw.to_global(there.params).items())
        with pytest.raises(CheckpointError, match=r"buffers/table: \(3,\) saved, \(5,\) here"):
            program(Positions(5, persistent=True)).restore(tmp_path / "saved")
