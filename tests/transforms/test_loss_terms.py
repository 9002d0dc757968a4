"""A loss of several terms: each is divided by its own count over all ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import BatchError, LossError, LowerError, RankError
from shardwise.testing import assert_equivalent

pytestmark = pytest.mark.simulated

VOCAB, WEIGHT = 7, 0.3
MESHES = [sw.Mesh(fsdp=1), sw.Mesh(fsdp=2), sw.Mesh(dp=2, fsdp=2)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, VOCAB)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x), x


def batch_of(rows: int, seed: int, *, flagged: int = 2) -> dict[str, Tensor]:
    """Rows with uneven labels; only the first `flagged` rows count for the second term."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, 5), generator=generator)
    labels = tokens.roll(1, dims=1)
    labels[torch.rand(rows, 5, generator=generator) < 0.3] = -100
    labels[0, 0] = 0
    return {"tokens": tokens, "labels": labels, "flag": torch.arange(rows) < flagged}


def counts(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"ce": (batch["labels"] != -100).sum(), "size": batch["flag"].sum()}


def terms(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, sw.Mean], Tensor]:
    logits, hidden = model(batch["tokens"])
    labels = batch["labels"].flatten()
    ce = nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    size = (hidden.square().mean((1, 2)) * batch["flag"]).sum()
    count = counts(batch)
    found = {"ce": sw.Mean(ce, count["ce"]), "size": sw.Mean(size, count["size"], weight=WEIGHT)}
    return found, (logits.flatten(0, 1).argmax(-1) == labels).sum()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    found, right = terms(model, batch)
    return found, {"accuracy": sw.Mean(right.double(), found["ce"].count)}


def by_hand(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], Any]:
    found, right = terms(model, batch)
    parts = {k: m.total / m.count if m.count else torch.zeros(()) for k, m in found.items()}
    loss = parts["ce"] + WEIGHT * parts["size"]
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    seen = {**parts, "accuracy": right.double() / found["ce"].count}
    return loss.detach(), dict(zip(named, grads, strict=True)), seen


@given(
    mesh=st.sampled_from(MESHES),
    level=st.integers(0, 3),
    steps=st.integers(1, 3),
    early=st.booleans(),
    rows=st.integers(1, 9),
    flagged=st.integers(0, 3),
    seed=st.integers(0, 99),
    transform=st.sampled_from([None, sw.loss_scale(1024.0)]),
)
def test_each_term_is_divided_by_its_own_count(
    mesh: sw.Mesh,
    level: int,
    steps: int,
    early: bool,
    rows: int,
    flagged: int,
    seed: int,
    transform: Any,
) -> None:
    torch.manual_seed(seed)
    model = Model().double()
    batch = batch_of(rows, seed, flagged=flagged)
    scaled = [transform] if transform is not None else []
    transforms = [sw.zero(level, mesh.names), sw.accumulate(steps), *scaled]
    with sw.simulate(mesh):
        plan = sw.plan(model, mesh, *transforms)
        count_fn = counts if early or steps > 1 else None
        lowered = sw.lower(plan, loss_fn, sw.optim.sgd(0.1), count_fn=count_fn)
        program = lowered.bind()
        state = program.init(sw.from_module(model))
        mine = program.shard_batch(batch)
        grads, metrics = program.grads(state, mine)
        assert program.last_collectives == program.lowered.grads_items
        packed = [item for item in program.last_collectives if item.reason == "counts"]
        assert [item.axis for item in packed] == list(reversed(program.lowered.batch_axes))
        assert all(item.nbytes == 8 * 2 * (mesh[item.axis] - 1) for item in packed)
        after, seen = program.step(state, mine, donate=False)
        assert program.last_collectives == program.lowered.collectives()
        evaluated = program.eval(state, mine)
        assert program.last_collectives == program.lowered.eval_items
    loss, want, parts = by_hand(model, batch)
    for one in (metrics, seen, evaluated):
        torch.testing.assert_close(one.loss, loss, rtol=1e-12, atol=0.0)
        assert one.tokens == max(float(c) for c in counts(batch).values())
        for name, value in parts.items():
            if name == "size" and not flagged:
                assert one.aux[name].isnan()  # nothing to average
            else:
                torch.testing.assert_close(
                    one.aux[name], value.detach().double(), rtol=1e-12, atol=1e-15
                )
    found, moved = sw.to_global(grads.leaves), sw.to_global(after.params)
    for path, grad in want.items():
        torch.testing.assert_close(found[path], grad, rtol=1e-9, atol=1e-13)
        param = model.get_parameter(path).detach()
        torch.testing.assert_close(moved[path], param - 0.1 * grad, rtol=1e-9, atol=1e-13)


