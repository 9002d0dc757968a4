"""The table of a plan, word for word, and its bytes against `torch.chunk`."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from torch import nn

from shardwise.sharding.describe import format_bytes, rest_bytes_per_rank
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Transform, plan
from shardwise.sharding.spec import Spec, local_range
from shardwise.transforms.compose import tree_at
from shardwise.transforms.zero import freeze, keep_gathered, shard_optimizer, zero
from tests.sharding import toys
from tests.sharding.toys import MESH, Tiny

pytestmark = pytest.mark.abstract

TABLE = """\
path                       shape    axes   params      grads       opt              compute  at rest
scale                      ()              whole       whole       whole            whole        4 B
embed.weight               (10, 8)  d0 d1  d0 d1/fsdp  d0 d1/fsdp  d0 d1/fsdp       whole       80 B
layers.{0..2}.norm.weight  (8,)     d0     d0/fsdp     d0/fsdp     d0/(fsdp dp)     whole       24 B
layers.{0..2}.norm.bias    (8,)     d0     d0/fsdp     d0/fsdp     d0/(fsdp dp)     whole       24 B
layers.{0..2}.up.weight    (12, 8)  d0 d1  d0 d1/fsdp  d0 d1/fsdp  d0 d1/(fsdp dp)  whole      288 B
layers.{0..2}.up.bias      (12,)    d0     d0/fsdp     d0/fsdp     d0/fsdp          whole       36 B
layers.{0..2}.down.weight  (8, 12)  d0 d1  d0/fsdp d1  d0/fsdp d1  d0/(fsdp dp) d1  whole      288 B
norm.weight                (8,)     d0     d0/fsdp     d0/fsdp     d0/fsdp          whole        8 B
norm.bias                  (8,)     d0     d0/fsdp     d0/fsdp     d0/fsdp          whole        8 B
head.weight                (10, 8)  d0 d1  d0 d1/fsdp  -           -                whole       80 B

Mesh(dp=2, fsdp=4)   20 parameters, 837 elements, 1 frozen   3 units
batch over dp, fsdp   prefetch 0   kept gathered: layers.{0..2}
at rest per rank: 840 B (optimizer moments: see lower)"""


def test_the_table() -> None:
    laid = plan(
        Tiny(),
        MESH,
        zero(3, "fsdp"),
        shard_optimizer(("fsdp", "dp"), where="layers.*"),
        freeze("head"),
        keep_gathered("layers.*"),
    )
    assert str(laid) == TABLE


def test_the_table_depends_on_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    laid = plan(Tiny(), MESH, zero(3, "fsdp"))
    text = str(laid)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(laid) == text
    assert text.isascii()
    assert "\x1b" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_paths_with_brackets_are_not_markup() -> None:
    model = nn.Module()
    model.add_module("[bold]", nn.Linear(2, 2))
    assert "[bold].weight" in str(plan(model, MESH))


def test_layers_that_differ_have_lines_of_their_own() -> None:
    text = str(plan(Tiny(), MESH, zero(3, "fsdp", where="layers.1")))
    assert "layers.{0,2}.up.weight" in text
    assert "layers.1.up.weight" in text


def test_uneven_cuts_show_their_padding() -> None:
    text = str(plan(nn.Linear(5, 7), MESH, zero(3, "fsdp")))
    assert "d0/fsdp d1 pad 1" in text
    assert "pad" not in str(plan(nn.Linear(8, 8), MESH, zero(3, "fsdp")))


@given(toys.models, toys.meshes, toys.recipes)
def test_bytes_at_rest_are_those_of_the_largest_chunk(
    model: nn.Module, mesh: Mesh, recipe: Transform
) -> None:
    """The master costs nothing where, on every rank, its rows are among those of the parameter."""
    laid = plan(model, mesh, recipe)
    params = dict(model.named_parameters())
    for info in laid.infos:
        specs = [laid.params[info.path]]
        if info.path in laid.opt and not is_part(laid.opt[info.path], specs[0], info.shape, mesh):
            specs.append(laid.opt[info.path])
        total = 0
        for spec in specs:
            block = params[info.path].detach()
            for dim in range(block.ndim):
                block = block.chunk(mesh.product(spec.dim_axes(dim)), dim)[0]
            total += block.numel() * block.element_size()
        assert rest_bytes_per_rank(laid.derived, info) == total


def is_part(fine: Spec, coarse: Spec, shape: tuple[int, ...], mesh: Mesh) -> bool:
    for coords, dim in itertools.product(map(mesh.coords, range(mesh.size)), range(len(shape))):
        inner = set(range(*local_range(fine, shape, mesh, coords, dim)))
        if not inner <= set(range(*local_range(coarse, shape, mesh, coords, dim))):
            return False
    return True


def test_a_master_of_another_dtype_counts_beside_the_parameter() -> None:
    model = nn.Linear(8, 4, bias=False).to(torch.bfloat16)
    laid = plan(model, MESH, zero(1, "fsdp"), tree_at("opt", "weight", "d0/fsdp d1"))
    assert rest_bytes_per_rank(laid.derived, laid.infos[0]) == 4 * 8 * 2 + 8 * 4


def test_the_total_is_the_sum_of_the_lines() -> None:
    laid = plan(Tiny(), Mesh(fsdp=2), zero(3, "fsdp"))
    total = sum(rest_bytes_per_rank(laid.derived, info) for info in laid.infos)
    assert f"at rest per rank: {format_bytes(total)}" in str(laid)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_bytes_are_written_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_no_axis_and_no_unit_print_too() -> None:
    text = str(plan(nn.Linear(2, 2), Mesh(fsdp=1)))
    assert "0 units\nbatch over fsdp" in text
    lines = text.splitlines()
    assert len(list(itertools.takewhile(bool, lines))) == 3
