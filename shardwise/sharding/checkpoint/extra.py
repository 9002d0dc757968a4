"""`State.extra` as JSON with references to tensors: data cursors, generator states, averages.

[Note: extra on disk]
Dicts, lists, tuples, text, bytes, whole numbers, exact floats, bools, None and tensors; anything
else is refused by its place, since reading runs no code. A DTensor under the path of a parameter
that lies as the parameter does is a global tensor, and lies as the parameter does on any plan that
reads it; so is a block in the place of a leaf that has no placements. Any other plain tensor of up
to 64 KiB, such as the state of a generator, is part of the JSON of its rank, so it may differ by
rank; a larger one is written once, so it must be equal on all ranks. Where the JSON of ranks is
equal it is written once. On as many ranks each rank gets its own back; on another number of ranks,
rank r gets what rank `r % saved` had.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from isal.isal_zlib import crc32
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.sharding.checkpoint.records import Record
from shardwise.sharding.errors import CheckpointError
from shardwise.sharding.layout import Entry, Layout
from shardwise.sharding.leaves import Home, owned, param_layouts
from shardwise.sharding.lying import Grid, Lying, grids_of, lying_of
from shardwise.sharding.placements import on_whole_dims

EXTRA = "extra"
INLINE_BYTES = 1 << 16
"""Of the largest plain tensor that is part of the JSON."""

_TAG = "$"
"""Key of a JSON object that stands for something that JSON has not."""


class Packed(NamedTuple):
    """One rank's `extra`: its JSON, and the global tensors that the JSON refers to."""

    tree: Any
    records: tuple[Record, ...]


def pack_extra(extra: Any, home: Home) -> Packed:
    """Turn this rank's `extra` into JSON and global tensors; no communication.

    Args:
        extra: of a state; see [Note: extra on disk].
        home: of the state.

    Raises:
        CheckpointError: something in it cannot be written; names the place.
    """
    packing = _Packing(home)
    tree = packing.pack(extra, EXTRA)
    return Packed(tree, tuple(packing.records))


def merge_extra(trees: Sequence[Any]) -> Any:
    """The JSON of all ranks as one value for the manifest: once, where it is equal.

    Args:
        trees: of `Packed`, in rank order.

    Raises:
        CheckpointError: ranks refer to other tensors than rank 0, or to other values of them.

    >>> merge_extra([{"epoch": 1}, {"epoch": 1}]), merge_extra([[1], [2]]), merge_extra([None])
    ({'same': {'epoch': 1}}, {'ranks': [[1], [2]]}, None)
    """
    first = trees[0]
    if all(tree == first for tree in trees):
        return None if first is None else {"same": first}
    tables = [_referred(tree) for tree in trees]
    for rank, table in enumerate(tables):
        for name in {**tables[0], **table}:
            if table.get(name) != tables[0].get(name):
                raise _differs(name, rank)
    return {"ranks": list(trees)}


def tree_of(saved: Any, rank: int) -> Any:
    """The JSON of one rank; see [Note: extra on disk] for another number of ranks.

    >>> [tree_of({"ranks": [[1], [2]]}, rank) for rank in range(3)]
    [[1], [2], [1]]
    """
    if saved is None:
        return None
    if "same" in saved:
        return saved["same"]
    return saved["ranks"][rank % len(saved["ranks"])]


def targets_of(
    tree: Any, home: Home, dtypes: Mapping[str, torch.dtype], device: torch.device
) -> tuple[Record, ...]:
    """Empty blocks for the tensors that a tree refers to, as they lie in a program.

    Args:
        tree: of this rank.
        home: of the program.
        dtypes: by name, as saved.
        device: where tensors live.

    Raises:
        CheckpointError: a tensor that lies like a parameter has no parameter, or is missing.
    """
    layouts = param_layouts(home)
    found: list[Record] = []
    for name, reference in _referred(tree).items():
        if name not in dtypes:
            raise _unreadable(name, "the checkpoint has no tensor of that name")
        shape, path = tuple(reference["shape"]), reference.get("path", "")
        if path and (path not in layouts or layouts[path][0].by_path[path].whole != shape):
            raise _unreadable(name, f"the program has no parameter {path!r} of shape {shape}")
        lying = _lying(home, layouts[path][0], path) if path else _whole(home, name, shape)
        block = torch.zeros(lying.entry.block, dtype=dtypes[name], device=device)
        found.append(Record(name, lying, block))
    return tuple(found)


