"""Chains, masks, partitions and single overrides."""

from __future__ import annotations

import pytest
from hypothesis import given
from torch import nn

from shardwise.sharding.errors import PatternError, PlanError, SpecError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan, Transform, plan
from shardwise.transforms.compose import chain, masked, partition, tree_at
from shardwise.transforms.zero import freeze, keep_gathered, prefetch, shard_params, zero
from tests.sharding import toys
from tests.sharding.toys import MESH, Tiny

pytestmark = pytest.mark.abstract


@given(toys.models, toys.meshes, toys.recipes, toys.recipes)
def test_a_chain_is_its_parts_in_order(
    model: nn.Module, mesh: Mesh, a: Transform, b: Transform
) -> None:
    start = plan(model, mesh)
    assert chain(a, b)(start) == b(a(start)) == chain(chain(a), chain(), b)(start)
    assert chain()(start) == start


@given(toys.models, toys.meshes, toys.recipes)
def test_masking_by_everything_changes_nothing(
    model: nn.Module, mesh: Mesh, recipe: Transform
) -> None:
    start = plan(model, mesh)
    assert masked(recipe, "**")(start) == recipe(start)
    assert masked(masked(recipe, "**"), "**")(start) == recipe(start)


@given(toys.meshes, toys.params_homes | toys.zeros)
def test_a_mask_changes_only_what_it_selects(mesh: Mesh, recipe: Transform) -> None:
    start = plan(Tiny(), mesh)
    whole, part = recipe(start), masked(recipe, "layers.*")(start)
    for path in start.params:
        expected = whole if path.startswith("layers.") else start
        assert part.params[path] == expected.params[path]
        assert part.opt[path] == expected.opt[path]


def test_masks_nest_by_intersection() -> None:
    laid = plan(Tiny(), MESH, masked(masked(shard_params("fsdp"), "layers.1"), "up"))
    cut = [path for path, spec in laid.params.items() if spec.mesh_axes]
    assert cut == ["layers.1.up.weight", "layers.1.up.bias"]


def test_a_mask_reaches_a_transform_of_the_user() -> None:
    def recipe(before: Plan) -> Plan:
        return freeze("bias")(shard_params("fsdp")(before))

    laid = plan(Tiny(), MESH, masked(recipe, "layers.0"))
    assert [info.path for info in laid.infos if not info.trainable] == [
        "layers.0.norm.bias",
        "layers.0.up.bias",
    ]
    assert laid.scope == plan(Tiny(), MESH).scope


def test_a_failing_dimension_outside_of_the_mask_does_not_matter() -> None:
    strict = shard_params("fsdp", on=0)
    with pytest.raises(PlanError):
        plan(Tiny(), MESH, strict)
    masked(strict, "up")(plan(Tiny(), MESH))


def test_an_empty_intersection_is_an_error() -> None:
    with pytest.raises(PatternError) as caught:
        plan(Tiny(), MESH, masked(freeze("embed"), "layers.*"))
    assert "'embed' and 'layers.*' matches none of" in str(caught.value)


def test_a_setting_of_the_whole_plan_cannot_be_masked() -> None:
    with pytest.raises(PlanError, match=r"prefetch\(1\) cannot be masked"):
        plan(Tiny(), MESH, masked(prefetch(1), "layers.*"))
    assert plan(Tiny(), MESH, masked(prefetch(1), "**")).prefetch == 1


def test_units_can_be_masked() -> None:
    laid = plan(Tiny(), MESH, masked(keep_gathered(), "layers.1"))
    assert laid.keep == {"layers.1"}


def test_every_parameter_goes_to_the_first_pattern() -> None:
    laid = plan(
        Tiny(),
        MESH,
        partition(
            {
                "norm": chain(),
                "layers.0": zero(3, "dp"),
                "~embed": zero(1, "fsdp"),
                "**": zero(0, None),
            }
        ),
    )
    assert not laid.opt["layers.0.norm.weight"].mesh_axes
    assert laid.params["layers.0.up.weight"].mesh_axes == ("dp",)
    assert laid.opt["layers.1.up.weight"].mesh_axes == ("fsdp",)
    assert not laid.params["layers.1.up.weight"].mesh_axes
    assert not laid.opt["embed.weight"].mesh_axes


