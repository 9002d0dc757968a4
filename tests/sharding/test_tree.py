"""FrozenMap against dict; patterns against a recursive matcher over segments."""

from __future__ import annotations

import fnmatch
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sharding.errors import PatternError
from shardwise.sharding.repeats import collapse, render_group
from shardwise.sharding.tree import (
    FrozenMap,
    as_patterns,
    match,
    match_exact,
    select,
    selects,
)

pytestmark = pytest.mark.abstract

PATHS = [
    "embed.weight",
    "layers.0.attn.wq.weight",
    "layers.0.norm1.bias",
    "layers.10.attn.wq.weight",
    "final_norm.weight",
]


def oracle(pattern: list[str], path: list[str]) -> bool:
    """Whether segments match segments to the end, by recursion instead of a regex."""
    if not pattern:
        return not path
    head, *rest = pattern
    if head == "**":
        return any(oracle(rest, path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], head) and oracle(rest, path[1:])


def oracle_match(pattern: str, path: str) -> bool:
    """The rule of the design, literally: the path or a module above, free at the start."""
    body = pattern.removeprefix("~")
    segments = body.removeprefix("^").split(".")
    if not body.startswith("^"):
        segments = ["**", *segments]
    parts = path.split(".")
    hit = any(oracle(segments, parts[:end]) for end in range(1, len(parts) + 1))
    return hit is not pattern.startswith("~")


names = st.text("ab1", min_size=1, max_size=2)
paths = st.lists(names, min_size=1, max_size=5).map(".".join)
segments = st.sampled_from(["a", "b", "ab", "1", "*", "**", "a*", "*b", "*1*"])
patterns = st.builds(
    lambda front, parts: front + ".".join(parts),
    st.sampled_from(["", "^", "~", "~^"]),
    st.lists(segments, min_size=1, max_size=4),
)


@given(patterns, paths)
def test_patterns_follow_the_rule(pattern: str, path: str) -> None:
    assert match(pattern, path) == oracle_match(pattern, path)


@given(patterns, paths)
def test_exact_match_has_no_path_below(pattern: str, path: str) -> None:
    body = pattern.removeprefix("~")
    parts = body.removeprefix("^").split(".")
    free = parts if body.startswith("^") else ["**", *parts]
    assert match_exact(pattern, path) == (
        oracle(free, path.split(".")) is not pattern.startswith("~")
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*", [1, 2, 3]),
        ("*norm*", [2, 4]),
        ("weight", [0, 1, 3, 4]),
        ("wq", [1, 3]),
        ("^layers.0", [1, 2]),
        ("^weight", []),
        ("layers.1", []),
        ("layers.**.weight", [1, 3]),
        ("~layers", [0, 4]),
        ("**", [0, 1, 2, 3, 4]),
    ],
)
def test_examples(pattern: str, expected: list[int]) -> None:
    assert [i for i, path in enumerate(PATHS) if match(pattern, path)] == expected


def test_negated_patterns_take_away_from_a_tuple() -> None:
    assert select(("layers.*", "~bias"), PATHS) == (PATHS[1], PATHS[3])
    assert select(["~layers", "~embed"], PATHS) == (PATHS[4],)


def test_predicates_become_exact_paths() -> None:
    clause = as_patterns(lambda path: "10" in path, PATHS)
    assert clause == ("^layers.10.attn.wq.weight",)
    assert select(lambda path: "10" in path, PATHS) == (PATHS[3],)


def test_a_tied_leaf_is_found_by_every_name() -> None:
    assert selects(("head",), ("embed.weight", "head.weight"))
    assert not selects(("~head",), ("embed.weight", "head.weight"))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("layer.*", ["'layer.*'", "5 paths", "did you mean 'layers'"]),
        ("embed.wieght", ["did you mean 'weight'"]),
        (("embed", "hd"), ["'hd'"]),
        (("embed", "~weight"), ["'embed', '~weight'", "5 paths"]),
        ((), ["empty tuple"]),
        (("embed", len), ["no pattern", "one predicate"]),
        (lambda path: path == "x", ["matches none of 5 paths"]),
    ],
)
def test_a_selection_of_nothing_is_an_error(where: object, words: list[str]) -> None:
    with pytest.raises(PatternError) as caught:
        select(where, PATHS)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "a..b", ".a", "a**", "a.^b", "~~a", "a b"])
def test_malformed_patterns_are_errors(pattern: str) -> None:
    with pytest.raises(PatternError, match="malformed"):
        match(pattern, "a.b")


@given(st.dictionaries(st.text(max_size=2), st.integers()))
def test_frozen_map_is_a_hashable_dict(items: dict[str, int]) -> None:
    frozen = FrozenMap(items)
    backwards = FrozenMap(reversed(list(items.items())))
    assert frozen == items == backwards
    assert list(frozen) == list(items)
    assert hash(frozen) == hash(backwards)
    assert pickle.loads(pickle.dumps(frozen)) == frozen
    assert frozen | {"new": 1} == {**items, "new": 1}


def test_frozen_map_differs_and_refuses_writes() -> None:
    frozen = FrozenMap(a=1)
    assert frozen != {"a": 2}
    assert frozen != [("a", 1)]
    with pytest.raises(TypeError):
        frozen["a"] = 2  # type: ignore[index]


def test_repeats_are_split_into_full_products() -> None:
    grid = [f"l.{i}.e.{j}.w" for i in range(3) for j in range(2)]
    texts = [render_group(group) for group in collapse(["a.w", *grid, "l.3.e.0.w", "l.3.r"])]
    assert texts == ["a.w", "l.{0..2}.e.{0..1}.w", "l.3.e.0.w", "l.3.r"]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), unique=True))
def test_every_path_is_in_exactly_one_group(indices: list[tuple[int, int, int]]) -> None:
    wanted = [f"a.{i}.b.{j}.{k}" for i, j, k in indices]
    groups = collapse(wanted)
    assert sorted(path for group in groups for path in group) == sorted(wanted)
    for group in groups:
        columns = list(zip(*(path.split(".") for path in group)))
        sizes = [len(set(column)) for column in columns]
        assert len(group) == sizes[1] * sizes[3] * sizes[4]


def test_groups_share_what_the_caller_compares() -> None:
    kinds = {"l.0": "x", "l.1": "y", "l.2": "x"}
    assert collapse(kinds, kinds.get) == [["l.0", "l.2"], ["l.1"]]
    assert render_group(["l.0", "l.2"]) == "l.{0,2}"
