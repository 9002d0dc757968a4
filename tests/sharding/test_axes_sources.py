"""Axes from the user, from modules, from guesses and for adapters; what is refused."""

from __future__ import annotations

from typing import Any, ClassVar

import einops
import pytest
import torch
from torch import Tensor, nn

from shardwise.sharding.axes import Axes
from shardwise.sharding.axes_sources import evaluate, names_in
from shardwise.sharding.errors import AxesError, PatternError, PlanError
from shardwise.sharding.naming import Named, name_parameters, with_axes
from shardwise.sharding.units import param_infos
from tests.sharding.toys import Tiny

pytestmark = pytest.mark.abstract

WIDTH, HEADS, KV, HD = 8, 4, 2, 3


class Fused(nn.Module):
    """Attention with all projections in one weight, which says what that is."""

    axes: ClassVar[dict[str, Any]] = {
        "qkv.weight": "((heads + kv + kv) hd) embed",
        "out.weight": "embed (heads hd)",
        "num_heads": "heads",
        "rows": "((heads + kv + kv) hd)",
        "groups": "heads // kv",
        "hd": HD,
    }

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.rows, self.groups = HEADS, (HEADS + 2 * KV) * HD, HEADS // KV
        self.qkv = nn.Linear(WIDTH, self.rows, bias=False)
        self.out = nn.Linear(HEADS * HD, WIDTH, bias=False)


class Attention(nn.Module):
    """Four projections by their usual names; `kv` heads are told only where they differ."""

    def __init__(self, heads: int = HEADS, kv: int | None = KV) -> None:
        super().__init__()
        self.num_heads = heads
        if kv is not None:
            self.num_key_value_heads = kv
            self.num_key_value_groups = heads // kv
        self.q_proj = nn.Linear(WIDTH, heads * HD)
        self.k_proj = nn.Linear(WIDTH, (kv or heads) * HD)
        self.v_proj = nn.Linear(WIDTH, (kv or heads) * HD)
        self.o_proj = nn.Linear(heads * HD, WIDTH)


