"""Precision: a program steps as one process under the same policy, in every mix of dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.sharding.errors import PlanError
from shardwise.testing import measure, rest_bytes
from shardwise.testing.compare import tolerance
from shardwise.testing.echo import bind_alone
from shardwise.testing.strategies import make_optimizer
from tests.laws.test_memory import BATCH as TOKENS
from tests.laws.test_memory import Big
from tests.laws.test_memory import loss_fn as mean_square
from tests.oracles.mixed_precision import (
    WIDTH,
    Dtypes,
    Net,
    Policy,
    dtypes_of,
    gradients,
    loss_fn,
    updated,
)

pytestmark = pytest.mark.simulated

MESHES = (sw.Mesh(fsdp=1), sw.Mesh(fsdp=2), sw.Mesh(fsdp=3), sw.Mesh(dp=2, fsdp=2))
WIDE = ("float32", "float64")
DTYPES = ("bfloat16", *WIDE)
OPTIMIZERS = ("sgd", "momentum", "adamw", "clipped sgd", "clipped adamw")


@dataclass(frozen=True)
class Draw:
    """A mesh, a level, a policy and what goes with it: all that a case follows from."""

    mesh: sw.Mesh
    level: int
    steps: int
    policy: Policy
    optimizer: str
    own: str
    remat: str
    frozen: str

    def plan(self) -> sw.Plan:
        moves = [
            sw.precision(**({} if where is None else {"where": where}), **given)
            for where, given in self.policy
        ]
        accumulate = [sw.accumulate(self.steps)] if self.steps > 1 else []
        module = Net().to(getattr(torch, self.own))
        level = sw.zero(self.level, "fsdp")
        remat = [sw.remat(self.remat)] if self.remat else []
        frozen = [sw.freeze(self.frozen)] if self.frozen else []
        return sw.plan(module, self.mesh, level, *moves, *accumulate, *remat, *frozen)


def one_policy(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, str]]:
    fields = ("params", "master", "compute", "gather", "reduce", "grads")
    optional = {field: st.sampled_from(names) for field in fields}
    if "bfloat16" in names:
        optional["rounding"] = st.sampled_from(("nearest", "stochastic"))
    return st.fixed_dictionaries({}, optional=optional).filter(bool)


@st.composite
def draws(draw: st.DrawFn, names: tuple[str, ...] = DTYPES, own: str = "float32") -> Draw:
    wheres = st.sampled_from(["*norm*", "head", "up"])
    # The whole model always computes in some dtype, or few draws would have two dtypes at all.
    policy = [(None, draw(one_policy(names)) | {"compute": draw(st.sampled_from(names))})]
    policy += [(draw(wheres), draw(one_policy(names)))] if draw(st.booleans()) else []
    found = Draw(
        mesh=draw(st.sampled_from(MESHES)),
        level=draw(st.integers(0, 3)),
        steps=draw(st.integers(1, 2)),
        policy=tuple(policy),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        own=own,
        remat=draw(st.sampled_from(["", "layers.*", "*.up", ""])),
        frozen=draw(st.sampled_from(["", "", "*norm*", "first", "layers.0.*"])),
    )
    try:
        found.plan()
    except PlanError:
        reject()  # a master that does not hold its parameter, stochastic rounding of 32 bits
    return found


def whole(tree: Any) -> dict[str, Tensor]:
    return {path: value.detach().clone() for path, value in sw.to_global(tree).items()}


def batch_of(draw: Draw, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = 3 * draw.mesh.size * draw.steps
    values = torch.randn(rows, WIDTH + 1, generator=generator).to(getattr(torch, draw.own))
    return {"x": values[:, :-1], "y": values[:, -1]}


def parts_of(draw: Draw, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    count = draw.mesh.size * draw.steps
    return [
        {name: value.chunk(count)[part] for name, value in batch.items()} for part in range(count)
    ]


def close(ours: Tensor, theirs: Tensor, relative: float, what: str, *, size: float = 1e-3) -> None:
    assert ours.dtype == theirs.dtype, (what, ours.dtype, theirs.dtype)
    allowed = relative * max(theirs.double().abs().max().item(), size)
    off = (ours.double() - theirs.double()).abs().max().item()
    assert off <= allowed, (what, off, allowed)


def rounding_of(dtypes: Dtypes, parts: int) -> float:
    """What sums in these dtypes over so many parts may be off by; all else has equal bits."""
    return max(tolerance(dtype, parts) for dtype in (dtypes.reduce, dtypes.sums, dtypes.grads))


def check(draw: Draw) -> None:
    plan = draw.plan()
    dtypes = {info.path: dtypes_of(info.path, draw.policy, draw.own) for info in plan.infos}
    cut = [p for p, spec in plan.params.items() if any(draw.mesh[a] > 1 for a in spec.mesh_axes)]
    optimizer = make_optimizer(draw.optimizer)
    lowered = lowered_quietly(plan, optimizer)
    parts = draw.mesh.size * draw.steps
    trainable = {info.path for info in plan.infos if info.trainable}
    with sw.simulate(draw.mesh):
        program = lowered.bind()
        state: Any = program.init(seed=1)
        for step in range(2):
            assert {rest_bytes(rank) for rank in state.ranks} == {lowered.memory().rest_bytes}
            batch = batch_of(draw, step)
            params, opt = whole(state.params), sw.to_global(state.opt)
            truth = {p: v for p, v in params.items() if p in trainable} | whole(state.master)
            for path, value in whole(state.master).items():
                assert torch.equal(value.to(dtypes[path].params), params[path])
            want_loss, want, sizes = gradients(
                params, dtypes, cut, parts_of(draw, batch), trainable=trainable
            )
            grads, metrics = program.grads(state, program.shard_batch(batch))
            assert program.last_collectives == program.lowered.grads_items
            torch.testing.assert_close(metrics.loss, want_loss, rtol=1e-12, atol=0.0)
            found = whole(grads.leaves)
            assert found.keys() == want.keys() == trainable
            for path, grad in found.items():
                # Parts may cancel, so what counts is their size and not that of their sum.
                bound, size = rounding_of(dtypes[path], parts), sizes[path]
                close(grad, want[path], bound, f"gradient {path}", size=size)
            opt = optree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, opt
            )
            state = program.update(state, grads)
            assert program.last_collectives == program.lowered.update_items
            check_update(
                draw, dtypes, state, optimizer=optimizer, truth=truth, grads=found, opt=opt
            )
            for path, value in whole(state.params).items():
                assert path in trainable or torch.equal(value, params[path])


def check_update(
    draw: Draw,
    dtypes: Mapping[str, Dtypes],
    state: Any,
    *,
    optimizer: Any,
    truth: dict[str, Tensor],
    grads: dict[str, Tensor],
    opt: Any,
) -> None:
    """Masters or parameters, and moments, against the optimizer's definition on whole tensors."""

    def wide(path: str, value: Tensor) -> Tensor:
        return value.to(dtypes[path].work)

    def wide_dict(value: Any) -> Any:
        return {p: wide(p, v) for p, v in value.items()} if is_over(value) else value

    def is_over(value: Any) -> bool:
        return isinstance(value, dict) and value.keys() == truth.keys()

    values = {path: wide(path, value) for path, value in truth.items()}
    opt = optree.tree_map(wide_dict, opt, is_leaf=is_over)
    want, want_opt = updated(optimizer, values, grads, opt)
    params, masters = whole(state.params), whole(state.master)
    # A norm over float32 gradients is added up by rows in float32, and rows follow the cut.
    single = any(dtypes[path].work == torch.float32 for path in truth)
    clipping = tolerance(torch.float32, 1) if single and "clipped" in draw.optimizer else 0.0
    for path, value in want.items():
        kind = dtypes[path]
        got = masters.get(path, params[path])
        assert got.dtype == (kind.master if path in masters else kind.params)
        assert params[path].dtype == kind.params
        if kind.stochastic:
            assert path not in masters
            # One of the two neighbours, so less than one step of the dtype away; the value itself
            # may be off by a rounding of float32.
            step = torch.finfo(got.dtype).eps * value.double().abs()
            off = (got.double() - value.double()).abs()
            assert (off <= step + tolerance(torch.float32, 1) * (1 + value.abs())).all(), path
        else:
            bound = max(tolerance(got.dtype, 1), clipping)
            close(got, value.to(got.dtype), bound, f"{draw.optimizer} {path}")
    found = optree.tree_leaves(sw.to_global(state.opt))
    states = zip(found, optree.tree_leaves(want_opt), optree.tree_leaves(opt), strict=True)
    for ours, theirs, old in states:
        if isinstance(theirs, Tensor) and theirs.is_floating_point():
            bound = max(tolerance(ours.dtype, 1), clipping)
            # What is old and what is new may cancel.
            size = max(old.double().abs().max().item(), 1e-3)
            close(ours, theirs.to(ours.dtype), bound, "optimizer state", size=size)
        else:
            assert ours == theirs