def test_counts_come_between_forward_and_backward_or_first_of_all() -> None:
    mesh = sw.Mesh(fsdp=2)
    plan = sw.plan(Model(), mesh, sw.zero(3, "fsdp"))
    batch = batch_of(4, 0)
    between = sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=batch)
    reasons = [item.reason for item in between.collectives()]
    at = reasons.index("counts")
    assert set(reasons[:at]) == {"forward"}
    assert "forward" not in reasons[at:]
    assert between.terms == ("ce", "size")
    assert between.aux == ("accuracy", "ce", "size")
    first = sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=batch, count_fn=counts)
    assert first.collectives()[0].reason == "counts"
    assert "counts" in first.text()


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_one_term_is_a_mean_and_costs_nothing(weight: float) -> None:
    mesh = sw.Mesh(fsdp=2)
    model, batch = Model().double(), batch_of(5, 0)

    def as_mean(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return terms(model, batch)[0]["ce"]

    def as_term(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        mean = as_mean(model, batch)
        return {"ce": sw.Mean(mean.total, mean.count, weight=weight)}

    found = []
    for function in (as_mean, as_term):
        with sw.simulate(mesh):
            plan = sw.plan(model, mesh, sw.zero(3, "fsdp"), sw.accumulate(2))
            program = sw.lower(plan, function, sw.optim.sgd(0.1)).bind()
            state = program.init(sw.from_module(model))
            grads, metrics = program.grads(state, program.shard_batch(batch))
            assert "counts" not in {item.reason for item in program.last_collectives}
            found.append((sw.to_global(grads.leaves), metrics))
    (plain, one), (single, other) = found
    assert other.loss == weight * one.loss
    assert other.aux["ce"] == one.loss
    for path, grad in plain.items():
        assert torch.equal(single[path], weight * grad)


def test_the_equivalence_harness_knows_terms() -> None:
    model = Model()
    assert_equivalent(
        model,
        loss_fn,
        [batch_of(6, seed) for seed in range(2)],
        plan=sw.plan(model, sw.Mesh(fsdp=2), sw.zero(3, "fsdp")),
        optimizer=sw.optim.adamw(1e-2, eps=1e-4),
    )


@pytest.mark.parametrize("traced", [True, False])
def test_several_passes_need_counts_first(traced: bool) -> None:
    mesh = sw.Mesh(fsdp=2)
    plan = sw.plan(Model(), mesh, sw.zero(3, "fsdp"), sw.accumulate(2))
    batch = batch_of(4, 0)
    if traced:
        with pytest.raises(LowerError) as caught:
            sw.lower(plan, loss_fn, sw.optim.sgd(0.1), batch=batch)
    else:
        with sw.simulate(mesh):
            program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
            state = program.init(0)
            with pytest.raises(LowerError) as caught:
                program.step(state, program.shard_batch(batch))
    error = caught.value
    assert "A loss of 2 terms over 2 micro-batches needs their counts first." in str(error)
    assert "terms: ce, size" in str(error)
    assert error.numbers == {"terms": ("ce", "size"), "steps": 2}
    assert error.fix.startswith("lower(..., count_fn=lambda batch: {'ce': ..., 'size': ...})")


def run_on(mesh: sw.Mesh, function: Any, batches: Any, **options: Any) -> None:
    """A good step, then one on these batches."""
    with sw.simulate(mesh):
        plan = sw.plan(Model(), mesh, sw.zero(3, "fsdp"), sw.accumulate(options.pop("steps", 1)))
        program = sw.lower(plan, function, sw.optim.sgd(0.1), **options).bind()
        state, _ = program.step(program.init(0), sw.Lifted([batch_of(3, 0)] * 2))
        program.step(state, sw.Lifted(batches))


def test_a_term_that_a_rank_leaves_out_later_is_an_error_on_all_ranks() -> None:
    def forgetful(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        found, _ = terms(model, batch)
        return found if len(batch["tokens"]) == 3 else {"ce": found["ce"]}

    with pytest.raises((LossError, RankError), match="other terms than the program") as caught:
        run_on(sw.Mesh(fsdp=2), forgetful, [batch_of(3, 1), batch_of(2, 1)])
    for text in ("now: no terms, or a single one", "lowered: ce, size", "with count 0 where there"):
        assert text in str(caught.value)


def test_a_term_that_a_rank_leaves_out_at_once_is_an_error_on_all_ranks() -> None:
    def uneven(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        found, _ = terms(model, batch)
        return found if len(batch["tokens"]) == 3 else {"ce": found["ce"]}

    mesh = sw.Mesh(fsdp=2)
    with sw.simulate(mesh):
        plan = sw.plan(Model(), mesh, sw.zero(3, "fsdp"))
        program = sw.lower(plan, uneven, sw.optim.sgd(0.1)).bind()
        with pytest.raises(LossError, match="Ranks return different auxiliary metrics") as caught:
            program.step(program.init(0), sw.Lifted([batch_of(3, 1), batch_of(2, 1)]))
    assert "ce, size" in str(caught.value)
    assert "with count 0 where there is nothing" in caught.value.fix


def test_counts_that_are_not_those_of_the_loss_are_an_error() -> None:
    def double(batch: dict[str, Tensor]) -> dict[str, Any]:
        found = counts(batch)
        return {**found, "size": 2 * found["size"]}

    with pytest.raises(LossError, match="elements of term 'size' where the loss") as caught:
        run_on(sw.Mesh(fsdp=2), loss_fn, [batch_of(3, 1)] * 2, count_fn=double, steps=2)
    assert caught.value.numbers == {"told": 8.0, "found": 4.0}
    assert "8 != 4" in str(caught.value)
    assert "let count_fn return for 'size'" in caught.value.fix


def test_counts_of_other_terms_are_an_error() -> None:
    def partial(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"ce": counts(batch)["ce"]}

    with pytest.raises((LossError, RankError), match="counts of other terms") as caught:
        run_on(sw.Mesh(fsdp=2), loss_fn, [batch_of(3, 1)] * 2, count_fn=partial)
    for text in ("count_fn: ce", "terms: ce, size", "one count for each term of the loss"):
        assert text in str(caught.value)


def test_counts_that_are_no_numbers_are_an_error() -> None:
    def negative(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        found, _ = terms(model, batch)
        sign = 1 if len(batch["tokens"]) == 3 else -1
        return {**found, "size": sw.Mean(found["size"].total, sign * found["size"].count)}

    with pytest.raises(BatchError, match="no countable number of elements"):
        run_on(sw.Mesh(fsdp=2), negative, [batch_of(3, 1), batch_of(2, 1)])


def opaque(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Reads a value, which ends the trace."""
    float(batch["tokens"].sum())
    return loss_fn(model, batch)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_cannot_be_traced_needs_count_fn_for_the_names(steps: int) -> None:
    batches = [batch_of(3, 1), batch_of(4, 1)]
    run_on(sw.Mesh(fsdp=2), opaque, batches, count_fn=counts, steps=steps)
    with pytest.raises((LossError, RankError), match="other terms than the program") as caught:
        run_on(sw.Mesh(fsdp=2), opaque, batches, steps=steps)
    assert "the trace ended at" in str(caught.value)
    assert "lower(..., count_fn=)" in str(caught.value)


def test_an_untraced_single_term_may_have_a_count_fn() -> None:
    def one_term(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        float(batch["tokens"].sum())
        return {"ce": terms(model, batch)[0]["ce"]}

    def one_count(batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"ce": counts(batch)["ce"]}

    run_on(sw.Mesh(fsdp=2), one_term, [batch_of(3, 1)] * 2, count_fn=one_count, steps=2)


def test_a_count_fn_that_raises_on_one_rank_ends_the_call_on_all() -> None:
    """Where it is asked for the names of terms, and in a later step where it counts."""

    def picky(batch: dict[str, Tensor]) -> dict[str, Any]:
        if len(batch["tokens"]) == 2:
            raise ValueError("two rows are too few")
        return counts(batch)

    good, bad = [batch_of(3, 1)] * 2, [batch_of(3, 1), batch_of(2, 1)]
    with sw.simulate(sw.Mesh(fsdp=2)):
        plan = sw.plan(Model(), sw.Mesh(fsdp=2), sw.zero(3, "fsdp"))
        program = sw.lower(plan, opaque, sw.optim.sgd(0.1), count_fn=picky).bind()
        state = program.init(0)
        for doing in ("the first pass over the model", "the step"):
            with pytest.raises(RankError, match=f"Rank 1 failed in {doing}") as caught:
                program.step(state, sw.Lifted(bad))
            assert "ValueError: two rows are too few" in str(caught.value)
            assert caught.value.numbers == {"rank": 1, "failed": 1}
            state, metrics = program.step(state, sw.Lifted(good))
            assert metrics.applied


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({}, "a dict without terms"),
        ({"ce": torch.ones(())}, "the term 'ce' as a Tensor"),
        ({"ce": sw.Mean(torch.ones(2), 1)}, "a Mean whose total is a Tensor of shape (2,)"),
        (
            ({"a": sw.Mean(torch.ones(()), 1)}, {"a": sw.Mean(torch.ones(()), 1)}),
            "the term and metric 'a'",
        ),
        (
            (torch.ones(()), {"m": sw.Mean(torch.ones(()), 1, weight=2.0)}),
            "the auxiliary metric 'm' with the weight 2",
        ),
    ],
)
def test_what_is_no_loss_is_refused(result: Any, text: str) -> None:
    with pytest.raises(LossError) as caught:
        sw.lower(
            sw.plan(Model(), sw.Mesh(fsdp=1)),
            lambda _model, _batch: result,
            sw.optim.sgd(0.1),
            batch=batch_of(2, 0),
        )
    assert text in str(caught.value)
    assert "sw.Mean(loss.sum(), loss.numel())" in caught.value.fix
