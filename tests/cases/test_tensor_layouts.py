"""CKP-2, UNE-2 and CLP-1 where tensor axes cut layers: column, row and whole weights, vocab 33."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.sharding.checkpoint.latest import read_manifest
from tests.cases.resumed import train
from tests.oracles.one_process import assert_same, one_process, sharded

AXES = {
    "embed.weight": "vocab embed",
    "up.weight": "mlp embed",
    "up.bias": "mlp",
    "down.weight": "embed mlp",
    "down.bias": "embed",
    "head.weight": "vocab embed",
}


ADAMW = sw.optim.adamw(1e-2, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


class Net(nn.Module):
    """A vocabulary of 33, a column and a row, and a norm that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.head = nn.Linear(4, 33, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def loss_fn(model: nn.Module, tokens: Tensor) -> sw.Mean:
    loss = sw.cross_entropy(model(tokens), tokens.roll(1, 1), reduction="sum")
    return sw.Mean(loss, tokens.numel())


def tokens(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 33, (4, 6), generator=generator) for _ in range(steps)]


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def plan_of(module: nn.Module, mesh: sw.Mesh, *more: sw.Transform) -> sw.Plan:
    """Tensor axes and data axes as the mesh has them."""
    steps = [sw.tensor_parallel("tp")] if "tp" in mesh else []
    steps += [sw.zero(3, "dp")] if "dp" in mesh else []
    return sw.plan(module, mesh, *steps, *more, axes=AXES)


def contents(state: Any) -> dict[str, Tensor]:
    """Parameters by their masters, moments, and steps."""
    masters = dict(sw.to_global(state.master))
    params = dict(sw.to_global(state.params))
    found = {f"params/{path}": masters.get(path, value) for path, value in params.items()}
    found |= {f"rounded/{path}": value for path, value in params.items() if masters}
    for name in ("mu", "nu"):
        values = sw.to_global(getattr(state.opt, name))
        found |= {f"{name}/{path}": value for path, value in values.items()}
    return found | {"step": sw.to_global(state.step), "count": sw.to_global(state.opt.count)}


def assert_bitwise(state: Any, want: dict[str, Tensor]) -> None:
    got = contents(state)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.simulated
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"tp": 4}, {"dp": 2, "tp": 4}])
def test_ckp_2_another_tensor_layout_with_masters(axes: dict[str, int], tmp_path: Path) -> None:
    """Weights in bfloat16 with float32 masters: masters, moments and steps come back in bits."""
    half = sw.precision(params="bfloat16", compute="bfloat16")
    module = net(torch.float32)

    def program_of(mesh: sw.Mesh) -> sw.Program:
        return sw.lower(plan_of(module, mesh, half), loss_fn, ADAMW).bind()

    first = sw.Mesh(dp=2, tp=2)
    with sw.simulate(first):
        program = program_of(first)
        state = train(program, program.init(sw.from_module(module)), tokens(3))
        program.save(tmp_path / "saved", state)
        want = contents(state)
        print_of = sw.fingerprint(state)
    assert sum(name.startswith("rounded/") for name in want) == len(AXES) + 2
    shapes = {one.name: one.shape for one in read_manifest(tmp_path / "saved").tensors}
    assert shapes["params/embed.weight"] == shapes["opt/mu/head.weight"] == (33, 4)
    mesh = sw.Mesh(**axes)
    with sw.simulate(mesh):
        there = program_of(mesh).restore(tmp_path / "saved")
        assert_bitwise(there, want)
        assert sw.fingerprint(there) == print_of
    assert want["step"] == want["count"] == 3


@pytest.mark.simulated
def test_ckp_2_two_ranks_to_one_to_two_to_four(tmp_path: Path) -> None:
    """Each state is that of the save before, and the export has 33 rows; training goes on alike."""
    module = net()
    one_file = one_process_after(module, tokens(4))
    want: dict[str, Tensor] = {}
    for number, ranks in enumerate([2, 1, 2, 4]):
        mesh = sw.Mesh(tp=ranks)
        with sw.simulate(mesh):
            plan = plan_of(module, mesh)
            program = sw.lower(plan, loss_fn, ADAMW).bind()
            if number:
                state = program.restore(tmp_path / f"{number - 1}")
                assert_bitwise(state, want)
            else:
                state = program.init(sw.from_module(module))
            state = train(program, state, [tokens(4)[number]])
            program.save(tmp_path / f"{number}", state)
            want = contents(state)
            sw.export_safetensors(state, tmp_path / f"export {number}")
        exported = load_file(tmp_path / f"export {number}" / "model.safetensors")
        assert exported["embed.weight"].shape == exported["head.weight"].shape == (33, 4)
        for path, value in exported.items():
            assert torch.equal(value, want[f"params/{path}"]), path
    for path, value in one_file.items():
        torch.testing.assert_close(want[f"params/{path}"], value, rtol=1e-9, atol=1e-11)


