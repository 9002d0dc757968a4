"""One forward pass on fake tensors: the order of units, the metrics, the buffers it writes.

Costs host time only: no memory is touched, nothing is communicated. What cannot be traced (a branch
on a value) ends the trace; what was seen until then is kept, and the report says where it ended.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwise.sharding.compat import FakeTensorMode, TorchDispatchMode
from shardwise.sharding.errors import PlanError, ShardwiseError
from shardwise.sharding.plan import Plan
from shardwise.sharding.pytree import tree_leaves, tree_map
from shardwise.transforms.activation_types import TypeMismatch
from shardwise.transforms.activations import Activations, Recomputation
from shardwise.transforms.binding import Stage
from shardwise.transforms.call_facts import CallFacts
from shardwise.transforms.crossings import Crossing
from shardwise.transforms.draws import TracedDraws, drawing
from shardwise.transforms.loss import parse_loss
from shardwise.transforms.order import Event
from shardwise.transforms.tensor_calls import Lengths
from shardwise.transforms.tensor_context import in_tensor_context
from shardwise.transforms.tracer import Tracer, storage_of
from shardwise.transforms.typed_trace import Typed, untraced

LossFunction = Callable[[Any, Any], Any]
Sites = Mapping[str, Sequence[tuple[dict[str, Any], str]]]
"""By the name of a buffer, the tables that hold it and its key in each."""


@dataclass(frozen=True)
class Trace:
    """What one forward pass showed.

    Args:
        events: units in the order in which they were entered and left.
        aux: names of the auxiliary metrics, loss terms included, sorted; None if the trace did not
            get there.
        terms: names of the loss terms if there are several, sorted.
        written: buffers that the forward pass changed.
        note: where the trace ended early, else "".
        tier_bytes: what goes to tiers, by their text; `activation_bytes` has only what of it is
            back on the device at the most.
        activation_bytes: what autograd saves for backward beside parameters and batch; None if the
            trace ended early.
        forward_flops: of matrix products, convolutions and attention; None likewise.
        recomputation: what recomputed modules change; None likewise.
        calls_dropout: whether `sw.dropout` was called, other than by a module `sw.Dropout`.
        crossings: how activations cross boundaries, by the name of each crossing.
        replicated: by tensor axis, parameters that are whole and of whose gradient each rank has
            a part.
        lengths: by length of a dimension that a loss asked about, how it is cut.
        facts: about calls inside of modules, where tensor axes cut layers.
    """

    events: tuple[Event, ...]
    aux: tuple[str, ...] | None
    written: tuple[str, ...]
    note: str = ""
    activation_bytes: int | None = None
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    forward_flops: int | None = None
    terms: tuple[str, ...] = ()
    recomputation: Recomputation | None = None
    calls_dropout: bool = False
    crossings: Mapping[str, Crossing] = field(default_factory=dict)
    replicated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=dict)
    facts: CallFacts = field(default_factory=CallFacts)


def like(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of a batch that does not exist yet, for `lower(..., batch=)`.

    >>> like((8, 128), torch.int64).shape
    torch.Size([8, 128])
    """
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def trace(
    plan: Plan,
    stage: Stage,
    loss_fn: LossFunction,
    batch: Any,
    *,
    buffers: Sites,
    device: torch.device,
    staying: frozenset[str],
) -> Trace:
    """Run `loss_fn` once on fake tensors; once more if logits have to be whole after all.

    Args:
        plan: names the units.
        stage: the template with its hooks.
        loss_fn: the user's loss function.
        batch: a pytree of tensors, real or fake.
        buffers: where each buffer of the template is held.
        device: where the program runs.
        staying: units that stay open once they are entered.

    Raises:
        ShardwiseError: the model breaks a rule of units or the loss is not a loss.
    """
    given: dict[str, Any] = {"buffers": buffers, "device": device, "staying": staying}
    if plan.tensor.axes:
        stage.place_modules()
    if not plan.tensor.axes or plan.tensor.logits != "auto":
        collects = plan.tensor.logits == "gathered"
        return _trace(plan, stage, loss_fn, batch, **given, collects=collects)
    try:
        return _trace(plan, stage, loss_fn, batch, **given, collects=False)
    except PlanError:
        return _trace(plan, stage, loss_fn, batch, **given, collects=True)


