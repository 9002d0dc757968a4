"""Rules: order, one use per mesh axis, divisibility, and the errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sharding.axes import Axes
from shardwise.sharding.errors import SpecError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.rules import Rules, llama
from tests.sharding.strategies import MESH_AXES

pytestmark = pytest.mark.abstract

MESH = Mesh(dp=2, fsdp=2, tp=4)


def spec(rules: Rules, pattern: str, shape: tuple[int, ...], **sizes: int) -> str:
    return str(rules.spec(Axes.parse(pattern), MESH, shape, sizes=sizes))


def test_first_free_match_wins() -> None:
    rules = Rules([("mlp", "tp"), ("embed", "tp"), ("embed", "fsdp")])
    assert spec(rules, "embed", (8,)) == "embed/tp"
    assert spec(rules, "mlp embed", (8, 8)) == "mlp/tp embed/fsdp"


def test_priority_is_the_order_of_rules_not_of_dimensions() -> None:
    rules = Rules(mlp="tp", embed="tp")
    assert spec(rules, "embed mlp", (8, 8)) == "embed mlp/tp"


def test_none_keeps_a_name_whole_and_ends_the_search() -> None:
    assert spec(Rules([("embed", None), ("embed", "tp")]), "embed", (8,)) == "embed"


def test_several_mesh_axes_need_all_of_them_free() -> None:
    rules = Rules([("mlp", "tp"), ("embed", ("fsdp", "tp")), ("embed", ("dp", "fsdp"))])
    assert spec(rules, "mlp embed", (8, 8)) == "mlp/tp embed/(dp fsdp)"
    assert spec(rules, "embed", (8,)) == "embed/(fsdp tp)"


def test_a_name_that_stands_twice_is_cut_once() -> None:
    assert spec(Rules(embed="tp"), "embed embed", (8, 8)) == "embed/tp embed"


def test_fused_projections() -> None:
    pattern = "((heads + kv + kv) hd) embed"
    assert spec(llama, pattern, (64, 32), heads=8, kv=4) == (
        "((heads/tp + kv/tp + kv/tp) hd) embed"
    )
    assert spec(llama, "(2 mlp) embed", (64, 32)) == "(2 mlp/tp) embed"
    assert spec(llama, "(kv (group + 1 + 1) hd) embed", (96, 32), kv=4, hd=6) == (
        "(kv/tp (group + 1 + 1) hd) embed"
    )


def test_an_even_cut_is_required_with_numbers() -> None:
    with pytest.raises(SpecError) as caught:
        spec(llama, "((heads + kv + kv) hd) embed", (48, 32), heads=8, kv=2)
    text = str(caught.value)
    assert "cannot cut 'kv' of '((heads + kv + kv) hd) embed' over tp evenly" in text
    assert "kv is 2; 2 % 4 == 2" in text
    assert "Mesh(dp=2, fsdp=2, tp=4)" in text
    assert "Fix: kv=None keeps it whole" in text
    assert caught.value.numbers == {"name": "kv", "size": 2, "count": 4}


def test_a_size_the_shape_leaves_open_is_asked_for() -> None:
    # 4 heads of 6 over tp=8 would cut through heads although 24 % 8 == 0.
    with pytest.raises(SpecError) as caught:
        spec(llama, "(heads hd) embed", (24, 32))
    assert "cannot cut 'heads'" in str(caught.value)
    assert "dim 0 '(heads hd)' has size 24" in str(caught.value)
    assert "Fix: sizes={'heads': ...}" in str(caught.value)
    assert spec(llama, "(heads hd) embed", (24, 32), hd=6) == "(heads/tp hd) embed"


def test_a_mesh_axis_of_size_one_needs_no_size() -> None:
    axes = Axes.parse("(heads hd) embed")
    assert str(llama.spec(axes, Mesh(tp=1), (24, 32))) == "(heads/tp hd) embed"


def test_unknown_mesh_axes_name_the_nearest() -> None:
    with pytest.raises(SpecError) as caught:
        Rules(embed="fdsp").spec(Axes.parse("mlp"), MESH, (8,))
    assert "the rule 'embed' -> 'fdsp' names an unknown mesh axis" in str(caught.value)
    assert "did you mean 'fsdp'?" in str(caught.value)


def test_names_without_a_rule_are_errors_unless_nobody_gave_them() -> None:
    with pytest.raises(SpecError) as caught:
        spec(llama, "embd", (8,))
    assert "'embd' of 'embd' has no rule" in str(caught.value)
    assert "did you mean 'embed'?" in str(caught.value)
    assert str(llama.spec(Axes.anonymous(2), MESH, (3, 5))) == "d0 d1"


def test_rules_are_values() -> None:
    a = Rules(embed="tp", mlp=None)
    b = Rules([("embed", ("tp",)), ("mlp", ())])
    assert a == b
    assert hash(a) == hash(b)
    assert eval(repr(a)) == a
    assert a != Rules(mlp=None, embed="tp")
    assert a.names == ("embed", "mlp")


def test_replace_keeps_the_place() -> None:
    rules = Rules([("a", "tp"), ("b", "tp"), ("a", "dp"), ("b", "fsdp")])
    assert rules.replace(a=None) == Rules([("a", None), ("b", "tp"), ("b", "fsdp")])
    assert rules.replace(c="dp").pairs[-1] == ("c", ("dp",))
    assert rules.replace() == rules


targets = st.none() | st.sampled_from(MESH_AXES) | st.permutations(MESH_AXES).map(tuple)


@given(st.lists(st.tuples(st.sampled_from("abc"), targets)))
def test_json_round_trip(pairs: list[tuple[str, str | tuple[str, ...] | None]]) -> None:
    rules = Rules(pairs)
    assert Rules.from_json(json.loads(json.dumps(rules.to_json()))) == rules


@given(st.lists(st.tuples(st.sampled_from("abc"), targets)), st.permutations("abc"))
def test_a_mesh_axis_is_used_once_per_tensor(
    pairs: list[tuple[str, str | tuple[str, ...] | None]], names: list[str]
) -> None:
    rules = Rules([*pairs, ("a", None), ("b", None), ("c", None)])
    made = rules.spec(Axes.parse(" ".join(names)), MESH, (16, 16, 16))
    used = [axis for dim in range(3) for axis in made.dim_axes(dim)]
    assert len(used) == len(set(used))


@pytest.mark.parametrize("entry", ["ab", ["a"], ["a", "tp"], ["a", [1]], [1, []], 3])
def test_json_of_another_form_is_refused(entry: object) -> None:
    with pytest.raises(SpecError, match="cannot read the entry"):
        Rules.from_json([entry])  # type: ignore[list-item]