def unpack_extra(
    tree: Any,
    tensors: Mapping[str, Tensor],
    home: Home,
    device: torch.device,
) -> Any:
    """The `extra` of this rank from its JSON.

    Args:
        tree: of this rank.
        tensors: blocks by name, filled.
        home: of the program.
        device: of the program; what was on an accelerator goes there.
    """
    layouts = param_layouts(home)

    def leaf(record: Mapping[str, Any]) -> Tensor:
        if "data" in record:
            return _from_text(record, device)
        block = tensors[record["name"]]
        if "path" not in record:
            return block.to(device if record["device"] != "cpu" else "cpu")
        return _leaf(home, layouts[record["path"]][0], record["path"], block)

    return _unpack(tree, leaf)


def pack_value(value: Any, where: str) -> Any:
    """A Python value without tensors as JSON; dicts, tuples and floats come back as they were.

    Args:
        value: see [Note: extra on disk].
        where: its name, for errors.

    Raises:
        CheckpointError: it cannot be written.

    >>> unpack_value(pack_value((1, float("inf"), {2: None}), "opt/rate"))
    (1, inf, {2: None})
    """

    def leaf(tensor: Tensor, place: str) -> Any:
        raise _refuse(place, f"a {type(tensor).__name__} is no value")

    return _pack(value, where, leaf)


def unpack_value(tree: Any) -> Any:
    """The inverse of `pack_value`."""

    def leaf(record: Mapping[str, Any]) -> Any:
        raise _unreadable("values", f"a tensor of shape {record.get('shape')} is no value")

    return _unpack(tree, leaf)


@dataclass
class _Packing:
    home: Home
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._layouts = param_layouts(self.home)

    def pack(self, value: Any, place: str) -> Any:
        return _pack(value, place, self._tensor)

    def _tensor(self, value: Tensor, place: str) -> dict[str, Any]:
        name = place.rpartition("/")[2]
        path = self.home.aliases.get(name, name)
        if isinstance(value, DTensor) or self._is_block(value, path):
            return self._cut(value, path, place)
        about = {_TAG: "tensor", "shape": list(value.shape), "dtype": _name(value.dtype)}
        about["device"] = value.device.type
        if value.nbytes <= INLINE_BYTES:
            return about | {"data": base64.b64encode(_bytes(value)).decode()}
        block = value.detach()
        self.records.append(Record(place, _whole(self.home, place, tuple(value.shape)), block))
        return about | {"name": place, "crc": crc32(_bytes(value))}

    def _is_block(self, value: Tensor, path: str) -> bool:
        """Whether a plain tensor lies as the leaf of a parameter does that has no placements."""
        if path not in self._layouts:
            return False
        entry, spec = self._layouts[path][0].by_path[path], self.home.specs["params"][path]
        framed = entry.frame is not None and tuple(value.shape) == entry.block
        return framed and on_whole_dims(spec, self.home.mesh, entry.whole) is None

    def _cut(self, value: Tensor, path: str, place: str) -> dict[str, Any]:
        if path not in self._layouts:
            raise _refuse(place, "a DTensor is written under the path of a parameter only")
        layout, _ = self._layouts[path]
        lying = _lying(self.home, layout, path)
        entry = lying.entry
        if isinstance(value, DTensor):
            shape, local = tuple(value.shape), value.to_local().detach()
            sizes = owned(self.home, layout, entry)
        else:
            shape, local, sizes = entry.whole, value.detach(), entry.block
        if shape != entry.whole or tuple(local.shape) != sizes:
            lies, needs = f"{tuple(local.shape)} of {shape}", f"{sizes} of {entry.whole}"
            raise _refuse(place, f"it lies as {lies}, parameter {path!r} as {needs}")
        self.records.append(Record(place, lying, local))
        about = {_TAG: "tensor", "shape": list(shape), "dtype": _name(value.dtype)}
        return about | {"name": place, "path": path}


