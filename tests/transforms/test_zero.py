"""ZeRO on homes: the three homes, the choice of dimension, and what cannot be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.sharding.errors import PlanError
from shardwise.sharding.homes import HOMES
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan, Transform, plan
from shardwise.sharding.spec import Spec, local_range
from shardwise.transforms.compose import chain
from shardwise.transforms.zero import (
    freeze,
    keep_gathered,
    prefetch,
    shard_grads,
    shard_optimizer,
    shard_params,
    zero,
)
from tests.sharding import toys
from tests.sharding.toys import MESH, Tiny

pytestmark = pytest.mark.abstract

CUTS = [shard_params, shard_grads, shard_optimizer]


class OneParam(nn.Module):
    def __init__(self, *shape: int, count: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape, device="meta"))
        for i in range(1, count):
            self.register_parameter(f"w{i}", nn.Parameter(torch.empty(shape, device="meta")))


def one(shape: tuple[int, ...], mesh: Mesh, *transforms: Transform, axes: str = "") -> Plan:
    return plan(OneParam(*shape), mesh, *transforms, axes={"w": axes} if axes else None)


def homes_of(laid: Plan, path: str = "w") -> tuple[str, str, str]:
    return str(laid.params[path]), str(laid.grads[path]), str(laid.opt[path])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (0, ("d0 d1", "d0 d1", "d0 d1")),
        (1, ("d0 d1", "d0 d1", "d0/fsdp d1")),
        (2, ("d0 d1", "d0/fsdp d1", "d0/fsdp d1")),
        (3, ("d0/fsdp d1", "d0/fsdp d1", "d0/fsdp d1")),
    ],
)
def test_levels_are_homes(level: int, expected: tuple[str, str, str]) -> None:
    laid = one((8, 4), MESH, zero(level, "fsdp"))
    assert homes_of(laid) == expected
    assert str(laid.compute["w"]) == "d0 d1"
    assert laid.batch == ("dp", "fsdp")


@given(toys.models, toys.meshes, st.integers(0, 3), toys.data_axes, toys.wheres)
def test_zero_is_a_chain_of_three(
    model: nn.Module, mesh: Mesh, level: int, axis: tuple[str, ...], where: str
) -> None:
    axis = axis or ("fsdp",)
    parts = [
        cut(axis if level >= least else None, where=where)
        for cut, least in zip(CUTS, (3, 2, 1), strict=True)
    ]
    whole = plan(model, mesh, zero(level, axis, where=where))
    for order in itertools.permutations(parts):
        assert plan(model, mesh, chain(*order)) == whole
    assert plan(model, mesh, *parts).same_layout(whole)


@given(toys.models, toys.meshes, toys.params_homes, toys.grads_homes, toys.opt_homes, toys.freezes)
def test_different_homes_commute(
    model: nn.Module,
    mesh: Mesh,
    params: Transform,
    grads: Transform,
    opt: Transform,
    frozen: Transform,
) -> None:
    plans = {
        plan(model, mesh, *order) for order in itertools.permutations([params, grads, opt, frozen])
    }
    assert len(plans) == 1


@given(toys.models, toys.meshes, toys.recipes, st.integers(0, 3))
def test_a_later_zero_decides_all_homes(
    model: nn.Module, mesh: Mesh, recipe: Transform, level: int
) -> None:
    before = plan(model, mesh, recipe)
    frozen = [f"^{info.path}" for info in before.infos if not info.trainable]
    fresh = plan(model, mesh, *([freeze(frozen)] if frozen else []))
    assert zero(level, "fsdp")(before).same_layout(zero(level, "fsdp")(fresh))
    assert zero(0, None)(before).same_layout(fresh)


@given(toys.models, toys.meshes, toys.recipes)
def test_transforms_are_idempotent_and_pure(
    model: nn.Module, mesh: Mesh, recipe: Transform
) -> None:
    start = plan(model, mesh)
    once = recipe(start)
    assert recipe(once) == once
    assert start == plan(model, mesh)


@given(toys.models, toys.meshes, toys.recipes)
def test_every_element_has_exactly_one_owner_per_home(
    model: nn.Module, mesh: Mesh, recipe: Transform
) -> None:
    """Oracle: `torch.chunk` of the rows over the ranks that a home names."""
    laid = plan(model, mesh, recipe)
    for info, home in itertools.product(laid.infos, HOMES):
        spec: Spec | None = getattr(laid, home).get(info.path)
        for dim, size in enumerate(info.shape if spec else ()):
            axes = spec.dim_axes(dim)
            chunks = torch.arange(size).chunk(mesh.product(axes)) if size else ()
            grid = itertools.product(*(range(mesh[axis]) for axis in axes))
            ranges = [
                local_range(spec, info.shape, mesh, dict(zip(axes, at, strict=True)), dim)
                for at in grid
            ]
            assert [r for r in ranges if r[0] < r[1]] == [
                (int(c[0]), int(c[-1]) + 1) for c in chunks
            ]


@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=3).map(tuple),
    st.sampled_from([Mesh(a=2, b=3, c=2), Mesh(a=1, b=2, c=1), Mesh(a=4, b=1, c=2)]),
    st.permutations(["a", "b", "c"]),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
)
def test_automatic_homes_of_nested_axes_nest(
    shape: tuple[int, ...], mesh: Mesh, order: list[str], counts: tuple[int, int, int]
) -> None:
    """A finer home cuts the dimension of the coarser one, by axes that begin with its axes."""
    laid = one(shape, mesh, *(cut(order[:n]) for cut, n in zip(CUTS, sorted(counts), strict=True)))
    specs = [laid.params["w"], laid.grads["w"], laid.opt["w"]]
    for coarse, fine in itertools.pairwise(specs):
        assert len(fine.shards) <= 1
        for (dim,), axes in coarse.shards:
            assert fine.dim_axes(dim)[: len(axes)] == axes


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((8, 3), "fsdp", "d0/fsdp d1"),
        ((6, 4), "fsdp", "d0 d1/fsdp"),
        ((6, 5), "fsdp", "d0/fsdp d1"),
        ((16, 8), ("fsdp", "dp"), "d0/(fsdp dp) d1"),
        ((12, 8), ("fsdp", "dp"), "d0 d1/(fsdp dp)"),
        ((12, 4), ("fsdp", "dp"), "d0/fsdp d1"),
        ((3, 3), ("one", "fsdp", "dp"), "d0/(one fsdp) d1"),
        ((2, 4), "fsdp", "d0 d1/fsdp"),
        ((1,), "fsdp", "d0/fsdp"),
        ((), "fsdp", ""),
    ],
)
def test_auto_takes_the_first_dimension_that_divides(
    shape: tuple[int, ...], axis: str, expected: str
) -> None:
    mesh = Mesh(one=1, dp=2, fsdp=4)
    assert str(one(shape, mesh, shard_params(axis)).params["w"]) == expected


def test_auto_chooses_a_dimension_that_the_finer_home_divides_too() -> None:
    # Dimension 0 divides by fsdp alone; only dimension 1 carries both homes.
    laid = one((4, 8), MESH, zero(3, "fsdp"), shard_optimizer(("dp", "fsdp")))
    assert homes_of(laid) == ("d0 d1/fsdp", "d0 d1/fsdp", "d0 d1/(fsdp dp)")
    assert homes_of(one((4, 8), MESH, zero(3, "fsdp")))[0] == "d0/fsdp d1"


def test_auto_stays_with_the_dimension_chosen_for_the_coarser_home() -> None:
    params = shard_params("fsdp", on=1)
    laid = one((8, 8), MESH, params, shard_optimizer(("fsdp", "dp")))
    assert homes_of(laid) == ("d0 d1/fsdp", "d0 d1", "d0 d1/(fsdp dp)")
    # Nothing divides by eight: the finer home keeps the cut of the coarser one.
    laid = one((6, 4), MESH, params, shard_optimizer(("fsdp", "dp")))
    assert homes_of(laid) == ("d0 d1/fsdp", "d0 d1", "d0 d1/fsdp")


def test_axes_of_homes_begin_with_those_of_the_coarser_home() -> None:
    laid = one((16,), MESH, shard_optimizer(("dp", "fsdp")), shard_params("fsdp"))
    assert homes_of(laid) == ("d0/fsdp", "d0", "d0/(fsdp dp)")


@pytest.mark.parametrize(
    ("on", "expected"), [("mlp", "embed mlp/fsdp"), (1, "embed mlp/fsdp"), (-2, "embed/fsdp mlp")]
)
def test_on_names_or_numbers_a_dimension(on: str | int, expected: str) -> None:
    laid = one((8, 8), MESH, shard_params("fsdp", on=on), axes="embed mlp")
    assert str(laid.params["w"]) == expected


def test_on_names_a_composite_dimension_by_its_text() -> None:
    laid = one((8, 8), MESH, shard_params("fsdp", on="(heads hd)"), axes="embed (heads hd)")
    assert str(laid.params["w"]) == "embed (heads hd)/fsdp"


def test_uneven_on_is_the_error_of_the_design() -> None:
    with pytest.raises(PlanError) as caught:
        one((4096, 11008), Mesh(fsdp=24), zero(3, "fsdp", on="embed"), axes="embed mlp")
    assert str(caught.value).splitlines() == [
        "zero(3, 'fsdp', on='embed') cannot shard 1 of 1 parameters evenly.",
        "  w   shape (4096, 11008)   axes 'embed mlp'   has 'embed/fsdp mlp'",
        "  dim 0 'embed' has size 4096; mesh axis 'fsdp' has size 24; 4096 % 24 == 16.",
        "  Mesh(fsdp=24).  Dimension chosen by on='embed'.",
        "  Fix: on='auto' (would cut dim 0 unevenly), pad=True (adds 8 rows, 0.2 %), "
        "or make fsdp a divisor of 4096.",
    ]
    numbers = caught.value.numbers
    assert (numbers["path"], numbers["dim"], numbers["size"]) == ("w", 0, 4096)
    assert (numbers["axes"], numbers["axes_size"], numbers["remainder"]) == (("fsdp",), 24, 16)
    assert (numbers["num_failed"], numbers["num_params"]) == (1, 1)


def test_the_fix_names_the_dimension_auto_would_pick() -> None:
    with pytest.raises(PlanError, match=r"on='auto' \(would pick dim 1\)"):
        one((6, 8), MESH, shard_params("fsdp", on=0))


def test_pad_cuts_unevenly_over_one_axis() -> None:
    laid = one((10, 8), MESH, shard_params("fsdp", on="d0", pad=True))
    assert str(laid.params["w"]) == "d0/fsdp d1"
    beside_size_1 = shard_params(("one", "fsdp"), on="d0", pad=True)
    assert str(one((10,), Mesh(one=1, fsdp=4), beside_size_1).params["w"]) == "d0/(one fsdp)"


def test_pad_over_two_axes_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError) as caught:
        one((12, 3), MESH, shard_params(("dp", "fsdp"), on="d0", pad=True))
    text = str(caught.value)
    assert "mesh axes 'dp' * 'fsdp' have size 2 * 4 == 8; 12 % 8 == 4." in text
    assert "chunks of chunks" in text
    assert "pad=True (" not in text
    assert "make dp * fsdp a divisor of 12" in text


def test_a_missing_dimension_names_the_nearest() -> None:
    with pytest.raises(PlanError) as caught:
        one((8, 8), MESH, shard_params("fsdp", on="embd"), axes="embed mlp")
    text = str(caught.value)
    assert "finds no dimension 'embd' in 1 of 1 parameters" in text
    assert "did you mean 'embed'?" in text
    with pytest.raises(PlanError, match="finds no dimension 2"):
        one((8, 8), MESH, shard_params("fsdp", on=2))


def test_many_failures_are_one_error_summarised_by_pattern() -> None:
    model = Tiny(depth=8, width=6)
    with pytest.raises(PlanError) as caught:
        plan(model, MESH, zero(3, "fsdp", on=0))
    text = str(caught.value)
    # Per block: norm (2) and down; besides them the embedding, the final norm (2) and the head.
    assert text.startswith("zero(3, 'fsdp', on=0) cannot shard 28 of 45 parameters evenly.")
    assert "layers.{0..7}.down.weight   shape (6, 12)" in text
    assert "6 % 4 == 2" in text
    assert "... and 2 more" in text
    assert len(text.splitlines()) < 20


def test_up_to_five_failures_are_listed_one_by_one() -> None:
    with pytest.raises(PlanError) as caught:
        plan(Tiny(width=6, depth=5), MESH, shard_params("fsdp", on=0, where="down"))
    assert [f"layers.{i}.down.weight   shape" in str(caught.value) for i in range(5)] == [True] * 5


def test_failures_of_different_kinds_are_one_error() -> None:
    with pytest.raises(PlanError) as caught:
        plan(
            OneParam(6, count=2),
            MESH,
            shard_params("fsdp", on="embed"),
            axes={"w": "embed", "w1": "mlp"},
        )
    text = str(caught.value)
    assert text.startswith("shard_params('fsdp', on='embed') cannot shard 1 of 2 parameters")
    assert "finds no dimension 'embed' in 1 of 2 parameters." in text
    assert "w1   shape (6,)   axes 'mlp'" in text
    assert caught.value.numbers["num_failed"] == 2


def test_frozen_parameters_have_no_grads_and_no_opt() -> None:
    laid = plan(Tiny(), MESH, zero(3, "fsdp"), freeze("embed"))
    assert (
        set(laid.params) - set(laid.grads) == {"embed.weight"} == set(laid.params) - set(laid.opt)
    )
    assert not laid.info("embed.weight").trainable
    assert str(laid.params["embed.weight"]) == "d0 d1/fsdp"


def test_a_frozen_parameter_does_not_fail_for_homes_it_lacks() -> None:
    laid = one((6,), MESH, freeze("w"), zero(1, "fsdp", on=0))
    assert laid.opt == {}


def test_keep_gathered_is_about_units() -> None:
    laid = plan(Tiny(), MESH, zero(3, "fsdp"), keep_gathered("layers.*"))
    assert laid.keep == {"layers.0", "layers.1", "layers.2"}
    assert keep_gathered("layers.1", keep=False)(laid).keep == {"layers.0", "layers.2"}
    assert keep_gathered(lambda name: name.endswith("2"))(plan(Tiny(), MESH)).keep == {"layers.2"}
    with pytest.raises(PlanError, match="'head'"):
        keep_gathered("head")(laid)


def test_options_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match=r"keep_gathered\(\) has no effect"):
        plan(nn.Linear(2, 2), MESH, keep_gathered())
    with pytest.warns(UserWarning, match="pad=True has no effect") as caught:
        shard_params("fsdp", pad=True)
    assert caught[0].filename == __file__


def test_prefetch_sets_a_distance() -> None:
    assert plan(Tiny(), MESH).prefetch == 0
    assert plan(Tiny(), MESH, prefetch(1), prefetch(2)).prefetch == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: zero(4, "fsdp"), "zero(4, 'fsdp') has no such level"),
        (lambda: zero(True, "fsdp"), "has no such level"),
        (lambda: zero(1, None), "zero(1, None) names no mesh axis"),
        (lambda: prefetch(-1), "prefetch(-1) is not a number of units"),
        (
            lambda: plan(Tiny(), MESH, zero(3, "fdsp")),
            "zero(3, 'fdsp') names the unknown mesh axis",
        ),
        (lambda: plan(Tiny(), MESH, zero(3, "fdsp")), "did you mean 'fsdp'?"),
        (lambda: plan(Tiny(), MESH, shard_params(("dp", "dp"))), "names a mesh axis twice"),
        (lambda: plan(Tiny(), MESH, freeze("heda")), "did you mean 'head'?"),
    ],
)
def test_bad_arguments_are_plan_errors(make: object, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        make()  # type: ignore[operator]
    assert words in str(caught.value)


@pytest.mark.parametrize("make", [*CUTS, lambda *a, **k: zero(1, *a, **k), keep_gathered])
def test_misspelt_keywords_name_the_nearest(make: object) -> None:
    with pytest.raises(TypeError, match="did you mean 'where'"):
        make("fsdp", were="embed")  # type: ignore[operator]


def test_memory_at_rest_falls_with_the_level() -> None:
    """Oracle: Psi * (1 + 1/n ...) counted by hand for one matrix that divides evenly."""
    numel, ranks = 8 * 16, 4

    def numels(level: int) -> list[int]:
        laid = one((8, 16), Mesh(fsdp=ranks), zero(level, "fsdp"))
        specs = [laid.params["w"], laid.grads["w"], laid.opt["w"]]
        return [numel // math.prod(ranks for _ in spec.mesh_axes) for spec in specs]

    cut = numel // ranks
    assert [numels(level) for level in range(4)] == [
        [numel, numel, numel],
        [numel, numel, cut],
        [numel, cut, cut],
        [cut, cut, cut],
    ]
