"""Any `torch.optim` optimizer as a gradient transform, and any scheduler as a schedule.

[Note: torch optimizers as functions]
A torch optimizer keeps its state in itself. Each step makes a private instance over the tensors at
hand, puts copies of (or, in place, the very) state tensors in, steps, and takes them out; so the
state is a value like any other. Torch makes state in the first step of a parameter: `init` finds
out which state there will be from a step on zeros, and the first real step starts without any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardwise.optim.base import Couples, GradientTransform, Scale, Tensors, scale_of
from shardwise.optim.flat import scaled
from shardwise.optim.schedules import Schedule
from shardwise.sharding.errors import OptimError

_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


class FromTorchState(NamedTuple):
    """Steps taken, steps of each parameter, and torch's state, by name and parameter."""

    count: Tensor  # 0-dim int64, on the CPU
    steps: Tensors  # 0-dim int64 each, on the CPU
    slots: dict[str, Tensors]


class _Source(NamedTuple):
    kind: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    schedule: Schedule | None


def from_torch(
    kind: Callable[..., torch.optim.Optimizer],
    *,
    schedule: Schedule | None = None,
    couples: Couples | None = None,
    **options: Any,
) -> GradientTransform:
    """A torch optimizer class as a gradient transform; the class itself does the arithmetic.

    Costs the making of an optimizer per step, and torch's own temporaries. Prefer the transforms
    of this package where there is one: their bits do not depend on how parameters are cut. In a
    program parameters of a group share one step count.

    Args:
        kind: a class such as `torch.optim.NAdam`, or what makes an optimizer from parameters.
        schedule: the rate, in the place of `lr=`.
        couples: what the optimizer must see whole. Default: `"element"` for torch's own
            elementwise classes, `"tensor"` for all others.
        options: keywords of the class.

    Raises:
        OptimError: an optimizer that needs a closure or sparse gradients.

    >>> optimizer = from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> params = {"w": torch.tensor([1.0])}
    >>> state = optimizer.init(params)
    >>> params, state = optimizer.apply(params, {"w": torch.tensor([1.0])}, state)
    >>> params, state.slots
    ({'w': tensor([0.5000])}, {'momentum_buffer': {'w': tensor([1.])}})
    """
    if kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        raise OptimError(
            f"from_torch({getattr(kind, '__name__', kind)}) cannot be a gradient transform.",
            where="argument kind of from_torch()",
            facts="it calls the loss again in its step, or wants sparse gradients.",
            why="A gradient transform sees dense gradients, once per step.",
            fix="from_torch(torch.optim.AdamW, lr=3e-4)",
        )
    source = _Source(kind, options, schedule)
    return GradientTransform(
        init=partial(_init, source),
        update=partial(_update, source),
        apply=partial(_apply, source),
        couples=couples or ("element" if kind in _ELEMENTWISE else "tensor"),
    )


def schedule_from_torch(
    make: Callable[[torch.optim.Optimizer], LRScheduler], learning_rate: float, *, steps: int
) -> Schedule:
    """The rates of a torch scheduler as a schedule: run once, written in a table, then read.

    Args:
        make: makes the scheduler from an optimizer.
        learning_rate: the rate that the scheduler starts from.
        steps: length of the table; later steps keep the last rate.

    Raises:
        OptimError: a scheduler that looks at a metric, or no steps.

    >>> from torch.optim.lr_scheduler import StepLR
    >>> rate = schedule_from_torch(lambda o: StepLR(o, 2, gamma=0.5), 1.0, steps=5)
    >>> [rate(torch.tensor(count)).item() for count in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
    scheduler = make(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau) or steps < 1:
        raise OptimError(
            "schedule_from_torch needs a scheduler that only counts, and at least one step.",
            where="arguments of schedule_from_torch()",
            facts=f"scheduler {type(scheduler).__name__}; steps {steps}.",
            why="The rates are written in a table before training.",
            fix="inject(adamw, learning_rate=...) and set_hyperparameters when a metric stalls",
            steps=steps,
        )
    rates: list[float] = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    table = torch.tensor(rates, dtype=torch.float64)

    def schedule(count: Tensor) -> Tensor:
        # Not table[count]: an index that is a number makes a step on a GPU wait for it.
        return table.to(count.device).index_select(0, count.clamp(max=steps - 1).reshape(1))[0]

    return schedule


def _options(source: _Source, count: Tensor) -> dict[str, Any]:
    if source.schedule is None:
        return source.options
    return {**source.options, "lr": float(source.schedule(count).item())}


def _init(source: _Source, params: Tensors) -> FromTorchState:
    count = torch.zeros((), dtype=torch.int64)
    slots: dict[str, Tensors] = {}
    for key, value in params.items():
        # On the meta device torch's steps read numbers that are not there.
        where = torch.device("cpu") if value.is_meta else value.device
        leaf = torch.zeros(value.shape, dtype=value.dtype, device=where, requires_grad=True)
        leaf.grad = torch.zeros_like(leaf)
        optimizer = source.kind([leaf], **_options(source, count))
        with torch.enable_grad():
            optimizer.step()
        for name, slot in optimizer.state[leaf].items():
            if slot is not None:
                first = torch.zeros_like(torch.as_tensor(slot))
                slots.setdefault(name, {})[key] = first.to("meta") if value.is_meta else first
    return FromTorchState(count, {key: count.clone() for key in params}, slots)


def _update(
    source: _Source, grads: Tensors, opt_state: FromTorchState, params: Tensors, **extra: Any
) -> tuple[Tensors, FromTorchState]:
    new = {key: value.detach().clone() for key, value in params.items()}
    state = FromTorchState(
        opt_state.count.clone(),
        {key: value.clone() for key, value in opt_state.steps.items()},
        {
            name: {key: value.clone() for key, value in values.items()}
            for name, values in opt_state.slots.items()
        },
    )
    _apply(source, new, grads, state, **extra)
    return {key: new[key] - params[key] for key in grads}, state


def _apply(
    source: _Source,
    params: Tensors,
    grads: Tensors,
    opt_state: FromTorchState,
    *,
    scale: Scale | None = None,
    **_extra: Any,
) -> tuple[Tensors, FromTorchState]:
    leaves: Tensors = {}
    for key, grad in grads.items():
        leaf = params[key].detach().requires_grad_()
        mine = scaled(grad, leaf.detach(), scale_of(scale, key))
        leaf.grad = mine.clone()  # torch may write into it
        leaves[key] = leaf
    if leaves:
        optimizer = source.kind(list(leaves.values()), **_options(source, opt_state.count))
        for key, leaf in leaves.items():
            if int(opt_state.steps[key]):
                optimizer.state[leaf] = {
                    name: values[key] for name, values in opt_state.slots.items() if key in values
                }
        with torch.enable_grad():
            optimizer.step()
        for key, leaf in leaves.items():
            _take(optimizer.state[leaf], key, opt_state)
    opt_state.count.add_(1)
    return params, opt_state


def _take(state: dict[str, Any], key: str, opt_state: FromTorchState) -> None:
    """Copy what torch has made into the state; what it changed in place is there already."""
    for name, values in opt_state.slots.items():
        if key in values and values[key] is not state.get(name):
            values[key].copy_(torch.as_tensor(state[name]))
    opt_state.steps[key].add_(1)
