"""Plans as text: the table, the differences between two plans, and why a parameter lies so."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.sharding.axes import Axes
from shardwise.sharding.derived import Accumulation, Derived
from shardwise.sharding.describe_tensor import GUESS, tensor_lines
from shardwise.sharding.edits import (
    AccumulateEdit,
    Edit,
    KeepEdit,
    LossScaleEdit,
    PrefetchEdit,
    RematEdit,
    TreeAtEdit,
)
from shardwise.sharding.homes import HOMES
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.modules import ROOT
from shardwise.sharding.offload_edit import OffloadEdit
from shardwise.sharding.precision import PrecisionEdit
from shardwise.sharding.repeats import collapse, render_group
from shardwise.sharding.spec import Spec
from shardwise.sharding.tree import selects
from shardwise.sharding.units import ParamInfo

_LAYOUTS = (*HOMES, "compute")
_COLUMNS = ("path", "shape", "axes", *_LAYOUTS, "at rest")
_UNIT_BYTES = 1024


def describe(derived: Derived) -> str:
    """The table of a plan: repeated blocks in one line, bytes per rank, settings below.

    `pad n` marks an uneven cut: so many rows of padding over all ranks, on the wire only, or in the
    blocks that a tensor axis makes. Axes that are guesses are marked as such.
    The moments of the optimizer are known only to `lower`.
    """
    rows = {info.path: _row(derived, info) for info in derived.infos}
    rest_bytes = {info.path: rest_bytes_per_rank(derived, info) for info in derived.infos}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column == "at rest" else "left", no_wrap=True)
    for group in collapse(rows, lambda path: (rows[path], rest_bytes[path])):
        total = sum(rest_bytes[path] for path in group)
        table.add_row(*map(Text, (render_group(group), *rows[group[0]], format_bytes(total))))
    lines = _render(table).splitlines()
    return "\n".join([*(line.rstrip() for line in lines), *_footer(derived, rest_bytes)])


def rest_bytes_per_rank(derived: Derived, info: ParamInfo) -> int:
    """Bytes of a parameter, and of its master copy if it has one, on every rank between steps.

    Where `opt` only cuts `params` further, in the same dtype, the master is a part of the
    parameter and takes no room of its own; nor is there one with stochastic rounding.
    """
    params = derived.params[info.path]
    opt = derived.opt.get(info.path, params)
    total = _local_bytes(derived, info, params)
    if _refines(opt, params, derived.mesh) or info.path in derived.precision.stochastic:
        return total
    return total + _local_bytes(derived, info, opt)


def format_bytes(count: float) -> str:
    """A number of bytes in the largest binary unit that keeps it above one.

    >>> format_bytes(512), format_bytes(3 * 1024**3)
    ('512 B', '3.0 GiB')
    """
    if count < _UNIT_BYTES:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= _UNIT_BYTES
        if count < _UNIT_BYTES:
            return f"{count:.1f} {unit}"
    return f"{count / _UNIT_BYTES:.1f} TiB"


def difference(old: Derived, new: Derived) -> tuple[str, ...]:
    """One line per difference, repeated parameters in one line."""
    return tuple(_difference(old, new))


def explain(
    derived: Derived, info: ParamInfo, edits: Iterable[tuple[Edit, str]], source: str = ""
) -> str:
    """Edits that touch a parameter, in replay order, and the specs that result.

    Args:
        derived: the layouts.
        info: the parameter.
        edits: with their call sites.
        source: where its axes come from; empty: it has no named ones.
    """
    names = f"  (also {', '.join(info.aliases)})" if info.aliases else ""
    named = f" (from: {source})" if source and info.axes != Axes.anonymous(info.axes.ndim) else ""
    head = f"{info.path}{names}   shape {info.shape}   axes '{info.axes}'{named}   {derived.mesh!r}"
    touching = [
        f"  {edit.by or edit.kind}  [{edit.phase}]  {site}"
        for edit, site in edits
        if _touches(derived, info, edit)
    ]
    specs = [
        f"  {layout + ':':9}{getattr(derived, layout)[info.path]}"
        for layout in _LAYOUTS
        if info.path in getattr(derived, layout)
    ]
    specs += [f"  {'wire:':9}{line}" for line in _wire_lines(derived, info.path)]
    rests = derived.rests.get(info.path)
    specs += [f"  {'rests:':9}{rests}"] if rests else []
    return "\n".join([head, *(touching or ["  no edit touches it"]), *specs])


def _wire_lines(derived: Derived, path: str) -> Iterator[str]:
    """What a parameter's movements carry, and how it is rounded, where its specs do not tell."""
    precision = derived.precision
    if precision.gather[path] != derived.compute[path].dtype:
        yield f"gathers in {precision.gather[path]}"
    if path in derived.grads and precision.reduce[path] != derived.grads[path].dtype:
        yield f"gradients summed in {precision.reduce[path]}"
    if path in precision.stochastic:
        yield "rounded stochastically, no master copy"


