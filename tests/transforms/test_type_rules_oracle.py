"""The types of activations against the operations themselves, on two and three ranks.

What the ranks compute, put together as the type says, must be what one process computes; and so for
gradients. A rule that gives a wrong type fails here; one that refuses is only counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

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
from tests.transforms.typed_cases import CASES, CUBE, UNARY, Function

SEEN = {"typed": 0, "refused": 0, "cut": 0}


def _blocks(whole: Tensor, kind: Sharded, ranks: int) -> list[Tensor]:
    """The block of each rank: of each global piece, its part."""
    pieces = whole.split([size * ranks for size in kind.segments], kind.dim)
    parts = [piece.chunk(ranks, kind.dim) for piece in pieces]
    return [torch.cat([part[rank] for part in parts], kind.dim) for rank in range(ranks)]


def _joined(blocks: Sequence[Tensor], kind: Sharded) -> Tensor:
    parts = [block.split(list(kind.segments), kind.dim) for block in blocks]
    return torch.cat([torch.cat(one, kind.dim) for one in zip(*parts, strict=True)], kind.dim)


def _summands(whole: Tensor, ranks: int, seed: torch.Generator) -> list[Tensor]:
    parts = [torch.randn(whole.shape, dtype=whole.dtype, generator=seed) for _ in range(ranks - 1)]
    return [*parts, whole - sum(parts, torch.zeros_like(whole))]


def _values(whole: Tensor, kind: Type, ranks: int, seed: torch.Generator) -> list[Tensor]:
    if isinstance(kind, Sharded):
        return _blocks(whole, kind, ranks)
    if isinstance(kind, Partial):
        return _summands(whole, ranks, seed)
    return [whole.clone() for _ in range(ranks)]


def _assembled(values: Sequence[Tensor], kind: Type) -> Tensor:
    if isinstance(kind, Sharded):
        return _joined(values, kind)
    if isinstance(kind, Partial):
        return torch.stack(list(values)).sum(0)
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-9, atol=1e-9)
    return values[0]


def _gradient_kind(kind: Type, used: set[str]) -> Type:
    if isinstance(kind, Free):
        return Partial() if "replicated" in used else Invariant()
    if isinstance(kind, Replicated):
        return Partial()
    return Invariant() if isinstance(kind, Partial) else kind


def _kinds(shape: tuple[int, ...], ranks: int, name: str) -> st.SearchStrategy[Type]:
    cuts = [
        Sharded(dim, (size // ranks // num,) * num)
        for dim, size in enumerate(shape)
        for num in (1, 2)
        if not size % (ranks * num)
    ]
    others: list[Type] = [Free(()), Free((name,)), Invariant(), Replicated(), Partial(), Constant()]
    return (
        st.one_of(st.sampled_from(cuts), st.sampled_from(others))
        if cuts
        else st.sampled_from(others)
    )


def _leaf(value: Tensor, kind: Type) -> Tensor:
    needs = kind not in (Free(()), Constant())
    return value.detach().clone().requires_grad_(needs)


def check(
    function: Function, shapes: Sequence[tuple[int, ...]], kinds: Sequence[Type], ranks: int
) -> Type | None:
    """Compare one function on all data and on the ranks; None if the types do not go together."""
    seed = torch.Generator().manual_seed(len(shapes) * 100 + ranks)
    wholes = [
        torch.full(shape, 1.5 + at, dtype=torch.float64)
        if kind == Constant()
        else torch.randn(shape, dtype=torch.float64, generator=seed)
        for at, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
    wholes = [_leaf(one, kind) for one, kind in zip(wholes, kinds, strict=True)]
    values = [
        [_leaf(one, kind) for one in _values(whole.detach(), kind, ranks, seed)]
        for whole, kind in zip(wholes, kinds, strict=True)
    ]
    types = Types(axes=("tp",))
    for value, kind in zip(values, kinds, strict=True):
        types.set(value[0], "tp", kind)
    try:
        with TypingMode(types, where=lambda: "here"):
            first = function(*(value[0] for value in values))
            kind = types.of(first, "tp")
    except (PlanError, RuntimeError):  # or local shapes that torch refuses before it dispatches
        SEEN["refused"] += 1
        return None
    SEEN["typed"] += 1
    SEEN["cut"] += isinstance(kind, Sharded | Partial)
    results = [first] + [function(*(value[at] for value in values)) for at in range(1, ranks)]
    expected = function(*wholes)
    torch.testing.assert_close(_assembled(results, kind), expected, rtol=1e-9, atol=1e-9)
    if expected.requires_grad:
        _check_gradients(types, kind, kinds, (wholes, values), (expected, results))
    return kind


def _check_gradients(
    types: Types,
    kind: Type,
    kinds: Sequence[Type],
    inputs: tuple[list[Tensor], list[list[Tensor]]],
    outputs: tuple[Tensor, list[Tensor]],
) -> None:
    (wholes, values), (expected, results) = inputs, outputs
    ranks, seed = len(results), torch.Generator().manual_seed(7)
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=seed)
    spread: Type = Partial() if isinstance(kind, Replicated) else kind
    spread = Invariant() if isinstance(kind, Partial) else spread
    expected.backward(cotangent)
    for result, part in zip(results, _values(cotangent, spread, ranks, seed), strict=True):
        result.backward(part)
    for at, declared in enumerate(kinds):
        if not wholes[at].requires_grad:
            continue
        used = types.used["tp"].get(f"p{at}", set())
        if len(used) > 1:
            event("used in both roles")
            continue
        found = _assembled([_grad(one) for one in values[at]], _gradient_kind(declared, used))
        torch.testing.assert_close(found, _grad(wholes[at]), rtol=1e-9, atol=1e-9)


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_typed_is_right(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    ranks = data.draw(st.sampled_from([2, 3]))
    kinds = [data.draw(_kinds(shape, ranks, f"p{at}")) for at, shape in enumerate(case.shapes)]
    check(case.function, case.shapes, kinds, ranks)


@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_chains_that_are_typed_are_right(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 3]))
    kind = data.draw(_kinds(CUBE, ranks, "p0"))
    names = data.draw(st.lists(st.sampled_from(sorted(UNARY)), min_size=1, max_size=3))

    def chain(x: Tensor) -> Tensor:
        for name in names:
            x = UNARY[name](x)
        return x

    check(chain, [CUBE], [kind], ranks)


@pytest.mark.parametrize("name", sorted(UNARY))
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_on_every_type(name: str, ranks: int) -> None:
    cuts = [Sharded(dim, (size // ranks,)) for dim, size in enumerate(CUBE)]
    several = [Sharded(1, (12 // ranks // 2,) * 2)]
    others: list[Type] = [Free(("p0",)), Invariant(), Replicated(), Partial(), Constant()]
    found = [check(UNARY[name], [CUBE], [kind], ranks) for kind in [*cuts, *several, *others]]
    assert all(kind is not None for kind in found[4:7]), "equal on all ranks always fits"


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_view_that_is_typed_is_a_view_of_all_data(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 3]))
    sizes = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5)
    atoms = data.draw(sizes)

    def grouped() -> list[int]:
        cuts = data.draw(st.lists(st.booleans(), min_size=len(atoms), max_size=len(atoms)))
        shape = [atoms[0]]
        for atom, cut in zip(atoms[1:], cuts[1:], strict=True):
            shape[-1:] = [shape[-1], atom] if cut else [shape[-1] * atom]
        return shape

    before, after = grouped(), grouped()
    dim = data.draw(st.integers(0, len(before) - 1))
    assume(before[dim] > 1)
    divisors = [num for num in range(1, before[dim] + 1) if not before[dim] % num]
    num = data.draw(st.sampled_from(divisors))
    kind = Sharded(dim, (before[dim] // num,) * num)
    whole_shape = [size * ranks if at == dim else size for at, size in enumerate(before)]
    whole = torch.arange(torch.tensor(whole_shape).prod().item(), dtype=torch.float64)
    whole = whole.reshape(whole_shape)
    blocks = _blocks(whole, kind, ranks)
    types = Types(axes=("tp",))
    types.set(blocks[0], "tp", kind)
    try:
        with TypingMode(types):
            first = blocks[0].view(after)
    except PlanError:
        event("refused")
        return
    found = types.of(first, "tp")
    assert isinstance(found, Sharded)
    goal = [size * ranks if at == found.dim else size for at, size in enumerate(after)]
    views = [block.view(after) for block in blocks]
    assert torch.equal(_joined(views, found), whole.reshape(goal))


def test_enough_of_it_was_typed() -> None:
    for name in UNARY:
        check(UNARY[name], [CUBE], [Sharded(0, (3,))], 2)
    assert SEEN["typed"] > SEEN["refused"] / 4
    assert SEEN["cut"] >= 30
