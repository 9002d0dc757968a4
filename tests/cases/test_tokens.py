"""TOK-1: the mean over all tokens, when ranks and micro-steps have different numbers of them."""

from __future__ import annotations

import optree
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)
COUNTS = (3, 1, 5, 2)  # labels of the four sequences; the rest is ignored
LENGTH, VOCAB = 6, 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4)
        self.head = nn.Linear(4, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def sequences() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (4, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (4, LENGTH), generator=generator)
    for row, count in enumerate(COUNTS):
        labels[row, count:] = -100
    return {"tokens": tokens, "labels": labels}


def as_sum(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    total = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return sw.Mean(total, (labels != -100).sum())


def as_mean(model: nn.Module, batch: dict[str, Tensor]) -> sw.Mean:
    """What a model of another library returns: the mean over its own tokens."""
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    return sw.Mean.of_tokens(nn.functional.cross_entropy(logits, labels), batch["labels"])


def one_process(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    batch = sequences()
    logits = module(batch["tokens"]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, batch["labels"].flatten())
    named = dict(module.named_parameters())
    return loss, dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize("loss_fn", [as_sum, as_mean])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_tok_1_loss_and_gradients_are_those_of_all_eleven_tokens(loss_fn, micro_steps):
    torch.manual_seed(0)
    module = Model().double()
    want_loss, want = one_process(module)
    with sw.simulate(MESH):
        plan = sw.plan(module, MESH, sw.zero(3, "fsdp"))
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        tokens, losses, sums = [], [], None
        for part in range(micro_steps):
            # Micro-step 0 has the sequences 0 and 2, one on each rank; micro-step 1 the others.
            rows = range(part, 4, micro_steps)
            micro = {name: value[list(rows)] for name, value in sequences().items()}
            grads, metrics = program.grads(state, program.shard_batch(micro))
            tokens.append(metrics.tokens.item())
            losses.append(metrics.loss * metrics.tokens)
            scaled = grads.map(lambda one, n=tokens[-1]: times(one, n))
            sums = scaled if sums is None else sums.map(plus, scaled)
        mean = sums.map(lambda one: times(one, 1 / sum(tokens)))
        got = sw.to_global(mean.leaves)
        after = sw.to_global(program.update(state, mean).params)
    assert sum(tokens) == sum(COUNTS) == 11
    torch.testing.assert_close(sum(losses) / 11, want_loss.detach(), rtol=1e-12, atol=0.0)
    for path, grad in want.items():
        torch.testing.assert_close(got[path], grad, rtol=1e-10, atol=1e-14)
        moved = module.get_parameter(path).detach() - 0.1 * grad
        torch.testing.assert_close(after[path], moved, rtol=1e-10, atol=1e-14)


def times(grads: object, factor: float) -> object:
    return optree.tree_map(lambda leaf: leaf * factor, grads, namespace="shardwise")


def plus(grads: object, others: object) -> object:
    return optree.tree_map(torch.add, grads, others, namespace="shardwise")


def test_tok_1_a_rank_without_any_label_counts_nothing():
    torch.manual_seed(0)
    module = Model().double()
    batch = sequences()
    batch["labels"][2:] = -100
    with sw.simulate(MESH):
        plan = sw.plan(module, MESH, sw.zero(3, "fsdp"))
        program = sw.lower(plan, as_mean, sw.optim.sgd(0.1)).bind()
        state = program.init(sw.from_module(module))
        grads, metrics = program.grads(state, program.shard_batch(batch))
        got = sw.to_global(grads.leaves)
    logits = module(batch["tokens"]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, batch["labels"].flatten())
    assert metrics.tokens == 4
    torch.testing.assert_close(metrics.loss, loss.detach(), rtol=1e-12, atol=0.0)
    for path, parameter in module.named_parameters():
        (grad,) = torch.autograd.grad(loss, [parameter], retain_graph=True)
        torch.testing.assert_close(got[path], grad, rtol=1e-10, atol=1e-14)
