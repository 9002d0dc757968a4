"""Units: which modules gather which parameters, on trees written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.sharding.errors import PatternError, PlanError
from shardwise.sharding.units import find_units, param_infos
from tests.sharding.toys import Block, Tiny

pytestmark = pytest.mark.abstract


class Holder(nn.Module):
    """A module with a forward, and whatever children it is given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x


def layout(model: nn.Module, patterns: list[str] | None = None) -> dict[str, tuple[str, int]]:
    """Name -> (kind, number of parameters) of every unit."""
    units = find_units(model, param_infos(model), patterns)
    return {unit.name: (unit.kind, len(unit.params)) for unit in units}


def test_a_transformer_has_root_children_and_units_in_order() -> None:
    assert list(layout(Tiny()).items()) == [
        ("", ("root", 1)),
        ("embed", ("child", 1)),
        ("layers.0", ("unit", 5)),
        ("layers.1", ("unit", 5)),
        ("layers.2", ("unit", 5)),
        ("norm", ("child", 2)),
        ("head", ("child", 1)),
    ]


def test_units_partition_the_parameters() -> None:
    model = Tiny(tied=True)
    infos = param_infos(model)
    owned = [path for unit in find_units(model, infos) for path in unit.params]
    assert sorted(owned) == sorted(info.path for info in infos)
    assert len(owned) == len(list(model.parameters()))


def test_a_tie_across_children_belongs_to_the_root() -> None:
    model = Tiny(tied=True)
    (tied,) = [info for info in param_infos(model) if info.aliases]
    assert (tied.path, tied.aliases) == ("embed.weight", ("head.weight",))
    root = find_units(model, param_infos(model))[0]
    assert root.params == ("scale", "embed.weight")
    assert "embed" not in layout(model)
    assert "head" not in layout(model)


def test_a_tie_inside_one_unit_stays_there() -> None:
    model = Tiny(depth=2)
    for layer in model.layers:
        layer.down.weight = nn.Parameter(layer.up.weight.detach().clone())
        layer.again = nn.Linear(8, 12, bias=False)
        layer.again.weight = layer.up.weight
    assert layout(model)["layers.0"] == ("unit", 5)
    assert layout(model)[""] == ("root", 1)


def test_one_block_used_three_times_is_one_unit() -> None:
    block = Block()
    model = Holder(layers=nn.ModuleList([block, block, block]))
    assert layout(model) == {"": ("root", 0), "layers.0": ("unit", 5)}


def test_a_part_shared_by_two_units_belongs_to_the_root() -> None:
    model = Tiny(depth=2)
    model.layers[1].up = model.layers[0].up
    assert layout(model)[""] == ("root", 3)
    assert layout(model)["layers.0"] == layout(model)["layers.1"] == ("unit", 3)


def test_without_lists_the_root_has_children_only() -> None:
    model = Holder(a=nn.Linear(2, 2), act=nn.ReLU(), b=Holder(c=nn.Linear(2, 3)))
    assert layout(model) == {"": ("root", 0), "a": ("child", 2), "b": ("child", 2)}


def test_a_bare_parameterless_or_single_layer_model() -> None:
    assert layout(nn.ReLU()) == {"": ("root", 0)}
    assert layout(nn.Linear(2, 2)) == {"": ("root", 2)}


@pytest.mark.parametrize(
    "parts",
    [
        [nn.Linear(2, 2), nn.Linear(2, 3)],
        [nn.Linear(2, 2), nn.ReLU()],
        [nn.Linear(2, 2)],
        [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)],
    ],
    ids=["shapes", "classes", "single", "names"],
)
def test_lists_whose_children_differ_are_no_units(parts: list[nn.Module]) -> None:
    assert "unit" not in {kind for kind, _ in layout(Holder(net=nn.Sequential(*parts))).values()}


def test_children_of_an_uneven_list_are_entered_one_by_one() -> None:
    # A ModuleList has no forward: no hook on it would ever fire.
    model = Holder(net=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)]))
    assert layout(model) == {"": ("root", 0), "net.0": ("child", 2), "net.1": ("child", 2)}


def test_the_outermost_list_wins() -> None:
    inner = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    assert set(layout(Holder(stages=nn.ModuleList(inner)))) == {"", "stages.0", "stages.1"}


def test_lists_of_lists_are_entered_at_the_modules_that_run() -> None:
    inner = [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)]
    names = set(layout(Holder(stages=nn.ModuleList(inner))))
    assert names == {"", "stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"}


def test_parameters_around_units_belong_to_the_root() -> None:
    class Body(Tiny):
        pass

    model = Holder(model=Body(), extra=nn.ParameterList([torch.ones(2)]))
    found = find_units(model, param_infos(model))
    assert found[0].params == ("model.scale", "extra.0")
    assert {unit.name for unit in found} >= {"model.embed", "model.layers.0", "model.head"}


def test_patterns_override_and_may_nest() -> None:
    assert layout(Tiny(depth=2), ["layers.*", "up", "embed"]) == {
        "": ("root", 1),
        "embed": ("unit", 1),
        "layers.0": ("unit", 3),
        "layers.0.up": ("unit", 2),
        "layers.1": ("unit", 3),
        "layers.1.up": ("unit", 2),
        "norm": ("child", 2),
        "head": ("child", 1),
    }
    assert layout(Tiny(), [])["embed"] == ("child", 1)
    assert "unit" not in {kind for kind, _ in layout(Tiny(), []).values()}


def test_a_pattern_without_module_is_an_error() -> None:
    with pytest.raises(PatternError, match="did you mean 'layers'"):
        layout(Tiny(), ["layrs.*"])


def test_a_pattern_for_a_module_without_forward_is_an_error() -> None:
    with pytest.raises(PlanError) as caught:
        layout(Tiny(), ["layers"])
    text = str(caught.value)
    assert "never called" in text
    assert "layers   ModuleList with 3 children" in text
    assert "'layers.*'" in text


def test_infos_record_shape_dtype_and_trainability() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    model.bias.requires_grad_(False)
    weight, bias = param_infos(model)
    assert (weight.shape, weight.dtype, weight.trainable) == ((2, 3), "bfloat16", True)
    assert (bias.shape, bias.trainable, str(bias.axes)) == ((2,), False, "d0")
