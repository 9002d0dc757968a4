"""TEN-1 to TEN-4: few kv heads, vocabularies that do not divide, fused rows, norm gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import shardwise as sw
from shardwise.sharding.errors import PlanError
from tests.laws.tensor_draws import check_copies
from tests.laws.tensor_models import FUSED, Small
from tests.oracles.one_process import assert_same, one_process, sharded
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated

IGNORED = -100


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


SGD = sw.optim.sgd(0.1, momentum=0.9)


def filled(small: Small) -> nn.Module:
    """The model with values."""
    torch.manual_seed(0)
    model = small.build()
    for parameter in model.parameters():
        parameter.data = 0.4 * torch.randn_like(parameter)
    return model


def compare(small: Small, model: nn.Module, plan: sw.Plan) -> None:
    """Two steps, against one process."""

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
        return small.loss_fn(model, batch)[0]

    data = [small.batch(4, 5, seed) for seed in range(2)]
    assert_same(
        sharded(model, plan, loss_fn, data, SGD), one_process(model, loss_fn, data, momentum)
    )


def local(leaf: Any) -> Tensor:
    """What a rank holds of a leaf."""
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def block_of(state: Any, path: str) -> Tensor:
    """What a rank holds of a parameter, with its padding."""
    for bucket in state.home.buckets:
        for entry in bucket.params.entries:
            if entry.path == path:
                return entry.view(state.flats[bucket.name])
    raise AssertionError(path)


# -- TEN-1 ----------------------------------------------------------------------------------------

FEW = Small(heads=8, kv=2, hd=4, vocab=16, depth=1)


def test_ten_1_two_kv_heads_on_four_ranks_are_copied(tmp_path: Path) -> None:
    model = filled(FEW)
    plan = sw.plan(model, sw.Mesh(tp=4), sw.tensor_parallel("tp"))
    assert dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)) == {"tp0": 2, "tp1": 2}
    assert str(plan.compute["layers.0.attention.k.weight"]).startswith("(kv/tp0 hd) embed")
    assert str(plan.compute["layers.0.attention.q.weight"]).startswith("(heads/(tp0 tp1) hd) embed")
    compare(FEW, model, plan)
    with sw.simulate(plan.base.mesh):
        program = sw.lower(plan, FEW.loss_fn, SGD).bind()
        state = program.init(sw.from_module(model))
        grads, _ = program.grads(state, program.shard_batch(FEW.batch(4, 5, 0)))
        blocks = [local(leaves["layers.0.attention.k.weight"]) for leaves in grads.leaves.ranks]
        state, _ = program.step(state, program.shard_batch(FEW.batch(4, 5, 0)))
        check_copies(state.ranks)
        sw.export_safetensors(state, tmp_path / "whole")
    assert [tuple(block.shape) for block in blocks] == [(4, 8)] * 4  # one head on each rank
    assert torch.equal(blocks[0], blocks[1])
    assert torch.equal(blocks[2], blocks[3])
    assert not torch.equal(blocks[0], blocks[2])
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    assert saved["layers.0.attention.k.weight"].shape == (2 * 4, 8)
    assert saved["layers.0.attention.q.weight"].shape == (8 * 4, 8)


def test_ten_1_one_kv_head_is_used_by_all_ranks() -> None:
    small = replace(FEW, kv=1)
    model = filled(small)
    compare(small, model, sw.plan(model, sw.Mesh(tp=4), sw.tensor_parallel("tp")))


def test_ten_1_three_kv_heads_on_four_ranks_are_refused() -> None:
    model = replace(FEW, heads=12, kv=3).build()
    with pytest.raises(PlanError) as caught:
        sw.plan(model, sw.Mesh(tp=4), sw.tensor_parallel("tp"))
    text = "kv is 3; mesh axis 'tp' has 4 ranks; 3 % 4 == 3."
    check(caught.value, PlanError, text, "kv % ranks == 0, or 4 % kv == 0", "Fix: tp=1")


# -- TEN-2 ----------------------------------------------------------------------------------------


class Lm(nn.Module):
    """A vocabulary of 33; the gradient of `shift` is that of the hidden states of each token."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.axes = dict.fromkeys(("embed.weight", "head.weight"), "vocab embed")
        self.axes["head.bias"] = "vocab"
        self.embed = nn.Embedding(33, 6)
        self.mix = nn.Linear(6, 6)
        self.shift = nn.Parameter(torch.zeros(4, 5, 6))
        self.head = nn.Linear(6, 33)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))) + self.shift)