def test_order_of_a_partition_against_explicit_masks() -> None:
    laid = plan(Tiny(), MESH, partition({"layers.0": zero(3, "dp"), "layers.*": zero(1, "fsdp")}))
    by_hand = plan(
        Tiny(),
        MESH,
        zero(3, "dp", where="layers.0"),
        zero(1, "fsdp", where=("layers.*", "~layers.0")),
    )
    assert laid.same_layout(by_hand)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("layrs.*",), "did you mean 'layers'?"),
        (("layers.*", "layers.0"), "partition has nothing left for 'layers.0'."),
    ],
)
def test_partition_keys_must_find_something(keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(PatternError) as caught:
        plan(Tiny(), MESH, partition(dict.fromkeys(keys, zero(1, "fsdp"))))
    assert words in str(caught.value)


@pytest.mark.parametrize("last", [zero(3, "dp"), chain()])
def test_tree_at_overrides_whatever_comes_later(last: Transform) -> None:
    laid = plan(Tiny(), MESH, tree_at("opt", "head.weight", "d0/dp d1/fsdp :float64"), last)
    assert str(laid.opt["head.weight"]) == "d0/dp d1/fsdp :float64"
    assert laid.params["head.weight"] == plan(Tiny(), MESH, last).params["head.weight"]


def test_tree_at_takes_an_alias_and_the_last_one_wins() -> None:
    laid = plan(
        Tiny(tied=True),
        MESH,
        tree_at("params", "embed.weight", "d0/dp d1"),
        tree_at("params", "head.weight", "d0 d1/fsdp"),
    )
    assert str(laid.params["embed.weight"]) == "d0 d1/fsdp"


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: tree_at("optim", "w", "d0"), PlanError, ["'optim'", "params, grads, opt"]),
        (lambda: tree_at("opt", "w", "d0/"), SpecError, ["column"]),
        (lambda: tree_at("opt", "hed.weight", "d0 d1"), PatternError, ["did you mean 'head'?"]),
        (lambda: tree_at("opt", "head", "d0 d1"), PatternError, ["'head'"]),
        (
            lambda: tree_at("opt", "norm.bias", "d0 d1"),
            PlanError,
            ["'d0 d1'", "shape (8,)", "'d0'"],
        ),
        (lambda: tree_at("opt", "norm.bias", "d0/tp"), PlanError, ["'tp'", "dp, fsdp"]),
        (lambda: tree_at("opt", "norm.bias", "d0 +dp"), PlanError, ["pending over dp"]),
        (
            lambda: tree_at("opt", "head.weight", "d0/(dp fsdp) d1"),
            PlanError,
            ["dim 0 has size 10; 10 % 8 == 2", "one axis only"],
        ),
        (
            lambda: masked(tree_at("opt", "norm.bias", "d0/dp"), "layers"),
            PlanError,
            ["outside of the mask", "norm.bias"],
        ),
    ],
)
def test_overrides_that_cannot_be(make: object, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        plan(Tiny(), MESH, make())  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)


def test_the_name_of_a_chain_shows_in_errors_and_in_the_log() -> None:
    recipe = chain(zero(3, "fsdp"), name="recipe")
    assert "recipe: zero(3, 'fsdp')" in plan(Tiny(), MESH, recipe).why("head.weight")
    with pytest.raises(PlanError, match=r"^outer: recipe: zero\(3, 'fdsp'\) names"):
        plan(Tiny(), MESH, chain(chain(zero(3, "fdsp"), name="recipe"), name="outer"))
    assert plan(Tiny(), MESH, recipe) == plan(Tiny(), MESH, zero(3, "fsdp"))


@pytest.mark.parametrize(
    ("wrong", "words"), [(lambda p: None, "returned a NoneType"), ("zero", "is no function")]
)
def test_what_is_no_transform_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(Tiny(), MESH, chain(wrong))  # type: ignore[arg-type]
