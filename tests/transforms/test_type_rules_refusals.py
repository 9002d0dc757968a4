"""Every way in which types of activations do not go together, with its text and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
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
    Types,
)
from shardwise.transforms.typing_mode import TypingMode


def tensor(types: Types, shape: tuple[int, ...], kind: Type, axis: str = "tp") -> Tensor:
    """A fake-like tensor of a type; it needs a gradient unless it is constant or free."""
    made = torch.ones(shape, requires_grad=kind not in (Constant(), Free(())))
    types.set(made, axis, kind)
    return made


def refuse(function: Callable[..., Any], *inputs: tuple[tuple[int, ...], Type]) -> PlanError:
    """The error of a function of inputs of these shapes and types."""
    types = Types(axes=("tp",))
    given = [tensor(types, shape, kind) for shape, kind in inputs]
    with pytest.raises(PlanError) as caught, TypingMode(types, where=lambda: "layers.0.attn"):
        function(*given)
    return caught.value


CUT = Sharded(1, (4,))
WIDE = (2, 4)

REFUSED: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], Type]], str]] = {
    "invariant and block": (
        torch.mul,
        [(WIDE, CUT), ((2, 1), Invariant())],
        "a block, which gives it only a part of its gradient",
    ),
    "invariant and replicated": (
        torch.add,
        [(WIDE, Invariant()), (WIDE, Replicated())],
        "meets a replicated one",
    ),
    "whole and block": (
        torch.add,
        [(WIDE, CUT), (WIDE, Replicated())],
        "dim 1 of size 4 of a value that is the same on all ranks",
    ),
    "two dims": (
        torch.add,
        [(WIDE, CUT), (WIDE, Sharded(0, (2,)))],
        "sharded on dim 1 and another on dim 0",
    ),
    "two cuts": (torch.add, [(WIDE, CUT), (WIDE, Sharded(1, (2, 2)))], "in segments 2|2"),
    "partial and block": (
        torch.mm,
        [((3, 4), Sharded(0, (3,))), ((4, 3), Partial())],
        "a partial sum meets a block",
    ),
    "partial and number": (lambda x: x + 1.0, [(WIDE, Partial())], "added once for each rank"),
    "partial and parameter": (
        torch.mul,
        [(WIDE, Partial()), (WIDE, Free(("w",)))],
        "mul of a partial sum",
    ),
    "relu of a sum": (
        torch.relu,
        [(WIDE, Partial())],
        "relu of a partial sum is not the sum of relu",
    ),
    "rounded sum": (lambda x: x.int(), [(WIDE, Partial())], "cannot be rounded to torch.int32"),
    "bias of a sum": (
        F.linear,
        [(WIDE, CUT), ((3, 4), CUT), ((3,), Free(("b",)))],
        "the bias would be added once for each rank",
    ),
    "whole weight": (
        F.linear,
        [(WIDE, CUT), ((3, 4), Free(("w",)))],
        "dim 1 of one factor is cut (4 rows on each rank)",
    ),
    "crossed cuts": (
        torch.mm,
        [((3, 4), Sharded(0, (3,))), ((4, 3), Sharded(0, (4,)))],
        "which are not multiplied with each other",
    ),
    "partial product": (
        torch.mm,
        [((3, 4), Partial()), ((4, 3), Free(("w",)))],
        "multiplied with a value that is free (w)",
    ),
    "mean": (
        lambda x: x.mean(1),
        [(WIDE, CUT)],
        "mean runs over dim 1, of which each rank has only 4 rows",
    ),
    "softmax": (
        lambda x: x.softmax(-1),
        [(WIDE, CUT)],
        "_softmax runs along dim 1, of which each rank has only 4 rows",
    ),
    "padded sum": (lambda x: x.sum(1), [(WIDE, Sharded(1, (4,), rows=7))], "sum runs over dim 1"),
    "padded product": (
        torch.mm,
        [((3, 4), Sharded(1, (4,), rows=7)), ((4, 3), Sharded(0, (4,), rows=7))],
        "dim 1 is contracted, which is padded to more than 7 rows",
    ),
    "layer norm": (
        lambda x: F.layer_norm(x, (4,)),
        [(WIDE, CUT)],
        "normalises over dim 1, of which each rank has only 4",
    ),
    "norm of cut weight": (
        lambda x, w: F.layer_norm(x, (4,), w),
        [(WIDE, Sharded(0, (2,))), ((4,), Sharded(0, (4,)))],
        "the weight of a norm is cut",
    ),
    "cuts a segment": (
        lambda x: x[:, 1:3],
        [(WIDE, CUT)],
        "rows 1 to 3 of dim 1 cut through a segment: each rank has 4 rows in segments 4",
    ),
    "split q|k|v": (
        lambda x: x.split(4, 1),
        [((2, 12), Sharded(1, (6, 3, 3)))],
        "rows 0 to 4 of dim 1 cut through a segment: each rank has 12 rows in segments 6|3|3",
    ),
    "every other row": (lambda x: x[:, ::2], [(WIDE, CUT)], "every 2th row of dim 1"),
    "one row": (
        lambda x: x.select(1, 2),
        [(WIDE, CUT)],
        "one row of dim 1 is taken, of which each rank has a block of 4",
    ),
    "view": (
        lambda x: x.view(4, 2, 3),
        [((2, 12), Sharded(1, (6, 3, 3)))],
        "a view from (2, 12) to (4, 2, 3) does not keep a block of dim 1 together",
    ),
    "squeeze": (lambda x: x.squeeze(1), [((2, 1), Sharded(1, (1,)))], "dim 1 is squeezed"),
    "expand": (
        lambda x: x.expand(2, 3),
        [((2, 1), Sharded(1, (1,)))],
        "a block of 1 rows is repeated to 3",
    ),
    "cat with whole": (
        lambda x, y: torch.cat([x, y], 1),
        [(WIDE, CUT), (WIDE, Replicated())],
        "put together along dim 1",
    ),
    "cat of two dims": (
        lambda x, y: torch.cat([x, y], 1),
        [(WIDE, CUT), (WIDE, Sharded(0, (2,)))],
        "sharded on dims [1, 0]",
    ),
    "cat of two cuts": (
        lambda x, y: torch.cat([x, y], 0),
        [(WIDE, CUT), (WIDE, Sharded(1, (2, 2)))],
        "cut differently",
    ),
    "cat of padded": (
        lambda x, y: torch.cat([x, y], 1),
        [(WIDE, Sharded(1, (4,), rows=7))] * 2,
        "blocks with padding",
    ),
    "vocabulary": (
        lambda w: F.embedding(torch.tensor([1]), w),
        [(WIDE, Sharded(0, (2,)))],
        "rows of dim 0 are looked up, of which each rank has only 2",
    ),
    "index": (
        lambda x: x[:, torch.tensor([1])],
        [(WIDE, CUT)],
        "rows of dim 1 are looked up, of which each rank has only 4",
    ),
    "query whole": (
        F.scaled_dot_product_attention,
        [((2, 4, 3, 2), Replicated()), ((2, 4, 3, 2), CUT), ((2, 4, 3, 2), CUT)],
        "key is cut and the query is not",
    ),
    "cut sequence": (
        F.scaled_dot_product_attention,
        [((2, 4, 3, 2), Sharded(2, (3,)))] * 3,
        "dim 2 of query is cut, along which the attention is computed",
    ),
    "whole keys": (
        F.scaled_dot_product_attention,
        [((2, 4, 3, 2), CUT), ((2, 4, 3, 2), Replicated()), ((2, 4, 3, 2), CUT)],
        "dim 1 of the query is cut, and dim 1 of key, of size 4, is the same",
    ),
    "copied sum": (
        lambda x: x.sum(1),
        [(WIDE, Sharded(1, (4,), copies=2))],
        "sum runs over dim 1, of which each rank has only 4 rows",
    ),
    "copied product": (
        torch.mm,
        [((3, 4), Sharded(1, (4,), copies=2)), ((4, 3), Sharded(0, (4,), copies=2))],
        "dim 1 is contracted, of which blocks are copied on 2 ranks",
    ),
    "product over a sequence": (
        torch.mm,
        [((3, 4), Sharded(1, (4,), stack="layers")), ((4, 3), Sharded(0, (4,), stack="layers"))],
        "dim 1 is contracted, of which blocks are padded for odd lengths",
    ),
    "sum over a sequence": (
        lambda x: x.sum(1),
        [(WIDE, Sharded(1, (4,), stack="layers"))],
        "sum runs over dim 1, of which each rank has only 4 rows",
    ),
    "cat of other copies": (
        lambda x, y: torch.cat([x, y], 1),
        [(WIDE, CUT), (WIDE, Sharded(1, (4,), copies=2))],
        "with other copies, are put together",
    ),
    "view of mixed copies": (
        lambda x: x.view(2, 2, 2),
        [(WIDE, Sharded(1, (2, 2), mixed=(1, 2)))],
        "does not keep a block of dim 1 together",
    ),
    "no rule": (
        torch.linalg.inv_ex,
        [((4, 4), CUT)],
        "linalg_inv_ex has no rule for inputs that differ between ranks",
    ),
    "shapes": (
        torch.add,
        [(WIDE, CUT), ((2, 8), Replicated())],
        "local shapes do not fit together (The size of tensor a (4)",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_does_not_fit_is_refused_with_its_reason(name: str) -> None:
    function, inputs, reason = REFUSED[name]
    error = refuse(function, *inputs)
    text = str(error)
    assert reason in text
    assert "module layers.0.attn, axis 'tp'" in text
    assert "Fix: declare the layout of the weight" in text
    assert "sw.constrain" in text
    assert "sw.local" in text
    assert error.numbers["axis"] == "tp"
    assert set(error.numbers["types"]) <= {kind for _, kind in inputs} | {Free(())}
    for shape, kind in inputs:
        if kind in error.numbers["types"]:
            assert shape in error.numbers["shapes"]


def test_the_error_tells_all_arguments_and_its_numbers() -> None:
    error = refuse(lambda x: x.split(4, 1), ((2, 12), Sharded(1, (6, 3, 3))))
    assert str(error).splitlines()[0] == (
        "split does not fit the tensor-parallel layouts of its inputs"
    )
    assert "self: sharded on dim 1 in segments 6|3|3, (2, 12) on each rank" in str(error)
    found = {name: error.numbers[name] for name in ("op", "start", "stop", "segments")}
    assert found == {"op": "split", "start": 0, "stop": 4, "segments": (6, 3, 3)}