class Pair(nn.Module):
    """A layer with a low-rank pair, as users write it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.zeros(rank, base.in_features))
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features)})


def named(
    model: nn.Module, axes: dict[str, str] | None = None, sizes: dict[str, int] | None = None
) -> Named:
    """What all sources say of a model."""
    return name_parameters(model, param_infos(model), axes or {}, sizes or {})


def refused(model: nn.Module, *args: Any) -> PlanError:
    """The error that comes instead."""
    with pytest.raises(PlanError) as caught:
        named(model, *args)
    return caught.value


def test_a_module_says_what_its_parameters_and_integers_are() -> None:
    found = named(nn.Sequential(Fused(), Fused()))
    assert found.axes["1.qkv.weight"] == "((heads + kv + kv) hd) embed"
    assert set(found.source.values()) == {"module"}
    assert found.sizes == {"heads": HEADS, "hd": HD, "kv": KV}
    assert found.local_ints["0.groups"] == "heads // kv"
    assert len(found.local_ints) == 6
    for path, text in found.local_ints.items():
        model, name = path.split(".")
        assert evaluate(text, found.sizes) == getattr(nn.Sequential(Fused())[0], name), model


def test_the_user_goes_before_the_module_and_the_inner_module_before_the_outer() -> None:
    model = nn.Sequential(Fused())
    model.axes = {"0.qkv.weight": "a b", "0.out.weight": "c d"}  # type: ignore[assignment]
    assert named(model).axes["0.qkv.weight"] == "((heads + kv + kv) hd) embed"
    found = named(model, {"out.weight": "embed (x hd)"})
    assert (found.axes["0.out.weight"], found.source["0.out.weight"]) == ("embed (x hd)", "user")
    assert found.source["0.qkv.weight"] == "module"


def test_axes_on_an_instance_and_of_a_list_of_layers() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 6) for _ in range(2))
    model.axes = {"layers.*.weight": "mlp embed", "layers.*.bias": "mlp"}  # type: ignore[assignment]
    found = named(model)
    assert dict(found.axes) == {
        f"layers.{i}.{kind}": text
        for i in range(2)
        for kind, text in (("weight", "mlp embed"), ("bias", "mlp"))
    }
    infos = with_axes(param_infos(model), found)
    assert [str(info.axes) for info in infos[:2]] == ["mlp embed", "mlp"]


def test_an_attribute_called_axes_that_is_something_else_is_no_source() -> None:
    model = nn.Linear(2, 2)
    model.axes = (0, 1)  # type: ignore[assignment]
    assert not named(model).axes


def test_sizes_come_from_the_user_or_the_shapes() -> None:
    model = nn.Linear(WIDTH, 12)
    model.heads = 4  # type: ignore[assignment]
    found = named(model, {"weight": "(heads hd) embed", "heads": "heads"})
    assert found.sizes == {"heads": 4}
    assert found.local_ints == {"heads": "heads"}
    model.width = 3  # type: ignore[assignment]
    found = named(model, {"weight": "(heads hd) embed", "width": "(1 hd)", "heads": "heads"})
    assert found.sizes == {"heads": 4, "hd": 3}
    assert named(model, {"weight": "(heads hd) embed"}, {"hd": 3}).sizes == {"hd": 3}


@pytest.mark.parametrize("text", ["(3 heads hd) embed", "(heads 3 hd) embed", "embed (2 mlp)"])
def test_sizes_are_those_of_einops(text: str) -> None:
    sizes = {"heads": 4, "hd": 3, "embed": 5, "mlp": 6}
    names = Axes.parse(text).names
    flat = text.replace("(", "").replace(")", "")
    letters = " ".join(f"n{part}" if part.isdigit() else part for part in flat.split())
    lengths = [int(p[1:]) if p[1:].isdigit() else sizes[p] for p in letters.split()]
    merged = " ".join(f"n{p}" if p.isdigit() else p for p in text.replace("(", "( ").split())
    whole = einops.rearrange(torch.zeros(lengths), f"{letters} -> {merged}")
    model = nn.ParameterDict({"w": nn.Parameter(whole)})
    known = {name: sizes[name] for name in names if name in ("hd", "mlp")}
    found = named(model, {"w": text}, known)
    axes = Axes.parse(found.axes["w"])
    assert axes.sizes(whole.shape, **found.sizes) == {name: sizes[name] for name in names}
    if "hd" in names:
        error = refused(model, {"w": text}, {"hd": 7})
        assert "7" in str(error)
        assert str(tuple(whole.shape)) in str(error)


def test_ten_5_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    error = refused(Tiny(), {"layers.*.upp.weight": "mlp embed"})
    assert isinstance(error, PatternError)
    assert "'layers.*.upp.weight' matches none of 20 paths" in str(error)
    assert "no segment is 'upp'; did you mean 'up'?" in error.fix


def test_ten_5_a_pattern_that_selects_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2))
    error = refused(model, {"1": "mlp"})
    assert "has a pattern '1' that selects no parameter" in str(error)
    assert "module '1', which has no parameters; 4 parameters" in str(error)
    assert error.numbers == {"pattern": "1", "num_params": 4}
    error = refused(model, {"running_mean": "norm"})
    assert "buffer '2.running_mean'" in str(error)


def test_ten_5_two_rules_for_the_same_parameters() -> None:
    error = refused(Tiny(), {"up.weight": "mlp embed", "layers.*.up.weight": "embed mlp"})
    assert "two rules for 3 parameters: 'up.weight' and 'layers.*.up.weight'" in str(error)
    assert "'up.weight': 'mlp embed' comes first" in str(error)
    assert "put 'layers.*.up.weight' before 'up.weight'" in error.fix
    assert error.numbers["num_params"] == 3
    found = named(Tiny(), {"layers.0.up.weight": "a b", "up.weight": "mlp embed"})
    assert found.axes["layers.0.up.weight"] == "a b"
    assert found.axes["layers.1.up.weight"] == "mlp embed"


def test_ten_5_a_tied_matrix_may_be_named_at_both_ends_if_alike() -> None:
    tied = Tiny(tied=True)
    found = named(tied, {"embed.weight": "vocab embed", "head.weight": "vocab embed"})
    assert found.axes == {"embed.weight": "vocab embed"}
    error = refused(tied, {"embed.weight": "vocab embed", "head.weight": "embed vocab"})
    assert "two rules for 1 parameters: 'embed.weight' and 'head.weight'" in str(error)


def test_axes_that_do_not_fit_tell_shape_and_source() -> None:
    error = refused(nn.Sequential(Fused()), {}, {"kv": 3})
    assert "does not fit 1 of 2 parameters" in str(error)
    assert "shape (24, 8)   axes '((heads + kv + kv) hd) embed', from the module" in str(error)
    assert "size 24, with heads=4, kv=3, hd=3" in str(error)
    assert error.numbers["num_failed"] == 1


class _Says(nn.Linear):
    def __init__(self, axes: dict[Any, Any]) -> None:
        super().__init__(4, 6)
        self.axes = axes  # type: ignore[assignment]
        self.heads = 3


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        ({"wieght": "a b"}, ["names 'wieght'", "it has 2 parameters", "did you mean 'weight'?"]),
        ({"weight": 1.5}, ["an entry 'weight': 1.5", "'num_heads': 'heads'"]),
        ({"heads": "heads hd"}, ["'heads hd' does not say what an integer", "of 2 dimensions"]),
        ({"heads": "a // b // c"}, ["3 parts around '//'"]),
        ({"heads": "heads", "heads ": 4}, ["a size is given to 'heads '", "in use: heads"]),
        ({"heads": "(2 hd)", "weight": "mlp embed"}, ["size of 'hd' is unknown", "1 of 1 sizes"]),
        (
            {"heads": "(2 hd)", "weight": "(hd 1) embed"},
            ["heads is 3, but '(2 hd)' is 12", "sizes: hd=6"],
        ),
        ({"a": 3, "weight": "(a b) embed", "heads": "a"}, []),
        ({"a": 2, "weight": "(a b) embed", "heads": "a"}, ["'a' has two sizes: 2 and 3"]),
    ],
)
def test_what_a_module_may_say(axes: dict[str, Any], parts: list[str]) -> None:
    model = nn.Sequential(_Says(axes))
    if not parts:
        assert named(model).sizes == {"a": 3}
        return
    error = str(refused(model))
    for part in parts:
        assert part in error


def test_axes_of_a_module_that_do_not_parse() -> None:
    with pytest.raises(AxesError):
        named(_Says({"weight": "(a"}))
    with pytest.raises(AxesError):
        named(_Says({"heads": "(a"}))


def test_a_size_that_no_name_has() -> None:
    error = refused(nn.Sequential(Fused()), {}, {"hdd": 3})
    assert "a size is given to 'hdd', which names no dimension" in str(error)
    assert "4 names are in use: heads, kv, hd, embed" in str(error)
    assert error.fix == "did you mean 'hd'?"
    assert refused(nn.Sequential(Fused()), {}, {"embed": 0}).numbers["size"] == 0


def test_expressions() -> None:
    assert names_in("((heads + kv + kv) hd)") == ("heads", "kv", "hd")
    assert evaluate("(3 heads hd)", {"heads": 2, "hd": 5}) == 30


def test_well_known_names_are_guesses_and_name_nothing() -> None:
    found = named(Tiny())
    assert not found.axes
    assert found.guesses["layers.0.up.weight"] == "mlp embed"
    assert found.guesses["layers.0.up.bias"] == "mlp"
    assert found.guesses["layers.0.down.weight"] == "embed mlp"
    assert found.guesses["embed.weight"] == "vocab embed"
    assert found.guesses["head.weight"] == "vocab embed"
    assert found.guesses["norm.bias"] == "norm"
    assert set(found.source.values()) == {"guess"}
    assert "scale" not in found.guesses
    tied = named(Tiny(tied=True))
    assert tied.guesses["embed.weight"] == "vocab embed"
    assert "head.weight" not in tied.guesses


def test_guesses_of_attention_know_its_heads() -> None:
    found = named(nn.Sequential(Attention(), Attention()))
    assert found.guesses["0.k_proj.bias"] == "(kv hd)"
    assert found.guesses["1.o_proj.weight"] == "embed (heads hd)"
    assert found.guesses["1.o_proj.bias"] == "embed"
    assert found.sizes == {"heads": HEADS, "hd": HD, "kv": KV}
    assert found.local_ints["1.num_key_value_groups"] == "heads // kv"
    alike = named(Attention(kv=None))
    assert alike.guesses["k_proj.weight"] == "(heads hd) embed"
    assert alike.local_ints == {"num_heads": "heads"}


def test_what_cannot_be_guessed_stays_unnamed() -> None:
    unlike = named(nn.Sequential(Attention(4), Attention(8)))
    assert not any(path.startswith("1.") for path in unlike.guesses)
    assert not any(path.startswith("1.") for path in unlike.local_ints)
    assert not named(nn.MultiheadAttention(WIDTH, 2)).guesses
    assert not named(nn.TransformerEncoderLayer(WIDTH, 2)).guesses
    assert not named(
        nn.ModuleDict({"qkv_proj": nn.Linear(2, 6), "o_proj": nn.Linear(2, 2)})
    ).guesses
    assert not named(nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(5, 4)})).guesses


def test_a_guess_gives_way_to_what_is_said() -> None:
    said = {"q_proj.weight": "(heads hd) embed"}
    found = named(Attention(), said)
    assert found.source["q_proj.weight"] == "user"
    assert "q_proj.weight" not in found.guesses
    assert found.guesses["k_proj.weight"] == "(kv hd) embed"
    model = nn.ModuleDict({"attention": Attention(), "mlp": Tiny().layers[0]})
    clash = named(model, said, {"hd": 2 * HD})
    assert clash.guesses["mlp.up.weight"] == "mlp embed"
    attention = {path for path in clash.guesses if path.startswith("attention")}
    assert attention == {"attention.o_proj.bias"}  # 'embed', which is whole in any case
    assert not clash.local_ints
    assert clash.sizes == {"hd": 2 * HD}


def test_an_adapter_follows_its_layer() -> None:
    model = nn.ModuleDict({"up": Pair(nn.Linear(4, 6)), "down": Pair(nn.Linear(6, 4))})
    found = named(model, {"up.base.weight": "mlp embed", "down.base.weight": "embed mlp"})
    assert found.axes["up.lora_A"] == "rank embed"
    assert found.axes["up.lora_B.default.weight"] == "mlp rank"
    assert found.axes["up.lora_B.default.bias"] == "mlp"
    assert found.axes["down.lora_A"] == "rank mlp"
    assert found.axes["down.lora_B.default.weight"] == "embed rank"
    assert found.source["down.lora_A"] == "user"
    own = named(model, {"up.base.weight": "mlp embed", "up.lora_A": "r embed"})
    assert own.axes["up.lora_A"] == "r embed"
    assert "down.lora_A" not in own.axes


def test_an_adapter_of_an_embedding_stays_whole() -> None:
    pair = {"lora_embedding_A": nn.Linear(10, 2), "lora_embedding_B": nn.Linear(2, 4)}
    model = nn.Sequential(nn.ModuleDict({"base_layer": nn.Embedding(10, 4), **pair}))
    assert set(named(model, {"base_layer.weight": "vocab embed"}).axes) == {"0.base_layer.weight"}


def test_an_adapter_of_a_layer_with_composite_axes_multiplies_as_the_layer() -> None:
    """Blocks of a rank: `B_r A_r` of the adapter is the same rows as of the weight."""
    model = nn.Sequential(Pair(nn.Linear(WIDTH, 3 * HEADS * HD)))
    found = named(model, {"base.weight": "(3 heads hd) embed"}, {"hd": HD})
    up = Axes.parse(found.axes["0.lora_B.default.weight"])
    assert str(up) == "(3 heads hd) rank"
    assert up.sizes((3 * HEADS * HD, 2), hd=HD)["heads"] == HEADS


def test_an_adapter_of_a_layer_that_is_kept_as_input_by_output() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    wrapper = nn.ModuleDict(
        {"base_layer": Conv1D(), "lora_A": nn.Linear(4, 2, bias=False), "lora_B": nn.Linear(2, 6)}
    )
    found = named(nn.Sequential(wrapper), {"base_layer.weight": "embed mlp"})
    assert found.axes["0.lora_A.weight"] == "rank embed"
    assert found.axes["0.lora_B.weight"] == "mlp rank"
