"""One forward pass on fake tensors: the order of units, the metrics, the buffers it writes.

Costs host time only: no memory is touched, nothing is communicated. What cannot be traced (a branch
on a value) ends the trace; what was seen until then is kept, and the report says where it ended.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.sharding.compat import FakeTensorMode, TorchDispatchMode
from shardwise.sharding.errors import PlanError, ShardwiseError
from shardwise.sharding.plan import Plan, Unit
from shardwise.sharding.pytree import tree_leaves, tree_map
from shardwise.transforms.activations import Activations, Recomputation
from shardwise.transforms.binding import Binding, Stage
from shardwise.transforms.crossings import Crossing
from shardwise.transforms.draws import TracedDraws, drawing
from shardwise.transforms.faults import read_outside, written_in_place
from shardwise.transforms.loss import parse_loss
from shardwise.transforms.order import Event, call_of
from shardwise.transforms.outputs import replace_tensors
from shardwise.transforms.regions import Region
from shardwise.transforms.tensor_calls import Lengths
from shardwise.transforms.tensor_context import in_tensor_context
from shardwise.transforms.tensor_layers import Boundary, Run
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
        activation_bytes: what autograd saves for backward beside parameters and batch; None if the
            trace ended early.
        forward_flops: of matrix products, convolutions and attention; None likewise.
        recomputation: what recomputed modules change; None likewise.
        calls_dropout: whether `sw.dropout` was called, other than by a module `sw.Dropout`.
        crossings: how activations cross boundaries, by the name of each crossing.
        replicated: by tensor axis, parameters that are whole and of whose gradient each rank has
            a part.
        lengths: by length of a dimension that a loss asked about, how it is cut.
    """

    events: tuple[Event, ...]
    aux: tuple[str, ...] | None
    written: tuple[str, ...]
    note: str = ""
    activation_bytes: int | None = None
    forward_flops: int | None = None
    terms: tuple[str, ...] = ()
    recomputation: Recomputation | None = None
    calls_dropout: bool = False
    crossings: Mapping[str, Crossing] = field(default_factory=dict)
    replicated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=dict)