def one_process_after(module: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    return one_process(module, loss_fn, batches, adamw).params


def save_on_ranks(place: Path) -> tuple[str, dict[str, Tensor]]:
    program = sw.lower(plan_of(net(), sw.Mesh(tp=2)), loss_fn, ADAMW).bind()
    state = train(program, program.init(sw.from_module(net())), tokens(2))
    program.save(place, state)
    leaf = sw.to_global(state.params["embed.weight"])
    found = contents(state)
    assert torch.equal(leaf, found["params/embed.weight"])
    return sw.fingerprint(state), found


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_ckp_2_real_tensor_ranks_to_one(tmp_path: Path) -> None:
    told = sw.spawn(save_on_ranks, ranks=2, args=(tmp_path / "saved",), timeout=60)
    with sw.simulate(sw.Mesh(tp=1)):
        program = sw.lower(plan_of(net(), sw.Mesh(tp=1)), loss_fn, ADAMW).bind()
        state = program.restore(tmp_path / "saved")
        for fingerprint, found in told:
            assert fingerprint == sw.fingerprint(state)
            assert_bitwise(state, found)


# -- UNE-2 -------------------------------------------------------------------------------------


class Composed(nn.Module):
    """A column of 10 rows, 5 on each rank, and a row of 10 columns; transposed and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.transposed = nn.Parameter(torch.randn(7, 6).t())
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.down(torch.tanh(self.up(x)))) * self.frozen) @ self.transposed


COMPOSED_AXES = {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}
ROWS = {"on": 0, "pad": True}
COLUMNS = {"on": 1, "pad": True}
COMPOSED: dict[str, tuple[dict[str, int], list[sw.Transform]]] = {
    "rows over both": ({"dp": 2, "tp": 2}, [sw.zero(3, "dp", where="up.weight", **ROWS)]),
    "rows over both, tensor first": (
        {"tp": 2, "dp": 2},
        [sw.zero(3, "dp", where="up.weight", **ROWS)],
    ),
    "columns over both": ({"dp": 2, "tp": 2}, [sw.zero(3, "dp", where="down.weight", **COLUMNS)]),
    "moments only": ({"dp": 2, "tp": 2}, [sw.zero(1, "dp", where="up.weight", **ROWS)]),
    "rows of the transposed": (
        {"dp": 2, "tp": 2},
        [sw.zero(2, "dp", where="transposed", **COLUMNS)],
    ),
}


def squares(model: nn.Module, x: Tensor) -> sw.Mean:
    out = model(x)
    return sw.Mean(out.square().sum(), out.shape[0])


def composed_plan(module: nn.Module, kind: str) -> sw.Plan:
    axes, more = COMPOSED[kind]
    return sw.plan(
        module,
        sw.Mesh(**axes),
        sw.tensor_parallel("tp"),
        sw.zero(3, "dp"),
        *more,
        axes=COMPOSED_AXES,
    )


@pytest.mark.simulated
@pytest.mark.parametrize("kind", COMPOSED)
def test_une_2_a_block_of_five_rows_over_two_data_ranks(kind: str) -> None:
    """Three and two of each: outputs, gradients, weights and moments equal one process."""
    torch.manual_seed(0)
    module = Composed().double()
    plan = composed_plan(module, kind)
    data = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    got = sharded(module, plan, squares, data, ADAMW)
    assert_same(got, one_process(module, squares, data, adamw))
    assert "frozen" not in got.moments["mu"]
    assert torch.equal(got.params["frozen"], module.frozen)


@pytest.mark.simulated
def test_une_2_shapes_and_strides_are_those_of_the_whole() -> None:
    """Of DTensor leaves, at every stage; where torch has no placements, of what is joined."""
    for kind in COMPOSED:
        module = Composed().double()
        plan = composed_plan(module, kind)
        with sw.simulate(plan.mesh):
            program = sw.lower(plan, squares, ADAMW).bind()
            state = program.init(sw.from_module(module))
            batch = torch.randn(8, 6, dtype=torch.float64)
            state, _ = program.step(state, program.shard_batch(batch))
            for leaves in (state.params, state.opt.mu, state.opt.nu):
                for path, value in sw.to_global(leaves).items():
                    whole = torch.empty(module.get_parameter(path).shape)
                    assert value.shape == whole.shape
                    for one in leaves.ranks:
                        leaf = one[path]
                        if isinstance(leaf, DTensor):
                            assert (leaf.shape, leaf.stride()) == (whole.shape, whole.stride())
                        else:
                            assert path in ("up.weight", "up.bias", "down.weight"), (kind, path)
                            assert leaf.shape != whole.shape


# -- CLP-1 -------------------------------------------------------------------------------------

CLIPPED: dict[str, tuple[dict[str, int], list[sw.Transform]]] = {
    "tensor axis": ({"tp": 2}, []),
    "tensor and data axes": ({"dp": 2, "tp": 2}, []),
    "the other order": ({"tp": 2, "dp": 2}, []),
    "sequence": ({"dp": 2, "tp": 2}, [sw.sequence_parallel("tp")]),
    "padding in many ranks": ({"tp": 8}, []),
}


@pytest.mark.simulated
@pytest.mark.parametrize("ord", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("kind", CLIPPED)
def test_clp_1_one_norm_over_tensor_and_data_axes(kind: str, ord: float) -> None:
    """Whole, cut and padded weights: the norm of the whole gradient, in bits on every rank."""
    axes, more = CLIPPED[kind]
    module, data = net(), tokens(2)
    plan = plan_of(module, sw.Mesh(**axes), *more)
    limit = 0.01
    optimizer = sw.optim.chain(sw.optim.clip_by_global_norm(limit, ord), sw.optim.sgd(0.1))
    norms: list[Tensor] = []
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_fn, optimizer).bind(debug=True)
        state = program.init(sw.from_module(module))
        for batch in data:
            state, metrics = program.step(state, program.shard_batch(batch))
            norms.append(metrics.grad_norm)  # which refuses values that differ by rank
            assert program.last_collectives == program.lowered.collectives()
        after = sw.to_global(state.params)
    stepper = torch.optim.SGD(module.parameters(), 0.1)
    for batch, norm in zip(data, norms, strict=True):
        stepper.zero_grad()
        mean = loss_fn(module, batch)
        (mean.total / mean.count).backward()
        want = nn.utils.clip_grad_norm_(module.parameters(), limit, ord)
        assert want > limit
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0.0)
        stepper.step()
    for path, parameter in module.named_parameters():
        torch.testing.assert_close(after[path], parameter.detach(), rtol=1e-11, atol=1e-13)
