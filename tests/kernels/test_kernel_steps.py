"""Kernels: the bits of the definition, whatever the cut, the threads and the dtypes."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise.kernels import native, recipes, step
from shardwise.kernels.step import Group, reference_, squares, step_, takes

pytestmark = [
    pytest.mark.abstract,
    pytest.mark.skipif(native.library() is None, reason="needs a C compiler"),
]

RECIPES = {
    "adamw": recipes.adamw(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, count=3),
    "lion": recipes.lion(lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1),
    "sgd": recipes.sgd(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.01),
    "momentum": recipes.sgd(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.01),
    "nesterov": recipes.sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0),
    "adagrad": recipes.adagrad(lr=0.1, eps=1e-10, weight_decay=0.01),
}
HALVES = (torch.bfloat16, torch.float16)


def make(
    name: str, length: int, dtype: torch.dtype, grad: torch.dtype, shadow: torch.dtype | None
) -> Group:
    generator = torch.Generator().manual_seed(length)

    def values() -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    return Group(
        values().to(dtype),
        values().to(grad),
        tuple(values().abs().to(dtype) for _ in range(RECIPES[name].num_states)),
        None if shadow is None else torch.zeros(length, dtype=shadow),
    )


def copied(group: Group) -> Group:
    shadow = None if group.shadow is None else group.shadow.clone()
    states = tuple(state.clone() for state in group.states)
    return Group(group.param.clone(), group.grad.clone(), states, shadow)


def results(group: Group) -> list[Tensor]:
    return [group.param, *group.states, *([] if group.shadow is None else [group.shadow])]


def equal(one: Group, other: Group) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results(one), results(other), strict=True))


@pytest.mark.parametrize("shadow", [None, *HALVES])
@pytest.mark.parametrize("grad", [torch.float32, *HALVES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RECIPES)
def test_the_bits_are_those_of_the_definition(
    name: str, dtype: torch.dtype, grad: torch.dtype, shadow: torch.dtype | None
) -> None:
    for scale in (1.0, 0.37):
        ours = make(name, 5003, dtype, grad, shadow)
        theirs = copied(ours)
        assert takes(ours)
        before = ours.param.clone()
        step_(RECIPES[name], [ours], scale=scale)
        reference_(RECIPES[name], [theirs], scale=scale)
        assert equal(ours, theirs)
        assert not torch.equal(ours.param, before)


@given(
    st.sampled_from(sorted(RECIPES)),
    st.integers(1, 3000),
    st.lists(st.integers(0, 3000), max_size=3),
    st.integers(1, 3),
)
def test_neither_cuts_nor_threads_change_a_bit(
    name: str, length: int, cuts: list[int], threads: int
) -> None:
    whole = make(name, length, torch.float32, torch.bfloat16, torch.bfloat16)
    parts = copied(whole)
    step_(RECIPES[name], [whole], scale=0.5)
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, stop in itertools.pairwise(bounds):
            at = slice(start, stop)
            states = tuple(state[at] for state in parts.states)
            assert parts.shadow is not None
            piece = Group(parts.param[at], parts.grad[at], states, parts.shadow[at])
            step_(RECIPES[name], [piece], scale=0.5)
    finally:
        torch.set_num_threads(before)
    assert equal(whole, parts)


def test_several_callers_at_once_do_not_disturb_each_other() -> None:
    """Each Python thread has threads of the kernel's own."""
    ours = [make("adamw", 100_003 + n, torch.float32, torch.bfloat16, None) for n in range(4)]
    theirs = [copied(one) for one in ours]
    for one in theirs:
        step_(RECIPES["adamw"], [one])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: step_(RECIPES["adamw"], [one]), ours))
    assert all(map(equal, ours, theirs))


def stepped_in_a_rank() -> float:
    """What two threads of the kernel make of a group."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        group = make("adamw", 300_001, torch.float32, torch.float32, None)
        step_(RECIPES["adamw"], [group])
        return squares(group.param)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_ranks_of_a_parent_that_has_used_its_threads() -> None:
    assert sw.spawn(stepped_in_a_rank, ranks=2, timeout=90) == [stepped_in_a_rank()] * 2


def test_many_threads_give_the_bits_of_one() -> None:
    one = make("adamw", 300_001, torch.float32, torch.float32, None)
    two = copied(one)
    step_(RECIPES["adamw"], [one])
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        step_(RECIPES["adamw"], [two])
        sums = {squares(one.param)}
    finally:
        torch.set_num_threads(before)
    assert equal(one, two)
    assert sums == {squares(one.param)}


def test_the_portable_build_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = next(filter(None, map(native.shutil.which, ("cc", "gcc", "clang"))))
    flags = (*native.FLAGS, "-DSW_PORTABLE")
    portable = native.load(native.build(compiler, flags=flags, folder=tmp_path))
    assert native.build(compiler, flags=flags, folder=tmp_path) == next(tmp_path.iterdir())
    values = torch.randn(10_000)
    partial = torch.zeros(8, dtype=torch.float64)
    told = portable.sw_squares(values.data_ptr(), values.numel(), 0, 1, partial.data_ptr())
    assert told == squares(values)
    for name in RECIPES:
        for grad in (torch.float32, torch.bfloat16, torch.float16):
            shadow = None if grad == torch.float32 else grad
            fast = make(name, 5003, torch.float32, grad, shadow)
            slow = copied(fast)
            assert takes(fast)
            step_(RECIPES[name], [fast], scale=0.37)
            with monkeypatch.context() as patch:
                patch.setattr(step, "library", lambda: portable)
                step_(RECIPES[name], [slow], scale=0.37)
            assert equal(fast, slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
def test_squares_tell_the_norm_and_what_is_not_finite(dtype: torch.dtype) -> None:
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert squares(values) == pytest.approx(float(values.double().square().sum()), rel=1e-12)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = values.clone()
        spoilt[7001] = bad
        assert not squares(spoilt) < float("inf")
    assert squares(values[:0]) == 0.0


def test_what_it_does_not_take() -> None:
    flat = torch.ones(8)
    assert takes(Group(flat, flat))
    assert not takes(Group(flat.to(torch.bfloat16), flat))
    assert not takes(Group(flat, flat.double()))
    assert not takes(Group(flat.view(2, 4).t(), flat.view(2, 4).t()))
    assert not takes(Group(flat, flat, (), torch.ones(8)))
    assert not takes(Group(flat.to("meta"), flat))


def test_without_a_compiler_torch_is_used_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        assert native.library.__wrapped__() is None
    assert "No C compiler" in caplog.text


def test_a_compiler_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(native.shutil, "which", lambda name: str(broken))
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        assert native.library.__wrapped__() is None
    assert "cannot be built" in caplog.text
    assert "no such flag" in caplog.text


def test_processes_that_build_at_once_all_get_a_whole_library(tmp_path: Path) -> None:
    code = (
        "from shardwise.kernels import native; import sys;"
        "assert native.library() is not None; print(native.cache_folder())"
    )
    where = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**where, **paths}, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    told = [run.communicate(timeout=120)[0].decode().strip() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    folder = tmp_path / "shardwise" / "kernels"
    assert told == [str(folder)] * 2
    assert len(list(folder.iterdir())) == 1
