"""Plans: construction, equality, JSON, pickling, the log, and speed at the size of Llama 8B."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import nn

from shardwise.sharding.errors import AxesError, PatternError, PlanError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan, Transform, plan
from shardwise.sharding.rules import Rules
from shardwise.transforms.compose import chain, tree_at
from shardwise.transforms.loss_scale import loss_scale
from shardwise.transforms.remat import remat, save
from shardwise.transforms.zero import freeze, keep_gathered, prefetch, shard_params, zero
from tests.sharding import toys
from tests.sharding.toys import MESH, Block, Tiny

pytestmark = pytest.mark.abstract


def rich_plan() -> Plan:
    """A plan with an edit of every kind."""
    return plan(
        Tiny(tied=True),
        Mesh(dp=2, fsdp=4, links={"dp": "network"}),
        zero(3, "fsdp"),
        freeze("norm"),
        keep_gathered("layers.0"),
        prefetch(2),
        remat(("layers.*", "~layers.1"), save("hidden")),
        loss_scale(window=500, maximum=float("inf")),
        tree_at("opt", "embed.weight", "vocab embed/(fsdp dp)"),
        rules=Rules(vocab="tp"),
        axes={"embed": "vocab embed"},
    )


def test_without_transforms_everything_is_replicated() -> None:
    laid = plan(Tiny(), MESH)
    names = [name for name, _ in Tiny().named_parameters()]
    for home in (laid.params, laid.grads, laid.opt, laid.compute):
        assert list(home) == names
        assert not any(spec.mesh_axes for spec in home.values())
    assert (laid.batch, laid.keep, laid.prefetch) == (("dp", "fsdp"), frozenset(), 0)


def test_specs_have_the_dtype_of_the_parameter() -> None:
    laid = plan(nn.Linear(2, 2).to(torch.bfloat16), MESH, zero(3, "dp"))
    assert str(laid.opt["weight"]) == "d0/dp d1 :bfloat16"


def test_a_model_on_the_meta_device_will_do_and_is_not_touched() -> None:
    with torch.device("meta"):
        model = Tiny()
    before = {name: id(param) for name, param in model.named_parameters()}
    assert plan(model, MESH, zero(3, "fsdp"), freeze("embed")).module is model
    assert before == {name: id(param) for name, param in model.named_parameters()}
    assert all(param.requires_grad for param in model.parameters())


def test_modules_that_are_frozen_already_have_no_gradient_home() -> None:
    model = Tiny()
    model.embed.requires_grad_(False)
    laid = plan(model, MESH)
    assert "embed.weight" not in laid.grads
    assert "embed.weight" in laid.params


def test_axes_are_given_by_pattern_and_the_first_match_wins() -> None:
    laid = plan(
        Tiny(),
        MESH,
        axes={
            "up.weight": "mlp embed",
            "norm.weight": "a",
            "up.bias": "b",
            "layers.*.*.weight": "c d",
            "head": "v e",
        },
    )
    assert str(laid.info("layers.0.up.weight").axes) == "mlp embed"
    assert str(laid.params["head.weight"]) == "v e"
    assert str(laid.info("embed.weight").axes) == "d0 d1"
    assert str(laid.info("layers.0.norm.weight").axes) == "a"
    assert str(laid.info("layers.0.down.weight").axes) == "c d"


def test_axes_that_do_not_fit_are_one_error() -> None:
    with pytest.raises(PlanError) as caught:
        plan(Tiny(), MESH, axes={"layers.*": "mlp embed", "head": "a b c"})
    text = str(caught.value)
    assert "does not fit 10 of 20 parameters" in text
    assert "layers.{0..2}.norm.weight   shape (8,)" in text
    assert "'mlp embed' name 2 dimensions; the tensor has 1" in text
    with pytest.raises(PatternError, match="did you mean 'head'"):
        plan(Tiny(), MESH, axes={"haed": "a b"})
    with pytest.raises(AxesError):
        plan(Tiny(), MESH, axes={"head": "(a"})


def test_misspelt_keywords_of_plan_name_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean 'rules'"):
        plan(Tiny(), MESH, rule=Rules())  # type: ignore[call-arg]


@given(toys.models, toys.meshes, toys.recipes)
def test_json_and_pickle_round_trips(model: nn.Module, mesh: Mesh, recipe: Transform) -> None:
    laid = plan(model, mesh, recipe)
    for again in (Plan.from_json(laid.to_json()), pickle.loads(pickle.dumps(laid))):
        assert again == laid
        assert hash(again) == hash(laid)
        assert again.same_layout(laid)
        assert again.log == laid.log
        assert again.module is None
    assert Plan.from_json(laid.to_json()).to_json() == laid.to_json()


def test_json_keeps_every_kind_of_edit() -> None:
    laid = rich_plan()
    again = Plan.from_json(laid.to_json())
    assert again == laid
    assert again.rules == Rules(vocab="tp")
    assert again.mesh.links == ("network", "")
    assert again.info("head.weight").path == "embed.weight"
    assert again.why("embed.weight") == laid.why("embed.weight")
    assert len(laid.edits) == 9


def test_a_plan_from_before_names_had_sources_is_read() -> None:
    laid = rich_plan()
    data = json.loads(laid.to_json())
    assert set(data.pop("naming")) == {"sources", "guesses", "sizes", "ints"}
    again = Plan.from_json(json.dumps(data))
    assert again.edits == laid.edits
    assert again.params == laid.params


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(mash={}), "unknown key 'mash'; did you mean 'mesh'?"),
        (lambda d: d.pop("units"), "missing 'units'"),
        (lambda d: d.update(version=2), "schema version 2"),
        (lambda d: d["edits"][0].update(kind="freese"), "did you mean 'freeze'?"),
        (lambda d: d["edits"][0].update(were=[]), "did you mean 'where'?"),
        (lambda d: d["params"][0].pop("dtype"), "missing 'dtype'"),
        (lambda d: d["units"][0].update(king="unit"), "did you mean 'kind'?"),
        (lambda d: d.update(mesh=[1]), "it is a list, not a record"),
        (lambda d: d["params"].clear(), "matches none of 0 paths"),
    ],
)
def test_json_is_read_strictly(change: Callable[[dict], object], words: str) -> None:
    data = json.loads(rich_plan().to_json())
    change(data)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": null}'])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        Plan.from_json(text)


def test_equality_ignores_module_log_and_spelling() -> None:
    laid = plan(Tiny(), MESH, zero(3, "fsdp"))
    again = plan(Tiny(), MESH, chain(zero(3, "fsdp", where=("**",)), name="mine"))
    assert laid == again
    assert hash(laid) == hash(again)
    assert laid.module is not again.module
    assert laid != plan(Tiny(), MESH, zero(2, "fsdp"))
    assert laid != plan(Tiny(), Mesh(dp=4, fsdp=2), zero(3, "fsdp"))
    assert laid != "plan"


def test_same_layout_looks_at_what_was_derived() -> None:
    twice = plan(Tiny(), MESH, zero(1, "dp"), zero(3, "fsdp"))
    once = plan(Tiny(), MESH, zero(3, "fsdp"))
    assert twice != once
    assert twice.same_layout(once)
    assert not once.same_layout(plan(Tiny(), MESH))


def test_predicates_do_not_live_in_a_plan() -> None:
    laid = plan(Tiny(), MESH, freeze(lambda path: path.endswith("bias")))
    assert laid == Plan.from_json(laid.to_json())
    assert [info.path for info in laid.infos if not info.trainable] == [
        name for name, _ in Tiny().named_parameters() if name.endswith("bias")
    ]


def test_the_log_names_the_line_of_the_user() -> None:
    made_here = zero(3, "fsdp")
    laid = plan(Tiny(), MESH, made_here)
    (site,) = set(laid.log)
    assert re.fullmatch(r"test_plan\.py:\d+ in test_the_log_names_the_line_of_the_user", site)
    line = int(site.partition(":")[2].partition(" ")[0])
    assert line == made_here_line()


def made_here_line() -> int:
    code = test_the_log_names_the_line_of_the_user.__code__
    return code.co_firstlineno + 1


def test_why_lists_the_edits_that_touch_a_parameter() -> None:
    text = rich_plan().why("layers.0.up.weight")
    assert text.splitlines()[0] == (
        "layers.0.up.weight   shape (12, 8)   axes 'd0 d1'   Mesh(dp=2, fsdp=4)"
    )
    assert text.count("zero(3, 'fsdp')") == 3
    assert "[params]  test_plan.py:" in text
    assert "keep_gathered('layers.0')" in text
    assert "freeze" not in text
    assert "opt:     d0/fsdp d1" in text
    tied = rich_plan().why("head.weight")
    assert tied.startswith("embed.weight  (also head.weight)")
    assert "tree_at" in tied
    assert "grads" not in rich_plan().why("norm.bias").replace("[grads]", "")
    assert "no edit touches it" in plan(Tiny(), MESH).why("scale")
    with pytest.raises(PatternError, match="did you mean 'weight'"):
        rich_plan().why("layers.0.up.wieght")


def test_diff_is_empty_exactly_for_the_same_layout() -> None:
    a, b = plan(Tiny(), MESH), plan(Tiny(), MESH, shard_params("fsdp", where="up.weight"))
    assert a.diff(a) == b.diff(b) == ()
    assert a.diff(b) == ("params layers.{0..2}.up.weight: 'd0 d1' -> 'd0/fsdp d1'",)


@given(toys.meshes, toys.recipes, toys.recipes)
def test_diff_agrees_with_same_layout(mesh: Mesh, one: Transform, two: Transform) -> None:
    a, b = plan(Tiny(), mesh, one), plan(Tiny(), mesh, two)
    assert (a.diff(b) == ()) == a.same_layout(b)


def test_diff_shows_meshes_settings_parameters_and_units() -> None:
    a = plan(Tiny(depth=1), MESH)
    b = plan(Tiny(depth=2), Mesh(dp=8), freeze("head"), keep_gathered("layers.0"), prefetch(1))
    text = "\n".join(a.diff(b))
    for words in (
        "mesh: Mesh(dp=2, fsdp=4) -> Mesh(dp=8)",
        "batch: ('dp', 'fsdp') -> ('dp',)",
        "prefetch: 0 -> 1",
        "keep: [] -> ['layers.0']",
        "layers.1.down.weight: only in the second plan",
        "head.weight: trainable True -> False",
        "opt head.weight: 'd0 d1' -> '-'",
        "unit 'layers.1': None -> ",
    ):
        assert words in text


def test_a_failing_transform_leaves_the_plan_as_it_was() -> None:
    laid = plan(Tiny(), MESH, zero(1, "fsdp"))
    text = laid.to_json()
    with pytest.raises(PlanError):
        zero(3, "fsdp", on=0)(laid)
    assert laid.to_json() == text


def test_repr_is_one_line_of_what_was_asked() -> None:
    assert repr(plan(Tiny(), MESH, zero(3, "fsdp"), prefetch(1))) == (
        "Plan(Mesh(dp=2, fsdp=4), 20 parameters, zero(3, 'fsdp'), prefetch(1))"
    )


class Wide(nn.Module):
    """The parameter list of Llama 3 8B: 32 layers of nine tensors, embedding, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128256, 4096)
        self.layers = nn.ModuleList(WideBlock() for _ in range(32))
        self.norm = nn.RMSNorm(4096)
        self.head = nn.Linear(4096, 128256, bias=False)


class WideBlock(Block):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        for name, (rows, columns) in {
            "wq": (4096, 4096),
            "wk": (1024, 4096),
            "wv": (1024, 4096),
            "wo": (4096, 4096),
            "gate": (14336, 4096),
            "up": (14336, 4096),
            "down": (4096, 14336),
        }.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))
        self.norm1, self.norm2 = nn.RMSNorm(4096), nn.RMSNorm(4096)


def test_a_plan_of_llama_8b_on_4096_ranks_is_quick() -> None:
    with torch.device("meta"):
        model = Wide()
    mesh = Mesh(dp=8, fsdp=512)

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    laid = plan(model, mesh, zero(3, "fsdp"))
    assert len(laid.infos) == 291
    # The best of three: the machine is shared, the work is not.
    assert min(seconds(lambda: plan(model, mesh, zero(3, "fsdp"))) for _ in range(3)) < 0.5
    assert min(seconds(lambda: str(laid)) for _ in range(3)) < 0.3
