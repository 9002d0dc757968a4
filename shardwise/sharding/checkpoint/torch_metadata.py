"""The `.metadata` by which torch's own DCP reads the files of a checkpoint.

Names there have dots for slashes, as DCP joins the keys of nested dicts: `params/layers.0.weight`
is what `dcp.load({"params": {"layers.0.weight": tensor}}, checkpoint_id=path)` asks for.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.sharding.checkpoint.manifest import Chunk, Stored
from shardwise.sharding.compat import StorageInfo

_DCP_VERSION = "1.0.0"


def dcp_metadata(tensors: Sequence[Stored]) -> bytes:
    """The pickle that DCP reads; shardwise itself never does.

    Args:
        tensors: with all their chunks.
    """
    described: dict[str, Any] = {}
    keys: dict[str, tuple[str, ...]] = {}
    stored_at: dict[MetadataIndex, Any] = {}
    for stored in tensors:
        name = dcp_name(stored)
        name = stored.name if name in described else name
        properties = TensorProperties(dtype=stored.dtype)
        size = torch.Size(stored.shape)
        chunks = [_rectangle(chunk) for chunk in stored.chunks]
        described[name] = TensorStorageMetadata(properties, size, chunks)
        keys[name] = _keys(stored)
        for index, (chunk, there) in enumerate(zip(stored.chunks, chunks, strict=True)):
            where = MetadataIndex(name, there.offsets, index)
            stored_at[where] = StorageInfo(chunk.file, *chunk.entry)
    metadata = Metadata(
        state_dict_metadata=described,
        planner_data=keys,
        storage_data=stored_at,
        version=_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def dcp_name(stored: Stored) -> str:
    """The name of a tensor in DCP.

    >>> dcp_name(Stored("opt/mu/layers.0.weight", (), torch.float32, (), "layers.0.weight"))
    'opt.mu.layers.0.weight'
    """
    return ".".join(_keys(stored))


def _keys(stored: Stored) -> tuple[str, ...]:
    return tuple(stored.name.split("/"))


def _rectangle(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
