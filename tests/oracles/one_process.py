"""The same training twice: in one process by plain torch, and sharded on simulated ranks.

`one_process` is the oracle: `torch.optim`, one module, one backward pass over the sum of all parts
of the batch. `sharded` runs the engine and reads everything back whole, so `assert_same` compares
losses, gradients, parameters, optimizer state and buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, nn

import shardwise as sw

_MOMENTS = {"mu": ("exp_avg", "momentum_buffer"), "nu": ("exp_avg_sq",)}


@dataclass
class Run:
    """What a training run leaves, by parameter path; an unused parameter has the gradient None."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def cut(batch: Any, parts: int) -> list[Any]:
    """The parts of a batch that the ranks get: dimension 0 of every tensor, as equal as can be."""

    def part(index: int) -> Any:
        return optree.tree_map(
            lambda leaf: leaf.tensor_split(parts)[index] if isinstance(leaf, Tensor) else leaf,
            batch,
        )

    return [part(index) for index in range(parts)]


def one_process(
    module: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    parts: int = 1,
) -> Run:
    """Train a copy of `module` without any sharding.

    `parts` matters only to models that look at their batch as a whole (branches, batch norm).
    """
    module = copy.deepcopy(module).train()
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    stepper = optimizer(list(named.values()))
    run = Run()
    for batch in batches:
        stepper.zero_grad()
        means = [_mean(loss_fn(module, part), part) for part in cut(batch, parts)]
        loss = sum(total for total, _ in means) / sum(count for _, count in means)
        loss.backward()
        run.losses.append(loss.item())
        run.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in named.items()})
        stepper.step()
    run.params = {name: p.detach() for name, p in module.named_parameters()}
    run.buffers = dict(module.named_buffers())
    for moment, keys in _MOMENTS.items():
        run.moments[moment] = {
            name: value
            for name, p in named.items()
            for key, value in stepper.state.get(p, {}).items()
            if key in keys and value is not None
        }
    return run


def _mean(result: Any, batch: Any) -> tuple[Any, Any]:
    if isinstance(result, sw.Mean):
        return result.total, result.count
    rows = next(leaf.shape[0] for leaf in optree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return result * rows, rows


def sharded(
    module: nn.Module,
    plan: sw.Plan,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    optimizer: Any,
    *,
    source: Any = None,
    after: Callable[[Any], None] | None = None,
) -> Run:
    """Train under a plan on simulated ranks, and check that what ran is what was listed.

    It starts from the values of the module, or from `source`; `after` gets the last state.
    """
    run = Run()
    with sw.simulate(plan.mesh):
        program = sw.lower(plan, loss_fn, optimizer).bind()
        state = program.init(sw.from_module(module) if source is None else source)
        for batch in batches:
            parts = program.shard_batch(batch)
            grads, _ = program.grads(state, parts)
            whole = sw.to_global(grads.leaves)
            used = grads.ranks[0].used
            assert all(one.used == used for one in grads.ranks)
            run.grads.append({path: whole[path] if path in used else None for path in whole})
            state, metrics = program.step(state, parts)
            assert program.last_collectives == program.lowered.collectives()
            run.losses.append(metrics.loss.item())
        run.params = sw.to_global(state.params)
        run.buffers = sw.to_global(state.buffers)
        opt = sw.to_global(state.opt)
        run.moments = {name: dict(getattr(opt, name, {})) for name in _MOMENTS}
        if after is not None:
            after(state)
    return run


def assert_same(got: Run, want: Run, *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Everything equal; a moment that torch never made must still be zero."""
    close = {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), **close)
    for step, (mine, theirs) in enumerate(zip(got.grads, want.grads, strict=True)):
        _same_leaves(f"gradient in step {step}", mine, theirs, close)
    _same_leaves("parameter", got.params, want.params, close)
    _same_leaves("buffer", got.buffers, want.buffers, close)
    for moment, mine in got.moments.items():
        zeros = {path: torch.zeros_like(value) for path, value in mine.items()}
        _same_leaves(moment, mine, zeros | want.moments[moment], close)


def _same_leaves(
    what: str,
    got: Mapping[str, Tensor | None],
    want: Mapping[str, Tensor | None],
    close: Mapping[str, float],
) -> None:
    assert sorted(got) == sorted(want), f"{what}: other paths"
    for path, value in want.items():
        mine = got[path]
        assert (mine is None) == (value is None), f"{what} {path}: {mine} against {value}"
        if mine is not None and value is not None:
            assert mine.shape == value.shape, f"{what} {path}: shape {tuple(mine.shape)}"
            torch.testing.assert_close(
                mine, value, msg=lambda m, p=path: f"{what} {p}: {m}", **close
            )