def lowered_quietly(plan: sw.Plan, optimizer: Any) -> sw.Lowered:
    halves = [p for p, s in plan.opt.items() if s.dtype == "bfloat16"]
    if all(path in plan.precision.stochastic for path in halves):
        return sw.lower(plan, loss_fn, optimizer)
    with pytest.warns(UserWarning, match="without a master copy"):
        return sw.lower(plan, loss_fn, optimizer)


@settings(max_examples=20)
@given(draws())
def test_a_program_steps_as_one_process_under_the_same_policy(draw: Draw) -> None:
    check(draw)


@settings(max_examples=6)
@given(draws(WIDE, own="float64"))
def test_wide_policies_agree_to_rounding(draw: Draw) -> None:
    check(draw)


@pytest.mark.parametrize("level", range(4))
def test_float16_steps_as_one_process_in_float16(level: int) -> None:
    """Under a fixed scale; the divisor is a power of two too, so only subnormals may differ."""
    mesh = sw.Mesh(fsdp=2)
    case = Draw(mesh, level, 1, ((None, {"compute": "float16"}),), "sgd", "float32", "", "")
    plan = sw.loss_scale(1024.0)(case.plan())
    dtypes = {info.path: dtypes_of(info.path, case.policy, case.own) for info in plan.infos}
    cut = [p for p, spec in plan.params.items() if spec.mesh_axes]
    with sw.simulate(mesh):
        program = sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).bind()
        state: Any = program.init(seed=1)
        for step in range(2):
            before, batch = whole(state.params), batch_of(case, step)
            parts = parts_of(case, batch)
            loss, want, sizes = gradients(before, dtypes, cut, parts, trainable=before)
            grads, metrics = program.grads(state, program.shard_batch(batch))
            assert metrics.applied
            torch.testing.assert_close(metrics.loss, loss, rtol=1e-12, atol=0.0)
            found = whole(grads.leaves)
            for path, grad in found.items():
                close(grad, want[path], tolerance(torch.float16, 1), path, size=sizes[path])
            state = program.update(state, grads)
            for path, value in whole(state.params).items():
                close(value, before[path] - 0.1 * found[path], tolerance(torch.float32, 1), path)