def _pack(given: Any, place: str, leaf: Callable[[Tensor, str], Any]) -> Any:
    value: Any = given  # exact types are asked for: a subclass would come back as its base
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, Tensor):
        return leaf(value, place)
    if type(value) is bytes:
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if type(value) in (list, tuple):
        items = [_pack(item, f"{place}/{at}", leaf) for at, item in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "value": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, place, leaf)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise _refuse(place, f"a {kind} cannot be written as JSON")


def _pack_mapping(
    value: Mapping[Any, Any], place: str, leaf: Callable[[Tensor, str], Any]
) -> dict[str, Any]:
    """JSON objects have text for keys; others become a list of pairs."""
    items = {key: _pack(part, f"{place}/{_step(key)}", leaf) for key, part in value.items()}
    if all(type(key) is str for key in items) and _TAG not in items:
        return items
    pairs = [[_pack(key, f"{place} (a key)", leaf), part] for key, part in items.items()]
    return {_TAG: "dict", "value": pairs}


def _unpack(tree: Any, leaf: Callable[[Mapping[str, Any]], Any]) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, leaf) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree.get(_TAG):
        case "float":
            return float(tree["value"])
        case "bytes":
            return base64.b64decode(tree["value"])
        case "tuple":
            return tuple(_unpack(item, leaf) for item in tree["value"])
        case "dict":
            pairs = tree["value"]
            return {_unpack(key, leaf): _unpack(part, leaf) for key, part in pairs}
        case "tensor":
            return leaf(tree)
        case _:
            return {key: _unpack(part, leaf) for key, part in tree.items()}


def _referred(tree: Any) -> dict[str, Mapping[str, Any]]:
    """The references of a tree to tensors outside of it, by name."""
    found: dict[str, Mapping[str, Any]] = {}

    def note(record: Mapping[str, Any]) -> None:
        if "name" in record:
            found[record["name"]] = record

    _unpack(tree, note)
    return found


def _step(key: Any) -> str:
    return str(key).replace("%", "%25").replace("/", "%2F")


def _lying(home: Home, layout: Layout, path: str) -> Lying:
    return lying_of(grids_of(home.mesh), layout, layout.by_path[path])


def _whole(home: Home, name: str, shape: tuple[int, ...]) -> Lying:
    return Lying(Grid(home.mesh, ()), Entry(name, shape, 0, shape, 0))


def _leaf(home: Home, layout: Layout, path: str, block: Tensor) -> Tensor:
    """A DTensor like the leaf of a parameter, over a padded block of its own."""
    entry = layout.by_path[path]
    alone = Entry(path, entry.shape, entry.dim, entry.block, 0, entry.frame)
    own = Layout(layout.axes, (alone,), block.numel(), layout.dtype)
    return home.leaf(block.view(-1), own, path, "params")


def _bytes(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _from_text(record: Mapping[str, Any], device: torch.device) -> Tensor:
    raw = bytearray(base64.b64decode(record["data"]))
    dtype = getattr(torch, record["dtype"])
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    value = flat.view(dtype).reshape(record["shape"]).clone()
    return value if record["device"] == "cpu" else value.to(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(place: str, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{place} cannot be saved: {fault}.",
        where=place,
        why="It is written as JSON and plain tensors, so that reading a checkpoint runs no code.",
        fix="keep dicts, lists, tuples, text, numbers, plain tensors, and DTensors under the path "
        "of the parameter that they lie like: {'average': {path: leaf}}",
        place=place,
    )


def _unreadable(place: str, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{place} cannot be read: {fault}.",
        where=place,
        why="What lies like a parameter is cut as the program cuts that parameter.",
        fix="restore with partial='extra', or into a program that has the parameter",
        place=place,
    )


def _differs(name: str, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{name} differs between ranks 0 and {rank}.",
        where=name,
        facts=f"A plain tensor of more than {INLINE_BYTES:,} bytes is written once.",
        why="Which rank writes which bytes is known without asking, so such a tensor must be the "
        "same on every rank.",
        fix="make it a DTensor under the path of a parameter, or keep what differs by rank in "
        f"tensors of up to {INLINE_BYTES:,} bytes",
        rank=rank,
        nbytes=INLINE_BYTES,
    )
