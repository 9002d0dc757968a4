"""OPT-2 to OPT-5 and DET-1: masks, coupled optimizers, scalar state, schedules, averages."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import optim
from shardwise.sharding.errors import OptimError, PatternError
from tests.oracles.one_process import one_process

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)


def copied(values: Any) -> Any:
    """Whole tensors that outlast the next step: replicated ones are live."""
    return optree.tree_map(torch.clone, sw.to_global(values))


class Mixed(nn.Module):
    """Everything that decay masks tell apart: a matrix, a bias, a norm, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    return sw.Mean(model(batch).square().sum(), batch.numel())


def make() -> nn.Module:
    torch.manual_seed(1)
    module = Mixed().double()
    for param in module.parameters():  # no zeros, or a bias would not show decay
        nn.init.normal_(param)
    return module


def batches(steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 5, (4,), generator=generator) for _ in range(steps)]


def bound(module: nn.Module, optimizer: Any, *transforms: Any, mesh: sw.Mesh = MESH) -> sw.Program:
    return sw.lower(sw.plan(module, mesh, *transforms), loss_fn, optimizer).bind()


def adamw(decay: float) -> optim.GradientTransform:
    return optim.adamw(0.1, weight_decay=decay)


BY_NAME = {"plain": ("bias", "*norm*", "embed")}
BY_SHAPE = {"plain": lambda path, shape: len(shape) < 2 or path == "embed.weight"}


@pytest.mark.parametrize("labels", [BY_NAME, BY_SHAPE], ids=["name", "ndim"])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_opt_2_only_the_decay_group_shrinks(labels: Any, level: int) -> None:
    module = make()
    masks = optim.partition({"plain": adamw(0.0), "decay": adamw(0.1)}, labels, otherwise="decay")
    with sw.simulate(MESH):
        program = bound(module, masks, sw.zero(level, "fsdp"))
        state = program.init(sw.from_module(module))
        grads, _ = program.grads(state, program.shard_batch(batches()[0]))
        zero = grads.map(lambda g: optree.tree_map(torch.zeros_like, g, namespace="shardwise"))
        got = sw.to_global(program.update(state, zero).params)
    for path, value in module.named_parameters():
        decays = path.endswith("weight") and path.split(".")[0] in ("layers", "head")
        expected = value.detach() * (0.99 if decays else 1.0)
        torch.testing.assert_close(got[path], expected, rtol=1e-14, atol=0)


def test_opt_2_a_mask_that_selects_nothing_is_an_error_before_anything_moves() -> None:
    plan = sw.plan(make(), MESH, sw.zero(3, "fsdp"))
    parts = {"plain": adamw(0.0), "decay": adamw(0.1)}
    wrapped = optim.partition(parts, {"plain": "_fsdp.bias"}, otherwise="decay")
    with pytest.raises(PatternError, match=r"'_fsdp\.bias' matches none of 9") as info:
        sw.lower(plan, loss_fn, wrapped)
    assert info.value.numbers["pattern"] == "_fsdp.bias"
    nothing = optim.partition(parts, {"plain": is_complex}, otherwise="decay")
    with pytest.raises(PatternError, match="is_complex matches none of 9"):
        sw.lower(plan, loss_fn, nothing)
    with pytest.raises(OptimError, match="no label for 5 of 9 parameters") as left:
        sw.lower(plan, loss_fn, optim.partition(parts, {"plain": ("layers.**.bias", "head")}))
    assert left.value.numbers["count"] == 5
    with pytest.raises(OptimError, match="no transform for the label 'plian'") as label:
        optim.partition(parts, {"plian": "bias"}, otherwise="decay")
    assert "did you mean 'plain'" in label.value.fix
    clipped = optim.chain(optim.clip_by_global_norm(1.0), adamw(0.1))
    with pytest.raises(OptimError, match="part 'decay' needs the norm"):
        optim.partition({"decay": clipped}, {"decay": "**"})


