"""The kernels as torch operators, for graphs that are captured or compiled.

A call through torch's dispatcher costs more host time than one of the kernel, so optimizers call
the kernel itself; `torch.ops.shardwise` is for what only sees operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import recipes
from shardwise.kernels.recipes import Recipe
from shardwise.kernels.step import Group, reference_, squares, step_, takes

_TENSORS = "Tensor(a!) param, Tensor grad"
_REST = "Tensor(d!)? shadow, float scale"
_SCHEMAS: dict[str, tuple[int, str, Callable[..., Recipe]]] = {
    "adamw_step_": (
        2,
        "float lr, float beta1, float beta2, float eps, float weight_decay, int count",
        recipes.adamw,
    ),
    "lion_step_": (1, "float lr, float beta1, float beta2, float weight_decay", recipes.lion),
    "adagrad_step_": (1, "float lr, float eps, float weight_decay", recipes.adagrad),
    "sgd_step_": (
        1,
        "float lr, float momentum, bool nesterov, float weight_decay",
        recipes.sgd,
    ),
}
"""By operator: tensors of state, settings, and the recipe that takes them by name."""


def operators() -> Any:
    """`torch.ops.shardwise`, once the operators are registered; each has a fake.

    >>> param, grad, mu = torch.ones(2), torch.ones(2), torch.zeros(2)
    >>> operators().lion_step_(param, grad, mu, None, 1.0, 0.5, 0.9, 0.99, 0.0)
    >>> param
    tensor([0.5000, 0.5000])
    """
    _library()
    return torch.ops.shardwise


@functools.cache
def _library() -> torch.library.Library:
    """Operators live as long as someone holds their library."""
    made = torch.library.Library("shardwise", "DEF")
    for name, (num_states, settings, recipe) in _SCHEMAS.items():
        states = ", ".join(f"Tensor({'bc'[n]}!) state{n}" for n in range(num_states))
        made.define(f"{name}({_TENSORS}, {states}, {_REST}, {settings}) -> ()")
        names = [setting.split()[1] for setting in settings.split(", ")]
        made.impl(name, _runs(recipe, num_states, names), "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardwise::{name}", _nothing, lib=made)
    made.define("squares(Tensor flat) -> Tensor")
    made.impl("squares", _squares, "CompositeExplicitAutograd")
    torch.library.register_fake("shardwise::squares", _one_number, lib=made)
    return made


def _runs(recipe: Callable[..., Recipe], num_states: int, names: list[str]) -> Callable[..., None]:
    def run(param: Tensor, grad: Tensor, *rest: Any) -> None:
        states, (shadow, scale, *settings) = rest[:num_states], rest[num_states:]
        chosen = recipe(**dict(zip(names, settings, strict=True)))
        group = Group(param, grad, states[: chosen.num_states], shadow)
        if takes(group):
            step_(chosen, [group], scale=scale)
        else:
            reference_(chosen, [group], scale=scale)

    return run


def _nothing(*_: Any) -> None:
    """All results are written in place."""


def _squares(flat: Tensor) -> Tensor:
    return torch.tensor(squares(flat), dtype=torch.float64, device=flat.device)


def _one_number(flat: Tensor) -> Tensor:
    return flat.new_empty((), dtype=torch.float64)
