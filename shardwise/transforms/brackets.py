"""Enter and Leave: the brackets around a unit, and the only place where parameters move in a step.

[Note: Enter and Leave]
`Enter` is created before the operations of its unit and `Leave` after them. Autograd runs ready
nodes latest-created first, so in backward `Leave` comes before all of them and `Enter` after all of
them. `Enter.forward` gathers the unit's parameters and returns views of the buffer; the leave hook
empties the buffer; `Leave.backward` refills it; `Enter.backward` empties it and reduces the
gradients to their landing layout, which is the shape of Enter's one differentiable input per
bucket. So full weights live only while a unit runs and full gradients never rest. Every Enter also
returns a *token*, a further input of the loss that gets no gradient: a unit whose output is not
used, or that this rank skips, still joins backward, and all ranks run the same collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.transforms.outputs import replace_tensors
from shardwise.transforms.unit_runtime import Call


class Turns(Protocol):
    """What backward tells the engine."""

    def on_leave_backward(self, call: Call) -> None:
        """Backward has reached what the unit returned."""
        ...

    def on_enter_backward(self, call: Call, grads: Sequence[Tensor | None]) -> None:
        """All gradients of the unit's parameters are there."""
        ...


class Enter(torch.autograd.Function):
    """Leaves of the landing shapes -> the unit's parameters and a token."""

    @staticmethod
    def forward(ctx: Any, call: Call, engine: Turns, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Give out aliases of the filled views; nothing for a call that this rank skips."""
        ctx.call, ctx.engine = call, engine
        ctx.num_inputs = 2 + len(leaves)
        ctx.set_materialize_grads(False)
        return (*call.parameters, leaves[0].new_empty(()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Empty the unit, then add and move its gradients; none of them is autograd's to add."""
        ctx.engine.on_enter_backward(ctx.call, grads[:-1])
        return (None,) * ctx.num_inputs


class Leave(torch.autograd.Function):
    """The tensors that leave a unit, unchanged; backward refills the unit first."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, engine: Turns, shared: Sequence[bool], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Alias by `detach`: it keeps the version counter, so in-place use stays checked.

        What shares memory with another output or an input (`shared`) becomes a view instead: torch
        refuses to write it, or what it shares with, in place. A change of one would be missing in
        the gradient of the other.
        """
        ctx.call, ctx.engine = call, engine
        ctx.set_materialize_grads(False)
        return tuple(
            tensor.view_as(tensor) if alias else tensor.detach()
            for tensor, alias in zip(tensors, shared, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Refill, then let the gradients pass."""
        ctx.engine.on_leave_backward(ctx.call)
        return (None, None, None, *grads)


class Close(torch.autograd.Function):
    """Placed on the inputs of a unit without trainable parameters: backward empties it."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of the inputs, which torch refuses to write: the caller still holds the inputs."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The unit's backward is over."""
        ctx.call.unit.unbind()
        ctx.call.unit.empty()
        return (None, *grads)


class Join(torch.autograd.Function):
    """The loss, with the tokens of all calls as further inputs that get no gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tokens: Tensor) -> Tensor:
        """Alias the loss."""
        ctx.num_tokens = len(tokens)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """All of it to the loss."""
        return (*grads, *([None] * ctx.num_tokens))


def guard_inputs(call: Call, inputs: Any) -> Any:
    """Put `Close` on inputs of a unit without trainable parameters: they tell when backward ends.

    Args:
        call: of the unit.
        inputs: its arguments, if they may be replaced.

    Returns:
        The inputs to use when they had to be replaced.
    """
    if inputs is None or call.unit.stays:
        return None

    def guard(tensors: list[Tensor]) -> Sequence[Tensor]:
        wanted = [t for t in tensors if t.requires_grad]
        if not wanted:
            return tensors
        new = iter(Close.apply(call, *wanted))
        return [next(new) if t.requires_grad else t for t in tensors]

    return replace_tensors(inputs, call.unit.name, guard)