def _precision_lines(derived: Derived) -> Iterator[str]:
    """Everything about dtypes that the table does not show: wires, casts, buffers."""
    wires: dict[str, str] = {}
    for info in derived.infos:
        text = ", ".join(_wire_lines(derived, info.path))
        if text:
            wires[info.path] = text
    casts = {path or "(root)": str(cast) for path, cast in derived.precision.casts.items()}
    buffers = {path: f"rests in {name}" for path, name in derived.precision.buffers.items()}
    for head, lines in (("", wires), ("cast ", casts), ("buffer ", buffers)):
        yield from _grouped(lines, head)


def _tier_lines(derived: Derived) -> Iterator[str]:
    """What rests, or waits for backward, off the device."""
    yield from _grouped({path: str(rests) for path, rests in derived.rests.items()}, "rests ")
    acts = {path or "(root)": str(acts) for path, acts in derived.acts.items()}
    yield from _grouped(acts, "saved for backward ")


def _row(derived: Derived, info: ParamInfo) -> tuple[str, ...]:
    specs = (getattr(derived, layout).get(info.path) for layout in _LAYOUTS)
    cells = ("-" if spec is None else _cell(derived, info, spec) for spec in specs)
    mark = f" {GUESS}" if info.path in derived.tensor.guessed else ""
    return str(info.shape), f"{info.axes}{mark}", *cells


def _cell(derived: Derived, info: ParamInfo, spec: Spec) -> str:
    """A spec as text: `whole` when it only repeats the axes, with the rows an uneven cut pads."""
    if not spec.shards:
        return str(spec).replace(str(info.axes), "whole", 1)
    parts = [derived.mesh.product(spec.dim_axes(dim)) for dim in range(len(info.shape))]
    padding = sum(-size % count for size, count in zip(info.shape, parts, strict=True))
    return f"{spec} pad {padding}" if padding else str(spec)


