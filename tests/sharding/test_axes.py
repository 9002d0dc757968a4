"""Axes: the grammar, the text round trip, and sizes against einops."""

from __future__ import annotations

import einops
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import AxesError
from shardwise.sharding.grammar import Atom, Product, Sum
from tests.sharding.strategies import axes as any_axes

pytestmark = pytest.mark.abstract

DESIGN = (
    "(3 heads hd) embed",
    "((heads + kv + kv) hd) embed",
    "(kv (group + 1 + 1) hd) embed",
    "(2 mlp) embed",
    "experts embed (2 mlp)",
    "embed",
    "",
)


@pytest.mark.parametrize("text", DESIGN)
def test_the_patterns_of_the_design_are_canonical(text: str) -> None:
    assert str(Axes.parse(text)) == text


@given(any_axes)
def test_text_round_trip(axes: Axes) -> None:
    again = Axes.parse(str(axes))
    assert again == axes
    assert hash(again) == hash(axes)
    assert str(again) == str(axes)


@given(any_axes, st.integers(0, 10**6))
def test_spaces_carry_no_meaning(axes: Axes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = str(axes).replace("(", " ( ").replace(")", " ) ").replace("+", " + ").split()
    text = "".join(token + " " * int(rng.integers(1, 4)) for token in tokens)
    assert Axes.parse(text) == axes


def test_the_tree_behind_a_pattern() -> None:
    axes = Axes.parse("(kv (group + 1) hd) embed")
    kv, group, one, hd = (Atom(text) for text in ("kv", "group", "1", "hd"))
    assert axes.dims == (Product((kv, Sum((group, one)), hd)), Atom("embed"))
    assert axes.ndim == 2
    assert axes.names == ("kv", "group", "hd", "embed")
    assert axes.dim_name(0) == "(kv (group + 1) hd)"
    assert axes.node((0, 1, 1)) == one
    assert axes.node((0, 3)) is None
    assert axes.places()["hd"] == ((0, 2),)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("(a b + c)", "(a (b + c))"),
        ("(((a)))", "a"),
        ("(a)(b)", "a b"),
        ("007 a", "7 a"),
        ("((a + b)) c", "(a + b) c"),
        ("(a (b c))", "(a (b c))"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Axes.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("embed)", 5, "expected a name, a number, '(' or the end, found ')'"),
        ("(a b", 4, "expected ')' for the '(' at column 0, found the end"),
        ("a () b", 2, "expected parts between '(' and ')'"),
        ("(a +) b", 4, "expected a name, a number or '(', found ')'"),
        ("a + b", 2, "expected a name, a number, '(' or the end, found '+'"),
        ("a 0", 2, "expected a name, a number from 1 or '(', found '0'"),
        ("a/fsdp b", 1, "expected no mesh axes"),
        ("a-b", 1, "found '-'"),
        ("a \u00b2", 2, "found '\u00b2'"),
        ("a\n\t-", 3, "found '-'"),
    ],
)
def test_a_fault_is_shown_with_a_caret(text: str, column: int, expected: str) -> None:
    with pytest.raises(AxesError) as caught:
        Axes.parse(text)
    first, pattern, caret, *_ = str(caught.value).splitlines()
    assert f"column {column}" in first
    assert pattern == "  " + text.replace("\n", " ").replace("\t", " ")
    assert caret == "  " + " " * column + "^"
    assert expected in str(caught.value)
    assert caught.value.numbers["column"] == column


FLAT = st.lists(
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3), min_size=1, max_size=3
)


