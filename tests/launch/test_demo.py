"""The parts of the demo that need no engine: text, model, sampling, tables and the command."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import shardwise as sw
from shardwise.cli import app
from shardwise.demo import engine
from shardwise.demo.gpt import GPT, GPTConfig, generate
from shardwise.demo.options import Options, Outcome, Traffic
from shardwise.demo.show import progress, summary
from shardwise.demo.text import TextError, draw_batch, standard_library, unigram_entropy

pytestmark = pytest.mark.abstract

SMALL = GPTConfig(layers=2, width=16, heads=2, context=8)


def write_files(root: Path, names: list[str], size: int) -> None:
    for index, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([index]) * size)


def test_text_comes_in_name_order_and_holds_out_every_20th_file(tmp_path: Path) -> None:
    names = [f"m{index:02}.py" for index in range(40)]
    write_files(tmp_path, names, 5000)
    write_files(tmp_path, ["test/a.py", "site-packages/x/b.py", "pkg/tests/c.py", "z.txt"], 5000)
    corpus = standard_library(tmp_path)
    assert corpus.num_files == 40
    assert corpus.held_out.tolist() == [19] * 5000 + [39] * 5000
    assert corpus.train[::5000].tolist() == [index for index in range(40) if index not in (19, 39)]


def test_a_python_without_source_is_named(tmp_path: Path) -> None:
    write_files(tmp_path, ["a.py", "b.py"], 10)
    with pytest.raises(TextError, match="2 source files with 20 bytes") as caught:
        standard_library(tmp_path)
    assert caught.value.numbers == {"num_files": 2, "num_bytes": 20}


def test_this_machine_has_enough_text() -> None:
    corpus = standard_library()
    assert len(corpus.train) > 1_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.train) < 0.2


def test_batches_depend_only_on_the_seed() -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(4)
    one, same, other = (draw_batch(data, rows=4, context=6, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one["tokens"], same["tokens"])
    assert not torch.equal(one["tokens"], other["tokens"])
    assert torch.equal(one["tokens"][:, 1:], one["targets"][:, :-1])


def test_entropy_by_its_formula() -> None:
    data = torch.tensor([7] * 3 + [200], dtype=torch.uint8)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy(data) == pytest.approx(expected, abs=1e-12)


def test_the_model_has_one_to_three_million_parameters() -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPT().parameters())
    assert 1_000_000 <= count <= 3_000_000


def test_no_position_sees_a_later_one() -> None:
    model = GPT(SMALL)
    tokens = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_a_saved_model_writes_the_same_text(tmp_path: Path) -> None:
    model = GPT(SMALL)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    loaded = GPT(SMALL)
    loaded.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    texts = [generate(m, b"de", length=20, temperature=0.7, seed=1) for m in (model, loaded)]
    assert texts[0] == texts[1]
    assert texts[0][:2] == b"de"
    assert len(texts[0]) == 22


def test_without_a_terminal_progress_is_a_few_lines() -> None:
    out = io.StringIO()
    with progress(Console(file=out, width=200), steps=45, predicted_bytes=2048) as advance:
        for step in range(1, 46):
            advance(step=step, loss=2.5, tokens_per_second=1234.0, rest_bytes=2048)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["20/45", "40/45", "45/45"]
    assert "loss 2.500  1,234 tokens/s  rest 2/2 KiB" in lines[0]


def test_the_live_bar_fits_a_terminal_of_80_columns() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    with progress(console, steps=200, predicted_bytes=3_996_688) as advance:
        for step in range(1, 201):
            advance(step=step, loss=2.5, tokens_per_second=12345.0, rest_bytes=3_996_688)
    last = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", out.getvalue()).splitlines()[-1]
    for word in ("200/200", "loss 2.500", "12,345 tokens/s", "rest 3,903/3,903 KiB", "0:00:0"):
        assert word in last


def test_the_table_shows_a_difference_from_the_prediction() -> None:
    outcome = Outcome(
        ranks=4,
        train_loss=2.0,
        eval_loss=2.125,
        unigram_nats=3.25,
        tokens_per_second=9876.5,
        predicted_bytes=1000,
        measured_bytes=1001,
        predicted_step=2000,
        measured_step=2002,
        plain_step=7000,
        predicted=Traffic(10, 5000),
        executed=Traffic(11, 5500),
        same_collectives=False,
        largest_difference=0.0,
        weights="runs/demo/weights.safetensors",
        sample="",
        reference="split reference",
    )
    out = io.StringIO()
    Console(file=out, width=120).print(summary(outcome))
    text = out.getvalue()
    for word in ("2.125", "3.250", "1,001", "predicted 1,000", "5,500", "ANOTHER"):
        assert word in text
    for word in ("2,002", "predicted 2,000", "predicted 7,000"):
        assert word in text
    assert re.search(r"largest weight difference.* 0\.0 .*split reference", text)


def test_the_command_checks_its_options() -> None:
    run = CliRunner().invoke
    assert run(app, ["demo", "--zero", "4"]).exit_code == 2
    assert run(app, ["demo", "--ranks", "0"]).exit_code == 2
    assert "--check" in run(app, ["demo", "--help"], terminal_width=200).output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--mesh", "tp"], "'tp' is not AXIS=SIZE, each axis once"),
        (["--mesh", "tp=2,tp=2"], "'tp=2' is not AXIS=SIZE, each axis once"),
        (["--mesh", "tp=two"], "'tp=two' is not AXIS=SIZE"),
        (["--mesh", "pp=2,tp=2"], "'pp' is no axis of the demo: tp cuts layers, others split"),
        (["--mesh", "fsdp=2", "--sequence"], "needs an axis tp; --mesh is fsdp=2"),
    ],
)
def test_a_mesh_that_the_demo_does_not_have(given: list[str], words: str) -> None:
    told = CliRunner().invoke(app, ["demo", *given])
    assert told.exit_code == 2
    assert words in " ".join(re.sub(r"\x1b\[[0-9;]*m|[^ -~]", " ", told.output).split())


def test_a_mesh_that_does_not_fit_the_ranks_fails_before_any_starts() -> None:
    told = CliRunner().invoke(app, ["demo", "--mesh", "fsdp=2,tp=3", "--ranks", "4"])
    assert told.exit_code == 1
    for word in ("MeshError", "Mesh(fsdp=2, tp=3)", "world size 4", "2 * 3 == 6; 4 % 6 == 4."):
        assert word in told.output + told.stderr


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tp": 2}, {"tp": 4}, {"replica": 2, "dp": 2}])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_mesh_and_options_make_a_plan(axes: dict[str, int], sequence: bool) -> None:
    """ZeRO is over `fsdp`, else over the last axis that splits the batch, if there is one."""
    options = Options(sequence=sequence and "tp" in axes, remat=True, accumulate=2)
    plan = engine.make_plan(sw.Mesh(**axes), options)
    split = [axis for axis in axes if axis != "tp"]
    assert plan.batch == tuple(split)
    assert plan.params["layers.1.norm1.weight"].mesh_axes == tuple(split[-1:])
    assert set(plan.tensor.axes) == set(axes) - set(split)
    if "tp" in axes:
        assert plan.tensor.ints["layers.0.attention.heads"] == 8 // axes["tp"]
        assert plan.tensor.axes["tp"].sequence == sequence
        assert not plan.tensor.guessed


@pytest.mark.parametrize(
    ("given", "fix"),
    [("x", "'x' is not STEP or STEP:RANK"), ("5:b", "'5:b' is not STEP"), ("5", "--checkpoint")],
)
def test_kill_at_needs_a_step_and_something_to_go_on_from(given: str, fix: str) -> None:
    checkpoint = [] if given == "5" else ["--checkpoint", "runs/x"]
    told = CliRunner().invoke(app, ["demo", "--kill-at", given, *checkpoint])
    assert told.exit_code == 2
    assert fix in " ".join(re.sub(r"\x1b\[[0-9;]*m|[^ -~]", " ", told.output).split())