def _render(table: Table) -> str:
    # A console that is no terminal: neither colour nor wrapping may depend on where we print.
    console = Console(file=io.StringIO(), width=10_000, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _footer(derived: Derived, rest_bytes: Mapping[str, int]) -> Iterator[str]:
    numel = sum(math.prod(info.shape) for info in derived.infos)
    frozen = [info for info in derived.infos if not info.trainable]
    units = sum(unit.kind == "unit" for unit in derived.units)
    kept = ", ".join(map(render_group, collapse(sorted(derived.keep))))
    settings = [
        f"batch over {', '.join(derived.batch) or 'no axis'}",
        f"prefetch {derived.prefetch}",
        *([f"kept gathered: {kept}"] if kept else []),
        *([f"remat: {_remat_text(derived)}"] if derived.remat else []),
        *([f"fetched ahead: {derived.fetch_ahead}"] if derived.fetch_ahead else []),
        *([str(derived.accumulation)] if derived.accumulation != Accumulation() else []),
        *([f"loss scale {derived.loss_scale}"] if derived.loss_scale else []),
    ]
    yield ""
    yield (
        f"{derived.mesh!r}   {len(derived.infos)} parameters, {numel:,} elements"
        f"{f', {len(frozen)} frozen' if frozen else ''}   {units} units"
    )
    yield "   ".join(settings)
    yield from tensor_lines(derived)
    yield from _precision_lines(derived)
    yield from _tier_lines(derived)
    total = format_bytes(sum(rest_bytes.values()))
    yield f"at rest per rank: {total} (optimizer moments: see lower)"


def _remat_text(derived: Derived) -> str:
    """Recomputed modules with their policies, those of repeated blocks once."""
    chosen = derived.remat
    groups = collapse([path for path in chosen if path != ROOT], lambda path: str(chosen[path]))
    shown = [f"{render_group(group)} ({chosen[group[0]]})" for group in groups]
    return ", ".join([*([f"(root) ({chosen[ROOT]})"] if ROOT in chosen else []), *shown])


def _refines(fine: Spec, coarse: Spec, mesh: Mesh) -> bool:
    """Whether one layout only cuts the blocks of the other."""
    if (fine.dtype, fine.memory) != (coarse.dtype, coarse.memory):
        return False
    dims = range(coarse.axes.ndim)
    pairs = ([_real(spec.dim_axes(dim), mesh) for spec in (fine, coarse)] for dim in dims)
    return all(inner[: len(outer)] == outer for inner, outer in pairs)


def _real(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in axes if mesh[axis] > 1)


def _local_bytes(derived: Derived, info: ParamInfo, spec: Spec) -> int:
    before, block = derived.compute[info.path], list(derived.tensor.block(info))
    for dim, rows in enumerate(block):
        axes = tuple(axis for axis in spec.dim_axes(dim) if axis not in before.dim_axes(dim))
        block[dim] = -(-rows // derived.mesh.product(axes))
    return math.prod(block) * getattr(torch, spec.dtype).itemsize


def _touches(derived: Derived, info: ParamInfo, edit: Edit) -> bool:
    if isinstance(edit, AccumulateEdit | PrefetchEdit | LossScaleEdit):
        return False
    if isinstance(edit, TreeAtEdit):
        return edit.path in info.names
    names = info.names
    if isinstance(edit, PrecisionEdit) and not edit.settings:
        return False  # it is about modules or buffers
    if isinstance(edit, OffloadEdit) and edit.part == "acts":
        return False
    if isinstance(edit, RematEdit):
        patterns = [pattern for pattern in edit.modules if pattern != ROOT]
        if patterns and not selects(patterns, names):
            return False
    if isinstance(edit, KeepEdit):
        names = tuple(unit.name for unit in derived.units if info.path in unit.params)
    return all(selects(clause, names) for clause in edit.where)


def _difference(old: Derived, new: Derived) -> Iterator[str]:
    for setting in ("mesh", "batch", "prefetch", "fetch_ahead", "accumulation", "loss_scale"):
        before, after = getattr(old, setting), getattr(new, setting)
        if before != after:
            yield f"{setting}: {before!r} -> {after!r}"
    if old.precision != new.precision:
        before, after = (set(_precision_lines(each)) for each in (old, new))
        yield from (f"no longer {line}" for line in sorted(before - after))
        yield from (f"now {line}" for line in sorted(after - before))
    before, after = (set(_tier_lines(each)) for each in (old, new))
    yield from (f"no longer {line}" for line in sorted(before - after))
    yield from (f"now {line}" for line in sorted(after - before))
    if old.remat != new.remat:
        yield f"remat: {_remat_text(old) or 'none'} -> {_remat_text(new) or 'none'}"
    if old.keep != new.keep:
        yield f"keep: {sorted(old.keep)} -> {sorted(new.keep)}"
    yield from _info_difference(old, new)
    for layout in _LAYOUTS:
        yield from _spec_difference(layout, getattr(old, layout), getattr(new, layout))
    before, after = ({unit.name: unit for unit in each.units} for each in (old, new))
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield f"unit {name!r}: {before.get(name)} -> {after.get(name)}"


def _info_difference(old: Derived, new: Derived) -> Iterator[str]:
    before, after = ({info.path: info for info in each.infos} for each in (old, new))
    changes: dict[str, str] = {}
    for path in dict.fromkeys([*before, *after]):
        a, b = before.get(path), after.get(path)
        if a is None or b is None:
            changes[path] = "only in the second plan" if a is None else "only in the first plan"
        elif a != b:
            parts = ("shape", "dtype", "trainable", "axes", "aliases")
            pairs = [(part, getattr(a, part), getattr(b, part)) for part in parts]
            changes[path] = ", ".join(f"{part} {x} -> {y}" for part, x, y in pairs if x != y)
    yield from _grouped(changes, "")


def _spec_difference(
    layout: str, old: Mapping[str, Spec], new: Mapping[str, Spec]
) -> Iterator[str]:
    changes = {
        path: f"'{old.get(path, '-')}' -> '{new.get(path, '-')}'"
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    }
    yield from _grouped(changes, f"{layout} ")


def _grouped(changes: Mapping[str, str], head: str) -> Iterator[str]:
    for group in collapse(changes, lambda path: changes[path]):
        yield f"{head}{render_group(group)}: {changes[group[0]]}"