def _trace(
    plan: Plan,
    stage: Stage,
    loss_fn: LossFunction,
    batch: Any,
    *,
    buffers: Sites,
    device: torch.device,
    staying: frozenset[str],
    collects: bool,
) -> Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracer = Tracer(plan, stage, mode, device, staying, collects=collects)
    guide, stage.guide = stage.guide, tracer
    stage.set_training(True)  # steps train, whatever mode the module was handed in
    held = {name: sites[0][0][sites[0][1]] for name, sites in buffers.items()}
    fakes = {name: mode.from_tensor(value) for name, value in held.items()}
    storages = {name: storage_of(fake) for name, fake in fakes.items()}
    flops = FlopCounterMode(display=False)
    run = _Run(stage, loss_fn, mode, device, tracer.typed)
    try:
        _hold(buffers, fakes)
        run(tracer, batch, fakes.values(), flops)
    finally:
        written = _written(buffers, fakes, storages, run)
        _hold(buffers, held)
        tracer.close()
        stage.guide = guide
    seen = Trace(
        tuple(tracer.events),
        run.aux,
        written,
        run.note,
        terms=run.terms,
        calls_dropout=run.draws.functional,
    )
    if tracer.typed is not None:
        if run.note:
            raise untraced(run.note)
        typed = tracer.typed
        seen = replace(
            seen,
            crossings=typed.crossings.chosen,
            replicated=typed.replicated(),
            lengths=typed.calls.lengths,
            facts=typed.facts,
        )
    if run.note or tracer.activations is None:
        return seen
    return replace(
        seen,
        activation_bytes=tracer.activations.saved_bytes(written)
        + tracer.activations.fetched_bytes(),
        tier_bytes=tracer.activations.tier_bytes(),
        forward_flops=flops.get_total_flops(),
        recomputation=tracer.activations.recomputation(),
    )


class _Run:
    """One run of a loss function under all the modes of a trace, and what it left behind."""

    def __init__(
        self,
        stage: Stage,
        loss_fn: LossFunction,
        mode: FakeTensorMode,
        device: torch.device,
        typed: Typed | None,
    ) -> None:
        self._stage, self._loss_fn, self._mode, self._device = stage, loss_fn, mode, device
        self.aux: tuple[str, ...] | None = None
        self.terms: tuple[str, ...] = ()
        self.note = ""
        self.writes = _Writes()
        self._typed = typed
        self.draws = TracedDraws(lambda: None if typed is None else typed.places.path)

    def __call__(
        self, tracer: Tracer, batch: Any, buffers: Iterable[Tensor], flops: FlopCounterMode
    ) -> None:
        """Run it; what is not our error ends the trace with a note."""
        mode = self._mode
        try:
            with mode:
                inputs = tree_map(lambda leaf: _fake_input(leaf, mode, self._device), batch)
            known = [*tracer.parameters, *tree_leaves(inputs), *buffers]
            saved = tracer.activations = Activations(known, flops.get_total_flops)
            grad = torch.enable_grad()
            typing = nullcontext() if tracer.typed is None else tracer.typed.mode
            with ExitStack() as around:
                for one in (drawing(self.draws), _unlogged(), mode, grad, saved.hooks(), flops):
                    around.enter_context(one)
                around.enter_context(self.writes)
                around.enter_context(typing)
                if tracer.typed is not None:
                    around.enter_context(in_tensor_context(tracer.typed.calls))
                tracer.enter("")
                loss = parse_loss(self._loss_fn(self._stage.template.module, inputs), inputs)
                self.aux, self.terms = tuple(loss.aux), tuple(loss.terms)
                if tracer.typed is not None:
                    tracer.typed.finish(loss)
            tracer.refuse_writes(self.writes.storages)
        except ShardwiseError:
            raise
        except TypeMismatch as mismatch:
            raise mismatch.error(self._typed and self._typed.places.path) from mismatch
        except Exception as error:
            self.note = _where(error)


def _written(
    buffers: Sites, fakes: Mapping[str, Tensor], storages: Mapping[str, int], run: _Run
) -> tuple[str, ...]:
    """The buffers that a run has replaced or written."""
    return tuple(
        name
        for name, sites in buffers.items()
        if any(table[key] is not fakes[name] for table, key in sites)
        or storage_of(fakes[name]) != storages[name]
        or storages[name] in run.writes.storages
        or run.note  # what comes after the end of the trace may write any of them
    )


def _hold(buffers: Sites, values: Mapping[str, Tensor]) -> None:
    for name, sites in buffers.items():
        for table, key in sites:
            table[key] = values[name]


@contextmanager
def _unlogged() -> Generator[None]:
    """Keep torch from logging an operation that fails on fake tensors: the trace has a note of it.

    For one, torch 2.13 has a grouped product of float32 matrices, but refuses it on fake ones.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


class _Writes(TorchDispatchMode):
    """Notes which storages are written, also through `.data` and other aliases.

    A batch norm in training writes its running statistics without saying so in its schema.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look for arguments that the operation writes."""
        arguments = func._schema.arguments
        names = [argument.name for argument in arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        targets = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
        if given.get("training", True):
            targets += ["running_mean", "running_var"]
        written = (given.get(name) for name in targets)
        self.storages |= {storage_of(value) for value in written if isinstance(value, Tensor)}
        return func(*args, **(kwargs or {}))


def _fake_input(leaf: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_meta:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return mode.from_tensor(leaf)


def _where(error: BaseException) -> str:
    """The user's line that ended the trace."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and "/shardwise/" not in frame.filename
    ]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "torch"
    first = (str(error).splitlines() or [""])[0]
    return f"the trace ended at {place} ({type(error).__name__}: {first})"