@given(FLAT, st.data())
def test_sizes_agree_with_einops(groups: list[list[str]], data: st.DataObject) -> None:
    names = [name for group in groups for name in group]
    # einops refuses a name that stands twice; ours is only compared where both speak.
    unique = {name: f"{name}{i}" for i, name in enumerate(dict.fromkeys(names))}
    seen: set[str] = set()
    groups = [[n for n in group if not (n in seen or seen.add(n))] for group in groups]
    groups = [[unique[n] for n in group] for group in groups if group]
    sizes = {n: data.draw(st.integers(1, 5), label=n) for group in groups for n in group}
    shape = tuple(int(np.prod([sizes[n] for n in group])) for group in groups)
    pattern = " ".join(f"({' '.join(group)})" for group in groups)
    # One name per dimension stays unknown: both libraries have to find it.
    hidden = {data.draw(st.sampled_from(group)) for group in groups}
    known = {n: size for n, size in sizes.items() if n not in hidden}
    target = " ".join(n for group in groups for n in group)
    split = einops.rearrange(np.zeros(shape), f"{pattern} -> {target}", **known)
    found = Axes.parse(pattern).sizes(shape, **known)
    assert tuple(found.values()) == split.shape
    assert found == sizes


def test_plain_dimensions_agree_with_parse_shape() -> None:
    array = np.zeros((4, 3, 7))
    assert Axes.parse("b seq embed").sizes(array.shape) == einops.parse_shape(array, "b seq embed")


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_sums_against_their_formula(heads: int, kv: int, hd: int) -> None:
    axes = Axes.parse("((heads + kv + kv) hd) embed")
    shape = ((heads + 2 * kv) * hd, 5)
    truth = {"heads": heads, "kv": kv, "hd": hd, "embed": 5}
    for hidden in ("heads", "kv", "hd"):
        known = {n: size for n, size in truth.items() if n not in (hidden, "embed")}
        assert axes.sizes(shape, **known) == truth


def test_a_name_found_in_one_dimension_closes_another() -> None:
    axes = Axes.parse("(heads hd) (embed hd) embed")
    assert axes.sizes((32, 24, 6)) == {"heads": 8, "hd": 4, "embed": 6}


def test_zero_sizes_leave_their_partner_open() -> None:
    assert Axes.parse("a b").sizes((0, 3)) == {"a": 0, "b": 3}
    with pytest.raises(AxesError, match="leave 1 sizes open: b"):
        Axes.parse("(a b)").sizes((0,), a=0)


def test_sizes_left_open_are_named() -> None:
    with pytest.raises(AxesError) as caught:
        Axes.parse("(heads hd) embed").sizes((32, 8))
    assert "leave 2 sizes open: heads, hd" in str(caught.value)
    assert "dim 0 '(heads hd)' has size 32" in str(caught.value)
    assert "Fix: give hd=" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "shape", "known", "text"),
    [
        ("embed mlp", (4,), {}, "name 2 dimensions; the tensor has 1"),
        ("embed embed", (4, 5), {}, "dim 1 'embed' has size 5, with embed=4"),
        ("(3 heads) embed", (8, 4), {}, "dim 0 '(3 heads)' has size 8"),
        ("(3 heads hd)", (32,), {"hd": 5}, "has size 32, with hd=5"),
        ("(heads + kv + kv)", (9,), {"heads": 4}, "has size 9, with heads=4"),
        ("(heads + 10)", (9,), {}, "dim 0 '(heads + 10)' has size 9"),
        ("4 embed", (5, 2), {}, "dim 0 '4' has size 5"),
    ],
)
def test_shapes_that_do_not_fit(
    pattern: str, shape: tuple[int, ...], known: dict[str, int], text: str
) -> None:
    with pytest.raises(AxesError) as caught:
        Axes.parse(pattern).sizes(shape, **known)
    assert text in str(caught.value)
    assert "Fix:" in str(caught.value)


def test_check_accepts_open_sizes_and_refuses_contradictions() -> None:
    Axes.parse("(heads hd) embed").check((32, 8))
    Axes.parse("").check(())
    with pytest.raises(AxesError, match="do not fit"):
        Axes.parse("(heads 3) heads").check((12, 5))


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(AxesError, match="did you mean 'heads'"):
        Axes.parse("(heads hd)").sizes((8,), head=2)


def test_terms_of_a_sum_are_alternatives() -> None:
    axes = Axes.parse("((heads + kv) hd) embed")
    assert axes.alternatives((0, 0, 0), (0, 0, 1))
    assert not axes.alternatives((0, 0, 0), (0, 0))
    assert not axes.alternatives((0, 0, 0), (0, 1))
    assert not axes.alternatives((0,), (1,))
