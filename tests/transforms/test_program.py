"""A program is pure: modules stay as they are, states are values, one seed gives one run."""

from __future__ import annotations

import copy
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.sharding.errors import BatchError, DonatedStateError, StateError

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)


class Model(nn.Module):
    """Units, a batch norm, a tie, a hook, an attribute; dropout on demand."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.calls: list[str] = []
        self.layers[0].register_forward_hook(lambda module, args, out: 2 * out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: Tensor) -> sw.Mean:
    out = model(batch)
    return sw.Mean(out.square().sum(), out.shape[0])


def rows(seed: int = 0, count: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator, dtype=torch.float64)


def make(module: nn.Module, level: int = 3, loss: Any = loss_fn, lr: float = 0.1) -> sw.Program:
    plan = sw.plan(module, MESH, sw.zero(level, "fsdp"))
    return sw.lower(plan, loss, sw.optim.adamw(lr)).bind()


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def simulated():
    with sw.simulate(MESH) as world:
        yield world


def equal(a: Any, b: Any) -> bool:
    """Whether two lifted states hold the same bits on every rank."""
    pairs = zip(local_leaves(a), local_leaves(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def local_leaves(state: Any) -> list[Tensor]:
    leaves = [x for one in state.ranks for x in optree.tree_leaves(one, namespace="shardwise")]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


# -- purity -----------------------------------------------------------------------------------


def portrait(module: nn.Module) -> dict[str, Any]:
    """Everything a module consists of: identities, values, hooks, attributes, modes."""
    shown: dict[str, Any] = {}
    for path, part in module.named_modules():
        shown[path] = (type(part), part.training, sorted(vars(part)))
        for name, table in vars(part).items():
            if name.endswith("hooks") or "hooks_" in name:
                shown[f"{path}:{name}"] = list(table.items())
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        shown[path] = (
            id(tensor),
            tensor.requires_grad,
            tensor.grad,
            tensor._version,
            tensor.tolist(),
        )
    return shown


def test_the_module_of_the_user_is_never_modified(module, simulated):
    module.layers[1].eval()
    before = portrait(module)
    program = make(module)
    state = program.init(sw.from_module(module))
    for seed in range(2):
        state, _ = program.step(state, program.shard_batch(rows(seed)))
    program.eval(state, program.shard_batch(rows()))
    program.init(seed=1)
    assert portrait(module) == before
    out = module(rows())
    assert torch.isfinite(out).all()


def test_two_programs_share_one_module(module, simulated):
    def run_alone(lr: float) -> Any:
        program = make(module, lr=lr)
        state = program.init(sw.from_module(module))
        for seed in range(3):
            state, _ = program.step(state, program.shard_batch(rows(seed)))
        return state

    alone = run_alone(0.1), run_alone(0.2)
    programs = make(module, lr=0.1), make(module, lr=0.2)
    states = [program.init(sw.from_module(module)) for program in programs]
    for seed in range(3):
        for index, program in enumerate(programs):
            states[index], _ = program.step(states[index], program.shard_batch(rows(seed)))
    assert all(equal(state, want) for state, want in zip(states, alone, strict=True))
    assert not equal(*states)


def test_one_program_serves_several_states(module, simulated):
    program = make(module)
    batch = program.shard_batch(rows())
    first, second = program.init(sw.from_module(module)), program.init(seed=1)
    want, _ = make(module).step(second, batch, donate=False)
    program.step(first, batch)
    got, _ = program.step(second, batch)
    assert equal(got, want)


# -- states -----------------------------------------------------------------------------------


def test_a_donated_state_names_the_step_and_the_call(module, simulated):
    program = make(module)
    batch = program.shard_batch(rows())
    state, _ = program.step(program.init(seed=0), batch)
    old = state
    state, _ = program.step(state, batch)  # the call that the message names
    uses = {
        "params": lambda: old.ranks[0].params,
        "opt": lambda: old.ranks[0].opt,
        "step": lambda: old.ranks[1].step,
        "flatten": lambda: optree.tree_leaves(old.ranks[0], namespace="shardwise"),
        "step()": lambda: program.step(old, batch),
        "step(donate=False)": lambda: program.step(old, batch, donate=False),
        "grads()": lambda: program.grads(old, batch),
        "eval()": lambda: program.eval(old, batch),
    }
    for name, use in uses.items():
        with pytest.raises(DonatedStateError) as caught:
            use()
        text = str(caught.value)
        assert "step 1 at test_program.py:" in text, name
        assert "in test_a_donated_state_names_the_step_and_the_call" in text
        assert "donate=False" in caught.value.fix
    program.step(state, batch)


def test_update_donates_and_grads_does_not(module, simulated):
    program = make(module)
    batch = program.shard_batch(rows())
    state = program.init(seed=0)
    grads, _ = program.grads(state, batch)
    again, _ = program.grads(state, batch)
    for one, two in zip(grads.ranks, again.ranks, strict=True):
        assert all(torch.equal(one[path].to_local(), two[path].to_local()) for path in one.leaves)
    program.update(state, grads)
    with pytest.raises(DonatedStateError, match=r"update 0 at test_program\.py:"):
        program.grads(state, batch)


def test_without_donation_the_input_stays_as_it_was(module, simulated):
    program = make(module)
    batch = program.shard_batch(rows())
    state = program.init(sw.from_module(module))
    kept = state.map(lambda one: one.clone())
    new, _ = program.step(state, batch, donate=False)
    assert equal(state, kept)
    assert not equal(state, new)
    want, _ = program.step(state, batch)
    assert equal(new, want)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_step_is_update_of_grads(module, simulated, level):
    program = make(module, level)
    batch = program.shard_batch(rows())
    state = program.init(sw.from_module(module))
    grads, _ = program.grads(state, batch)
    composed = program.update(state, grads, donate=False)
    stepped, _ = program.step(state, batch)
    assert equal(composed, stepped)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_state_that_tree_map_has_built_trains_on(module, simulated, level):
    program = make(module, level)
    batch = program.shard_batch(rows())
    state, _ = program.step(program.init(sw.from_module(module)), batch)
    halved = state.map(
        lambda one: optree.tree_map(
            lambda leaf: leaf * 0.5 if leaf.is_floating_point() else leaf,
            one,
            namespace="shardwise",
        )
    )
    got = sw.to_global(halved.params)
    want = sw.to_global(state.params)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[path], 0.5 * want[path]) for path in want)
    same = state.map(lambda one: optree.tree_map(torch.clone, one, namespace="shardwise"))
    after, _ = program.step(same, batch)
    expected, _ = program.step(state, batch)
    assert equal(after, expected)


def test_gradients_that_tree_map_has_built_are_applied(module, simulated):
    program = make(module)
    batch = program.shard_batch(rows())
    state = program.init(sw.from_module(module))
    grads, _ = program.grads(state, batch)
    tripled = grads.map(
        lambda one: optree.tree_map(lambda leaf: leaf * 3, one, namespace="shardwise")
    )

    def scaled(model: nn.Module, batch: Tensor) -> sw.Mean:
        mean = loss_fn(model, batch)
        return sw.Mean(3 * mean.total, mean.count)

    other = make(module, loss=scaled)
    want, _ = other.grads(state, batch)
    for got, expected in zip(tripled.ranks, want.ranks, strict=True):
        for path in expected.leaves:
            torch.testing.assert_close(got[path].to_local(), expected[path].to_local())
    program.update(state, tripled)


def test_a_state_with_leaves_of_another_shape_is_refused(module, simulated):
    program = make(module)
    state = program.init(sw.from_module(module))
    odd = state.map(
        lambda one: optree.tree_map(
            lambda leaf: leaf.to_local()[:1] if leaf.ndim == 2 else leaf, one, namespace="shardwise"
        )
    )
    with pytest.raises(StateError) as caught:
        program.step(odd, program.shard_batch(rows()))
    assert "embed.weight: has (1, 4), needs (2, 4) on rank 0" in str(caught.value)
    assert caught.value.numbers["faults"] >= 1


# -- modes and randomness ---------------------------------------------------------------------


def test_step_trains_and_eval_evaluates_but_what_was_in_eval_mode_stays(module, simulated):
    seen: list[dict[str, bool]] = []

    def loss(model: nn.Module, batch: Tensor) -> sw.Mean:
        seen.append({path: part.training for path, part in model.named_modules()})
        return loss_fn(model, batch)

    module.layers[1].eval()
    own = {path: part.training for path, part in module.named_modules()}
    program = make(module, loss=loss)
    state, _ = program.step(program.init(seed=0), program.shard_batch(rows()))
    assert all(modes == own for modes in seen)
    seen.clear()
    program.eval(state, program.shard_batch(rows()))
    assert seen
    assert not any(any(modes.values()) for modes in seen)


def test_dropout_is_reproducible_and_differs_by_step_rank_and_seed(simulated):
    torch.manual_seed(0)
    module = Model(dropout=0.5).double()
    masks: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> sw.Mean:
        mask = nn.functional.dropout(torch.ones(32), 0.5, model.training)
        if type(mask) is Tensor:
            masks.append(mask)
        return loss_fn(model, batch)

    def run(seed: int) -> tuple[Any, list[Tensor]]:
        masks.clear()
        program = make(module, loss=loss)
        state = program.init(sw.from_module(module), seed=seed) if seed else program.init(seed=0)
        torch.manual_seed(torch.seed())  # the caller's stream does not matter
        for step in range(2):
            state, _ = program.step(state, program.shard_batch(rows(step)))
        return state, list(masks)

    (first, drawn), (second, again) = run(0), run(0)
    assert equal(first, second)
    assert len(drawn) == 2 * 2
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    assert len({tuple(mask.tolist()) for mask in drawn}) == 4  # two ranks, two steps


def test_the_generator_of_the_caller_is_untouched(module, simulated):
    program = make(Model(dropout=0.5).double())
    batch = program.shard_batch(rows())
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    state = program.init(seed=1)
    program.step(state, batch)
    assert torch.equal(torch.rand(3), want)


# -- batches ----------------------------------------------------------------------------------


def test_shard_batch_cuts_rows_and_leaves_the_rest(simulated, module):
    program = make(module)
    parts = program.shard_batch({"x": torch.arange(5), "text": "a", "scalar": torch.tensor(2.0)})
    assert [part["x"].tolist() for part in parts.ranks] == [[0, 1, 2], [3, 4]]
    assert all(part["text"] == "a" and part["scalar"] == 2.0 for part in parts.ranks)


@pytest.mark.parametrize(
    ("batch", "fact"),
    [
        ({"x": torch.ones(4), "y": torch.ones(6)}, "rows of its tensors: 4, 6"),
        (["a"], "a list, holds no tensor with rows"),
    ],
)
def test_a_batch_that_cannot_be_cut(simulated, module, batch, fact):
    with pytest.raises(BatchError) as caught:
        make(module).shard_batch(batch)
    assert fact in str(caught.value)
    assert "parts: 2" in str(caught.value)
    assert caught.value.numbers["parts"] == 2


def test_metrics_are_means_over_all_ranks(simulated, module):
    def loss(model: nn.Module, batch: Tensor) -> Any:
        total = batch.square().sum()
        return loss_fn(model, batch), {"square": sw.Mean(total, batch.numel())}

    program = make(copy.deepcopy(module), loss=loss)
    state = program.init(sw.from_module(module))
    batch = rows(count=7)  # four rows and three
    state, metrics = program.step(state, program.shard_batch(batch))
    torch.testing.assert_close(metrics.aux["square"], batch.square().mean(), rtol=1e-12, atol=0.0)
    assert metrics.tokens == 7
    evaluated = program.eval(state, program.shard_batch(batch))
    torch.testing.assert_close(evaluated.aux["square"], batch.square().mean(), rtol=1e-12, atol=0.0)
