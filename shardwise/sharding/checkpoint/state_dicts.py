"""State dicts of torch: one file of torch.save, or a directory of torch's DCP.

[Note: names in state dicts]
A dict of tensors is the weights by name. Else the weights are in the first of `model`, `module`,
`state_dict`, `model_state_dict`, `params`, and the optimizer's state in the first of `optim`,
`optimizer`, `optimizer_state_dict`: `state` by parameter, as `get_state_dict` of torch writes it,
and as `optimizer.state_dict()` does, by number; numbers become parameters through `param_groups`
and the names in them (`param_names`, torch >= 2.6) or, where there are none, the order of trained
parameters that the caller passes. DCP joins the same keys by dots.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.foreign import Foreign
from shardwise.sharding.checkpoint.manifest import Chunk, Stored
from shardwise.sharding.checkpoint.torch_zip import load_without_elements, number_in, place_of
from shardwise.sharding.errors import CheckpointError

MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "params")
OPTIM_KEYS = ("optim", "optimizer", "optimizer_state_dict")
METADATA = ".metadata"


def read_torch_save(path: Path, order: Sequence[str] = ()) -> Foreign:
    """What a file of torch.save holds; no element is read.

    Args:
        path: of the file.
        order: names of parameters by number, for an optimizer that does not have them.

    Raises:
        CheckpointError: it holds no state dict, or would run code.
    """
    tree = load_without_elements(path)
    if not isinstance(tree, Mapping):
        raise _no_dict(path, f"it holds {type(tree).__name__}")
    model = next((tree[key] for key in MODEL_KEYS if isinstance(tree.get(key), Mapping)), tree)
    weights = {
        str(name): place_of(value.detach(), str(name), path, path.parent)
        for name, value in model.items()
        if isinstance(value, Tensor)
    }
    if not weights:
        raise _no_dict(path, f"its keys are {', '.join(map(str, list(tree)[:8]))}")
    optim = next((tree[key] for key in OPTIM_KEYS if isinstance(tree.get(key), Mapping)), {})
    slots: dict[str, dict[str, Stored]] = {}
    for name, kind, value in _slots_of(optim, order, path):
        if isinstance(value, Tensor):
            place = place_of(value.detach(), f"{kind} of {name}", path, path.parent)
            slots.setdefault(kind, {})[name] = place
    return _foreign(path, path.parent, weights, slots)


def _slots_of(
    optim: Mapping[str, Any], order: Sequence[str], path: Path
) -> Iterator[tuple[str, str, Any]]:
    names = _names_by_number(optim, order)
    for key, state in optim.get("state", {}).items():
        name = key if isinstance(key, str) else names.get(key)
        if name is None:
            raise _no_dict(
                path,
                f"its optimizer numbers parameters, and {len(names)} names are known for number "
                f"{key}",
                fix="pass order=[...], the names of the optimizer's parameters in their order",
            )
        for kind, value in state.items():
            yield name, kind, value


def _names_by_number(optim: Mapping[str, Any], order: Sequence[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for group in optim.get("param_groups", ()):
        names = group.get("param_names") or ()
        found |= dict(zip(group["params"], names, strict=False))
    return found or dict(enumerate(order))


def _foreign(
    where: Path,
    root: Path,
    weights: Mapping[str, Stored],
    slots: Mapping[str, Mapping[str, Stored]],
) -> Foreign:
    """Counts of steps are read: they are numbers, not tensors over parameters."""
    steps = {name: number_in(one, root) for name, one in slots.get("step", {}).items()}
    return Foreign(
        where=str(where),
        root=root,
        weights=weights,
        slots={kind: one for kind, one in slots.items() if kind != "step"},
        steps=steps,
        step=max(steps.values()) if steps else None,
    )


# -- DCP --------------------------------------------------------------------------------------

_METADATA_CLASSES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset(
        {"Size", "device"}
        | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    ),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"Path", "PosixPath", "PurePosixPath"}),
}
"""What a `.metadata` of DCP is made of; all of them are values."""


class _Values(pickle.Unpickler):
    """Reads a pickle of the classes above, and refuses any other."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for each class or function that the pickle names."""
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it needs {module}.{name}")