def lm_batches() -> list[dict[str, Tensor]]:
    """Tokens and labels of the whole vocabulary, its last shard too, and some that are ignored."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        tokens, labels = (torch.randint(0, 33, (4, 5), generator=generator) for _ in range(2))
        labels[torch.rand(4, 5, generator=generator) < 0.3] = IGNORED
        labels[0, :2], tokens[0, :2] = torch.tensor([32, 31]), torch.tensor([32, 0])
        found.append({"tokens": tokens, "labels": labels})
    return found


def by_torch(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    loss = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    return sw.Mean(loss, (labels != IGNORED).sum())


def by_blocks(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    labels = batch["labels"]
    loss = sw.cross_entropy(model(batch["tokens"]), labels, label_smoothing=0.1)
    return sw.Mean(loss, (labels != IGNORED).sum())


@pytest.mark.parametrize("loss_fn", [by_blocks, by_torch])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_2_a_vocabulary_of_33(ranks: int, tied: bool, loss_fn: Any) -> None:
    torch.manual_seed(0)
    model = Lm(tied=tied).double()
    plan = sw.plan(model, sw.Mesh(tp=ranks), sw.tensor_parallel("tp"))
    want = one_process(model, by_torch, lm_batches(), momentum)
    assert want.grads[0]["shift"] is not None
    assert_same(sharded(model, plan, loss_fn, lm_batches(), SGD), want)
    assert plan.tensor.frames["embed.weight"].block == (-(-33 // ranks), 6)
    kept = sw.lower(plan, loss_fn, SGD, batch=lm_batches()[0]).crossings
    assert any(one.kind == "collect" for one in kept.values()) is (loss_fn is by_torch)


def test_ten_2_padding_takes_no_part() -> None:
    """Huge logits of padding change neither loss nor gradients."""
    torch.manual_seed(0)
    model = Lm(tied=False).double()
    plan = sw.plan(model, sw.Mesh(tp=4), sw.tensor_parallel("tp"))
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, by_blocks, SGD).bind()
        state = program.init(sw.from_module(model))
        batch = program.shard_batch(lm_batches()[0])
        grads, before = program.grads(state, batch)
        want = sw.to_global(grads.leaves)
        last = block_of(state.ranks[3], "head.weight")
        assert last.shape == (9, 6)
        assert not last[6:].any()
        last[6:] = 1e30
        grads, after = program.grads(state, batch)
        assert torch.equal(before.loss, after.loss)
        assert after.applied
        whole = sw.to_global(grads.leaves)
        assert whole["head.weight"].shape == (33, 6)
        assert all(torch.equal(whole[path], want[path]) for path in want)


# -- TEN-3 ----------------------------------------------------------------------------------------

LAYOUTS = {
    "all q, all k, all v": Small(heads=4, kv=2, rows="blocks", mlp="fused", vocab=16),
    "per head": Small(heads=4, kv=4, rows="heads", mlp="fused", vocab=16),
    "per group": Small(heads=4, kv=2, rows="groups", mlp="fused", vocab=16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_3_fused_rows_in_each_order(layout: str, tmp_path: Path) -> None:
    """Output, gradients, and the exported weight in the model's own order."""
    small = LAYOUTS[layout]
    model = filled(small)
    plan = sw.plan(model, sw.Mesh(tp=2), sw.tensor_parallel("tp"))
    cut = {path.rpartition(".")[0] for path in plan.tensor.frames}
    assert {f"layers.0.{name}" for name in ("attention.qkv", "mlp.up", "mlp.down")} <= cut
    compare(small, model, plan)
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, small.loss_fn, SGD).bind()
        state = program.init(sw.from_module(model))
        sw.export_safetensors(state, tmp_path / "whole", dtype=torch.float64)
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    for path, parameter in model.named_parameters():
        assert torch.equal(saved[path], parameter), path


def lowered(small: Small, model: nn.Module) -> sw.Lowered:
    plan = sw.plan(model, sw.Mesh(tp=2), sw.tensor_parallel("tp"))
    return sw.lower(plan, small.loss_fn, SGD, batch=small.batch(2, 4, 0))


