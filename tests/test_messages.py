"""Every error class: raised by a real misuse, with path, numbers and a fix in the words shown."""

from __future__ import annotations

import pickle
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch

import shardwise as sw
from shardwise.demo.text import TextError
from shardwise.sharding import errors
from shardwise.sharding.errors import ShardwiseError
from shardwise.testing import (
    CommsError,
    EquivalenceError,
)
from tests.misuses import (
    another_optimizer_restored,
    another_rank_fails,
    bits_of_a_norm,
    careless_mean,
    kept_value_written,
    leaves_of_other_shapes,
    mismatched_axes,
    no_own_init,
    no_such_folder,
    other_module,
    overflow_at_the_minimum,
    own_collective,
    plan,
    ranks_that_differ,
    stripped_python,
    tight_budget,
    too_long_a_warmup,
    train,
    uneven_cut,
    uneven_heads,
    uneven_rows,
    used_twice,
    wrong_rank,
)
from tests.transforms.five_parts import check

# -- the table -----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A misuse, and what the error must say: words (path, numbers, fix), and numbers by name."""

    kind: type[ShardwiseError]
    misuse: Callable[[], object]
    words: tuple[str, ...]
    numbers: dict[str, Any]


ENTRIES = [
    Entry(
        errors.MeshError,
        lambda: sw.Mesh(dp=3, fsdp=4, world=8),
        ("Mesh(dp=3, fsdp=4)", "3 * 4 == 12; 8 % 12 == 8.", "Fix: use -1 for one axis"),
        {"world": 8, "product": 12},
    ),
    Entry(
        errors.AxesError,
        mismatched_axes,
        ("'embed mlp' name 2 dimensions", "shape (4,)", "Fix: write 1 dimensions"),
        {"ndim": 2, "shape": (4,)},
    ),
    Entry(
        errors.SpecError,
        uneven_heads,
        ("'(heads/tp hd)'", "6 % 4 == 2. Mesh(tp=4)", "Fix: choose axis sizes"),
        {"dim": 0, "size": 6, "factor": 4},
    ),
    Entry(
        errors.PlanError,
        uneven_cut,
        (
            "weight   shape (5, 4)",
            "5 % 4 == 1",
            "Fix: on='auto' (would pick dim 1), pad=True (adds 3 rows, 60.0 %)",
        ),
        {"path": "weight", "size": 5, "axes_size": 4, "remainder": 1, "num_failed": 2},
    ),
    Entry(
        errors.PatternError,
        lambda: plan(sw.zero(3, "fsdp", where="layer.*")),
        ("zero(3, 'fsdp', where='layer.*')", "none of 6 paths", "did you mean 'layers'?"),
        {"pattern": "layer.*", "num_paths": 6},
    ),
    Entry(
        errors.OptimError,
        too_long_a_warmup,
        ("arguments warmup and steps", "warmup is 9; steps is 5", "Fix: steps=14"),
        {"warmup": 9, "steps": 5},
    ),
    Entry(
        errors.LowerError,
        other_module,
        ("8 differ", "layers.0.weight", "Fix: pass the module that the plan was made from"),
        {"differing": 8},
    ),
    Entry(
        errors.OffloadError,
        no_such_folder,
        (
            "disk:/no/such/folder on ",
            "The folder '/no/such/folder' does not exist.",
            "Fix: free some room, name another folder",
        ),
        {"faults": 1},
    ),
    Entry(
        errors.InitError,
        no_own_init,
        ("scale", "1 tensors", "Fix: give that module a reset_parameters()"),
        {"count": 1},
    ),
    Entry(
        errors.BatchError,
        uneven_rows,
        ("program.shard_batch(batch)", "parts: 2 (axes fsdp of Mesh(fsdp=2))", "Fix: pass tensors"),
        {"parts": 2},
    ),
    Entry(
        errors.LossError,
        lambda: train("loss"),
        ("loss_fn(model, batch)", "shape (2, 2)", "Fix: return loss.mean(), or sw.Mean("),
        {"shape": (2, 2)},
    ),
    Entry(
        errors.UnitError,
        lambda: train("read"),
        ("'layers.1.weight' is read outside", "Fix: read it inside the forward of 'layers.1'"),
        {"path": "layers.1.weight", "unit": "layers.1"},
    ),
    Entry(
        errors.OrderError,
        lambda: train("", "order"),
        ("'layers.0'", "forward, at position 4 of 5", "next in the lowered order", "Fix: keep the"),
        {"unit": "layers.0", "position": 4},
    ),
    Entry(
        errors.ImplicitCommError,
        own_collective,
        ("allreduce_", "loss_fn", "64 bytes", "Fix: remove the call"),
        {"nbytes": 64},
    ),
    Entry(
        errors.DonatedStateError,
        used_twice,
        ("step 0 at misuses.py:", "in used_twice", "Fix: use the state that step returned"),
        {},
    ),
    Entry(
        errors.StateError,
        leaves_of_other_shapes,
        ("layers.0.weight: has (1, 4), needs (2, 4) on rank 0", "Fix: map leaves to tensors of"),
        {"faults": 1},
    ),
    Entry(
        errors.RankError,
        another_rank_fails,
        ("rank 1 of 2", "RuntimeError: sample 17 is broken", "Fix: see the failure of that rank"),
        {"rank": 1, "failed": 1},
    ),
    Entry(
        errors.SimulationError,
        ranks_that_differ,
        ("Ranks 0 and 1", "rank 1: tensor([1.])", "Fix: read value.ranks"),
        {"rank": 1},
    ),
    Entry(
        errors.LaunchError,
        wrong_rank,
        ("environment", "RANK=5", "WORLD_SIZE=2", "Fix: let torchrun or sw.spawn set both"),
        {"rank": 5, "world": 2},
    ),
    Entry(
        EquivalenceError,
        careless_mean,
        ("Law 1 is broken at step 0: losses", "Mesh(fsdp=2)", "Fix: a scalar loss is the mean"),
        {"law": 1, "step": 0, "path": "loss"},
    ),
    Entry(
        CommsError,
        tight_budget,
        (
            "all_gather: 6 would run, 1 expected",
            "payload: 2,128 bytes, at most 10 expected",
            "layers.0",
            "Fix: see plan.why(path)",
        ),
        {"all_gather": 6, "reduce_scatter": 3, "nbytes": 2128},
    ),
    Entry(
        errors.RematError,
        kept_value_written,
        ("(3, 2), 24 bytes, written 1 times", "Fix: use the operation that is not in place"),
        {"module": "", "nbytes": 24},
    ),
    Entry(
        errors.LossScaleError,
        overflow_at_the_minimum,
        ("scale 1, minimum 1", "1 steps in a row", "Fix: look for NaN in the batch"),
        {"scale": 1.0, "minimum": 1.0},
    ),
    Entry(
        errors.RandomError,
        lambda: sw.dropout(torch.ones(2), 1.5),
        ("Dropout of 1.5 is no probability", "sw.dropout(x, p)", "Fix: a number from 0 to 1"),
        {"p": 1.5},
    ),
    Entry(
        errors.CheckpointError,
        another_optimizer_restored,
        ("missing in the checkpoint: 12", "opt/mu/layers.{0..1}.weight", "Fix: partial=["),
        {"count": 12, "step": 0, "unexpected": ()},
    ),
    Entry(
        TextError,
        stripped_python,
        ("has 0 source files with 0 bytes", "Fix: use a Python that"),
        {"num_files": 0, "num_bytes": 0},
    ),
    Entry(
        ShardwiseError,
        bits_of_a_norm,
        ("assert_bitwise", "the norm of all gradients", "Fix: use assert_equivalent"),
        {"couples": "element", "needs": ("norm",)},
    ),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.kind.__name__)