def is_complex(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 2


class Two(nn.Module):
    """The weights of OPT-3: (6, 4) and (4, 7), stored transposed by nn.Linear, and (7, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(7, 4)])
        self.last = nn.Linear(5, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.embed(tokens)))
        y = self.layers[1](torch.cat([x, x[:, :1]], 1))
        return self.last(torch.cat([y, y[:, :1]], 1)) + 1


COUPLED = {
    "adafactor": lambda: optim.adafactor(0.1),
    "torch adafactor": lambda: optim.from_torch(torch.optim.Adafactor, lr=0.1),
}


@pytest.mark.parametrize("mesh", [sw.Mesh(fsdp=2), sw.Mesh(fsdp=4)], ids=repr)
@pytest.mark.parametrize("on", [0, 1, "auto"])
@pytest.mark.parametrize("name", COUPLED)
def test_opt_3_adafactor_on_shards_is_torchs_on_whole_tensors(
    name: str, on: Any, mesh: sw.Mesh
) -> None:
    torch.manual_seed(0)
    module = Two().double()
    want = one_process(module, loss_fn, batches(), lambda p: torch.optim.Adafactor(p, lr=0.1))
    matrices = ("layers.**.weight", "last.weight", "embed")
    cut = [sw.zero(3, "fsdp"), sw.zero(3, "fsdp", on=on, where=matrices, pad=on != "auto")]
    with sw.simulate(mesh):
        program = bound(module, COUPLED[name](), *cut, mesh=mesh)
        state = program.init(sw.from_module(module))
        for batch in batches():
            state, _ = program.step(state, program.shard_batch(batch))
        got = sw.to_global(state.params)
        assert program.last_collectives == program.lowered.collectives()
    for path, value in want.params.items():
        torch.testing.assert_close(got[path], value, rtol=1e-9, atol=1e-12)


def test_opt_3_only_what_couples_is_gathered() -> None:
    plan = sw.plan(make(), MESH, sw.zero(3, "fsdp"))
    plain = sw.lower(plan, loss_fn, adamw(0.1))
    some = sw.lower(plan, loss_fn, optim.muon(0.1, where="layers", rest=adamw(0.1)))
    assert not [item for item in plain.collectives() if item.reason == "update"]
    moved = [item for item in some.collectives() if item.reason == "update"]
    # Gradient, parameter and momentum of two weights (6, 6) and biases (6,): half of each leaves.
    weight, bias = 8 * 18, 8 * 32  # a bias of 3 elements is padded to 32
    assert [item.unit for item in moved] == ["layers.0"] * 3 + ["layers.1"] * 3
    assert all(weight <= item.nbytes <= weight + 8 * 32 + bias for item in moved)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_opt_4_the_step_count_is_one_number_of_the_right_type_on_every_rank(level: int) -> None:
    module = make()
    first, then = batches(5)[:3], batches(5)[3:]
    straight = one_process(module, loss_fn, batches(5), lambda p: torch.optim.Adam(p, lr=0.1))
    with sw.simulate(MESH):
        program = bound(module, optim.adam(0.1), sw.zero(level, "fsdp"))
        state = program.init(sw.from_module(module))
        for batch in first:
            state, _ = program.step(state, program.shard_batch(batch))
        counts = [rank.opt.count for rank in state.ranks]
        assert [(c.item(), c.dtype, c.shape) for c in counts] == [(3, torch.int64, ())] * 2
        opt, params = copied((state.opt, state.params))
        for batch in then:
            state, _ = program.step(state, program.shard_batch(batch))
        assert [rank.opt.count.item() for rank in state.ranks] == [5, 5]
        got = sw.to_global(state.params)
    # The gathered state goes on in a plain process, in torch's own optimizer.
    alone = copy.deepcopy(module)
    alone.load_state_dict(params)
    plain = torch.optim.Adam(alone.parameters(), lr=0.1)
    for path, param in alone.named_parameters():
        plain.state[param] = {
            "step": opt.count.to(torch.float32),
            "exp_avg": opt.mu[path],
            "exp_avg_sq": opt.nu[path],
        }
    for batch in then:
        plain.zero_grad()
        mean = loss_fn(alone, batch)
        (mean.total / mean.count).backward()
        plain.step()
    for path, value in straight.params.items():
        torch.testing.assert_close(got[path], value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(alone.get_parameter(path).detach(), value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_opt_5_the_rate_at_step_k_is_schedule_of_k_for_any_world(ranks: int) -> None:
    schedule = optim.cosine(0.1, steps=10)
    module, mesh = make(), sw.Mesh(fsdp=ranks)
    with sw.simulate(mesh):
        program = bound(module, optim.adamw(schedule), sw.zero(2, "fsdp"), mesh=mesh)
        state = program.init(sw.from_module(module))
        rates = []
        for batch in batches(10):
            # The pieces of a step do not move the schedule: only update does.
            program.grads(state, program.shard_batch(batch))
            program.eval(state, program.shard_batch(batch))
            state, _ = program.step(state, program.shard_batch(batch))
            rates.append(state.ranks[0].opt.learning_rate.item())
    assert rates == pytest.approx([schedule(torch.tensor(k)).item() for k in range(10)], rel=1e-12)


def test_opt_5_an_injected_rate_is_set_on_every_rank_and_used_once() -> None:
    module = make()
    injected = optim.inject(optim.sgd, learning_rate=0.1)
    with sw.simulate(MESH):
        program = bound(module, injected, sw.zero(3, "fsdp"))
        state = program.init(sw.from_module(module))
        optim.set_hyperparameters(state.opt, learning_rate=0.0)
        state, _ = program.step(state, program.shard_batch(batches()[0]))
        got = sw.to_global(state.params)
        for path, value in module.named_parameters():
            assert torch.equal(got[path], value)
        with pytest.raises(OptimError, match="No hyperparameter 'learning_rat'") as caught:
            optim.set_hyperparameters(state.opt, learning_rat=0.1)
        assert "did you mean 'learning_rate'" in caught.value.fix


@pytest.mark.parametrize("mesh", [sw.Mesh(fsdp=2), sw.Mesh(fsdp=4)], ids=repr)
def test_det_1_an_average_of_shards_is_the_average_of_the_whole(mesh: sw.Mesh) -> None:
    module = make()
    alone = copy.deepcopy(module)
    average = torch.optim.swa_utils.AveragedModel(
        alone, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    plain = torch.optim.AdamW(alone.parameters(), lr=0.1)
    averaged = optim.ema(optim.adamw(0.1), decay=0.9)
    with sw.simulate(mesh):
        program = bound(module, averaged, sw.zero(3, "fsdp"), mesh=mesh)
        state = program.init(sw.from_module(module))
        for batch in batches(5):
            plain.zero_grad()
            mean = loss_fn(alone, batch)
            (mean.total / mean.count).backward()
            plain.step()
            average.update_parameters(alone)
            state, _ = program.step(state, program.shard_batch(batch))
            program.eval(state, program.shard_batch(batch))  # gathers all weights
            got = sw.to_global(state.opt.average)
            for path, value in average.module.named_parameters():
                torch.testing.assert_close(got[path], value.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["ema", "muon", "adafactor"])
def test_det_1_a_clone_shares_nothing_and_leaves_survive_pickle(optimizer: str) -> None:
    module = make()
    made = {
        "ema": optim.ema(optim.adamw(0.1)),
        "muon": optim.muon(0.1),
        "adafactor": optim.adafactor(0.1),
    }[optimizer]
    with sw.simulate(MESH):
        program = bound(module, made, sw.zero(3, "fsdp"))
        state = program.init(sw.from_module(module))
        state, _ = program.step(state, program.shard_batch(batches()[0]))
        kept = state.map(lambda one: one.clone())
        before = copied((kept.params, kept.opt))
        for mine, theirs in zip(state.ranks, kept.ranks, strict=True):
            assert storages(mine).isdisjoint(storages(theirs))
        locals_ = [leaf.to_local() for leaf in state.ranks[1].params.values()]
        again = pickle.loads(pickle.dumps(locals_))
        assert all(torch.equal(a, b) for a, b in zip(locals_, again, strict=True))
        after, _ = program.step(state, program.shard_batch(batches()[1]))
        same = sw.to_global((kept.params, kept.opt))
        assert optree.tree_all(optree.tree_map(torch.equal, before, same))
        # The clone steps as the state did, also after its leaves were taken apart and joined.
        rebuilt = kept.map(
            lambda one: optree.tree_map(lambda leaf: leaf * 1, one, namespace="shardwise")
        )
        other, _ = program.step(rebuilt, program.shard_batch(batches()[1]))
        want, got = (sw.to_global((one.params, one.opt)) for one in (after, other))
    assert optree.tree_all(optree.tree_map(torch.equal, want, got))


def storages(state: sw.State) -> set[int]:
    leaves = optree.tree_leaves((dict(state.flats), dict(state.masters), state.opt_flats))
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()}


@pytest.mark.parametrize("level", [1, 3])
def test_a_parameter_that_no_rank_uses_keeps_value_and_coupled_state(level: int) -> None:
    module = make()

    def skips(model: nn.Module, batch: Tensor) -> sw.Mean:
        out = model.head(model.norm(model.layers[1](model.embed(batch))))
        return sw.Mean(out.square().sum(), batch.numel())

    with sw.simulate(MESH):
        plan = sw.plan(module, MESH, sw.zero(level, "fsdp"))
        program = sw.lower(plan, loss_fn, optim.lamb(0.1)).bind()
        state = program.init(sw.from_module(module))
        state, _ = program.step(state, program.shard_batch(batches()[0]))
        other = sw.lower(plan, skips, optim.lamb(0.1)).bind()
        before = copied((state.params, state.opt.mu))
        state, _ = other.step(state, other.shard_batch(batches()[1]))
        after = sw.to_global((state.params, state.opt.mu))
    for old, new in zip(before, after, strict=True):
        for path in old:
            assert torch.equal(old[path], new[path]) == path.startswith("layers.0")
