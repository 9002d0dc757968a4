"""A small model of blocks that tensor axes cut, whose blocks do what a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.transforms.tensor_calls import RunCalls
from shardwise.transforms.tensor_context import current_tensor_context
from tests.oracles.one_process import Run, assert_same, one_process, sharded

AXES = {
    "up.weight": "mlp embed",
    "up.bias": "mlp",
    "down.weight": "embed mlp",
    "down.bias": "embed",
    "embed.weight": "vocab embed",
    "head.weight": "vocab embed",
    "q.weight": "(heads hd) embed",
    "k.weight": "(heads hd) embed",
    "v.weight": "(heads hd) embed",
    "o.weight": "embed (heads hd)",
}


class Block(nn.Module):
    """A residual block: `run(block, norm(x))` is added."""

    def __init__(self, run: Callable[[Block, Tensor], Tensor], *, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 16)
        self.down = nn.Linear(16, width)
        self.drop, self.again = nn.Dropout(0.5), nn.Dropout(0.5)
        self.sw_drop, self.sw_again = sw.Dropout(0.5), sw.Dropout(0.25)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(self, self.norm(x))


class Attention(nn.Module):
    """Four heads of four; what is done to probabilities and to the result is up to a test."""

    def __init__(self, run: Callable[[Attention, Tensor], Tensor] = lambda a, p: p) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, 16, bias=False) for _ in range(3))
        self.o = nn.Linear(16, 8, bias=False)
        self.sw_drop = sw.Dropout(0.5)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            one(y).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        scores = self.run(self, (q @ k.transpose(-1, -2) / 2).softmax(-1))
        return x + self.o((scores @ v).transpose(1, 2).flatten(-2))


class Stack(nn.Module):
    """Embedding, blocks, and a head over the vocabulary of 11 tokens."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack(*blocks: nn.Module) -> Stack:
    """In float64, with values that a seed gives."""
    torch.manual_seed(3)
    model = Stack(blocks).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def plan_of(
    model: nn.Module, mesh: sw.Mesh, *transforms: Any, axes: Mapping[str, str] = AXES
) -> sw.Plan:
    """Tensor parallelism over `tp`, and what a test adds; axes of what the model has."""
    names = {name for name, _ in model.named_parameters()}
    known = {key: value for key, value in axes.items() if any(n.endswith(key) for n in names)}
    sizes = {"hd": 4} if any("hd" in text for text in known.values()) else {}
    return sw.plan(model, mesh, sw.tensor_parallel("tp"), *transforms, axes=known, sizes=sizes)


def loss_of(model: Any, tokens: Tensor) -> Any:
    """The mean over all tokens."""
    total = sw.cross_entropy(model(tokens), tokens, reduction="sum")
    return sw.Mean(total, tokens.numel())


def tokens_of(steps: int = 2, *, rows: int = 4, length: int = 6) -> list[Tensor]:
    """Batches of tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 11, (rows, length), generator=generator) for _ in range(steps)]


def run(model: nn.Module, plan: sw.Plan, data: Sequence[Tensor]) -> Run:
    """Train under a plan; what is planned runs."""
    return sharded(model, plan, loss_of, data, sw.optim.sgd(0.1, momentum=0.9))


def alone(model: nn.Module, data: Sequence[Tensor], *, parts: int = 1) -> Run:
    """Train in one process."""
    return one_process(
        model, loss_of, data, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), parts=parts
    )


def check_alone(model: nn.Module, plan: sw.Plan, data: Sequence[Tensor], *, parts: int = 1) -> None:
    """Equal to one process."""
    assert_same(run(model, plan, data), alone(model, data, parts=parts))


def check_evaluation_and_frozen(model: nn.Module) -> None:
    """Evaluate, and train with frozen blocks, beside one process."""
    mesh, tokens = sw.Mesh(tp=2), tokens_of()[0]
    with sw.simulate(mesh):
        program = sw.lower(plan_of(model, mesh), loss_of, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model))
        found = program.eval(state, program.shard_batch(tokens)).loss.item()
        assert program.last_collectives == program.lowered.eval_items
    want = loss_of(model.eval(), tokens)
    assert abs(found - (want.total / want.count).item()) < 1e-12
    for parameter in model.get_submodule("layers").parameters():
        parameter.requires_grad_(False)
    check_alone(model.train(), plan_of(model, mesh), tokens_of())


def assert_bits(got: Run, want: Run) -> None:
    """Losses, gradients and parameters are equal bit for bit."""
    assert got.losses == want.losses
    for mine, theirs in zip(got.grads, want.grads, strict=True):
        assert all(_same(mine[path], theirs[path]) for path in theirs)
    assert all(_same(got.params[path], want.params[path]) for path in want.params)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


class Seen:
    """Remembers tensors of a step by label and rank; not those of traces and recomputations."""

    def __init__(self) -> None:
        self.by_label: dict[str, dict[int, list[Tensor]]] = {}

    def note(self, label: str, tensor: Tensor) -> None:
        """Remember a copy."""
        context = current_tensor_context()
        if isinstance(context, RunCalls):
            rank = context._mesh.rank(context._coords)
            kept = self.by_label.setdefault(label, {}).setdefault(rank, [])
            kept.append(tensor.detach().clone())

    def ranks(self, label: str, call: int = 0) -> list[Tensor]:
        """One call of every rank."""
        found = self.by_label[label]
        return [found[rank][call] for rank in sorted(found)]


def one_step(model: nn.Module, plan: sw.Plan, tokens: Tensor, *, seed: int = 0) -> Any:
    """The state after one step on simulated ranks."""
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_of, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(model), seed=seed)
        state, _ = program.step(state, program.shard_batch(tokens))
        assert program.last_collectives == program.lowered.collectives()
    return state