def test_an_error_says_where_how_much_and_what_to_do(entry: Entry) -> None:
    with pytest.raises(entry.kind) as caught:
        entry.misuse()
    assert type(caught.value) is entry.kind
    check(caught.value, entry.kind, *entry.words, **entry.numbers)
    assert any(word.startswith("Fix: ") or "did you mean" in word for word in entry.words)


def test_a_dead_state_knows_who_consumed_it() -> None:
    with pytest.raises(errors.DonatedStateError) as caught:
        used_twice()
    assert caught.value.numbers["consumed_by"] == caught.value.where


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.kind.__name__)
def test_an_error_crosses_processes_whole(entry: Entry) -> None:
    with pytest.raises(entry.kind) as caught:
        entry.misuse()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is entry.kind
    assert str(copy) == str(caught.value)
    assert copy.numbers == caught.value.numbers


# -- no class without a message ------------------------------------------------------------------


def error_classes(above: type[Exception] = ShardwiseError) -> Iterator[type[Exception]]:
    """All error classes of the package, once its modules are imported."""
    yield above
    for kind in above.__subclasses__():
        yield from error_classes(kind)


def without_entry(entries: list[Entry]) -> set[str]:
    for module in pkgutil.walk_packages(sw.__path__, "shardwise."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    kinds = {kind for kind in error_classes() if kind.__module__.startswith("shardwise.")}
    return {kind.__name__ for kind in kinds - {entry.kind for entry in entries}}


def test_every_error_class_has_an_entry() -> None:
    assert without_entry(ENTRIES) == set()


def test_a_class_without_an_entry_is_found() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert without_entry([]) >= {name for name in defined if name.endswith("Error")}
    assert without_entry(ENTRIES[1:]) == {"MeshError"}