def like(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of a batch that does not exist yet, for `lower(..., batch=)`.

    >>> like((8, 128), torch.int64).shape
    torch.Size([8, 128])
    """
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


class Tracer:
    """The guide of a trace: binds fake parameters and writes down who came when."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        mode: FakeTensorMode,
        device: torch.device,
        staying: frozenset[str],
        *,
        collects: bool = False,
    ) -> None:
        self._staying = staying
        self._bindings: dict[str, Binding] = {}
        self._values: dict[str, list[Tensor]] = {}
        self._open: dict[str, int] = {}
        self._entered: dict[str, int] = {}
        self._around: list[str] = []
        self._num_calls: Counter[str] = Counter()
        self.events: list[Event] = []
        self.activations: Activations | None = None
        infos = {info.path: info for info in plan.infos}
        with mode:
            for unit in plan.units:
                self._bindings[unit.name] = Binding(unit.name, unit.params, stage.template)
                self._values[unit.name] = [
                    _fake_parameter(
                        plan.tensor.block(infos[path]),
                        plan.compute[path].dtype,
                        device,
                        infos[path].trainable,
                    )
                    for path in unit.params
                ]
        self.typed: Typed | None = None
        if plan.tensor.axes:
            values = {path: value for unit in plan.units for path, value in self._named(unit)}
            self.typed = Typed(plan, values, self.events, self._around, collects=collects)
        self._trainable = {
            unit.name: any(infos[path].trainable for path in unit.params) for unit in plan.units
        }

    def enter(self, unit: str, inputs: Any = None) -> Any:
        """Bind and note."""
        if self._open.get(unit):
            self._open[unit] += unit not in self._staying
            return
        self._open[unit] = 1
        self._bindings[unit].bind(self._values[unit])
        self._entered[unit] = len(self.events)
        grad = self._trainable[unit] and (unit in self._staying or torch.is_grad_enabled())
        self.events.append(Event("enter", unit, grad, tuple(self._around)))

    def leave(self, unit: str, output: Any, inputs: Any = None) -> Any:
        """Unbind and note; a frozen unit has a backward if its output has one."""
        if unit in self._staying:
            return output
        self._open[unit] -= 1
        if self._open[unit]:
            return output
        entered = self._entered[unit]
        grad = self.events[entered].grad or _requires_grad(output, unit)
        self.events[entered] = replace(self.events[entered], grad=grad)
        self.events.append(Event("leave", unit, grad, tuple(self._around)))
        self._bindings[unit].unbind(self._values[unit])
        return output

    def resolve(self, path: str, unit: str) -> Tensor:
        """A read binds a child of the root."""
        if unit in self._staying and not self._open.get(unit):
            self.enter(unit)
        if not self._open.get(unit) or unit not in self._staying:
            raise read_outside(path, unit, "the trace of the forward pass")
        return self._values[unit][self._bindings[unit].index[path]]

    def run(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module once and count what its recomputation will do."""
        if not torch.is_grad_enabled() or self.activations is None:
            return region.forward(*args, **kwargs)
        call = call_of(region.name, self._num_calls[region.name])
        self._num_calls[region.name] += 1
        first = len(self.events)
        self._around.append(call)
        if self.typed is not None:
            self.typed.crossings.recent.clear()
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            with self.activations.region(region, inputs):
                output = region.forward(*args, **kwargs)
        finally:
            self._around.pop()
            if self.typed is not None:
                self.typed.crossings.recent.clear()
        if region.spans and not _requires_grad(output, region.name):
            # Backward never comes here, so nothing inside is gathered again.
            self.events[first:] = [_outside(event, call) for event in self.events[first:]]
        return output

    def cross(self, boundary: Boundary, place: str, tensor: Tensor) -> Tensor:
        """Choose how an activation crosses, by its type."""
        return tensor if self.typed is None else self.typed.crossings.cross(boundary, place, tensor)

    def look_up(self, boundary: Boundary, module: nn.Embedding, run: Run, tokens: Tensor) -> Tensor:
        """Each rank has a summand."""
        assert self.typed is not None
        return self.typed.look_up(boundary, module, run, tokens)

    def _named(self, unit: Unit) -> Iterable[tuple[str, Tensor]]:
        return zip(unit.params, self._values[unit.name], strict=True)

    @property
    def parameters(self) -> list[Tensor]:
        """All fake parameters."""
        return [value for values in self._values.values() for value in values]

    def refuse_writes(self, storages: set[int]) -> None:
        """Raise if the forward pass has written parameters, given the storages it has written."""
        for unit, values in self._values.items():
            for path, value in zip(self._bindings[unit].paths, values, strict=True):
                if _storage(value) in storages:
                    raise written_in_place(path, unit)

    def close(self) -> None:
        """Put all placeholders back."""
        for binding in self._bindings.values():
            binding.restore()


def _fake_parameter(
    shape: tuple[int, ...], dtype: str, device: torch.device, trainable: bool
) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device, requires_grad=trainable)


def _outside(event: Event, call: str) -> Event:
    return replace(event, regions=tuple(region for region in event.regions if region != call))


def _requires_grad(output: Any, unit: str) -> bool:
    found = False

    def look(tensors: list[Tensor]) -> Sequence[Tensor]:
        nonlocal found
        found = any(tensor.requires_grad for tensor in tensors)
        return tensors

    replace_tensors(output, unit, look)
    return found


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
    storages = {name: _storage(fake) for name, fake in fakes.items()}
    flops = FlopCounterMode(display=False)
    run = _Run(stage, loss_fn, mode, device)
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
        )
    if run.note or tracer.activations is None:
        return seen
    return replace(
        seen,
        activation_bytes=tracer.activations.saved_bytes(written),
        forward_flops=flops.get_total_flops(),
        recomputation=tracer.activations.recomputation(),
    )


class _Run:
    """One run of a loss function under all the modes of a trace, and what it left behind."""

    def __init__(
        self, stage: Stage, loss_fn: LossFunction, mode: FakeTensorMode, device: torch.device
    ) -> None:
        self._stage, self._loss_fn, self._mode, self._device = stage, loss_fn, mode, device
        self.aux: tuple[str, ...] | None = None
        self.terms: tuple[str, ...] = ()
        self.note = ""
        self.writes = _Writes()
        self.draws = TracedDraws()

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
        or _storage(fakes[name]) != storages[name]
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
        self.storages |= {_storage(value) for value in written if isinstance(value, Tensor)}
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


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
