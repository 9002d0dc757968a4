"""Every error class: raised by a real misuse, with path, numbers and a fix in the words shown."""

from __future__ import annotations

import pickle
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.demo.text import TextError, standard_library
from shardwise.sharding import errors
from shardwise.sharding.errors import ShardwiseError
from shardwise.sharding.pytree import NAMESPACE, tree_map
from shardwise.sharding.spec import local_shape
from shardwise.testing import (
    CommsError,
    EquivalenceError,
    assert_bitwise,
    assert_comms,
    assert_equivalent,
)
from tests.transforms.five_parts import check

pytestmark = pytest.mark.simulated

MESH = sw.Mesh(fsdp=2)
ZERO = sw.zero(3, "fsdp")
SGD = sw.optim.sgd(0.1)


class Model(nn.Module):
    """Two units and a head; a batch may say what is odd about its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x, odd = batch["x"], batch["odd"]
        if odd == "fail":
            raise RuntimeError("sample 17 is broken")
        for layer in reversed(self.layers) if odd == "order" else self.layers:
            x = layer(x)
        if odd == "read":
            x = x + self.layers[1].weight.sum()
        if odd == "reduce":
            dist.all_reduce(x)
        return self.head(x)


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Any:
    out = model(batch)
    return out if batch["odd"] == "loss" else out.square().mean()


def rows(count: int = 4, odd: str = "") -> dict[str, Any]:
    values = torch.arange(4.0 * count).view(count, 4) / 16
    return {"x": values, "odd": odd}


def plan(*transforms: sw.Transform, mesh: sw.Mesh = MESH) -> sw.Plan:
    return sw.plan(Model(), mesh, *(transforms or (ZERO,)))


def train(*odd: str) -> None:
    """One step after the other on two simulated ranks."""
    with sw.simulate(MESH):
        program = sw.lower(plan(), loss_fn, SGD).bind()
        state = program.init(seed=0)
        for one in odd:
            state, _ = program.step(state, program.shard_batch(rows(odd=one)))


# -- misuses -------------------------------------------------------------------------------------


def uneven_cut() -> None:
    sw.plan(nn.Linear(4, 5), sw.Mesh(fsdp=4), sw.shard_params("fsdp", on="d0"))


def no_own_init() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(4))
    with sw.simulate(MESH):
        sw.lower(sw.plan(model, MESH, ZERO), loss_fn, SGD).bind().init(seed=0)


def other_module() -> None:
    with sw.simulate(MESH):
        sw.lower(plan(), loss_fn, SGD, module=nn.Linear(2, 2)).bind()


def uneven_rows() -> None:
    with sw.simulate(MESH):
        sw.lower(plan(), loss_fn, SGD).bind().shard_batch({"x": rows(3), "y": rows(2)})


def own_collective() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        program = sw.lower(plan(mesh=sw.Mesh(fsdp=1)), loss_fn, SGD).bind()
        program.step(program.init(seed=0), rows(odd="reduce"))
    finally:
        dist.destroy_process_group()


class Both(nn.Linear):
    """Returns a value beside what is computed from it."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(input)
        return y, y.sin()


def kept_value_written() -> None:
    """The function writes a value that remat keeps."""

    def written(model: nn.Module, batch: Tensor) -> Tensor:
        y, z = model(batch)
        return (y.add_(1) + z).mean()

    recomputed = sw.plan(Both(4, 2), sw.Mesh(fsdp=1), sw.remat("", "dots"))
    program = sw.lower(recomputed, written, SGD).bind()
    program.grads(program.init(seed=0), torch.ones(3, 4))


def used_twice() -> None:
    with sw.simulate(MESH):
        program = sw.lower(plan(), loss_fn, SGD).bind()
        state, batch = program.init(seed=0), program.shard_batch(rows())
        program.step(state, batch)
        program.step(state, batch)


def leaves_of_other_shapes() -> None:
    def halve(leaf: Any) -> Any:
        return leaf.to_local()[:1] if leaf.ndim == 2 else leaf

    with sw.simulate(MESH):
        program = sw.lower(plan(), loss_fn, SGD).bind()
        state = program.init(seed=0).map(lambda one: tree_map(halve, one, namespace=NAMESPACE))
        program.step(state, program.shard_batch(rows()))


def mismatched_axes() -> None:
    sw.Axes.parse("embed mlp").check((4,))


def uneven_heads() -> None:
    local_shape(sw.Spec.parse("(heads/tp hd)"), (6,), sw.Mesh(tp=4))


def too_long_a_warmup() -> None:
    sw.optim.warmup_cosine(1.0, warmup=9, steps=5)


def another_rank_fails() -> None:
    """What rank 0 is told of a failure on rank 1."""
    with sw.simulate(MESH) as world:
        program = sw.lower(plan(), loss_fn, SGD).bind()
        state = program.init(seed=0)
        told: list[Exception] = []

        def step(rank: int) -> None:
            try:
                batch = rows(odd="fail" if rank == 1 else "")
                program._ranks[rank].step(state.ranks[rank], batch)
            except ShardwiseError as error:
                told.append(error)

        world.run(step)
    raise min(told, key=lambda error: "sample 17" not in str(error))


def ranks_that_differ() -> None:
    sw.to_global(sw.Lifted([torch.zeros(1), torch.ones(1)]))


def wrong_rank() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "5")
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("MASTER_ADDR", "localhost")
        patch.setenv("MASTER_PORT", "1")
        sw.lower(plan(), loss_fn, SGD).bind()


def careless_mean() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return model(batch)[batch["x"][:, 0] > 0.6].mean()

    assert_equivalent(Model(), loss, [rows(8)], plan=plan(), optimizer=SGD)


def tight_budget() -> None:
    assert_comms(sw.lower(plan(), loss_fn, SGD), all_gather=1, max_bytes=10)


def bits_of_a_norm() -> None:
    clipped = sw.optim.chain(sw.optim.clip_by_global_norm(1.0), SGD)
    assert_bitwise(Model(), loss_fn, [rows()], plan=plan(), optimizer=clipped)


def stripped_python() -> None:
    with TemporaryDirectory() as folder:
        standard_library(Path(folder))


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
        ("'layers.0'", "forward, at position 5 of 6", "next in the lowered order", "Fix: keep the"),
        {"unit": "layers.0", "position": 5},
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
        ("step 0 at test_messages.py:", "in used_twice", "Fix: use the state that step returned"),
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
            "payload: 2,120 bytes, at most 10 expected",
            "layers.0",
            "Fix: see plan.why(path)",
        ),
        {"all_gather": 6, "reduce_scatter": 3, "nbytes": 2120},
    ),
    Entry(
        errors.RematError,
        kept_value_written,
        ("(3, 2), 24 bytes, written 1 times", "Fix: use the operation that is not in place"),
        {"module": "", "nbytes": 24},
    ),
    Entry(
        errors.RandomError,
        lambda: sw.dropout(torch.ones(2), 1.5),
        ("Dropout of 1.5 is no probability", "sw.dropout(x, p)", "Fix: a number from 0 to 1"),
        {"p": 1.5},
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