# -- the wire and memory -----------------------------------------------------------------------


def test_gathers_and_reductions_carry_their_own_dtypes() -> None:
    """Bytes of a step: 3 parameters' worth in `gather`, in `reduce`, and updates in `params`."""
    mesh = sw.Mesh(fsdp=2)

    def payload(**given: str) -> dict[str, int]:
        plan = sw.plan(Net(), mesh, sw.zero(3, "fsdp"), sw.precision(**given))
        found: dict[str, int] = {}
        for item in sw.lower(plan, loss_fn, sw.optim.sgd(0.1)).collectives():
            found[item.reason] = found.get(item.reason, 0) + item.nbytes
        return found

    wide = payload(compute="float32")
    half = payload(compute="bfloat16")
    for reason in ("forward", "backward"):
        assert 2 * half[reason] == wide[reason]
        assert payload(compute="bfloat16", gather="float32")[reason] == wide[reason]
    assert half["grads"] == wide["grads"]
    assert 2 * payload(compute="bfloat16", reduce="bfloat16")["grads"] == wide["grads"]
    assert payload(compute="bfloat16", grads="bfloat16")["grads"] == wide["grads"]


POLICIES = {
    "masters": {"params": "bfloat16"},
    "compute": {"compute": "bfloat16"},
    "wires": {"compute": "bfloat16", "gather": "float32", "reduce": "bfloat16", "grads": "float32"},
    "narrow grads": {"compute": "bfloat16", "grads": "bfloat16"},
    "stochastic": {"params": "bfloat16", "rounding": "stochastic"},
    "all 16 bits": {"params": "bfloat16", "master": "bfloat16", "rounding": "stochastic"},
}
MIB = 2**20


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_the_peak_is_the_predicted_one(name: str, level: int) -> None:
    mesh = sw.Mesh(dp=2, fsdp=2)
    plan = sw.plan(Big(), mesh, sw.zero(level, "fsdp"), sw.precision(**POLICIES[name]))
    lowered = sw.lower(plan, mean_square, sw.optim.sgd(0.1, momentum=0.9), batch=TOKENS)
    program = bind_alone(lowered)
    state, _ = program.step(program.init(0, None), TOKENS)
    memory = lowered.memory()
    assert rest_bytes(state) == memory.rest_bytes
    _, usage = measure(lambda: program.step(state, TOKENS))
    assert memory.activations is not None
    transient = usage.peak - memory.grads - memory.activations
    # Autograd's own copies of casts are activations of a batch of two tokens: nothing beside these.
    assert abs(transient - memory.transient) <= 0.05 * memory.transient + MIB / 4


def test_optimizers_that_see_whole_tensors_round_alike_on_every_mesh() -> None:
    """LAMB couples a tensor: what it reads and keeps is gathered, and rounded where it rests."""
    results = []
    for mesh, level in ((sw.Mesh(fsdp=1), 3), (sw.Mesh(fsdp=2), 3), (sw.Mesh(fsdp=2), 1)):
        policy = sw.precision(params="bfloat16", master="bfloat16", rounding="stochastic")
        module = Exact().bfloat16()
        plan = sw.plan(module, mesh, sw.zero(level, "fsdp"), policy)
        with sw.simulate(mesh):
            program = sw.lower(plan, exact_loss, sw.optim.lamb(1e-3)).bind()
            state = program.init(sw.from_module(module), seed=0)
            for _ in range(3):
                state, _ = program.step(state, program.shard_batch(torch.ones(4, 1)))
                assert program.last_collectives == program.lowered.collectives()
            leaves = optree.tree_leaves(sw.to_global(state.opt))
            results.append([*whole(state.params).values(), *leaves])
    assert len({str(value.dtype) for value in results[0]} & {"torch.bfloat16"}) == 1
    for other in results[1:]:
        for ours, theirs in zip(other, results[0], strict=True):
            assert torch.equal(ours, theirs)


class Exact(nn.Module):
    """Gradients that no order of summation changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 35).view(7, 5))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * (self.weight.sum() + self.scale)


def exact_loss(model: nn.Module, x: Tensor) -> sw.Mean:
    return sw.Mean(model(x).float(), len(x))