def read_dcp(directory: Path, order: Sequence[str] = ()) -> Foreign:
    """What a directory of torch's DCP holds; of tensors, no element is read.

    Args:
        directory: with `.metadata`.
        order: names of parameters by number, for an optimizer that does not have them.

    Raises:
        CheckpointError: it is none, or its metadata would run code.
    """
    metadata = _metadata(directory)
    stored: dict[str, Stored] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            stored[name] = _stored(name, entry, metadata.storage_data, directory)
    prefix = next((f"{key}." for key in MODEL_KEYS if _has(stored, f"{key}.")), "")
    in_optim = next((f"{key}." for key in OPTIM_KEYS if _has(stored, f"{key}.state.")), None)
    weights = {
        name.removeprefix(prefix): one
        for name, one in stored.items()
        if name.startswith(prefix) and not (in_optim and name.startswith(in_optim))
    }
    slots: dict[str, dict[str, Stored]] = {}
    if in_optim:
        numbers = dict(enumerate(order))
        start = f"{in_optim}state."
        for name in (name for name in stored if name.startswith(start)):
            path, _, kind = name.removeprefix(start).rpartition(".")
            path = numbers.get(int(path), path) if path.isdecimal() else path
            slots.setdefault(kind, {})[path] = stored[name]
    return _foreign(directory, directory, weights, slots)


def _has(names: Mapping[str, Any], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _metadata(directory: Path) -> Any:
    path = directory / METADATA
    try:
        found = _Values(io.BytesIO(path.read_bytes())).load()
        if not isinstance(found.state_dict_metadata, dict):
            raise TypeError("it has no table of tensors")
    except (OSError, pickle.UnpicklingError, AttributeError, TypeError, EOFError) as error:
        raise CheckpointError(
            "The directory is no checkpoint of torch's DCP that can be read.",
            where=str(path),
            facts=str(error) or type(error).__name__,
            why="Its metadata is a pickle; only the classes that DCP itself writes are allowed in "
            "it, so that a file from elsewhere can do no harm.",
            fix="pass a directory that torch.distributed.checkpoint.save has written",
            path=str(path),
        ) from None
    return found


def _stored(name: str, entry: Any, places: Mapping[Any, Any], directory: Path) -> Stored:
    by_offset = {
        tuple(index.offset): info
        for index, info in places.items()
        if index.fqn == name and index.offset is not None
    }
    chunks: list[Chunk] = []
    for chunk in entry.chunks:
        info = by_offset.get(tuple(chunk.offsets))
        if info is None:
            raise _lost(name, tuple(chunk.offsets), directory)
        path = directory / str(info.relative_path)
        if path.resolve().parent != directory.resolve():
            raise _lost(name, tuple(chunk.offsets), directory)
        window = (int(info.offset), int(info.length))
        value = load_without_elements(path, window=window)
        place = place_of(value.detach(), name, path, directory, start=window[0])
        only = place.chunks[0]
        sizes = tuple(chunk.sizes)
        if place.shape != sizes or place.dtype != entry.properties.dtype:
            raise _lost(name, tuple(chunk.offsets), directory)
        chunks.append(
            Chunk(tuple(chunk.offsets), sizes, only.file, only.entry, only.start, only.sums)
        )
    return Stored(name, tuple(entry.size), entry.properties.dtype, tuple(chunks))


def _lost(name: str, offsets: tuple[int, ...], directory: Path) -> CheckpointError:
    return CheckpointError(
        f"{name} is not where the metadata says.",
        where=str(directory),
        facts=f"the rectangle at {offsets}",
        why="Every rectangle of a tensor lies in one file of the directory, with its own shape.",
        fix="copy the checkpoint again from where it was written",
        name=name,
    )


def _no_dict(path: Path, fault: str, fix: str = "") -> CheckpointError:
    return CheckpointError(
        "The file holds no state dict that can be told apart.",
        where=str(path),
        facts=fault,
        why=f"Weights are a dict of tensors, or under one of the keys {', '.join(MODEL_KEYS)}.",
        fix=fix or "save {'model': model.state_dict(), 'optim': optimizer.state_dict()}",
        path=str(path),
    )
