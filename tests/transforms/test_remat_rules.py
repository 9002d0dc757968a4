"""The rules of remat: which modules, which policies, what a kept value may not suffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.sharding.errors import PatternError, PlanError, RematError
from tests.transforms.five_parts import check
from tests.transforms.rematted import WIDTH, Net, mean_square, rows

pytestmark = pytest.mark.abstract

ALONE = sw.Mesh(fsdp=1)


def plan(*transforms: sw.Transform) -> sw.Plan:
    return sw.plan(Net(), sw.Mesh(fsdp=2), *transforms)


# -- which modules --------------------------------------------------------------------------------


def test_the_last_word_on_a_module_counts_and_nothing_undoes() -> None:
    got = plan(
        sw.remat("layers.*"),
        sw.remat("layers.1", "dots"),
        sw.remat("layers.2", "nothing"),
        sw.remat(lambda path: path in ("", "norm"), sw.save("b", "a", "b")),
    )
    shown = {path: str(policy) for path, policy in got.remat.items()}
    assert shown == {
        "": "save a, b",
        "body.layers.0": "everything",
        "body.layers.1": "dots",
        "norm": "save a, b",
    }


def test_a_pattern_selects_modules_and_not_what_lies_below_them() -> None:
    assert list(plan(sw.remat("body")).remat) == ["body"]
    assert list(plan(sw.remat(["layers.*", "~layers.0"])).remat) == [
        "body.layers.1",
        "body.layers.2",
    ]


def test_a_mask_bounds_what_is_recomputed() -> None:
    assert list(plan(sw.masked(sw.remat("layers.*"), "layers.1")).remat) == ["body.layers.1"]


def test_a_pattern_without_a_module() -> None:
    with pytest.raises(PatternError) as caught:
        plan(sw.remat("layer.*"))
    assert "'layer.*'" in str(caught.value)
    assert "layers" in str(caught.value)


def test_a_list_of_modules_is_never_called() -> None:
    with pytest.raises(PatternError) as caught:
        plan(sw.remat("body.layers"))
    assert caught.value.numbers["pattern"] == "body.layers"
    assert "which is never called" in str(caught.value)
    assert "body.layers.*" in caught.value.fix


# -- which policies -------------------------------------------------------------------------------


def test_an_unknown_policy() -> None:
    with pytest.raises(PlanError) as caught:
        sw.remat("layers.*", "dot")
    check(caught.value, PlanError, "unknown policy 'dot'", "everything, dots", policy="dot")
    assert "'dots'" in caught.value.fix


def test_a_function_is_no_policy() -> None:
    odd: Any = torch.relu
    with pytest.raises(PlanError) as caught:
        sw.remat("layers.*", odd)
    check(caught.value, PlanError, "'relu'", "No function can live in a plan", policy=odd)


@pytest.mark.parametrize("names", [(), (1,)])
def test_save_wants_names(names: Any) -> None:
    with pytest.raises(PlanError) as caught:
        sw.save(*names)
    check(caught.value, PlanError, f"{len(names)} names", "sw.name(x, 'attn_out')", names=names)


def test_save_without_a_name_by_its_word() -> None:
    with pytest.raises(PlanError) as caught:
        sw.remat("layers.*", "save")
    check(caught.value, PlanError, "keeps 0 names", "names: none", names=())


# -- names ----------------------------------------------------------------------------------------


def test_a_name_is_the_identity_everywhere() -> None:
    x = torch.ones(2, requires_grad=True)
    assert sw.name(x, "x") is x
    with torch.no_grad():
        assert sw.name(x, "x") is x
    with FakeTensorMode():
        fake = torch.empty(3)
        assert sw.name(fake, "x") is fake

    def square(y: Tensor) -> Tensor:
        return sw.name(y * y, "y").sum()

    assert torch.equal(torch.func.grad(square)(torch.ones(2)), torch.full((2,), 2.0))


class Ops(TorchDispatchMode):
    """How often the operations of some names have run."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.counts = dict.fromkeys(names, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def counted(module: nn.Module, *remats: sw.Transform, ops: tuple[str, ...]) -> dict[str, int]:
    """Operations of one call of `grads`, forward and backward."""
    program = sw.lower(
        sw.plan(module, ALONE, *remats), mean_square, sw.optim.sgd(0.1), batch=rows()
    ).bind()
    state = program.init(sw.from_module(module))
    program.grads(state, rows())
    with Ops(*ops) as seen:
        program.grads(state, rows())
    return seen.counts


def test_what_made_a_named_value_does_not_run_again_and_the_rest_does() -> None:
    """Attention here is two products forward and four backward, in each of three layers."""
    module, ops = Net().double(), ("bmm", "gelu")
    assert counted(module, ops=ops) == {"bmm": 18, "gelu": 3}
    assert counted(module, sw.remat("layers.*"), ops=ops) == {"bmm": 24, "gelu": 6}
    saved = counted(module, sw.remat("layers.*", sw.save("attn_out")), ops=ops)
    assert saved == {"bmm": 21, "gelu": 6}
    other = counted(module, sw.remat("layers.*", sw.save("other")), ops=ops)
    assert other == {"bmm": 24, "gelu": 6}
    dots = counted(module, sw.remat("layers.*", "dots"), ops=ops)
    assert dots == {"bmm": 18, "gelu": 6}


# -- a kept value stays as it was -----------------------------------------------------------------


class Passes(nn.Module):
    """Returns a kept value itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = sw.name(self.lin(x), "y")
        return y, torch.tanh(self.out(y.sin()))


class WritesAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Passes()

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.block(x)
        return y.add_(1) + z


@pytest.mark.parametrize("policy", ["dots", sw.save("y")])
def test_a_kept_value_that_is_written_after_the_module_has_ended(policy: Any) -> None:
    module = WritesAfter().double()
    program = sw.lower(
        sw.plan(module, ALONE, sw.remat("block", policy)), mean_square, sw.optim.sgd(0.1)
    ).bind()
    state = program.init(sw.from_module(module))
    with pytest.raises(RematError) as caught:
        program.grads(state, rows(4))
    error = check(caught.value, RematError, module="block", nbytes=4 * 4 * WIDTH * 8)
    assert "remat('block', 'everything')" in error.fix
    assert "shape (16, 8), 1,024 bytes, written 1 times" in str(error)
