"""Types in their table: uses, axes, writes and random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.sharding.errors import PlanError
from shardwise.transforms.activation_types import (
    Constant,
    Free,
    Invariant,
    Partial,
    Replicated,
    Sharded,
    Type,
    TypeMismatch,
    Types,
)
from shardwise.transforms.typing_mode import TypingMode


def tensor(types: Types, shape: tuple[int, ...], kind: Type, axis: str = "tp") -> Tensor:
    """A fake-like tensor of a type; it needs a gradient unless it is constant or free."""
    made = torch.ones(shape, requires_grad=kind not in (Constant(), Free(())))
    types.set(made, axis, kind)
    return made


CUT = Sharded(1, (4,))


def test_a_tensor_that_nobody_typed_is_not_guessed() -> None:
    types = Types(axes=("tp",))
    weight = nn.Parameter(torch.ones(3))
    reason = r"a tensor of shape \(3,\) .made by no operation. has no type"
    with pytest.raises(PlanError, match=reason), TypingMode(types):
        torch.relu(weight)
    made = weight * 2
    with pytest.raises(TypeMismatch, match="made by MulBackward0"):
        types.of(made, "tp")
    assert types.of(made.detach(), "tp") == Free(())


def test_what_gradient_is_decided_by_use() -> None:
    types = Types(axes=("tp",))
    first, second, third = (tensor(types, (2, 4), Free((name,))) for name in "abc")
    invariant = tensor(types, (2, 4), Invariant())
    replicated = tensor(types, (2, 4), Replicated())
    with TypingMode(types):
        both = first * second
        assert types.of(both, "tp") == Free(("a", "b"))
        assert types.of(both + invariant, "tp") == Invariant()
        assert types.of(second * replicated, "tp") == Replicated()
        assert types.of(third[:, :1] * tensor(types, (2, 4), CUT), "tp") == CUT
    assert types.used["tp"] == {
        "a": {"invariant"},
        "b": {"invariant", "replicated"},
        "c": {"replicated"},
    }


def test_without_gradient_all_that_is_equal_is_free() -> None:
    types = Types(axes=("tp",))
    invariant = tensor(types, (2, 4), Invariant())
    with TypingMode(types):
        with torch.no_grad():
            assert types.of(invariant * 2, "tp") == Free(())
        assert types.of(invariant.detach(), "tp") == Free(())
        assert types.of(invariant.argmax(-1), "tp") == Free(())
        cut = tensor(types, (2, 4), CUT)
        assert types.of(cut * invariant.detach()[:, :1], "tp") == CUT
    assert types.used["tp"] == {}


def test_axes_are_typed_apart() -> None:
    types = Types(axes=("tp0", "tp1"))
    left = tensor(types, (4, 6), Sharded(0, (4,)), "tp0")
    types.set(left, "tp1", Sharded(1, (6,)))
    right = tensor(types, (6, 2), Replicated(), "tp0")
    types.set(right, "tp1", Sharded(0, (6,)))
    with TypingMode(types):
        product = left @ right
    assert (types.of(product, "tp0"), types.of(product, "tp1")) == (Sharded(0, (4,)), Partial())


def test_a_write_reaches_what_shares_the_storage() -> None:
    types = Types(axes=("tp",))
    with TypingMode(types):
        out = torch.zeros(2, 4)
        half = out[:, 2:]
        assert types.of(out, "tp") == Constant()
        half.copy_(torch.arange(2.0))
        assert types.of(out, "tp") == Free(())
        source = tensor(types, (2, 2), Sharded(0, (2,)))
        with pytest.raises(PlanError, match="is written into a part of one that is"):
            out[:, 2:].copy_(source)
        same = torch.zeros(2, 2)
        alias = same.view(2, 2)
        same.copy_(source.detach())
        assert types.of(alias, "tp") == Sharded(0, (2,))
    unknown = torch.zeros(2, 2)
    with TypingMode(types):
        unknown[:].copy_(source.detach())
        with pytest.raises(TypeMismatch, match="a view of it was written"):
            types.of(unknown, "tp")


def test_random_numbers_are_noted_with_their_module() -> None:
    types = Types(axes=("tp",))
    cut = tensor(types, (2, 4), CUT)
    with TypingMode(types, where=lambda: "mlp"):
        assert types.of(F.dropout(cut, 0.5), "tp") == CUT
        assert types.of(torch.zeros(2, 4).normal_(), "tp") == Free(())
    assert types.random[0][1:] == ({"tp": CUT}, "mlp")
    assert [op for op, _, _ in types.random][-1] == "normal"


def test_no_block_of_another_length_can_be_declared() -> None:
    with pytest.raises(ValueError, match=r"no tensor of local shape \(2, 4\) is sharded on dim 1"):
        tensor(Types(axes=("tp",)), (2, 4), Sharded(1, (3,)))


def test_padding_is_kept_by_what_does_not_look_at_it() -> None:
    types = Types(axes=("tp",))
    hidden = tensor(types, (2, 3, 4), Replicated())
    vocabulary = tensor(types, (5, 4), Sharded(0, (5,), rows=9))
    with TypingMode(types):
        logits = F.linear(hidden, vocabulary)
        assert types.of(logits, "tp") == Sharded(2, (5,), rows=9)
        scaled = logits.transpose(1, 2) * 2.0
        assert types.of(scaled, "tp") == Sharded(1, (5,), rows=9)
        assert types.of(scaled.sum(0), "tp") == Sharded(0, (5,), rows=9)
        assert types.of(logits.view(6, 5), "tp") == Sharded(1, (5,), rows=9)
        with pytest.raises(PlanError, match="does not keep a block of dim 2 together"):
            logits.view(2, 15)
        with pytest.raises(PlanError, match="9 rows, padded"):
            logits + tensor(types, (5,), Sharded(0, (5,)))


def test_types_along_several_axes_are_set_at_once() -> None:
    types = Types(axes=("tp0", "tp1"))
    made = torch.zeros(2, 4)
    types.set(made, {"tp0": CUT, "tp1": Partial()})
    types.set(made, {"tp1": Constant()})
    assert (types.of(made, "tp0"), types.of(made, "tp1")) == (CUT, Constant())


class _Twice(torch.autograd.Function):
    """Several operations on a copy, as a function with its own backward has them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        total = inputs[0] * 0
        for one in inputs:
            total = total + one
        return total * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, grads[0] * 2


def test_a_function_with_its_own_backward_keeps_what_is_equal_on_all_ranks() -> None:
    types = Types(axes=("tp",))
    invariant, other = (tensor(types, (2, 4), Invariant()) for _ in range(2))
    free, replicated = tensor(types, (2, 4), Free(("w",))), tensor(types, (2, 4), Replicated())
    cut = tensor(types, (2, 4), CUT)
    with TypingMode(types, where=lambda: "mlp"):
        assert types.of(_Twice.apply(invariant.neg(), other), "tp") == Invariant()
        assert types.of(_Twice.apply(free, free.neg()), "tp") == Free(("w",))
        assert types.of(_Twice.apply(invariant.neg(), free), "tp") == Invariant()
        assert types.used["tp"] == {"w": {"invariant"}}
        assert types.of(_Twice.apply(cut.neg(), cut), "tp") == CUT
        mixed = _Twice.apply(invariant.neg(), replicated)
        with pytest.raises(PlanError, match=r"made by _TwiceBackward.* has no type"):
            mixed.sin()