WRONG = [(one, other) for one in LAYOUTS for other in LAYOUTS if one != other]


@pytest.mark.parametrize(("layout", "told"), WRONG)
def test_ten_3_rows_told_in_another_order_are_refused(layout: str, told: str) -> None:
    """Sizes that do not fit, or activations that are not what the forward takes them for."""
    small = LAYOUTS[layout]
    model: Any = filled(small)
    assert lowered(small, model)
    rows = FUSED[LAYOUTS[told].rows]
    for layer in model.layers:
        layer.attention.axes |= {"qkv.weight": f"{rows} embed", "qkv.bias": rows}
    with pytest.raises((PlanError, sw.errors.AxesError)) as caught:
        lowered(small, model)
    assert "attention" in str(caught.value)


def test_ten_3_an_unknown_order_is_left_whole() -> None:
    """Fused rows that nobody names are not guessed; the rest of the model is cut."""
    small = LAYOUTS["per group"]
    model: Any = filled(small)
    for layer in model.layers:
        layer.attention.axes = {}
    plan = sw.plan(model, sw.Mesh(tp=2), sw.tensor_parallel("tp"))
    assert not [path for path in plan.tensor.frames if "attention" in path]
    assert "layers.0.mlp.up.weight" in plan.tensor.frames
    compare(small, model, plan)


# -- TEN-4 ----------------------------------------------------------------------------------------


class NormsAround(nn.Module):
    """Norm -> column -> row -> norm, twice, on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NormColumnRow() for _ in range(2))
        self.last = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class NormColumnRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.axes = {"column.weight": "mlp embed", "column.bias": "mlp"}
        self.axes |= {"row.weight": "embed mlp", "row.bias": "embed"}
        self.before, self.after = nn.LayerNorm(8), nn.LayerNorm(8)
        self.column, self.row = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.row(torch.relu(self.column(self.before(x)))))


def distance(model: Any, batch: dict[str, Tensor]) -> sw.Mean:
    return sw.Mean((model(batch["x"]) - batch["y"]).square().sum(), batch["x"][..., 0].numel())


NORMS = [f"layers.{n}.{name}" for n in (0, 1) for name in ("before", "after")]
PARTIAL = {f"{norm}.{kind}" for norm in NORMS for kind in ("weight", "bias")}


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "fsdp": 2}, {"tp": 4}], ids=str)
def test_ten_4_norm_gradients_are_summed_over_a_cut_sequence(sizes: dict[str, int]) -> None:
    """Seven rows of a sequence do not divide; five steps."""
    torch.manual_seed(0)
    model = NormsAround().double()
    data = [
        {name: torch.randn(4, 7, 8, dtype=torch.float64) for name in ("x", "y")} for _ in range(5)
    ]
    zero = [sw.zero(2, "fsdp")] if "fsdp" in sizes else []
    plan = sw.plan(
        model, sw.Mesh(**sizes), sw.tensor_parallel("tp"), sw.sequence_parallel("tp"), *zero
    )
    want = one_process(model, distance, data, momentum)
    assert_same(sharded(model, plan, distance, data, SGD), want)
    lowered = sw.lower(plan, distance, SGD, batch={k: v[:2] for k, v in data[0].items()})
    assert lowered.replicated["tp"] >= PARTIAL
    assert "last.weight" not in lowered.replicated["tp"]
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, distance, SGD).bind()
        state = program.init(sw.from_module(model))
        for batch in data:
            parts = program.shard_batch(batch)
            grads, _ = program.grads(state, parts)
            for path in PARTIAL:
                check_equal_along_tp(plan, grads.leaves.ranks, path)
            state, _ = program.step(state, parts)
            check_copies(state.ranks)


def check_equal_along_tp(plan: sw.Plan, ranks: Any, path: str) -> None:
    """The same bits on all ranks with the same place along the data axes."""
    first: dict[int, Tensor] = {}
    for rank, leaves in enumerate(ranks):
        mine = local(leaves[path])
        place = plan.mesh.coords(rank).get("fsdp", 0)
        assert torch.equal(first.setdefault(place, mine), mine), (path, rank)
